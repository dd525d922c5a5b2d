//! Windows of vectors, which ranks expose to each other if all are processes of one machine that can map the files behind the others'
//! vectors.
//!
//! An exposure epoch begins with a collective and ends once every rank has published that its work is over, with or without an error. A
//! rank that does not do so within the deadline, for example because it is stopped, is a failure. After a failure, the other ranks get
//! the deadline to leave the epoch, unless the failure is a timeout that names them. Memory that a rank may still use then is
//! [revoked](file::revoke): its owner continues with a copy at the same address, and the late rank with the old file, which is no longer
//! read.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

use super::handshake::Handshake;
use super::mailbox::{self, Mailboxes, end_of_epoch};
use super::wait::Wait;
use super::{MemoryUse, MessagePassing, SetUp};
use crate::call::scope;
use crate::comm::Ranks;
use crate::comm::collective_call::check_shards;
use crate::error::{Call, CommError, Departure, Operation, Result};
use crate::memory::file::{self, FileHandle, Mapped, MemoryFile};
use crate::memory::{SharedWindows, Work};
use crate::slice::SliceMut;

/// The files of other ranks that this rank has mapped; equal on all ranks.
#[derive(Debug, Default)]
pub(super) struct PeerMappings {
    /// Set once a rank could not map the vector of another; no rank tries again.
    is_unavailable: Cell<bool>,
    /// The mappings. Mappings of dropped buffers are evicted at the next map. Ranks may do so at different times, because no rank needs
    /// such a mapping again.
    sets: RefCell<Vec<Arc<FileSet>>>,
}

/// One file of every rank.
#[derive(Debug)]
struct FileSet {
    handles: Vec<FileHandle>,
    /// The bytes that every file has at least.
    bytes: usize,
    /// The mapped files by rank; `None` for this rank.
    files: Vec<Option<Mapped>>,
}

impl FileSet {
    fn map(handles: &[FileHandle], own: usize, bytes: usize) -> io::Result<Self> {
        let map = |(rank, handle): (usize, &FileHandle)| (rank != own).then(|| handle.map(bytes)).transpose();
        let files: Vec<Option<Mapped>> = handles.iter().enumerate().map(map).collect::<io::Result<_>>()?;
        let bytes = files.iter().flatten().map(Mapped::len).min().unwrap_or(bytes);
        Ok(Self { handles: handles.to_vec(), bytes, files })
    }
}

impl SharedWindows for MessagePassing {
    fn with_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool> {
        let operation = Operation::SharedWindows;
        let (rank, world_size, len, dtype) = (self.rank(), self.world_size(), vector.len(), vector.dtype());
        let window = len / world_size;
        check_shards("with_windows", world_size, ("vector", len, dtype), ("windows", window, dtype))
            .map_err(|error| self.handshake.refuse(operation, error))?;
        let Some(mailboxes) = self.handshake.mailboxes.as_ref().filter(|_| !self.mappings.is_unavailable.get()) else {
            return Ok(false);
        };
        let Some(handle) = FileHandle::of(vector.as_slice().as_bytes()) else { return Ok(false) };
        let scope = scope::within(operation);
        let handles = self.handles(Call::new(operation, len, dtype), handle)?;
        // From here on, another rank may use this rank's memory, even if this rank fails.
        let own = vector.as_bytes_mut();
        let epoch = ExposureEpoch::begin(&self.handshake, mailboxes, own);
        let own = own.as_mut_ptr();
        let Some(set) = self.map(&handles, len * dtype.size_bytes())? else {
            drop(epoch);
            return self.handshake.check(operation).map(|()| false);
        };

        let bytes = window * dtype.size_bytes();
        let window = |file: &Option<Mapped>| {
            let start = file.as_ref().map_or(own, Mapped::start).wrapping_add(rank * bytes);
            // SAFETY: every rank's vector has this window, by the compared calls, and lies at the start of its file, or it would have no
            // handle. Its owner stays in this call, which has borrowed it, until no rank works on it any more, or has revoked access and
            // continues with a copy. No other rank has the window of this rank's number.
            SliceMut::of_bytes(dtype, unsafe { std::slice::from_raw_parts_mut(start, bytes) })
        };
        let windows = set.files.iter().map(window).collect();
        drop(scope);
        let outcome = work(windows).map_err(|error| match self.handshake.check(operation) {
            Ok(()) => self.handshake.refuse(operation, error),
            Err(_) => error,
        });
        drop(epoch);
        outcome?;
        self.handshake.check(operation)?;
        Ok(true)
    }

