//! Transfers between two ranks: the sender offers, the receiver compares and accepts, and only then do data move.
//!
//! A call has any number of transfers, and each proceeds by itself; transfers between the same two ranks in the same direction keep their order.
//! Once it has accepted, the receiver is bound to take the data, unless the sender tells it of a failure instead; so a transfer never
//! ends on one side only, whatever the outcome of the others. No third rank is involved, except to be told of failures.

use super::handshake::{Failure, Handshake, Wait, end_of_epoch, known, mismatch};
use super::link::Link;
use super::record::Record;
use super::stream::Stall;
use crate::error::{Call, CommError, Operation, Result};

/// The progress of an agreed transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::comm) enum Stage {
    /// None has been started.
    Idle,
    /// Some are still to be started. Whether anything has moved since the last look.
    Starting { has_moved: bool },
    /// All have been started: the next transfer between the two may start its own.
    Started { has_moved: bool },
    /// All are over.
    Done,
}

/// This rank's end of a transfer: memory, and how its bytes get into messages or out of them.
pub(in crate::comm) trait End {
    /// Goes on as far as is possible without waiting; called from when the transfer is agreed on until it is done. A failure does not
    /// keep messages from being sent or received: the other side counts on them.
    fn advance(&mut self, link: &dyn Link, peer: usize) -> Stage;

    /// Why the data are not correct, if they are not. Asked once, when the transfer is done.
    fn failure(&mut self) -> Option<String>;

    /// Whether the sender confirms its data behind the last message, because it can fail between two messages. Equal on both sides.
    fn is_confirmed(&self) -> bool;

    /// Whether this rank can return while messages are under way, because MPI uses no memory of the caller.
    fn can_be_left(&self) -> bool;
}

/// One direction of a call.
pub(in crate::comm) struct Half<'a> {
    peer: usize,
    call: Call,
    bytes: usize,
    end: Box<dyn End + 'a>,
    state: State,
    /// Whether it was recorded that both sides have agreed.
    is_recorded: bool,
    /// Since when nothing has moved, once it is agreed on.
    stall: Stall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// For the other side's word.
    Waiting,
    Agreed,
    /// All messages have been started.
    Started,
    /// For the sender's word that the data were right.
    Unconfirmed,
    Done,
}

impl<'a> Half<'a> {
    /// A transfer with `peer`, which has `bytes` bytes.
    pub(in crate::comm) fn new(peer: usize, call: Call, bytes: usize, end: impl End + 'a) -> Self {
        Half { peer, call, bytes, end: Box::new(end), state: State::Waiting, is_recorded: false, stall: Stall::new() }
    }

    fn is_waiting(&self) -> bool {
        self.state == State::Waiting
    }

    /// Both sides have agreed: without data, that is all.
    fn agree(&mut self) {
        self.stall.end();
        self.state = if self.bytes == 0 { State::Done } else { State::Agreed };
    }
}

/// A failure with the operation of the transfer that it was found in.
type Found = (Operation, Failure);

/// One call's transfers.
struct Exchange<'m, 'a> {
    handshake: &'m Handshake,
    sends: Vec<Half<'a>>,
    receives: Vec<Half<'a>>,
    failure: Option<Found>,
}

/// Sends and receives everything at once.
pub(in crate::comm) fn exchange(handshake: &Handshake, sends: Vec<Half<'_>>, receives: Vec<Half<'_>>) -> Result<()> {
    let mut exchange = Exchange { handshake, sends, receives, failure: None };
    handshake.check(exchange.operation())?;
    handshake.calls().begin(exchange.halves().map(|half| half.call));
    exchange.run();
    exchange.failure.map_or(Ok(()), |(operation, failure)| Err(handshake.fail(operation, failure)))?;
    handshake.calls().finish();
    Ok(())
}

