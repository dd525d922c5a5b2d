//! Communicators made from communicators: groups, NCCL started by MPI, and the choice between the two.

use gradsync::comm::mpi::device::{MpiDeviceOptions, connect};
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Split};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::memory::Cuda;

use crate::context::{Context, DEADLINE};
use crate::report::Report;

const LEN: usize = 100_003;

pub(super) fn run(context: &Context, report: &mut Report) {
    let (rank, world_size) = (context.rank, context.world_size);
    report.case("groups by parity, in reverse, and alone", || {
        let comm = context.mpi_communicator(MpiDeviceOptions::default());
        let part = comm.split(Some((rank % 2) as u64), -(rank as i64)).unwrap().expect("a colour");
        let members: Vec<usize> = (0..world_size).rev().filter(|other| other % 2 == rank % 2).collect();
        assert_eq!((part.world_size(), members[part.rank()]), (members.len(), rank));
        assert_sums(&part, &context.queue, rank, &members);
        let alone = part.split(Some(rank as u64), 0).unwrap().expect("a colour");
        assert_sums(&alone, &context.queue, rank, &[rank]);
        let some = comm.split((rank > 0).then_some(7), 0).unwrap();
        assert_eq!(some.is_some(), rank > 0);
        if let Some(some) = some {
            assert_sums(&some, &context.queue, rank, &(1..world_size).collect::<Vec<_>>());
        }
        assert_sums(&comm, &context.queue, rank, &(0..world_size).collect::<Vec<_>>());
    });
    report.case("NCCL by a control channel over MPI", || {
        let member = context.job().member(DEADLINE).unwrap();
        assert_eq!((member.rank(), member.world_size()), (rank, world_size));
        let comm = NcclCommunicator::new(member, &context.queue, &context.options()).unwrap();
        assert_sums(&comm, &context.queue, rank, &(0..world_size).collect::<Vec<_>>());
    });
    report.case("connect gives NCCL where every rank can have it", || {
        let comm = connect(context.world(), &context.queue, &context.options(), MpiDeviceOptions::default()).unwrap();
        assert_eq!((comm.rank(), comm.world_size()), (rank, world_size));
        assert_sums(&*comm, &context.queue, rank, &(0..world_size).collect::<Vec<_>>());
        // NCCL's communicator offers memory that other ranks' kernels can access, and MPI's communicator does not.
        assert!(comm.sharing().is_some(), "not NCCL's");
    });
    report.case("connect gives MPI where ranks share a GPU", || {
        let queue = Queue::new(0).unwrap();
        let options = context.options().with_shared_gpu(false);
        let comm = connect(context.world(), &queue, &options, MpiDeviceOptions::default()).unwrap();
        assert_eq!((comm.rank(), comm.world_size()), (rank, world_size));
        assert_sums(&*comm, &queue, rank, &(0..world_size).collect::<Vec<_>>());
        let is_nccl = comm.sharing().is_some();
        assert_eq!(is_nccl, world_size == 1, "NCCL takes no two ranks on one GPU without being asked to, and MPI does");
    });
}

/// Asserts the sum over a group, whose members are the ranks `members` of the whole.
#[track_caller]
fn assert_sums(comm: &dyn Communicator<Cuda>, queue: &Queue, rank: usize, members: &[usize]) {
    let number = |rank: usize, index: usize| (index % 97 * (rank + 1)) as f32;
    let own: Vec<f32> = (0..LEN).map(|index| number(rank, index)).collect();
    let mut data = DeviceBuffer::from_host(queue, (&own).into()).unwrap();
    comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
    comm.synchronize(queue).unwrap();
    let mut sums = vec![0f32; LEN];
    data.as_slice().copy_to_host((&mut sums).into()).unwrap();
    let expected = |index: usize| members.iter().map(|&rank| number(rank, index)).sum::<f32>();
    let wrong = sums.iter().enumerate().find(|&(index, &sum)| sum != expected(index));
    assert_eq!(wrong, None, "the sum over ranks {members:?}");
}
