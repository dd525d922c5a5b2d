//! Ranks with a GPU each, over NCCL: [`NcclCommunicator`].
//!
//! NCCL moves the data, on the caller's queue. This module adds error handling: ranks find each other and compare their calls over a
//! control channel ([`bootstrap`](crate::bootstrap)), a thread watches every collective, and a rank that dies, hangs or is late becomes an
//! error on all others within the deadline; then the kernels that waited for it return. The only arithmetic here is in the kernels of
//! [small sums](self#small-sums), and in the `scale` kernel for factors that NCCL cannot apply.
//!
//! ```no_run
//! use gradsync::bootstrap::Launch;
//! use gradsync::comm::nccl::NcclOptions;
//! use gradsync::comm::{Communicator, Ranks};
//! use gradsync::ops::{Adasum, AdasumOptions};
//! use gradsync::{DType, GradientBuffer};
//!
//! let (comm, queue) = Launch::from_env()?.join_gpu(&NcclOptions::default())?;
//!
//! let tensors = [("weight", vec![1024, 1024]), ("bias", vec![1024])];
//! let mut gradients = GradientBuffer::on_queue(&queue, DType::BF16, comm.world_size(), tensors)?;
//! let mut adasum = Adasum::new(&comm, &gradients, AdasumOptions::default())?;
//! adasum.all_reduce(&mut gradients)?;
//! comm.synchronize(&queue)?;
//! # Ok::<(), gradsync::Error>(())
//! ```
//!
//! # Blocking
//!
//! NCCL's communicators are blocking or non-blocking. On non-blocking ones, NCCL 2.28 starts a thread for every call: 45 to 60 µs of the
//! host's time each on an H200 machine, against 7 µs on blocking ones, and more than a small all-reduce takes. So communicators here
//! block by default: the host may wait inside NCCL while two ranks connect for the first time, and never later. Set-up runs on a separate
//! thread and can be given up; a call that hangs in a first connection is ended by the watching thread's abort.
//! [`NcclOptions::blocking`]` = false` selects a non-blocking communicator.
//!
//! # Many ranks on one GPU
//!
//! Two ranks on one GPU are refused, because usually the wrong device was chosen. If it is intended, as in tests of more ranks than GPUs,
//! [`NcclOptions::shared_gpu`] allows it, together with NCCL 2.30 or later and NCCL's own variable `NCCL_MULTI_RANK_GPU_ENABLE=1`. The
//! variable has to be set before the process starts: NCCL reads it once, and a library cannot set a variable safely while other threads
//! may read one.
//!
//! NCCL's kernels wait for each other, so all ranks' blocks have to be on the GPU at once, or the ranks hang. Ranks in several processes
//! need CUDA MPS for that, or else take turns of some milliseconds each; and `NCCL_MAX_NCHANNELS` has to limit the blocks: 4 are enough
//! for four ranks, 2 for eight. [`NcclCommunicator::ranks_on_device`] returns the number of ranks.
//!
//! # Small sums
//!
//! Between two to eight ranks of one machine whose kernels can access each other's memory, an all-reduce (`Sum` or `Mean`, scaled or not)
//! of a small tensor is one launch of this crate's kernels, which send packets to the mailboxes of their peers, without any work of the
//! host. That takes a quarter to three quarters of NCCL's time ([performance](crate::docs::performance)), also in a recorded
//! graph. The sum has the bits of [`OrderedAllReduce`](crate::ops::OrderedAllReduce): in rank order, in `f64`, times the factors, rounded once.
//!
//! Up to a threshold every rank sends all data to all others (one shot: half a round trip); above it each rank sums up its shard, and
//! sends the result to all (two shots: less traffic), as vLLM's custom all-reduce and PyTorch's symmetric memory do. The largest small
//! tensor ([`NcclCommunicator::low_latency_bytes`]) has 8 MiB on GPUs of compute capability 9.x and 256 KiB on others, and
//! [`NcclOptions::low_latency_bytes`] changes it; 0 leaves all sums to NCCL. Mailboxes take four times that size on every rank, and
//! stay occupied until all ranks have dropped the communicator and their graphs.
//!
//! Such a launch begins only after all earlier launches of this crate's kernels by the same communicator have ended, on whichever queue they
//! are.
//!
//! # Checks
//!
//! With [`NcclOptions::checks`], each rank sends a record of every call (operation, factors, root, peer, count and dtype) over the
//! control channel and enqueues the call without waiting. The records are matched as they arrive, in each rank's order: collectives with
//! those of all ranks, sends with receives pair by pair, groups as a whole. The first record that can never match fails the communicator
//! on every rank, as a [`CommError::Mismatch`] that names two ranks and their calls, and kernels that wait for each other are ended.
//!
//! **Guaranteed**: the next [`synchronize`](Communicator::synchronize) at the latest reports a mismatch on every rank, because it waits
//! until all calls of this rank so far have been matched with the records of the participating ranks. Often an earlier call reports it. If
//! a rank never makes the matching call, `synchronize` names it after the deadline, also for operations of 0 elements, for which no GPU
//! waits.
//!
//! **Not guaranteed**: NCCL gets a call before it is compared. If calls differ, the operands and all results computed from them have
//! unspecified contents when the error is returned. Use results only after `synchronize` has returned without an error: waiting for the
//! queue by other means does not wait for the comparison. The error is final, so a program cannot continue after counts have differed.
//!
//! Work that is recorded into a CUDA graph is compared before it is recorded. A launch by [`launch`](NcclCommunicator::launch) is one
//! call, [`Operation::Graph`], with the number of the recording: launching different recordings is a mismatch.
//!
//! The cost, measured over loopback on 2 x86 cores that were busy with other work too, as medians: 0.1 to 0.2 µs of the host's time a
//! call, and 3 to 28 µs for the 14 calls of a step that follow each other, where the thread that writes to the connection must be woken;
//! but 0.26 ms on rank 0 of 8 processes, which matches the records of all ranks and had no separate core for that. Comparing before each
//! call takes 0.6 ms for them on 2 ranks and 3.8 ms on 8. `synchronize` requests the confirmation while the queue runs; if the queue is
//! done sooner, it takes as long as a message to rank 0 and back, 0.06 ms on 2 ranks and 0.2 to 0.4 ms on 8. Rank 0's process handled 0.2
//! million records a second of 2 ranks, and 0.7 million of 8. To bound the memory, a host that is 4096 calls ahead of another rank waits.
//!
//! # Without checks
//!
//! With [`NcclOptions::checks`]` = false`, calls that differ hang until the deadline, or give wrong numbers, but memory stays safe:
//!
//! * Between processes, NCCL's kernels send data through NCCL's own buffers, and use this rank's operands only up to this rank's count. A
//!   call of another length, dtype or root never reaches beyond them.
//! * Between threads of one process, and between buffers that NCCL registers because a graph names them, NCCL writes to the peer's memory
//!   directly, up to the writer's count. So these calls wait until they have been compared, whatever the option: calls of NCCL by ranks
//!   that share a process, and calls of NCCL that are recorded, once, while they are recorded.
//! * Launches of graphs with calls of NCCL are compared too. They wait for that only where ranks share a process, or where a communicator
//!   has several recordings in which NCCL may have registered buffers; in both cases [`Graph::launch`] refuses the graph. NCCL may register
//!   memory of `cuMemAlloc`, which this crate allocates, before 2.24 and with `NCCL_LEGACY_CUDA_REGISTER=1`; other memory always; and no
//!   memory with `NCCL_GRAPH_REGISTER=0`.
//! * The kernels of this crate write only to memory that all ranks have agreed on, within its size, and are never compared.
//!
//! So without checks, ranks that are threads of one process may use several communicators in different orders, as long as their calls are
//! launches of this crate's kernels: [small sums](self#small-sums), and [`OrderedAllReduce`](crate::ops::OrderedAllReduce) and
//! [`Adasum`](crate::ops::Adasum) by peers. Calls of NCCL need the same order on all ranks.

