//! Collectives of processes by messages, over any [`Link`]: the code that all transports between processes share.
//!
//! Ranks compare their calls before data move (`handshake`): in shared-memory mailboxes if all are processes of one machine (`mailbox`),
//! otherwise by records (`record`). Operands of small calls are sent with the call (`eager`). Larger ones go through the mailboxes in
//! pieces (`pipelined`), or move pairwise in messages (`transfer`, by `stream`). Sends and receives are messages that two ranks agree on
//! (`point_to_point`, `direct`). Ranks of one machine expose windows of their buffers to each other (`windows`).
//!
//! These modules do not depend on the way in which records and bytes are sent: a transport implements [`Link`], makes a
//! [`MessagePassing`] of it, and wraps it in its own public type.

mod direct;
mod eager;
mod handshake;
mod link;
mod mailbox;
mod pipelined;
mod point_to_point;
mod record;
mod scratch;
mod stream;
mod transfer;
mod wait;
mod windows;

use std::borrow::Cow;
use std::time::Duration;

use self::handshake::Handshake;
pub(in crate::comm) use self::link::{Buffers, Incoming, Link, LinkError, Outgoing, Pending, Requests};
use self::mailbox::Payload;
pub(in crate::comm) use self::point_to_point::Half;
#[cfg(all(feature = "cuda", feature = "mpi"))]
pub(in crate::comm) use self::point_to_point::{DataMover, Stage, exchange};
#[cfg(feature = "mpi")]
pub(in crate::comm) use self::record::RECORD_BYTES;
pub(in crate::comm) use self::record::Record;
#[cfg(all(feature = "cuda", feature = "mpi"))]
pub(in crate::comm) use self::scratch::Scratch;
pub(in crate::comm) use self::transfer::AgreedCollective;
#[cfg(all(feature = "cuda", feature = "mpi"))]
pub(in crate::comm) use self::transfer::part_len;
#[cfg(feature = "mpi")]
pub(in crate::comm) use self::wait::Wait;
use self::windows::PeerMappings;
use super::collective_call::check_peer;
use super::reduction::Reduction;
use super::{Collective, Communicator, Operands, Ranks, ReduceOp, Split, gather_words_by};
use crate::call::scope;
use crate::error::{Call, Error, Operation, Result};
use crate::memory::SharedWindows;
use crate::slice::{Slice, SliceMut};
use crate::trace::CurrentCall;

/// One rank of a group of processes that run collectives on host memory. It may move to another thread, but only one thread at a time can
/// use it.
#[derive(Debug)]
pub(in crate::comm) struct MessagePassing {
    handshake: Handshake,
    mappings: PeerMappings,
    memory: MemoryUse,
}

/// Whether ranks use shared memory where they can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::comm) enum MemoryUse {
    Shared,
    MessagesOnly,
}

impl MemoryUse {
    /// Returns [`MessagesOnly`](Self::MessagesOnly) if the environment variable has any value but `0`.
    pub(in crate::comm) fn unless(variable: &str) -> Self {
        if std::env::var_os(variable).is_some_and(|value| value != "0") { Self::MessagesOnly } else { Self::Shared }
    }
}

impl MessagePassing {
    /// Makes the ranks of a link. All ranks of the link have to call it.
    pub(in crate::comm) fn new(link: Box<dyn Link>, deadline: Duration, memory: MemoryUse) -> Result<Self> {
        let calls = CurrentCall::of_processes(link.transport(), link.rank(), link.world_size());
        Self::recording(link, deadline, memory, calls)
    }

    /// Like [`new`](Self::new), with the trace of this rank's calls.
    fn recording(link: Box<dyn Link>, deadline: Duration, memory: MemoryUse, calls: CurrentCall) -> Result<Self> {
        let handshake = Handshake::new(link, deadline, calls);
        let mut ranks = Self { handshake, mappings: PeerMappings::default(), memory };
        ranks.open_mailboxes()?;
        Ok(ranks)
    }

