//! Transfers between two ranks: the sender offers, the receiver compares and accepts, and only then do data move.
//!
//! A call has any number of transfers, and each proceeds independently; transfers between the same two ranks in the same direction keep
//! their order. Once it has accepted, the receiver has to receive the data, unless the sender reports a failure instead; so a transfer
//! never ends on one side only, whatever the outcome of the others. A third rank is involved only when a failure is reported to it.

use std::collections::BTreeSet;

use super::handshake::Handshake;
use super::link::Link;
use super::record::Record;
use super::wait::{Stall, Wait};
use crate::engine;
use crate::error::{Call, CommError, Operation, Result};

/// The progress of an agreed transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::comm) enum Stage {
    /// No message has been started.
    Idle,
    /// Some messages have not been started; `has_moved` is whether data have moved since the last call.
    Starting { has_moved: bool },
    /// All messages have been started, so the next transfer between the two ranks may start its own.
    Started { has_moved: bool },
    /// All messages are complete.
    Done,
}

/// This rank's end of a transfer: memory, and the way in which its bytes are sent or received.
pub(in crate::comm) trait DataMover {
    /// Makes progress without waiting; called from the agreement on the transfer until it is done. After a failure, messages are still
    /// sent and received, because the other side relies on them.
    fn advance(&mut self, link: &dyn Link, peer: usize) -> Stage;

    /// The reason why the data are incorrect, if they are. Called once, when the transfer is done.
    fn failure(&mut self) -> Option<String>;

    /// Whether the sender confirms its data after the last message, because it can fail between two messages. Equal on both sides.
    fn is_confirmed(&self) -> bool;

    /// Whether this rank can return while messages are in flight, because the transport uses no memory of the caller then. Dropping the end
    /// leaves the memory of these messages to the transport.
    fn can_be_left(&self) -> bool;
}

/// One end of a transfer in a call.
pub(in crate::comm) struct Half<'a> {
    peer: usize,
    call: Call,
    bytes: usize,
    mover: Box<dyn DataMover + 'a>,
    state: State,
    /// Whether the agreement of both sides was recorded in the trace.
    is_recorded: bool,
    /// The time without progress, once the transfer is agreed on.
    stall: Stall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// This rank waits for the other side's offer or acceptance.
    Waiting,
    Agreed,
    /// All messages have been started.
    Started,
    /// This rank waits for the sender's confirmation.
    Unconfirmed,
    Done,
}

impl<'a> Half<'a> {
    /// Makes an end of a transfer of `bytes` bytes with `peer`.
    pub(in crate::comm) fn new(peer: usize, call: Call, bytes: usize, mover: impl DataMover + 'a) -> Self {
        Half {
            peer,
            call,
            bytes,
            mover: Box::new(mover),
            state: State::Waiting,
            is_recorded: false,
            stall: Stall::new(),
        }
    }

    fn is_waiting(&self) -> bool {
        self.state == State::Waiting
    }

    /// Notes that both sides have agreed. A transfer without data is then done.
    fn agree(&mut self) {
        self.stall.end();
        self.state = if self.bytes == 0 { State::Done } else { State::Agreed };
    }
}

/// A failure, and the operation of the transfer in which it was detected.
type Found = (Operation, CommError);

/// The transfers of one call.
struct Exchange<'m, 'a> {
    handshake: &'m Handshake,
    sends: Vec<Half<'a>>,
    receives: Vec<Half<'a>>,
    failure: Option<Found>,
}

/// Runs all sends and receives of a call concurrently.
pub(in crate::comm) fn exchange(handshake: &Handshake, sends: Vec<Half<'_>>, receives: Vec<Half<'_>>) -> Result<()> {
    let mut exchange = Exchange { handshake, sends, receives, failure: None };
    handshake.check(exchange.operation())?;
    handshake.calls.begin(exchange.halves().map(|half| half.call));
    exchange.run();
    exchange.failure.map_or(Ok(()), |(operation, failure)| Err(handshake.fail(operation, failure)))?;
    handshake.calls.finish();
    Ok(())
}

