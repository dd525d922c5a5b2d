//! Transfers between two ranks: the sender offers, the receiver compares and accepts, and only then do data move.
//!
//! Once accepted, the receiver is bound to take the data, unless the sender tells it that it has failed instead; so a transfer never
//! ends on one side alone, whatever becomes of the other half of a `send_recv`. Never involves a third rank, except to tell of failures.

use super::channel::{Incoming, Outgoing, Record, Requests};
use super::meeting::{Failure, Meeting, Wait, known, mismatch};
use crate::error::{Call, CommError, Operation, Result};

/// How far one direction has come.
#[derive(Debug)]
enum Half {
    /// For the other side's word.
    Waiting,
    /// For the data of an accepted offer.
    Accepted,
    Moving(Requests),
    Done,
}

/// One call's transfers.
struct Exchange<'a> {
    meeting: &'a Meeting,
    operation: Operation,
    send: Option<(Call, Outgoing)>,
    receive: Option<(Call, Incoming)>,
    out: Half,
    into: Half,
    failure: Option<Failure>,
}

/// Sends to one rank, receives from one rank, or both at once.
///
/// # Safety
/// The memory is valid for what it is described to be, and nobody else uses what is received into until this returns.
pub(super) unsafe fn exchange(
    meeting: &Meeting,
    operation: Operation,
    send: Option<(Call, Outgoing)>,
    receive: Option<(Call, Incoming)>,
) -> Result<()> {
    meeting.check(operation)?;
    let half = |is_there: bool| if is_there { Half::Waiting } else { Half::Done };
    let (out, into) = (half(send.is_some()), half(receive.is_some()));
    let mut exchange = Exchange { meeting, operation, send, receive, out, into, failure: None };
    exchange.run();
    exchange.failure.map_or(Ok(()), |failure| Err(meeting.fail(operation, failure)))
}