    pub(in crate::comm) fn set_deadline(&mut self, deadline: Duration) {
        self.handshake.deadline = deadline;
    }

    #[cfg(all(feature = "mpi", feature = "cuda"))]
    pub(in crate::comm) fn handshake(&self) -> &Handshake {
        &self.handshake
    }

    pub(in crate::comm) fn link(&self) -> &dyn Link {
        self.handshake.link()
    }

    /// Whether all ranks are processes of one machine that share memory.
    pub(in crate::comm) fn shares_memory(&self) -> bool {
        self.handshake.mailboxes.is_some()
    }

    /// Agrees on a number that no group of these ranks has. Another thread of a rank, which splits another communicator, may take it
    /// first; then the ranks try again.
    fn agree_on_group(&self) -> Result<u64> {
        loop {
            let free = self.gather(SetUp::Group.call(), &[self.link().free_group()])?;
            let number = free.into_iter().max().unwrap_or_default();
            let is_taken = self.link().take_group(number)?;
            if !self.gather(SetUp::Group.call(), &[u64::from(is_taken)])?.contains(&0) {
                return Ok(number);
            }
        }
    }

    /// Refuses a call with more bytes than the links to these ranks can send.
    fn check_length(&self, operation: Operation, bytes: usize, peers: impl Iterator<Item = usize>) -> Result<()> {
        let longest = peers.map(|peer| self.link().longest_message(peer)).min().unwrap_or(usize::MAX);
        if bytes <= longest {
            return Ok(());
        }
        let reason = format!(
            "{operation} of {bytes} bytes, and processes without MPI carry at most {longest} between machines in a call: on CPUs build the program \
             with the feature `mpi` and start it with mpiexec (page \"Deployment\", \"Several CPU machines\"), on GPUs use NCCL"
        );
        Err(self.handshake.refuse(operation, Error::InvalidArgument { operation: "message passing", reason }))
    }