impl<'a> Exchange<'_, 'a> {
    fn run(&mut self) {
        self.offer();
        let (mut wait, mut grace) = (Wait::new(Some(self.handshake.deadline)), None);
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
            let is_late = wait.is_over();
            if is_late || wait.is_time_to_listen() {
                self.judge(is_late);
            }
            if self.failure.is_some() {
                self.withdraw();
                // The other transfers may go on for a while, but may also wait for memory that an abandoned one keeps.
                if grace.get_or_insert_with(|| Wait::new(Some(self.handshake.deadline))).is_over() {
                    self.abandon();
                }
            }
            if is_moving {
                std::thread::yield_now();
            } else {
                wait.pause();
            }
        }
    }

    /// Marks agreed transfers as finished in the trace, because they no longer wait for another rank.
    fn record(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let agreed = |half: &&mut Half<'_>| !half.is_recorded && !half.is_waiting();
        for half in self.sends.iter_mut().chain(&mut self.receives).filter(agreed) {
            half.is_recorded = true;
            self.handshake.calls.finish_transfer(half.call.operation);
        }
    }

    /// The operation that errors name: the operation of the first unfinished transfer.
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
                return self.note(call.operation, Err(self.handshake.broken(call.operation, error)));
            }
        }
    }

    /// Keeps the first failure.
    fn note(&mut self, operation: Operation, outcome: Result<(), CommError>) {
        if let Err(failure) = outcome {
            self.failure.get_or_insert((operation, failure));
        }
    }

    /// Asks the engine whether the transfers that are not agreed can still be.
    fn judge(&mut self, is_late: bool) {
        let waiting: Vec<&Half<'_>> = self.halves().filter(|half| half.is_waiting()).collect();
        let Some(operation) = waiting.first().map(|half| half.call.operation) else { return };
        let own: Vec<Call> = waiting.iter().map(|half| half.call).collect();
        let missing: BTreeSet<usize> = waiting.iter().map(|half| half.peer).collect();
        let judged = self.handshake.judge(&own, self.handshake.calls_elsewhere(&own, missing), is_late);
        self.note(operation, judged);
    }

    /// Abandons the transfers that are not agreed. A receiver that has accepted just now learns from this rank's report that no data will be
    /// sent.
    fn withdraw(&mut self) {
        let waiting = self.sends.iter_mut().chain(&mut self.receives).filter(|half| half.is_waiting());
        waiting.for_each(|half| half.state = State::Done);
    }

    /// Abandons all transfers whose memory is not the caller's.
    fn abandon(&mut self) {
        let halves = self.sends.iter_mut().chain(&mut self.receives);
        halves.filter(|half| half.mover.can_be_left()).for_each(|half| half.state = State::Done);
    }

    /// Advances the outgoing transfers. Returns whether any is in flight.
    fn step_out(&mut self, round: usize) -> bool {
        for index in 0..self.sends.len() {
            let half = &self.sends[index];
            if !half.is_waiting() {
                continue;
            }
            let accepted = |record: &Record| matches!(record, Record::Accept).then_some(());
            if self.handshake.link().take(half.peer, accepted).is_some() {
                self.sends[index].agree();
            }
        }
        let turns = turns(&self.sends, round);
        for &index in &turns {
            let (half, link) = (&mut self.sends[index], self.handshake.link());
            if half.state == State::Done {
                continue;
            }
            match half.mover.advance(link, half.peer) {
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

    /// Advances the incoming transfers. Returns whether any is in flight.
    fn step_into(&mut self, round: usize) -> bool {
        let mut is_moving = false;
        for index in 0..self.receives.len() {
            let half = &self.receives[index];
            let operation = half.call.operation;
            match half.state {
                State::Waiting => match accept(self.handshake, half) {
                    Ok(false) => {}
                    Ok(true) => self.receives[index].agree(),
                    Err(failure) => self.note(operation, Err(failure)),
                },
                State::Unconfirmed => {
                    is_moving = true;
                    let is_late = half.stall.is_over(self.handshake.deadline);
                    let confirmed = confirmed(self.handshake, half, is_late);
                    if confirmed != Ok(false) {
                        self.receives[index].state = State::Done;
                        self.note(operation, confirmed.map(drop));
                    }
                }
                State::Agreed | State::Started | State::Done => {}
            }
        }
        for index in turns(&self.receives, round) {
            let (half, link) = (&mut self.receives[index], self.handshake.link());
            let operation = half.call.operation;
            // Data that were sent before the sender failed arrive before its report, so the report is read first.
            let told = lost(self.handshake, half, false);
            if half.state == State::Done {
                continue;
            }
            match half.mover.advance(link, half.peer) {
                Stage::Idle => {
                    // The sender has made its offer, but a sender of device memory may have many other transfers, so it gets twice the
                    // deadline.
                    let patience = if half.mover.is_confirmed() { 2 } else { 1 };
                    let is_late = half.stall.is_over(self.handshake.deadline.saturating_mul(patience));
                    let told = told.and_then(|()| lost(self.handshake, half, is_late));
                    if told.is_err() {
                        half.state = State::Done;
                        self.note(operation, told);
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
                    half.state = if half.mover.is_confirmed() { State::Unconfirmed } else { State::Done };
                    half.stall.end();
                    if let Some(reason) = half.mover.failure() {
                        self.note(operation, Err(self.handshake.broken(operation, reason)));
                    }
                }
            }
        }
        is_moving
    }

    /// Abandons the transfers with a peer, in one direction, if none has progressed for the deadline, or for a moment if the peer has
    /// failed. All of them are abandoned, because the data of a later transfer would be taken for the rest of an earlier one.
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
            // By now, everything that the departed rank has sent and received is known.
            match halves[index].mover.advance(handshake.link(), peer) {
                Stage::Done | Stage::Starting { has_moved: true } | Stage::Started { has_moved: true } => return,
                Stage::Idle | Stage::Starting { .. } | Stage::Started { .. } => {}
            }
        }
        let half = &halves[index];
        let is_late = half.stall.is_over(handshake.deadline);
        if !half.mover.can_be_left() || !(is_late || half.stall.is_long()) {
            return;
        }
        if let Err(failure) = lost(handshake, half, is_late) {
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

/// Returns the failure of the other side of an agreed transfer, if it has reported one, has left or is late.
fn lost(handshake: &Handshake, half: &Half<'_>, is_late: bool) -> Result<(), CommError> {
    handshake.link().reported(half.peer..half.peer + 1, u64::MAX).map_or(Ok(()), Err)?;
    handshake.judge(&[half.call], vec![(half.peer, Vec::new())], is_late)
}

/// The transfers that may proceed: with each peer, only the first that still has messages to start, because the messages of the next
/// transfer have to follow. The order of peers rotates with each round, so that no peer waits permanently for memory that others are
/// using.
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

/// Accepts the sender's offer, if it was made and matches. Returns whether it was made.
fn accept(handshake: &Handshake, half: &Half<'_>) -> Result<bool, CommError> {
    let (link, peer) = (handshake.link(), half.peer);
    let offer = |record: &Record| if let Record::Offer { call, .. } = record { Some(*call) } else { None };
    let Some(offered) = link.take(peer, offer) else { return Ok(false) };
    engine::compare_transfer((peer, offered), (link.rank(), half.call))?;
    link.post(peer, Record::Accept).map_err(|error| handshake.broken(half.call.operation, error))?;
    Ok(true)
}

/// Confirms the sent data, or tells the receiver at once that they are incorrect: later data may be confirmed.
fn sent(handshake: &Handshake, half: &mut Half<'_>) -> Result<(), CommError> {
    let (operation, failed) = (half.call.operation, half.mover.failure());
    let outcome = failed.map_or(Ok(()), |reason| Err(handshake.broken(operation, reason)));
    if half.mover.is_confirmed() {
        let word = outcome.clone().map_or_else(|error| handshake.failed(error), |()| Record::Sent);
        handshake.link().post(half.peer, word).map_err(|error| handshake.broken(operation, error))?;
    }
    outcome
}

/// Whether the sender has confirmed its data. Its failure stays in the inbox, for its other transfers.
fn confirmed(handshake: &Handshake, half: &Half<'_>, is_late: bool) -> Result<bool, CommError> {
    let word = |record: &Record| matches!(record, Record::Sent | Record::Failed { .. });
    {
        let records = &mut handshake.link().inbox()[half.peer];
        if let Some(index) = records.iter().position(word).filter(|&index| records[index] == Record::Sent) {
            records.remove(index);
            return Ok(true);
        }
    }
    lost(handshake, half, is_late).map(|()| false)
}

#[cfg(test)]
mod tests;
