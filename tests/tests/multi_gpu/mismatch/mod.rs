//! Ranks whose calls do not belong together: with checks on, an error on every rank that names who called what, by the next
//! `synchronize` and not at the deadline; and ranks that cannot form a group, or never come.

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

use crate::checks::{Checks, Expected};
use crate::context::{Context, DEADLINE};
use crate::placed::Placed;
use crate::report::Report;

/// What "at once" means, on a busy machine; the deadline is several times as long.
const QUICK: Duration = Duration::from_secs(5);

/// Something that a rank does with a communicator.
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

/// What is the same wherever a failure is seen: not the operation, which is each rank's own.
fn identity(error: &CommError) -> String {
    match error {
        CommError::Mismatch { .. } => error.to_string(),
        CommError::InvalidCall { rank, reason, .. } => format!("invalid call of rank {rank}: {reason}"),
        other => panic!("neither a mismatch nor an invalid call: {other:?}"),
    }
}

/// One communicator after the other: each fails in its own way.
struct Groups<'c> {
    context: &'c Context,
    /// Of the newest group.
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

    /// The number of a new group.
    fn next(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// Goes on with a new communicator, which works.
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
        // Only until all have come to the comparison: then the first may go on to what makes it fail.
        assert!(comm.failure().is_none(), "a communicator that works has a failure");
        checks.finish();
    }

    /// Has the communicator fail. `provoke` does it, and judges what this rank's call said; whatever it is, every later
    /// call fails too, all ranks know of the same failure, and a new communicator works. Returns the failure.
    fn fail(&mut self, provoke: impl FnOnce(&NcclCommunicator)) -> CommError {
        let comm = self.comm.take().expect("a communicator");
        let begun = Instant::now();
        provoke(&comm);
        // A rank that has called nothing hears of it as well.
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
