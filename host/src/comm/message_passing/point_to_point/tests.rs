//! Transfers whose peer falls silent.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::*;
use crate::comm::message_passing::{Buffers, Incoming, LinkError, Outgoing, Requests};
use crate::dtype::DType;
use crate::error::{Departure, Error};
use crate::trace::CurrentCall;

const DEADLINE: Duration = Duration::from_millis(300);

/// Rank 0 of two. Rank 1 has sent these records, and sends no more.
#[derive(Debug)]
struct Silent {
    inbox: RefCell<Vec<VecDeque<Record>>>,
    departure: Option<Departure>,
}

impl Link for Silent {
    fn transport(&self) -> &'static str {
        "test"
    }

    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        2
    }

    fn post(&self, _: usize, _: Record) -> Result<(), LinkError> {
        Ok(())
    }

    fn pump(&self) -> Result<(), LinkError> {
        Ok(())
    }

    fn inbox(&self) -> RefMut<'_, Vec<VecDeque<Record>>> {
        self.inbox.borrow_mut()
    }

    fn has_data(&self, _: usize) -> Result<bool, LinkError> {
        Ok(true)
    }

    unsafe fn send(&self, _: Outgoing, _: &mut Requests) {}

    unsafe fn receive(&self, _: Incoming, _: &mut Requests) {}

    fn buffers(&self) -> Option<&Buffers> {
        None
    }

    fn departure(&self, _: usize) -> Option<Departure> {
        self.departure
    }

    fn is_one_machine(&self) -> bool {
        true
    }

    fn longest_message(&self, _: usize) -> usize {
        usize::MAX
    }

    fn free_group(&self) -> u64 {
        1
    }

    fn take_group(&self, _: u64) -> Result<bool> {
        Ok(true)
    }

    fn among(&self, _: &[usize], _: u64) -> Box<dyn Link> {
        unreachable!("it is not split")
    }

    fn leave(&mut self, _: bool) {}

    fn abort(&self, code: i32) -> ! {
        unreachable!("aborts with {code}")
    }
}

/// An end of device memory, which stays in this stage. Notes when it is dropped.
struct InStage(Stage, Rc<RefCell<bool>>);

impl DataMover for InStage {
    fn advance(&mut self, _: &dyn Link, _: usize) -> Stage {
        self.0
    }

    fn failure(&mut self) -> Option<String> {
        None
    }

    fn is_confirmed(&self) -> bool {
        true
    }

    fn can_be_left(&self) -> bool {
        true
    }
}

impl Drop for InStage {
    fn drop(&mut self) {
        *self.1.borrow_mut() = true;
    }
}

/// The error of a transfer with rank 1, which has agreed and whose end here stays in this stage.
fn error_of(stage: Stage, is_sent: bool, departure: Option<Departure>) -> CommError {
    let operation = if is_sent { Operation::Send { peer: 1 } } else { Operation::Recv { peer: 1 } };
    let call = Call::new(operation, 5, DType::F32);
    let offer = Record::Offer { call: Call::new(Operation::Send { peer: 0 }, 5, DType::F32), is_alone: true };
    let records = VecDeque::from([if is_sent { Record::Accept } else { offer }]);
    let link = Silent { inbox: RefCell::new(vec![VecDeque::new(), records]), departure };
    let handshake = Handshake::new(Box::new(link), DEADLINE, CurrentCall::of_processes("test", 0, 2));
    let is_dropped = Rc::new(RefCell::new(false));
    let half = Half::new(1, call, 20, InStage(stage, is_dropped.clone()));
    let (sends, receives) = if is_sent { (vec![half], vec![]) } else { (vec![], vec![half]) };
    let begun = Instant::now();
    let outcome = exchange(&handshake, sends, receives);
    assert!(begun.elapsed() < 10 * DEADLINE, "after {:?}", begun.elapsed());
    assert!(*is_dropped.borrow(), "the end gives its memory up");
    match outcome.expect_err("rank 1 is silent") {
        Error::Comm(error) => error,
        other => panic!("{other}"),
    }
}

fn is_late(error: &CommError) -> bool {
    matches!(error, CommError::Timeout { missing, deadline, .. } if *missing == [1] && *deadline == DEADLINE)
}

#[test]
fn point_to_point_names_the_sender_of_a_late_confirmation() {
    let error = error_of(Stage::Done, false, None);
    assert!(is_late(&error), "{error}");
}

#[test]
fn point_to_point_names_a_sender_that_left_unconfirmed() {
    let error = error_of(Stage::Done, false, Some(Departure::Lost));
    assert!(matches!(error, CommError::PeerGone { rank: 1, departure: Departure::Lost, .. }), "{error}");
}

#[test]
fn point_to_point_names_the_peer_of_messages_that_do_not_move() {
    for is_sent in [true, false] {
        for stage in [Stage::Starting { has_moved: false }, Stage::Started { has_moved: false }] {
            let error = error_of(stage, is_sent, None);
            assert!(is_late(&error), "{stage:?}: {error}");
        }
    }
}
