//! The memory of a reducer's buckets: shared where ranks share memory, and of one kind on all ranks if one of them cannot allocate it.

use gradsync::comm::{Communicator, local};
use gradsync::train::{BucketMemory, Parameter, Reducer, ReducerOptions, Reduction};
use gradsync::{DType, Error, Result};
use rustix::process::Resource;

use super::Processes;
use super::limits::under;
use crate::suite::Suite;

/// The number of elements of each gradient: more than travel with a call.
const LEN: usize = 50_000;
/// The longest file of a rank that cannot share memory.
const SHORTEST_FILE: u64 = 4096;

/// Two gradients, each in a bucket of its own.
fn parameters() -> [Parameter; 2] {
    ["first", "second"].map(|name| Parameter::new(name, [LEN], DType::F32))
}

fn options(memory: BucketMemory) -> ReducerOptions {
    ReducerOptions::from(Reduction::Sum).with_first_bucket_bytes(1).with_bucket_bytes(1).with_shared_memory(memory)
}

fn number(rank: usize, parameter: usize, index: usize) -> f32 {
    ((rank + 1) * (parameter + 1) * (index % 1013)) as f32
}

fn gradient(rank: usize, parameter: usize) -> Vec<f32> {
    (0..LEN).map(|index| number(rank, parameter, index)).collect()
}

/// Runs a step whose gradients appear in this order, under a limit on files if the rank is `limited`, and checks that the results are
/// `times` the sums of all ranks' gradients.
fn step(reducer: &mut Reducer<'_>, order: [usize; 2], limited: bool, times: f32) {
    let (rank, world_size) = (reducer.communicator().rank(), reducer.communicator().world_size());
    let mut step = under(Resource::Fsize, limited.then_some(SHORTEST_FILE), || reducer.step()).expect("a step");
    for parameter in order {
        step.ready(parameter, &gradient(rank, parameter)).expect("a gradient");
    }
    let reduced = step.finish().expect("the end of a step");
    assert_eq!(reduced.skipped().count(), 0);
    for parameter in order {
        let found = reducer.gradient(parameter).expect("reduced").to_vec::<f32>().expect("f32");
        let sum = |index| times * (0..world_size).map(|rank| number(rank, parameter, index)).sum::<f32>();
        let wrong = found.iter().enumerate().find(|&(index, &found)| found != sum(index));
        assert_eq!(wrong, None, "gradient {parameter}");
    }
}

fn follow_the_option(comm: &dyn Communicator) {
    for memory in [BucketMemory::Automatic, BucketMemory::Own, BucketMemory::Shared] {
        match Reducer::new(comm, parameters(), options(memory)) {
            Ok(mut reducer) => {
                assert_eq!(
                    reducer.shares_memory(),
                    comm.sharing().is_some() && memory != BucketMemory::Own,
                    "{memory:?}"
                );
                (0..3).for_each(|_| step(&mut reducer, [1, 0], false, 1.0));
            }
            Err(error) => {
                assert!(memory == BucketMemory::Shared && comm.sharing().is_none(), "{memory:?}: {error}");
                assert!(matches!(&error, Error::InvalidArgument { reason, .. } if reason.contains("share no memory")));
            }
        }
    }
    // Threads, and a rank alone, need no shared buckets.
    for ranks in [1, 2] {
        let is_shared = |comm: local::LocalCommunicator| {
            Ok::<_, Error>(Reducer::new(&comm, parameters(), options(BucketMemory::Shared))?.shares_memory())
        };
        assert_eq!(local::run(ranks, is_shared).expect("no error"), vec![false; ranks]);
    }
}

/// Rank 1 cannot share memory from the beginning: no rank does, or all get an error.
fn one_cannot(comm: &dyn Communicator) {
    let rank = comm.rank();
    let limit = (rank == 1).then_some(SHORTEST_FILE);
    let made = |memory| under(Resource::Fsize, limit, || Reducer::new(comm, parameters(), options(memory)));
    let mut reducer = made(BucketMemory::Automatic).expect("memory of the ranks' own");
    assert!(!reducer.shares_memory());
    (0..3).for_each(|_| step(&mut reducer, [1, 0], false, 1.0));
    let refused: Result<_> = made(BucketMemory::Shared);
    match refused.expect_err("one rank cannot") {
        Error::MemoryFile { .. } => assert_eq!(rank, 1),
        Error::InvalidArgument { reason, .. } => assert!(rank != 1 && reason.contains("rank 1 refuses"), "{reason}"),
        error => panic!("{error}"),
    }
    // Two agree to share, and one wants to keep its own.
    let memory = if rank == 1 { BucketMemory::Own } else { BucketMemory::Automatic };
    let error = Reducer::new(comm, parameters(), options(memory)).expect_err("ranks that disagree");
    assert!(matches!(error, Error::Disagreement(_)) && error.to_string().contains("shared_memory"), "{error}");
}

/// Rank 1 cannot share memory any more when the order of the gradients assigns them to buckets anew: the buckets of all ranks move, with
/// the sums over micro-batches in them.
fn one_cannot_later(comm: &dyn Communicator) {
    let rank = comm.rank();
    let mut reducer = Reducer::new(comm, parameters(), options(BucketMemory::Automatic)).expect("a reducer");
    assert!(reducer.shares_memory());
    step(&mut reducer, [1, 0], false, 1.0);
    let is_limited = rank == 1;
    let sums = [0, 1].map(|parameter| gradient(rank, parameter));
    let micro_batch = [(0, (&sums[0]).into()), (1, (&sums[1]).into())];
    under(Resource::Fsize, is_limited.then_some(SHORTEST_FILE), || reducer.accumulate(&micro_batch)).expect("sums");
    step(&mut reducer, [1, 0], is_limited, 2.0);
    assert!(!reducer.shares_memory());
    step(&mut reducer, [0, 1], false, 1.0);
}

/// All cases.
pub(super) fn run<T: Processes>(suite: &mut Suite<T>) {
    suite.check("buckets are shared where they can be", |comm| follow_the_option(comm));
    if suite.comm.sharing().is_some() {
        suite.check("a rank that cannot share buckets", |comm| one_cannot(comm));
        suite.check("a rank that can share buckets no more", |comm| one_cannot_later(comm));
    }
    suite.done("buckets");
}