mod all_reduce;
mod companions;
pub(crate) mod group;
mod host;
mod low_latency;
mod options;
mod peer_memory;
mod primitive;
mod raw;
mod recorded;
mod session;
mod setup;
mod watch;

use std::cell::{Cell, OnceCell};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::group::NcclGroup;
use self::low_latency::LowLatency;
pub use self::options::NcclOptions;
use self::primitive::{Primitive, RawSlice};
use self::recorded::Recorded;
use self::session::{Failure, Session};
use self::watch::End;
use super::collective_call::one_queue;
use super::process::ProcessCommunicator;
use super::{Agreements, Collective, Communicator, Ledger, Operands, Ranks, Split};
use crate::bootstrap::Member;
use crate::call::scope;
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Graph, HostFlag, Queue, Sharers};
use crate::error::{Call, CommError, Error, Operation, Result};
use crate::memory::{Cuda, PeerMemory, SharedMemory};
use crate::sys::nccl::Version;

/// One rank of a group with a GPU each. It may move to another thread, but only one thread at a time can use it.
///
/// Runs the calls of [`Communicator`] on slices of any queue of its device. Small sums and means are added by this crate's kernels in
/// `f64` in rank order ([small sums](self#small-sums)); for all others, NCCL computes sums in the dtype of the data, in an order that depends
/// on the length and on the machine, but is equal on all ranks and from run to run on the same machine. Means are sums times `1/P`, applied
/// by NCCL to the inputs if the dtype is f32 or f64 or `P` is a power of two, and otherwise by the next smaller power of two before and a
/// pass over the result, so that no mean is off by the rounding of its factor, and no sum overflows. `Max` and `Min` of NaN are unspecified.
///
/// Dropping it waits for its operations, at most until their deadline, and destroys the communicator; a rank that panics aborts it. Of
/// ranks that are threads of one process, the last one to be dropped destroys NCCL's part of all of them. A [`Graph`] with its operations
/// postpones this until the graph is dropped too.
#[derive(Debug)]
pub struct NcclCommunicator {
    session: Arc<Session>,
    /// Ends the communicator when dropped; recorded graphs hold it too.
    end: Arc<End>,
    agreements: Agreements,
    /// Sums of small tensors by this crate's kernels, if they can access the memory of all ranks.
    low_latency: Option<LowLatency>,
    /// The communicator for host memory, once it was requested.
    host: OnceCell<ProcessCommunicator>,
    one_thread: PhantomData<Cell<()>>,
}

