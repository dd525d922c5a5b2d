//! NCCL without gradsync, as the baseline of collectives over NCCL.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use gradsync::DType;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Ranks, ReduceOp};
use gradsync::driver::{DeviceSlice, DeviceSliceMut};
use gradsync::internal::sys::nccl::{Comm, Config, DataTypeCode, Nccl, RedOp, ResultCode, UniqueId};

use crate::perf::PerfError;
use crate::perf::record::BaselineName;

const DEADLINE: Duration = Duration::from_secs(60);

/// An NCCL communicator.
pub(super) struct Plain {
    nccl: &'static Nccl,
    comm: Comm,
    rank: usize,
    ranks: usize,
}

fn check(call: &'static str, code: ResultCode) -> Result<(), PerfError> {
    if code == ResultCode::SUCCESS { Ok(()) } else { Err(PerfError::Nccl { call, code: code.0 }) }
}

fn data_type(dtype: DType) -> DataTypeCode {
    DataTypeCode(dtype.nccl_code().expect("a floating-point dtype"))
}

fn red_op(op: ReduceOp) -> RedOp {
    match op {
        ReduceOp::Sum => RedOp::SUM,
        ReduceOp::Mean => RedOp::AVG,
        ReduceOp::Max => RedOp::MAX,
        ReduceOp::Min => RedOp::MIN,
        _ => unreachable!("{op} is not measured"),
    }
}

/// A destination rank with the address to send from, and a source rank with the address to receive into.
type Pair = ((usize, *const c_void), (usize, *mut c_void));

fn place(data: DeviceSlice<'_>) -> *const c_void {
    data.address() as usize as *const c_void
}

fn place_mut(data: &DeviceSliceMut<'_>) -> *mut c_void {
    place(data.as_slice()).cast_mut()
}

impl Plain {
    pub(super) const NAME: BaselineName = BaselineName { column: "plain NCCL", full: "plain NCCL" };

    /// A communicator of the ranks of `ours`, whose control channel carries the identifier, on the current device of this thread.
    pub(super) fn new(ours: &NcclCommunicator) -> Result<Self, PerfError> {
        let nccl = Nccl::get().map_err(gradsync::Error::from)?;
        let (rank, ranks) = (ours.rank(), ours.world_size());
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            // SAFETY: writes one identifier.
            check("ncclGetUniqueId", unsafe { (nccl.functions.ncclGetUniqueId)(&mut id) })?;
        }
        let bytes: Vec<u8> = id.0.iter().map(|&byte| byte as u8).collect();
        let all = ours.member().all_gather(&bytes, DEADLINE).map_err(gradsync::Error::from)?;
        id.0.iter_mut().zip(&all[0]).for_each(|(to, &from)| *to = from as _);
        let (mut comm, mut config) = (std::ptr::null_mut(), Config { blocking: 1, ..Config::default() });
        // SAFETY: every rank calls it with the common identifier, a distinct rank number, and a device of its own.
        check("ncclCommInitRankConfig", unsafe {
            (nccl.functions.ncclCommInitRankConfig)(&mut comm, ranks as c_int, id, rank as c_int, &mut config)
        })?;
        Ok(Self { nccl, comm, rank, ranks })
    }

    /// All-reduces in place.
    pub(super) fn all_reduce(&self, data: DeviceSliceMut<'_>, op: ReduceOp) -> Result<(), PerfError> {
        let (to, view) = (place_mut(&data), data.as_slice());
        // SAFETY: the data are borrowed mutably, and later work on them in the queue is ordered behind this call. The calls below rely on
        // this too.
        check("ncclAllReduce", unsafe {
            let (len, dtype, stream) = (view.len(), data_type(view.dtype()), view.queue().stream());
            (self.nccl.functions.ncclAllReduce)(to, to, len, dtype, red_op(op), self.comm, stream)
        })
    }

    /// All-gathers in place: each rank's shard is at its final position.
    pub(super) fn all_gather(&self, data: DeviceSliceMut<'_>) -> Result<(), PerfError> {
        let (to, view) = (place_mut(&data), data.as_slice());
        let shard = view.len() / self.ranks;
        let own = place(view.range(self.rank * shard..(self.rank + 1) * shard));
        // SAFETY: as above; NCCL gathers in place if the input is the rank's shard of the output.
        check("ncclAllGather", unsafe {
            let (dtype, stream) = (data_type(view.dtype()), view.queue().stream());
            (self.nccl.functions.ncclAllGather)(own, to, shard, dtype, self.comm, stream)
        })
    }

    /// Reduce-scatters in place, into this rank's shard.
    pub(super) fn reduce_scatter(&self, data: DeviceSliceMut<'_>, op: ReduceOp) -> Result<(), PerfError> {
        let view = data.as_slice();
        let shard = view.len() / self.ranks;
        let own = place(view.range(self.rank * shard..(self.rank + 1) * shard)).cast_mut();
        // SAFETY: as above.
        check("ncclReduceScatter", unsafe {
            let (dtype, stream) = (data_type(view.dtype()), view.queue().stream());
            (self.nccl.functions.ncclReduceScatter)(place(view), own, shard, dtype, red_op(op), self.comm, stream)
        })
    }

    /// Exchanges a shard with each rank, in one group.
    pub(super) fn all_to_all(&self, input: DeviceSlice<'_>, output: DeviceSliceMut<'_>) -> Result<(), PerfError> {
        let shard = input.len() / self.ranks;
        let part = |data: DeviceSlice<'_>, peer: usize| place(data.range(peer * shard..(peer + 1) * shard));
        let view = output.as_slice();
        let pairs = (0..self.ranks).map(|peer| ((peer, part(input, peer)), (peer, part(view, peer).cast_mut())));
        self.exchange(input, shard, &pairs.collect::<Vec<_>>())
    }

    /// Sends to the next rank, and receives from the previous one.
    pub(super) fn send_recv(&self, input: DeviceSlice<'_>, output: DeviceSliceMut<'_>) -> Result<(), PerfError> {
        let (next, last) = ((self.rank + 1) % self.ranks, (self.rank + self.ranks - 1) % self.ranks);
        self.exchange(input, input.len(), &[((next, place(input)), (last, place_mut(&output)))])
    }

    /// Sends and receives `len` elements of `like`'s type, in its queue.
    fn exchange(&self, like: DeviceSlice<'_>, len: usize, pairs: &[Pair]) -> Result<(), PerfError> {
        let (api, dtype, stream) = (&self.nccl.functions, data_type(like.dtype()), like.queue().stream());
        // SAFETY: as above; the group is closed even if a call in it fails.
        unsafe {
            check("ncclGroupStart", (api.ncclGroupStart)())?;
            let issued = pairs.iter().try_for_each(|&((to, from_place), (from, to_place))| {
                check("ncclSend", (api.ncclSend)(from_place, len, dtype, to as c_int, self.comm, stream))?;
                check("ncclRecv", (api.ncclRecv)(to_place, len, dtype, from as c_int, self.comm, stream))
            });
            let ended = check("ncclGroupEnd", (api.ncclGroupEnd)());
            issued.and(ended)
        }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // All measured work has finished; unlike `ncclCommDestroy`, this call does not hang if a peer has failed.
        // SAFETY: the communicator was created in `new`, and is ended once.
        unsafe { (self.nccl.functions.ncclCommAbort)(self.comm) };
    }
}