    /// Agrees with the other ranks on this call, after which data may move.
    pub(in crate::comm) fn agree(&self, call: Call) -> Result<AgreedCollective<'_>> {
        self.handshake.agree(call, Payload::EMPTY, true)?;
        Ok(AgreedCollective { handshake: &self.handshake, operation: call.operation })
    }

    /// Receives the failures that other ranks have sent since the last call, without waiting.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(in crate::comm) fn listen(&self, operation: Operation) -> Result<()> {
        self.handshake.check(operation)?;
        let heard = self.handshake.pump(operation).and_then(|()| self.handshake.look_for_failure());
        heard.map_err(|failure| self.handshake.fail(operation, failure))
    }

    /// Gathers every rank's words, in rank order; all ranks pass the same number of words. Either all ranks get the result, or none.
    pub(in crate::comm) fn gather(&self, call: Call, own: &[u64]) -> Result<Vec<u64>> {
        let mut all = vec![0u64; own.len() * self.world_size()];
        let (own, output): (&[u8], &mut [u8]) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(&mut all));
        if self.handshake.is_eager(own.len()) {
            self.handshake.all_gather_confirmed(call, own, output)?;
        } else {
            self.gather_bytes(call, own, output)?;
        }
        self.handshake.calls.finish();
        Ok(all)
    }

    /// Gathers byte strings of equal length into `all`.
    fn gather_bytes(&self, call: Call, own: &[u8], all: &mut [u8]) -> Result<()> {
        if self.handshake.is_eager(own.len()) {
            return self.handshake.all_gather_eager(call, own, all);
        }
        let transfer = self.agree(call)?;
        // SAFETY: there is room for as many bytes of every rank.
        unsafe { transfer.all_gather(own.as_ptr(), all.as_mut_ptr(), own.len()) }
    }

    pub(in crate::comm) fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        check_peer(operation, peer, self.rank(), self.world_size())
    }

    fn run_all_reduce(&self, call: Call, operands: Operands<'_>, reduction: Reduction<'_>) -> Result<()> {
        let (input, output) = match operands {
            Operands::InPlace(data) => (None, data.as_bytes_mut()),
            Operands::Apart { input, output } => (Some(input.as_bytes()), output.as_bytes_mut()),
        };
        if self.world_size() > 1 && self.handshake.is_eager(output.len()) {
            return self.handshake.all_reduce_eager(call, reduction, input, output);
        }
        let transfer = self.agree(call)?;
        input.into_iter().for_each(|input| output.copy_from_slice(input));
        if self.world_size() == 1 && reduction.keeps_one_rank() {
            return Ok(());
        }
        // SAFETY: the data have as many elements as the call says.
        unsafe { transfer.all_reduce(reduction, output.as_mut_ptr(), call.len) }
    }

    fn run_reduce_scatter(&self, call: Call, mut operands: Operands<'_>, op: ReduceOp) -> Result<()> {
        let (reduction, bytes) = (Reduction::new(operands.dtype(), op), call.bytes());
        let is_in_place = matches!(operands, Operands::InPlace(_));
        let (input, output) = operands.raw_bytes();
        let begin = if is_in_place { self.rank() * bytes } else { 0 };
        let shard = output.cast::<u8>().wrapping_add(begin);
        if self.handshake.is_eager(bytes) {
            // SAFETY: the memory of the input, borrowed by the operands; no reference to the shard exists yet.
            let input = unsafe { &*input };
            let input = if is_in_place { Cow::Owned(input.to_vec()) } else { Cow::Borrowed(input) };
            // SAFETY: the memory of the shard, borrowed mutably by the operands; the input is a copy, or disjoint from it.
            let shard = unsafe { std::slice::from_raw_parts_mut(shard, bytes) };
            return self.handshake.reduce_scatter_eager(call, reduction, &input, shard);
        }
        let transfer = self.agree(call)?;
        // SAFETY: the input has a shard of the output's length for every rank, as was checked; the output is apart, or this rank's shard.
        unsafe { transfer.reduce_scatter(reduction, input.cast(), shard, call.len) }
    }

    fn run_all_gather(&self, call: Call, operands: Operands<'_>) -> Result<()> {
        let data = match operands {
            Operands::Apart { input, output } => {
                return self.gather_bytes(call, input.as_bytes(), output.as_bytes_mut());
            }
            Operands::InPlace(data) => data,
        };
        let (all, bytes) = (data.as_bytes_mut(), call.bytes());
        let begin = self.rank() * bytes;
        if self.handshake.is_eager(bytes) {
            let own = all[begin..begin + bytes].to_vec();
            return self.handshake.all_gather_eager(call, &own, all);
        }
        let (transfer, to) = (self.agree(call)?, all.as_mut_ptr());
        // SAFETY: the data are one shard for every rank, as was checked.
        unsafe { transfer.all_gather(to.add(begin), to, bytes) }
    }

    fn run_all_to_all(&self, call: Call, operands: Operands<'_>) -> Result<()> {
        let bytes = call.bytes() / self.world_size();
        let is_eager = self.handshake.is_eager(bytes);
        match operands {
            Operands::Apart { input, output } if is_eager => {
                self.handshake.all_to_all_eager(call, input.as_bytes(), output.as_bytes_mut())
            }
            Operands::InPlace(data) if is_eager => {
                let input = data.as_slice().as_bytes().to_vec();
                self.handshake.all_to_all_eager(call, &input, data.as_bytes_mut())
            }
            mut operands => {
                let transfer = self.agree(call)?;
                let (input, output) = operands.raw_bytes();
                // SAFETY: both have one shard for every rank, as was checked, and are the same, or apart.
                unsafe { transfer.all_to_all(input.cast(), output.cast(), bytes) }
            }
        }
    }

    fn run_broadcast(&self, call: Call, data: SliceMut<'_>, root: usize) -> Result<()> {
        let transfer = self.agree(call)?;
        let bytes = data.as_bytes_mut();
        // SAFETY: the data of that many bytes.
        unsafe { transfer.broadcast(bytes.as_mut_ptr(), bytes.len(), root) }
    }

    /// Broadcasts the message of `root`; the messages of other ranks are ignored.
    #[cfg(feature = "mpi")]
    pub(in crate::comm) fn tell(&self, kind: SetUp, root: usize, message: Vec<u8>) -> Result<Vec<u8>> {
        let transfer = self.agree(kind.call())?;
        let mut message = if self.rank() == root { message } else { Vec::new() };
        let mut len = (message.len() as u64).to_ne_bytes();
        // SAFETY: so many bytes.
        unsafe { transfer.broadcast(len.as_mut_ptr(), len.len(), root)? };
        message.resize(u64::from_ne_bytes(len) as usize, 0);
        // SAFETY: as many as the root has.
        unsafe { transfer.broadcast(message.as_mut_ptr(), message.len(), root)? };
        Ok(message)
    }
}