impl NcclCommunicator {
    /// Makes a communicator on `queue`'s device, with all ranks of a group; returns when every rank has one.
    ///
    /// # Errors
    /// [`Error::Nccl`] if NCCL is missing, too old or fails; [`Error::InvalidArgument`] for contradictory options, two ranks on one GPU
    /// without [the requirements for it](self#many-ranks-on-one-gpu), or ranks with different versions or options; [`Error::Comm`] naming
    /// a rank that cannot take part, is gone, or missed the deadline.
    pub fn new(member: Member, queue: &Queue, options: &NcclOptions) -> Result<Self> {
        Self::part_of(Sharers::ONE, member, queue, options)
    }

    /// Like [`new`](Self::new); `parent` describes the sharing of this rank's GPU in the communicator that this one is split from.
    fn part_of(parent: Sharers, member: Member, queue: &Queue, options: &NcclOptions) -> Result<Self> {
        let _scope = scope::within(Operation::SetUp);
        let abort = Arc::new(HostFlag::new(queue)?);
        let connected = setup::connect(&member, queue, options, parent)?;
        let limits = connected.limits;
        let session = Arc::new(Session::new(connected, member, queue.clone(), options, abort));
        let watched = session.clone();
        let watcher = std::thread::Builder::new()
            .name(format!("gradsync-watch-{}", session.member.rank()))
            .spawn(move || watch::watch(&watched))
            .map_err(|error| {
                session.fail(Failure::Comm(CommError::Transport {
                    operation: Operation::SetUp,
                    rank: session.member.rank(),
                    reason: "no thread watches over it".into(),
                }));
                watch::end(&session, false);
                let reason = format!("the thread that watches over it did not start: {error}");
                Error::InvalidArgument { operation: "nccl communicator", reason }
            })?;
        let end = Arc::new(End::new(session.clone(), watcher));
        let mut comm = Self {
            session,
            end,
            agreements: Agreements::default(),
            low_latency: None,
            host: OnceCell::new(),
            one_thread: PhantomData,
        };
        comm.low_latency = LowLatency::connect(&comm, limits)?;
        Ok(comm)
    }

