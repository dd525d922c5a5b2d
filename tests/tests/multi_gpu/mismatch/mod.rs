//! Ranks whose calls do not match: with checks on, every rank gets an error that names the ranks and their calls, by the next `synchronize`
//! and not at the deadline. Also ranks that cannot form a group, and absent ranks.

mod absent;
mod calls;
mod invalid;
mod setup;
mod transfers;

use std::rc::Rc;
use std::time::{Duration, Instant};

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::{CommError, DType, Error};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::{Checks, Expected};

use crate::context::{Context, DEADLINE};
use crate::placed::Placed;
use crate::report::Report;

/// The longest time that counts as immediate on a busy machine; the deadline is several times as long.
const QUICK: Duration = Duration::from_secs(5);

/// A call on a communicator.
type Step = fn(&NcclCommunicator, &Queue) -> gradsync::Result<()>;

const SUM: Step = |comm, queue| comm.all_reduce(f32s(queue, 5).as_mut_slice(), ReduceOp::Sum);

pub(crate) fn run(context: &Context, report: &mut Report) {
    assert!(QUICK * 4 < DEADLINE);
    let mut groups = Groups { context, generation: 0, comm: None };
    report.case("communicator", || groups.renew());
    calls::run(&mut groups, report);
    transfers::run(&mut groups, report);
    invalid::run(&mut groups, report);
    setup::run(&mut groups, report);
    absent::run(&mut groups, report);
}

fn f32s(queue: &Queue, len: usize) -> DeviceBuffer {
    DeviceBuffer::zeroed(queue, DType::F32, len).unwrap()
}

#[track_caller]
fn comm_error(error: Error) -> CommError {
    match error {
        Error::Comm(error) => error,
        other => panic!("in place of a failure of the group: {other:?}"),
    }
}

/// The part of a failure that is equal on all ranks: everything except the operation, which is each rank's own.
fn identity(error: &CommError) -> String {
    match error {
        CommError::Mismatch { .. } => error.to_string(),
        CommError::InvalidCall { rank, reason, .. } => format!("invalid call of rank {rank}: {reason}"),
        other => panic!("neither a mismatch nor an invalid call: {other:?}"),
    }
}

/// A succession of communicators, each of which fails in its own way.
struct Groups<'c> {
    context: &'c Context,
    /// The generation of the newest group.
    generation: u64,
    comm: Option<NcclCommunicator>,
}

impl Groups<'_> {
    fn rank(&self) -> usize {
        self.context.rank
    }

    fn world_size(&self) -> usize {
        self.context.world_size
    }

    fn queue(&self) -> &Queue {
        &self.context.queue
    }

    /// The generation of a new group.
    fn next(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// Replaces the communicator by a new one, and checks that it works.
    fn renew(&mut self) {
        self.comm = None;
        let generation = self.next();
        let comm = self.comm.insert(self.context.communicator(generation, &self.context.options()));
        let (rank, world_size) = (self.context.rank, self.context.world_size);
        let own = Array::new(Format::F32, &[rank as f64 + 1.0; 7]);
        let sum = (world_size * (world_size + 1) / 2) as f64;
        let expected = Rc::new(Expected::Values(vec![sum; 7]));
        let mut data = Placed::new(&self.context.queue, &own, 0);
        comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
        let mut checks = Checks::new(comm);
        checks.same("an all-reduce of the new group", data.read(comm), &expected);
        // Checked before the comparison of results: after it, the fastest rank may already make the failing call.
        assert!(comm.failure().is_none(), "a communicator that works has a failure");
        checks.finish();
    }

    /// Makes the communicator fail. `provoke` makes the call, and checks the result of this rank. Afterwards every later call fails too,
    /// all ranks have the same failure, and a new communicator works. Returns the failure.
    fn fail(&mut self, provoke: impl FnOnce(&NcclCommunicator)) -> CommError {
        let comm = self.comm.take().expect("a communicator");
        let begun = Instant::now();
        provoke(&comm);
        // A rank that has made no call hears of the failure as well.
        let failure = loop {
            assert!(begun.elapsed() < QUICK, "no failure after {:?}", begun.elapsed());
            match comm.failure() {
                Some(failure) => break comm_error(failure),
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        let begun = Instant::now();
        let queue = &self.context.queue;
        for again in [comm.synchronize(queue), SUM(&comm, queue)] {
            let again = comm_error(again.expect_err("it has failed"));
            assert_eq!(identity(&again), identity(&failure), "{again}: another failure than {failure}");
        }
        assert!(begun.elapsed() < QUICK, "calls after a failure waited for {:?}", begun.elapsed());
        drop(comm);

        self.renew();
        let mut checks = Checks::new(self.comm.as_ref().expect("a new one"));
        checks.same_list("the failure", vec![identity(&failure)], vec![identity(&failure)]);
        checks.finish();
        failure
    }
}