    fn needs_shared_buffers(&self) -> bool {
        true
    }
}

impl MessagePassing {
    /// Maps the mailboxes of all ranks, if all are processes of one machine that can map each other's mailboxes. All ranks have to call
    /// it before any other collective.
    pub(super) fn open_mailboxes(&mut self) -> Result<()> {
        if !(2..=mailbox::MOST_RANKS).contains(&self.world_size()) {
            return Ok(());
        }
        let may_share = self.memory == MemoryUse::Shared && self.link().is_one_machine();
        let mailbox = may_share.then(Mailboxes::make).and_then(|made| self.or_log(made));
        let handle = mailbox.as_ref().and_then(|mailbox| FileHandle::of(mailbox.bytes())).unwrap_or(FileHandle::NONE);
        let handles = self.handles(SetUp::Mailboxes.call(), handle)?;
        let found = if handles.contains(&FileHandle::NONE) {
            None
        } else {
            self.or_log(Mailboxes::find(&handles, self.rank()))
        };
        if let Some(mailboxes) = self.if_all_succeeded(found)? {
            mailbox.into_iter().for_each(MemoryFile::leave);
            self.handshake.mailboxes = Some(mailboxes);
        }
        Ok(())
    }

    fn or_log<T>(&self, outcome: io::Result<T>) -> Option<T> {
        if let Err(error) = &outcome {
            tracing::info!(rank = self.rank(), %error, "ranks do not reach each other's memory, and send messages");
        }
        outcome.ok()
    }

    /// Returns `own` only if every rank succeeded.
    fn if_all_succeeded<T>(&self, own: Option<T>) -> Result<Option<T>> {
        let have = self.gather(SetUp::Map.call(), &[u64::from(own.is_some())])?;
        Ok(own.filter(|_| !have.contains(&0)))
    }

    /// The handles of all ranks, by rank.
    fn handles(&self, call: Call, own: FileHandle) -> Result<Vec<FileHandle>> {
        let words = self.gather(call, &own.words())?;
        let handle = |words: &[u64]| FileHandle::of_words(words.try_into().expect("as many as it has"));
        Ok(words.chunks_exact(FileHandle::WORDS).map(handle).collect())
    }

    /// Maps the files of these handles, of at least `bytes` bytes each; returns `None`, on every rank, if one rank cannot map the file of
    /// another.
    fn map(&self, handles: &[FileHandle], bytes: usize) -> Result<Option<Arc<FileSet>>> {
        let mut sets = self.mappings.sets.borrow_mut();
        // A file is as long as its owner's vector, unless its owner is broken: then it is mapped once more, and that fails.
        if let Some(set) = sets.iter().find(|set| set.handles == handles && set.bytes >= bytes) {
            return Ok(Some(set.clone()));
        }
        let own = |set: &FileSet| set.handles[self.rank()];
        sets.retain(|set| own(set).is_own() && set.files.iter().flatten().all(Mapped::has_owner));
        let Some(set) = self.if_all_succeeded(self.or_log(FileSet::map(handles, self.rank(), bytes)))? else {
            self.mappings.is_unavailable.set(true);
            return Ok(None);
        };
        let set = Arc::new(set);
        sets.push(set.clone());
        Ok(Some(set))
    }
}

/// This rank's part in an exposure epoch: dropped when its work has ended, even if it panicked or never began.
struct ExposureEpoch<'a> {
    handshake: &'a Handshake,
    mailboxes: &'a Mailboxes,
    /// The memory that this rank exposes to the others.
    own: *mut [u8],
}

impl<'a> ExposureEpoch<'a> {
    fn begin(handshake: &'a Handshake, mailboxes: &'a Mailboxes, own: &mut [u8]) -> Self {
        mailboxes.begin_epoch();
        Self { handshake, mailboxes, own }
    }