    /// Like [`Split::split`], on a queue of the same device, with these options.
    ///
    /// # Errors
    /// As [`Member::split`] and [`new`](Self::new).
    pub fn split_onto(
        &self,
        queue: &Queue,
        options: &NcclOptions,
        color: Option<u64>,
        key: i64,
    ) -> Result<Option<Self>> {
        let _scope = scope::within(Operation::Split);
        self.session.check(scope::called(Operation::Split))?;
        let member = self.session.member.split(color, key, options.deadline)?;
        member.map(|member| Self::part_of(self.session.neighbours.sharers, member, queue, options)).transpose()
    }

    /// The version of the NCCL library.
    pub fn version(&self) -> Version {
        self.session.nccl.version()
    }

    /// The number of its ranks on this rank's GPU, including this one: more than one only with [`NcclOptions::shared_gpu`]. Kernels that
    /// wait for kernels of other ranks share the GPU's multiprocessors with that many ranks.
    pub fn ranks_on_device(&self) -> usize {
        self.session.neighbours.ranks_on_device
    }

    /// The largest all-reduce that is one launch of this crate's kernels ([small sums](self#small-sums)), in bytes; 0 if kernels cannot
    /// access the memory of all ranks. Equal on all ranks.
    pub fn low_latency_bytes(&self) -> usize {
        self.low_latency.as_ref().map_or(0, LowLatency::most_bytes)
    }

    /// The control channel of this rank.
    pub fn member(&self) -> &Member {
        &self.session.member
    }

    /// The failure that has ended this communicator, if any. Does not wait.
    pub fn failure(&self) -> Option<Error> {
        self.session.check_outstanding().err()
    }

    /// Ends the communicator at once, without waiting for its operations; the other ranks get an error that names this one.
    pub fn abort(self) {
        self.session.report(Operation::Exchange, "it aborted".into());
    }

    /// Launches a graph in which collectives of this communicator, or kernels that wait for kernels of other ranks, were recorded. The
    /// launch is one call of [`Operation::Graph`] with the number of the recording: it is compared with the calls of the other ranks, and
    /// given up after the deadline if one of them does not launch. If calls of NCCL by other communicators are in the graph, their ranks
    /// compare the launch too. With [checks](self#checks) or [without](self#without-checks), all ranks launch the same recordings in the
    /// same order.
    ///
    /// # Errors
    /// The errors of a collective, and of [`Graph::launch`].
    pub fn launch(&self, graph: &Graph) -> Result<()> {
        self.session.launch(graph)
    }

    /// Begins a group of operations that run at once.
    pub(crate) fn group<'d>(&self) -> NcclGroup<'_, 'd> {
        NcclGroup::new(self)
    }

    /// Enqueues operations, all of them as one group of NCCL, after announcing them for comparison, and watches them from then on.
    ///
    /// # Safety
    /// As [`Session::issue`].
    unsafe fn submit(&self, queue: &Queue, calls: &[Call], primitives: &[Primitive]) -> Result<()> {
        let Some(last) = calls.last() else { return Ok(()) };
        let primitives = if calls.iter().all(|call| call.len == 0) { &[] } else { primitives };
        let session = &*self.session;
        let _held = queue.hold();
        let recorded = self.recorded(queue)?;
        if recorded.is_some() {
            session.recordings.note_operands(queue, primitives);
        }
        let recording = session.compare((queue, recorded.as_deref()), calls, true)?;
        let begun = session.begin(queue, calls)?;
        // SAFETY: the caller's promise.
        let issued = unsafe { session.issue(queue, primitives, last.called()) };
        session.watch(queue, begun, recording.is_none() && !primitives.is_empty(), issued)
    }

    /// This communicator's part of the recording of the queue's work, if there is one. It keeps the communicator alive: NCCL's communicator
    /// must outlive graphs with its operations, because destroying it waits for them. The caller holds the queue.
    fn recorded(&self, queue: &Queue) -> Result<Option<Arc<Recorded>>> {
        let is_own = |part: &Recorded| Arc::ptr_eq(&part.session, &self.session);
        let make = || Recorded::new(self.session.clone(), self.end.clone());
        Ok(queue.part_of_recording(is_own, make, Recorded::launch_waits)?)
    }

    fn world(&self) -> usize {
        self.session.member.world_size()
    }

    /// Returns an error of this rank's own call, after reporting it to the other ranks.
    fn refused<T>(&self, operation: Operation, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| self.session.refuse(operation, error))
    }
}