/// The collectives that set something up. Their numbers are passed as the length, so that different ones do not match.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) enum SetUp {
    Split,
    Group,
    #[cfg(feature = "mpi")]
    Member,
    Map,
    Mailboxes,
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    Device,
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    Connect,
}

impl SetUp {
    pub(in crate::comm) fn call(self) -> Call {
        Call::of(Operation::SetUp, self as usize, None)
    }
}

impl Split for MessagePassing {
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let _scope = scope::within(Operation::Split);
        let world_size = self.world_size();
        let own = [u64::from(color.is_some()), color.unwrap_or(0), key as u64];
        let all = self.gather(SetUp::Split.call(), &own)?;
        let wishes: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
        let mut members: Vec<usize> = (0..world_size).filter(|&other| wishes[other][..2] == own[..2]).collect();
        members.sort_by_key(|&member| wishes[member][2] as i64);
        let number = self.agree_on_group()?;
        let group = || {
            let link = self.link().among(&members, number);
            let calls = self.handshake.calls.split(number, &members, link.rank());
            Self::recording(link, self.handshake.deadline, self.memory, calls)
        };
        color.map(|_| group()).transpose()
    }
}

impl Ranks for MessagePassing {
    fn rank(&self) -> usize {
        self.link().rank()
    }

    fn world_size(&self) -> usize {
        self.link().world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        gather_words_by(self, words)
    }

    fn barrier(&self) -> Result<()> {
        self.agree(Call::without_data(Operation::Barrier))?;
        self.handshake.calls.finish();
        Ok(())
    }
}

// In all unsafe blocks of these collectives, memory is borrowed by the call, which returns when the memory is no longer in use; lengths
// were compared before.
impl Communicator for MessagePassing {
    fn run(&self, collective: Collective<'_>) -> Result<()> {
        let checked = collective.check(self.rank(), self.world_size());
        checked.map_err(|error| self.handshake.refuse(collective.operation(), error))?;
        let call = collective.call(self.world_size());
        let shards = match collective {
            Collective::ReduceScatter { .. } | Collective::AllGather { .. } => self.world_size(),
            _ => 1,
        };
        self.check_length(call.operation, call.bytes().saturating_mul(shards), self.link().others())?;
        match collective {
            Collective::AllReduce { operands, op, scaling } => {
                let reduction = Reduction::scaled(operands.dtype(), op, scaling);
                self.run_all_reduce(call, operands, reduction)
            }
            Collective::WeightedMean { operands, weights } => {
                let reduction = Reduction::weighted(operands.dtype(), weights);
                self.run_all_reduce(call, operands, reduction)
            }
            Collective::ReduceScatter { operands, op } => self.run_reduce_scatter(call, operands, op),
            Collective::AllGather { operands } => self.run_all_gather(call, operands),
            Collective::AllToAll { operands } => self.run_all_to_all(call, operands),
            Collective::Broadcast { data, root } => self.run_broadcast(call, data, root),
        }?;
        self.handshake.calls.finish();
        Ok(())
    }