    /// Waits until all ranks have left the epoch, including ranks that have failed, or revokes their access.
    fn wait_for_all(&self) {
        let Self { handshake, mailboxes, .. } = *self;
        let (link, mut wait, mut grace) = (handshake.link(), Wait::new(Some(handshake.deadline)), None);
        while !mailboxes.have_all_ended() {
            if wait.is_time_to_listen() {
                self.note(self.listen());
                let (ended, missing): (Vec<usize>, Vec<usize>) =
                    link.others().partition(|&peer| mailboxes.has_ended(peer).is_some());
                if missing.is_empty() {
                    continue;
                }
                if let Some(failure) = handshake.failure() {
                    let grace = grace.get_or_insert_with(|| Wait::new(Some(handshake.deadline)));
                    // A process that has ended uses no memory.
                    if missing.iter().all(|&peer| link.departure(peer).is_some()) {
                        return;
                    }
                    let late = if let CommError::Timeout { missing, .. } = failure { missing } else { Vec::new() };
                    if grace.is_over() || missing.iter().all(|peer| late.contains(peer)) {
                        return self.revoke();
                    }
                } else {
                    let ended = ended.into_iter().map(|peer| (peer, vec![end_of_epoch()]));
                    let others = ended.chain(missing.into_iter().map(|peer| (peer, Vec::new()))).collect();
                    let judged = handshake.judge(&[end_of_epoch()], others, wait.is_over());
                    self.note(judged.or_else(|failure| mailboxes.close_epochs(&failure)));
                }
            }
            wait.pause();
        }
    }

    fn revoke(&self) {
        // SAFETY: borrowed by the call that this epoch is part of, where nothing uses it now.
        if let Err(error) = unsafe { file::revoke(self.own) } {
            let rank = self.handshake.link().rank();
            tracing::error!(rank, %error, "a rank still uses shared windows after a failure: aborting the job");
            self.handshake.link().abort(1);
        }
    }

    /// Receives the failure of a rank whose mailbox says that it has failed.
    fn receive_failure(&self) {
        let Self { handshake, mailboxes, .. } = *self;
        let Some(peer) = handshake.link().others().find(|&peer| mailboxes.has_ended(peer) == Some(true)) else {
            return;
        };
        let mut wait = Wait::new(Some(handshake.deadline));
        while handshake.failure().is_none() {
            self.note(self.listen());
            if wait.is_over() {
                let reason = "it failed, and has not told the reason within the deadline".into();
                let error = CommError::Transport { operation: Operation::SharedWindows, rank: peer, reason };
                self.note(Err(error));
            }
            wait.pause();
        }
    }

    /// Detects peers that still issue calls.
    fn listen(&self) -> Result<(), CommError> {
        let Self { handshake, mailboxes, .. } = *self;
        handshake.pump(Operation::SharedWindows)?;
        handshake.look_for_failure()?;
        mailboxes.check_epochs()?;
        let mut elsewhere = handshake.calls_elsewhere(&[end_of_epoch()], handshake.link().others());
        // The order matters: a rank leaves its epoch before it makes its next call.
        elsewhere.retain(|(peer, calls)| !calls.is_empty() && mailboxes.has_ended(*peer).is_none());
        handshake.judge(&[end_of_epoch()], elsewhere, false)
    }

    /// Keeps the first failure.
    fn note(&self, outcome: Result<(), CommError>) {
        if let Err(failure) = outcome
            && self.handshake.failure().is_none()
        {
            self.handshake.fail(Operation::SharedWindows, failure);
        }
    }
}

impl Drop for ExposureEpoch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (operation, rank) = (Operation::SharedWindows, self.handshake.link().rank());
            let error = CommError::PeerGone { operation, rank, departure: Departure::Panicked };
            self.note(Err(error));
        }
        self.note(self.mailboxes.end_epoch(self.handshake.failure().is_some()));
        self.wait_for_all();
        self.receive_failure();
        if self.handshake.failure().is_none() {
            self.handshake.count_completed();
        }
    }
}