impl Split for NcclCommunicator {
    /// Makes a group with the queue and the options of this communicator. Operations of two communicators with a rank in common must be
    /// enqueued in the same order on all ranks, as NCCL requires.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        self.split_onto(&self.session.device, &self.session.options, color, key)
    }
}

impl Ranks for NcclCommunicator {
    fn rank(&self) -> usize {
        self.session.member.rank()
    }

    fn world_size(&self) -> usize {
        self.world()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        let _scope = scope::within(Operation::GatherWords);
        self.session.check(scope::called(Operation::GatherWords))?;
        let fail = |error: &CommError| self.session.fail(Failure::Comm(error.clone()));
        let all = self.session.member.all_gather(bytemuck::cast_slice(words), self.session.options.deadline);
        let all = all.inspect_err(fail)?;
        if let Some(rank) = all.iter().position(|bytes| bytes.len() != size_of_val(words)) {
            let reason = format!(
                "it brought {} bytes, where rank {} brought {}",
                all[rank].len(),
                self.rank(),
                size_of_val(words)
            );
            let operation = scope::called(Operation::GatherWords);
            let error = CommError::InvalidCall { operation, rank, reason };
            fail(&error);
            return Err(error.into());
        }
        Ok(all.iter().flat_map(|bytes| bytemuck::pod_collect_to_vec::<u8, u64>(bytes)).collect())
    }

    fn ledger(&self) -> Option<&dyn Ledger> {
        Some(self)
    }

    fn failure(&self) -> Option<Error> {
        NcclCommunicator::failure(self)
    }
}

impl Ledger for NcclCommunicator {
    fn agreements(&self) -> &Agreements {
        &self.agreements
    }

    fn announced(&self) -> u64 {
        self.session.member.announced()
    }

    fn is_confirmed(&self, calls: u64) -> bool {
        self.session.member.is_confirmed(calls)
    }

    fn confirm(&self, calls: u64) -> Result<()> {
        self.session.confirm(calls, self.session.options.deadline)
    }

    fn refuse(&self, operation: Operation, error: Error) -> Error {
        self.session.refuse(operation, error)
    }

    fn recall(&self, agreement: u64) -> Result<()> {
        let operation = Operation::Agreed { agreement };
        self.session.check(scope::called(operation))?;
        if self.session.compares_calls() { self.session.announce(&[Call::without_data(operation)]) } else { Ok(()) }
    }
}