impl<'a> Exchange<'_, 'a> {
    fn run(&mut self) {
        self.offer();
        let mut wait = Wait::new(Some(self.handshake.deadline()));
        for round in 0.. {
            let operation = self.operation();
            let pumped = self.handshake.pump(operation);
            self.note(operation, pumped);
            let is_moving = self.step_out(round) | self.step_into(round);
            self.record();
            if self.halves().all(|half| half.state == State::Done) {
                return;
            }
            let heard = self.handshake.look_for_failure();
            self.note(operation, heard);
            if wait.is_over() {
                self.note_missing();
            }
            if self.failure.is_some() {
                self.withdraw();
            }
            if is_moving {
                std::thread::yield_now();
            } else {
                wait.pause();
            }
        }
    }

    /// Records transfers that both sides have agreed on: nobody waits for another rank because of them.
    fn record(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let agreed = |half: &&mut Half<'_>| !half.is_recorded && !half.is_waiting();
        for half in self.sends.iter_mut().chain(&mut self.receives).filter(agreed) {
            half.is_recorded = true;
            self.handshake.calls().finish_transfer(half.call.operation);
        }
    }

    /// The operation that errors name: the first transfer that is not over.
    fn operation(&self) -> Operation {
        let first = self.halves().find(|half| half.state != State::Done).or(self.halves().next());
        first.map_or(Operation::Exchange, |half| half.call.operation)
    }

    fn halves(&self) -> impl Iterator<Item = &Half<'a>> {
        self.sends.iter().chain(&self.receives)
    }

    fn offer(&mut self) {
        for index in 0..self.sends.len() {
            let Half { peer, call, .. } = self.sends[index];
            let is_alone = !self.receives.iter().any(|half| half.peer == peer);
            if let Err(error) = self.handshake.link().post(peer, Record::Offer { call, is_alone }) {
                // No receiver accepts an offer that was not made.
                self.sends[index..].iter_mut().for_each(|half| half.state = State::Done);
                return self.note(call.operation, Err(self.handshake.broken(call.operation, &error)));
            }
        }
    }

    /// Keeps the first failure.
    fn note(&mut self, operation: Operation, outcome: Result<(), Failure>) {
        if let Err(failure) = outcome {
            self.failure.get_or_insert((operation, failure));
        }
    }

    /// Notes a timeout for transfers that were not agreed by the deadline.
    fn note_missing(&mut self) {
        let late: Vec<&Half<'_>> = self.halves().filter(|half| half.is_waiting()).collect();
        let Some(first) = late.first() else { return };
        let (operation, deadline) = (first.call.operation, self.handshake.deadline());
        let mut missing: Vec<usize> = late.iter().map(|half| half.peer).collect();
        missing.sort_unstable();
        missing.dedup();
        let error = CommError::Timeout { operation, missing, deadline };
        self.note(operation, Err(Failure { error, is_unreported: true }));
    }

    /// Gives up the transfers that are not agreed. The receiver may have accepted just now: it is told that no data come.
    fn withdraw(&mut self) {
        let Some((_, failure)) = &self.failure else { return };
        for half in self.sends.iter_mut().filter(|half| half.is_waiting()) {
            if !failure.is_unreported {
                self.handshake.tell_failure(half.peer, failure.error.clone());
            }
            half.state = State::Done;
        }
        for half in self.receives.iter_mut().filter(|half| half.is_waiting()) {
            half.state = State::Done;
        }
    }

    /// Advances the outgoing transfers; whether anything is under way.
    fn step_out(&mut self, round: usize) -> bool {
        for index in 0..self.sends.len() {
            let half = &self.sends[index];
            if !half.is_waiting() {
                continue;
            }
            let from_peer = self.receives.iter().any(|other| other.is_waiting() && other.peer == half.peer);
            match accepted(self.handshake, half, from_peer) {
                Ok(false) => {}
                Ok(true) => self.sends[index].agree(),
                Err(failure) => self.note(half.call.operation, Err(failure)),
            }
        }
        let turns = turns(&self.sends, round);
        for &index in &turns {
            let (half, link) = (&mut self.sends[index], self.handshake.link());
            if half.state == State::Done {
                continue;
            }
            match half.end.advance(link, half.peer) {
                Stage::Idle => {}
                Stage::Starting { has_moved } => self.look_at_stall(Direction::Out, index, has_moved),
                Stage::Started { has_moved } => {
                    half.state = State::Started;
                    self.look_at_stall(Direction::Out, index, has_moved);
                }
                Stage::Done => {
                    half.state = State::Done;
                    let (operation, sent) = (half.call.operation, sent(self.handshake, half));
                    self.note(operation, sent);
                }
            }
        }
        !turns.is_empty()
    }

    /// Advances the incoming transfers; whether anything is under way.
    fn step_into(&mut self, round: usize) -> bool {
        let mut is_moving = false;
        for index in 0..self.receives.len() {
            let half = &self.receives[index];
            let (operation, peer) = (half.call.operation, half.peer);
            match half.state {
                State::Waiting => match accept(self.handshake, half) {
                    Ok(false) => {}
                    Ok(true) => self.receives[index].agree(),
                    Err(failure) => self.note(operation, Err(failure)),
                },
                State::Unconfirmed => {
                    is_moving = true;
                    if let Some(word) = confirmed(self.handshake, peer) {
                        self.receives[index].state = State::Done;
                        self.note(operation, word);
                    }
                }
                State::Agreed | State::Started | State::Done => {}
            }
        }
        for index in turns(&self.receives, round) {
            let (half, link) = (&mut self.receives[index], self.handshake.link());
            let operation = half.call.operation;
            // Data that were sent before the sender failed are there before its word of it, so this is read first.
            let told = failure_of(self.handshake, half);
            if half.state == State::Done {
                continue;
            }
            match half.end.advance(link, half.peer) {
                Stage::Idle => {
                    // The sender said that it was there; one that sends memory of a device may have much to send elsewhere.
                    let patience = if half.end.can_be_left() { 1 } else { 2 };
                    let is_late = half.stall.is_over(self.handshake.deadline().saturating_mul(patience));
                    if let Some(failure) = told.or_else(|| is_late.then(|| late(self.handshake, half))) {
                        half.state = State::Done;
                        self.note(operation, Err(failure));
                    }
                }
                Stage::Starting { has_moved } => {
                    is_moving = true;
                    self.look_at_stall(Direction::In, index, has_moved);
                }
                Stage::Started { has_moved } => {
                    is_moving = true;
                    half.state = State::Started;
                    self.look_at_stall(Direction::In, index, has_moved);
                }
                Stage::Done => {
                    is_moving = true;
                    half.state = if half.end.is_confirmed() { State::Unconfirmed } else { State::Done };
                    if let Some(reason) = half.end.failure() {
                        self.note(operation, Err(self.handshake.own_failure(operation, reason)));
                    }
                }
            }
        }
        is_moving
    }

    /// Abandons the transfers with a peer, in one direction, if nothing has moved for the deadline, or for a moment when the peer has failed. None
    /// of them proceeds: the data of a later transfer would be taken for the rest of an earlier one.
    fn look_at_stall(&mut self, direction: Direction, index: usize, has_moved: bool) {
        let handshake = self.handshake;
        let halves = match direction {
            Direction::Out => &mut self.sends,
            Direction::In => &mut self.receives,
        };
        let (peer, operation) = (halves[index].peer, halves[index].call.operation);
        let of_peer = |half: &&mut Half<'_>| half.peer == peer;
        if has_moved {
            return halves.iter_mut().filter(of_peer).for_each(|half| half.stall.end());
        }
        if handshake.link().departure(peer).is_some() {
            // Everything that the rank has sent, and has taken, is known by now.
            match halves[index].end.advance(handshake.link(), peer) {
                Stage::Done | Stage::Starting { has_moved: true } | Stage::Started { has_moved: true } => return,
                Stage::Idle | Stage::Starting { .. } | Stage::Started { .. } => {}
            }
        }
        let half = &halves[index];
        let told = || failure_of(handshake, half).filter(|_| half.stall.is_long());
        let is_late = half.stall.is_over(handshake.deadline());
        if !half.end.can_be_left() {
            return;
        }
        if let Some(failure) = told().or_else(|| is_late.then(|| late(handshake, half))) {
            halves.iter_mut().filter(of_peer).for_each(|half| half.state = State::Done);
            self.note(operation, Err(failure));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Direction {
    Out,
    In,
}

fn late(handshake: &Handshake, half: &Half<'_>) -> Failure {
    let (operation, deadline) = (half.call.operation, handshake.deadline());
    Failure { error: CommError::Timeout { operation, missing: vec![half.peer], deadline }, is_unreported: true }
}

/// The transfers that may proceed: of the transfers with one peer only the first that still has messages to start, because the messages of the next
/// have to follow. The peer that comes first changes with each round, so that no peer waits for memory that others are using.
fn turns(halves: &[Half<'_>], round: usize) -> Vec<usize> {
    let mut starting = Vec::new();
    let mut turns: Vec<usize> = (0..halves.len())
        .filter(|&index| match halves[index].state {
            State::Started => true,
            State::Agreed if starting.contains(&halves[index].peer) => false,
            State::Agreed => {
                starting.push(halves[index].peer);
                true
            }
            State::Waiting | State::Unconfirmed | State::Done => false,
        })
        .collect();
    let shift = round % turns.len().max(1);
    turns.rotate_left(shift);
    turns
}

/// Whether the receiver has accepted an offer. It never will if it waits for this rank to receive, and this call does not receive from it.
fn accepted(handshake: &Handshake, half: &Half<'_>, receives_from_peer: bool) -> Result<bool, Failure> {
    let (rank, mut inbox) = (handshake.link().rank(), handshake.link().inbox());
    for (index, record) in inbox[half.peer].iter().enumerate() {
        match record {
            Record::Accept => {
                inbox[half.peer].remove(index);
                return Ok(true);
            }
            Record::Offer { call, is_alone: true } if !receives_from_peer => {
                return Err(mismatch((rank, half.call), (half.peer, *call)));
            }
            Record::Call { call, .. } => return Err(mismatch((rank, half.call), (half.peer, *call))),
            Record::Failed { error, .. } => return Err(known(error)),
            Record::Offer { .. } | Record::Go | Record::Sent | Record::Closed => {}
        }
    }
    drop(inbox);
    handshake.departure(half.call.operation, half.peer).map_or(Ok(false), Err)
}

/// Accepts the sender's offer, if it has made it and it fits.
fn accept(handshake: &Handshake, half: &Half<'_>) -> Result<bool, Failure> {
    let (link, peer, call) = (handshake.link(), half.peer, half.call);
    let mut found = None;
    for (index, record) in link.inbox()[peer].iter().enumerate() {
        match record {
            Record::Offer { call, .. } => {
                found = Some((index, *call));
                break;
            }
            Record::Call { call: other, .. } => return Err(mismatch((link.rank(), call), (peer, *other))),
            Record::Failed { error, .. } => return Err(known(error)),
            Record::Accept | Record::Go | Record::Sent | Record::Closed => {}
        }
    }
    let Some((index, offered)) = found else {
        not_elsewhere(handshake, half)?;
        return handshake.departure(call.operation, peer).map_or(Ok(false), Err);
    };
    link.inbox()[peer].remove(index);
    if (offered.len, offered.dtype) != (call.len, call.dtype) {
        return Err(mismatch((link.rank(), call), (peer, offered)));
    }
    link.post(peer, Record::Accept).map_err(|error| handshake.broken(call.operation, &error))?;
    Ok(true)
}

/// An error if the sender is in a collective, or has left its exposure epoch: it would have made its offer before. A receiver in another call
/// finds the offer there.
fn not_elsewhere(handshake: &Handshake, half: &Half<'_>) -> Result<(), Failure> {
    let Some(mailboxes) = handshake.mailboxes() else { return Ok(()) };
    let elsewhere = mailboxes.call_ahead(half.peer).or(mailboxes.has_ended_early(half.peer).then(end_of_epoch));
    elsewhere.map_or(Ok(()), |call| Err(mismatch((handshake.link().rank(), half.call), (half.peer, call))))
}

/// Confirms the data that were sent, or tells the receiver that they are not correct.
fn sent(handshake: &Handshake, half: &mut Half<'_>) -> Result<(), Failure> {
    let operation = half.call.operation;
    let failed = half.end.failure().map(|reason| handshake.own_failure(operation, reason));
    match failed {
        Some(failure) => {
            if half.end.is_confirmed() {
                handshake.tell_failure(half.peer, failure.error.clone());
            }
            Err(failure)
        }
        None if half.end.is_confirmed() => {
            handshake.link().post(half.peer, Record::Sent).map_err(|error| handshake.broken(operation, &error))
        }
        None => Ok(()),
    }
}

/// The sender's confirmation or failure, once it has arrived.
fn confirmed(handshake: &Handshake, peer: usize) -> Option<Result<(), Failure>> {
    let mut inbox = handshake.link().inbox();
    let word = |record: &Record| matches!(record, Record::Sent | Record::Failed { .. });
    let index = inbox[peer].iter().position(word)?;
    if let Record::Failed { error, .. } = &inbox[peer][index] {
        return Some(Err(known(error)));
    }
    inbox[peer].remove(index);
    Some(Ok(()))
}

/// The failure that the other side has sent, or that it has left.
fn failure_of(handshake: &Handshake, half: &Half<'_>) -> Option<Failure> {
    let told = handshake.link().inbox()[half.peer].iter().find_map(|record| match record {
        Record::Failed { error, .. } => Some(known(error)),
        _ => None,
    });
    told.or_else(|| handshake.departure(half.call.operation, half.peer))
}