    fn exchange(&self, sends: &[(usize, Slice<'_>)], receives: &mut [(usize, SliceMut<'_>)]) -> Result<()> {
        sends.iter().try_for_each(|&(peer, _)| self.check_peer(Operation::Send { peer }, peer))?;
        receives.iter().try_for_each(|&(peer, _)| self.check_peer(Operation::Recv { peer }, peer))?;
        let outward = sends.iter().map(|&(peer, data)| (Operation::Send { peer }, peer, data.as_bytes().len()));
        let inward = receives
            .iter()
            .map(|(peer, data)| (Operation::Recv { peer: *peer }, *peer, data.as_slice().as_bytes().len()));
        outward
            .chain(inward)
            .try_for_each(|(operation, peer, bytes)| self.check_length(operation, bytes, peer..peer + 1))?;
        let call = |operation, data: Slice<'_>| Call::new(operation, data.len(), data.dtype());
        let sends = sends.iter().map(|&(peer, data)| {
            let (call, bytes) = (call(Operation::Send { peer }, data), data.as_bytes());
            let outgoing = Outgoing { peer, start: bytes.as_ptr(), bytes: bytes.len() };
            // SAFETY: the data are borrowed until the exchange is over.
            unsafe { Half::outgoing(self.link(), call, outgoing, true) }
        });
        let receives = receives.iter_mut().map(|(peer, data)| {
            let (peer, call) = (*peer, call(Operation::Recv { peer: *peer }, data.as_slice()));
            let bytes = data.reborrow().as_bytes_mut();
            let incoming = Incoming { peer, start: bytes.as_mut_ptr(), bytes: bytes.len() };
            // SAFETY: the data are borrowed until the exchange is over.
            unsafe { Half::incoming(self.link(), call, incoming, true) }
        });
        point_to_point::exchange(&self.handshake, sends.collect(), receives.collect())
    }

    fn sharing(&self) -> Option<&(dyn SharedWindows + 'static)> {
        self.shares_memory().then_some(self)
    }
}

/// Implements the traits of communicators for a type with a field `ranks`, which is a [`MessagePassing`], and a method `group`, which
/// wraps the ranks of a new group.
macro_rules! communicator {
    ($name:ident, $(#[$split:meta])*) => {
        impl $crate::comm::Ranks for $name {
            fn rank(&self) -> usize {
                self.ranks.rank()
            }

            fn world_size(&self) -> usize {
                self.ranks.world_size()
            }

            fn gather_words(&self, words: &[u64]) -> $crate::error::Result<Vec<u64>> {
                self.ranks.gather_words(words)
            }

            fn barrier(&self) -> $crate::error::Result<()> {
                self.ranks.barrier()
            }
        }

        impl $crate::comm::Communicator for $name {
            fn run(&self, collective: $crate::comm::Collective<'_>) -> $crate::error::Result<()> {
                self.ranks.run(collective)
            }

            fn exchange(
                &self,
                sends: &[(usize, $crate::slice::Slice<'_>)],
                receives: &mut [(usize, $crate::slice::SliceMut<'_>)],
            ) -> $crate::error::Result<()> {
                self.ranks.exchange(sends, receives)
            }

            fn sharing(&self) -> Option<&(dyn $crate::memory::SharedWindows + 'static)> {
                self.ranks.sharing()
            }
        }

        impl $crate::memory::SharedWindows for $name {
            fn with_windows(
                &self,
                vector: $crate::slice::SliceMut<'_>,
                work: &mut $crate::memory::Work<'_>,
            ) -> $crate::error::Result<bool> {
                self.ranks.with_windows(vector, work)
            }

            fn needs_shared_buffers(&self) -> bool {
                self.ranks.needs_shared_buffers()
            }
        }

        impl $crate::comm::Split for $name {
            $(#[$split])*
            fn split(&self, color: Option<u64>, key: i64) -> $crate::error::Result<Option<Self>> {
                Ok(self.ranks.split(color, key)?.map(|ranks| self.group(ranks)))
            }
        }
    };
}
pub(in crate::comm) use communicator;