// In all unsafe blocks of these collectives, operands are borrowed and belong to one queue, on which later work on them is ordered, and
// lengths were checked: an input is the output, or its shard, or disjoint from it.
impl Communicator<Cuda> for NcclCommunicator {
    fn run(&self, collective: Collective<'_, Cuda>) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world());
        let operation = collective.operation();
        self.refused(operation, collective.check(rank, world_size))?;
        // The range of this rank's shard in a vector for input and output.
        let own = |data: DeviceSlice<'_>| {
            let len = data.len() / world_size;
            rank * len..(rank + 1) * len
        };
        match collective {
            Collective::AllReduce { operands, op, scaling } => {
                let (input, output) = operands.views();
                let operands = (input.into(), output.address());
                // SAFETY: see above.
                unsafe { self.reduce((input.queue(), operation), operands, op, scaling) }
            }
            Collective::WeightedMean { operands, weights } => {
                // SAFETY: see above.
                unsafe { self.reduce_weighted(operation, operands.views(), weights) }
            }
            Collective::ReduceScatter { operands, op } => {
                let is_in_place = matches!(operands, Operands::InPlace(_));
                let (input, output) = operands.views();
                let output = if is_in_place { output.range(own(output)) } else { output };
                // SAFETY: see above.
                unsafe { self.reduce_scatter_raw(input.address(), output, op) }
            }
            Collective::AllGather { operands } => {
                let is_in_place = matches!(operands, Operands::InPlace(_));
                let (input, output) = operands.views();
                let part = if is_in_place { input.range(own(input)) } else { input };
                // SAFETY: see above.
                unsafe { self.all_gather_raw(part, output.address()) }
            }
            Collective::AllToAll { operands: Operands::Apart { input, output } } => {
                // SAFETY: see above.
                unsafe { self.all_to_all_raw(input, output.as_slice().address()) }
            }
            Collective::AllToAll { operands: Operands::InPlace(data) } => {
                let data = data.as_slice();
                let copy = self.refused(Operation::AllToAll, DeviceBuffer::copy_of(data))?;
                // SAFETY: see above; the copy is freed in the order of the queue.
                unsafe { self.all_to_all_raw(copy.as_slice(), data.address()) }
            }
            Collective::Broadcast { data, root } => {
                // SAFETY: see above.
                unsafe { self.broadcast_raw(data.as_slice(), root) }
            }
        }
    }

    fn run_all(&self, collectives: Vec<Collective<'_, Cuda>>) -> Result<()> {
        let is_small = |collective: &Collective<'_, Cuda>| match (&self.low_latency, collective) {
            (Some(low_latency), Collective::AllReduce { operands, op, scaling }) => {
                low_latency.takes(operands.views().0.into(), *op, *scaling).is_some()
            }
            _ => false,
        };
        let mut group = self.group();
        if collectives.iter().all(is_small) || !collectives.iter().all(|collective| group.takes(collective)) {
            return collectives.into_iter().try_for_each(|collective| self.run(collective));
        }
        for collective in collectives {
            let operation = collective.operation();
            self.refused(operation, group.add_collective(collective))?;
        }
        group.submit()
    }

    fn exchange(&self, sends: &[(usize, DeviceSlice<'_>)], receives: &mut [(usize, DeviceSliceMut<'_>)]) -> Result<()> {
        let Some(queue) = one_queue(sends, receives)? else { return Ok(()) };
        let (mut calls, mut primitives) = (Vec::new(), Vec::new());
        for &(peer, data) in sends {
            let data = RawSlice::from(data);
            self.check_peer(Operation::Send { peer }, peer)?;
            calls.push(Call::new(Operation::Send { peer }, data.len, data.dtype));
            primitives.push(Primitive::Send { data, peer });
        }
        for (peer, data) in receives {
            let (peer, data) = (*peer, RawSlice::from(data.as_slice()));
            self.check_peer(Operation::Recv { peer }, peer)?;
            calls.push(Call::new(Operation::Recv { peer }, data.len, data.dtype));
            primitives.push(Primitive::Recv { data, peer });
        }
        primitives.retain(|primitive| !primitive.is_empty());
        // SAFETY: see above.
        unsafe { self.submit(queue, &calls, &primitives) }
    }

    fn sharing(&self) -> Option<&(dyn PeerMemory + 'static)> {
        Some(self)
    }

    fn synchronize(&self, queue: &Queue) -> Result<()> {
        self.session.check_outstanding()?;
        let end = queue.event()?;
        end.record()?;
        // The answer arrives while the queue runs.
        self.session.member.ask_to_confirm();
        let begun = Instant::now();
        while !end.is_done()? {
            self.session.check_outstanding()?;
            // Most waits are short, and a sleeping thread wakes late.
            if begun.elapsed() < Duration::from_millis(1) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        let left = self.session.options.deadline.saturating_sub(begun.elapsed());
        self.session.confirm(self.session.member.announced(), left)?;
        self.session.check_outstanding()
    }
}

// SAFETY: `share` maps the memory that each rank offers and agrees with the other ranks that all have mapped it, and the result keeps the
// mappings; rank and world size are the session's and never change.
unsafe impl PeerMemory for NcclCommunicator {
    fn share(&self, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>> {
        let _scope = scope::within(Operation::Share);
        peer_memory::share(&self.session, data)
    }

    fn run_kernels(&self, call: Call, queue: &Queue, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let session = &*self.session;
        let _held = queue.hold();
        let recorded = self.recorded(queue)?;
        let recording = session.compare((queue, recorded.as_deref()), &[call], false)?;
        let begun = session.begin(queue, &[call])?;
        let launched = session.order.launch(queue, recording, launch);
        session.watch(queue, begun, recording.is_none(), launched)
    }
}