impl Exchange<'_> {
    fn run(&mut self) {
        if let Some((call, Outgoing { peer, .. })) = self.send {
            if let Err(error) = self.meeting.channel().post(peer, Record::Offer(call)) {
                self.failure = Some(self.meeting.broken(self.operation, &error));
                return;
            }
        }
        let mut wait = Wait::new(Some(self.meeting.deadline()));
        loop {
            let pumped = self.meeting.pump(self.operation);
            self.note(pumped);
            let sent = self.step_out();
            self.note(sent);
            let received = self.step_into(&wait);
            self.note(received);
            if matches!((&self.out, &self.into), (Half::Done, Half::Done)) {
                return;
            }
            let heard = self.meeting.look_for_failure();
            self.note(heard);
            if wait.is_over() {
                let missing = self.missing();
                if !missing.is_empty() {
                    let (operation, deadline) = (self.operation, self.meeting.deadline());
                    let error = CommError::Timeout { operation, missing, deadline };
                    self.note(Err(Failure { error, is_news: true }));
                }
            }
            if self.failure.is_some() {
                self.withdraw();
            }
            wait.pause();
        }
    }

    /// Keeps the first failure.
    fn note(&mut self, outcome: Result<(), Failure>) {
        if let Err(failure) = outcome {
            self.failure.get_or_insert(failure);
        }
    }

    /// The ranks that have not come.
    fn missing(&self) -> Vec<usize> {
        let out = self.send.filter(|_| matches!(self.out, Half::Waiting)).map(|(_, outgoing)| outgoing.peer);
        let into = self.receive.filter(|_| matches!(self.into, Half::Waiting | Half::Accepted));
        let mut missing: Vec<usize> = out.into_iter().chain(into.map(|(_, incoming)| incoming.peer)).collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Gives up what has not been agreed. The receiver may just have accepted: it hears that nothing comes.
    fn withdraw(&mut self) {
        if let (Half::Waiting, Some((_, outgoing)), Some(failure)) = (&self.out, self.send, &self.failure) {
            if !failure.is_news {
                self.meeting.tell_failure(outgoing.peer, failure.error.clone());
            }
            self.out = Half::Done;
        }
        if matches!(self.into, Half::Waiting) {
            self.into = Half::Done;
        }
    }

    fn step_out(&mut self) -> Result<(), Failure> {
        let Some((call, outgoing)) = self.send else { return Ok(()) };
        let channel = self.meeting.channel();
        match &mut self.out {
            Half::Waiting => {
                let wanted = |record: &Record| matches!(record, Record::Accept);
                if self.take(outgoing.peer, call, wanted)?.is_some() {
                    let mut requests = Requests::default();
                    // SAFETY: by the contract of `exchange`, which returns after the messages are out.
                    unsafe { channel.start(&[], &[outgoing], &mut requests) };
                    self.out = Half::Moving(requests);
                }
                Ok(())
            }
            Half::Moving(_) => {
                let mut out = std::mem::replace(&mut self.out, Half::Done);
                let outcome = self.progress(&mut out);
                self.out = out;
                outcome
            }
            Half::Accepted | Half::Done => Ok(()),
        }
    }

    fn step_into(&mut self, wait: &Wait) -> Result<(), Failure> {
        let Some((call, incoming)) = self.receive else { return Ok(()) };
        let (channel, peer) = (self.meeting.channel(), incoming.peer);
        match &mut self.into {
            Half::Waiting => {
                let wanted = |record: &Record| matches!(record, Record::Offer(_));
                let Some(Record::Offer(offered)) = self.take(peer, call, wanted)? else { return Ok(()) };
                if (offered.len, offered.dtype) != (call.len, call.dtype) {
                    return Err(mismatch((channel.rank(), call), (peer, offered)));
                }
                let accepted = channel.post(peer, Record::Accept);
                accepted.map_err(|error| self.meeting.broken(self.operation, &error))?;
                self.into = if incoming.bytes == 0 { Half::Done } else { Half::Accepted };
                Ok(())
            }
            Half::Accepted => {
                let told = channel.inbox()[peer].iter().find_map(|record| match record {
                    Record::Failed { error, .. } => Some(known(error)),
                    _ => None,
                });
                // Data that were sent before the sender failed are there before its word of it.
                if channel.has_data(peer).map_err(|error| self.meeting.broken(self.operation, &error))? {
                    let mut requests = Requests::default();
                    // SAFETY: by the contract of `exchange`, which returns after the messages are in.
                    unsafe { channel.start(&[incoming], &[], &mut requests) };
                    self.into = Half::Moving(requests);
                } else if told.is_some() || wait.is_long_over() {
                    self.into = Half::Done;
                    return told.map_or(Ok(()), Err);
                }
                Ok(())
            }
            Half::Moving(_) => {
                let mut into = std::mem::replace(&mut self.into, Half::Done);
                let outcome = self.progress(&mut into);
                self.into = into;
                outcome
            }
            Half::Done => Ok(()),
        }
    }

    /// Takes the wanted record out of what `peer` has sent, unless something before it shows that it will never come.
    fn take(&self, peer: usize, own: Call, wanted: impl Fn(&Record) -> bool) -> Result<Option<Record>, Failure> {
        let (rank, mut inbox) = (self.meeting.channel().rank(), self.meeting.channel().inbox());
        let is_send = |call: &Call| matches!(call.operation, Operation::Send { .. });
        for (index, record) in inbox[peer].iter().enumerate() {
            match record {
                record if wanted(record) => return Ok(inbox[peer].remove(index)),
                Record::Call(call) => return Err(mismatch((rank, own), (peer, *call))),
                Record::Offer(call) if is_send(call) && is_send(&own) => {
                    return Err(mismatch((rank, own), (peer, *call)));
                }
                Record::Failed { error, .. } => return Err(known(error)),
                Record::Offer(_) | Record::Accept | Record::Go => {}
            }
        }
        Ok(None)
    }

    /// Looks whether the messages of a half are over, even if something has failed: their memory is in use until then.
    fn progress(&self, half: &mut Half) -> Result<(), Failure> {
        let Half::Moving(requests) = half else { return Ok(()) };
        if !self.meeting.channel().progress(requests) {
            return Ok(());
        }
        let outcome = std::mem::take(requests).into_result();
        *half = Half::Done;
        outcome.map_err(|error| self.meeting.broken(self.operation, &error))
    }
}
