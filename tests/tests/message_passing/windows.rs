//! Exposure epochs over memory that all ranks can map: each rank gets its window of every vector, no rank gets its memory back while
//! another uses it, and ranks fall back where memory cannot be mapped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::transport::{Comm, MESSAGES_ONLY};
use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp, Split};
use gradsync::memory::SharedWindows;
use gradsync::ops::{AdasumOptions, adasum_all_reduce};
use gradsync::{DType, Error, GradientBuffer, Result, SliceMut};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::cases::{Cases, fresh};
use super::failures::assert_timeout;

/// Well under the deadline of the communicators: a call that takes longer has waited for the deadline.
const AT_ONCE: Duration = Duration::from_secs(10);
/// The number of elements of a window for which the arena has no padding.
const WINDOW: usize = 1024;

fn shared(world_size: usize, window: usize) -> GradientBuffer {
    GradientBuffer::new_shared(DType::F32, world_size, [("vector", [world_size * window])]).expect("a shared buffer")
}

fn lend(comm: &Comm, buffer: &mut GradientBuffer, mut work: impl FnMut(Vec<&mut [f32]>) -> Result<()>) -> Result<bool> {
    comm.with_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
        work(windows.into_iter().map(|window| window.typed().expect("f32 was lent")).collect())
    })
}

fn numbers(buffer: &mut GradientBuffer) -> &mut [f32] {
    buffer.as_mut_slice().typed().expect("f32")
}

fn each_rank_has_its_window(comm: &Comm) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for window in [0, 64, WINDOW, 300 * WINDOW] {
        // Two buffers in turn: the mappings of one buffer stay while the other is mapped.
        let mut buffers = [shared(world_size, window), shared(world_size, window)];
        // Shards begin at chunks of the tensor, so a short shard is longer than requested.
        let window = buffers[0].shard_len();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let values = numbers(buffer).iter_mut().enumerate();
            values.for_each(|(index, value)| *value = (number + 10 * rank + index) as f32);
        }
        for round in 0..3 {
            for (number, buffer) in buffers.iter_mut().enumerate() {
                let mut calls = 0;
                let lent = lend(comm, buffer, |windows| {
                    calls += 1;
                    assert_eq!(windows.len(), world_size);
                    for (owner, mine) in windows.into_iter().enumerate() {
                        assert_eq!(mine.len(), window);
                        for (index, value) in mine.iter_mut().enumerate() {
                            assert_eq!(*value, (number + 10 * owner + rank * window + index + round) as f32);
                            *value += 1.0;
                        }
                    }
                    Ok(())
                });
                assert!(lent.unwrap() && calls == 1);
            }
        }
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let mut values = numbers(buffer).iter().enumerate();
            assert!(values.all(|(index, &value)| value == (number + 10 * rank + index + 3) as f32));
        }
    }
}

fn collectives_and_loans_run_inside(comm: &Comm) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (mut outer, mut inner) = (shared(world_size, WINDOW), shared(world_size, WINDOW));
    numbers(&mut inner).fill(rank as f32);
    let mut sum = [0.0f32];
    let lent = lend(comm, &mut outer, |windows| {
        let mut owners = Vec::new();
        assert!(lend(comm, &mut inner, |others| {
            owners.extend(others.iter().map(|other| other[0]));
            Ok(())
        })?);
        windows.into_iter().zip(&owners).for_each(|(window, &owner)| window.fill(owner));
        sum[0] = owners.iter().sum();
        comm.all_reduce(&mut sum, ReduceOp::Sum)
    });
    assert!(lent.unwrap());
    let all = (world_size * (world_size - 1) / 2) as f32;
    assert_eq!(sum, [all * world_size as f32]);
    assert!(numbers(&mut outer).iter().all(|&value| value == rank as f32), "each wrote the owner's number");
}

/// Rank 1 ends its work at once by `leave`; the others work slowly, and use its memory to the end.
fn stays(comm: Comm, leave: fn() -> Result<()>, is_right: fn(&Error) -> bool) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut buffer = shared(world_size, WINDOW);
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        lend(&comm, &mut buffer, |mut windows| {
            if rank == 1 {
                return leave();
            }
            for _ in 0..50 {
                sleep(Duration::from_millis(2));
                windows.iter_mut().for_each(|window| window.iter_mut().for_each(|value| *value += 1.0));
            }
            comm.barrier()
        })
    }));
    assert!(start.elapsed() < AT_ONCE, "waited for the deadline");
    let expected = |index: usize| if index / WINDOW == 1 { 0.0 } else { 50.0 };
    let values = numbers(&mut buffer).to_vec();
    assert!(values.iter().enumerate().all(|(index, &value)| value == expected(index)), "has its memory back too early");
    match outcome {
        Ok(outcome) => {
            let error = outcome.expect_err("a rank left");
            assert!(rank == 1 || is_right(&error), "{error}");
            assert!(comm.barrier().is_err(), "a communicator that failed was usable again");
        }
        Err(_) => assert_eq!(rank, 1, "who did not mean to panic"),
    }
}

fn what_has_no_windows(comm: Comm, is_longer: bool) {
    let mut buffer = shared(comm.world_size(), WINDOW);
    let len = buffer.len();
    let len = if comm.rank() == 1 { len - if is_longer { comm.world_size() } else { 1 } } else { len };
    let start = Instant::now();
    let vector = buffer.as_mut_slice().range_mut(0..len);
    let outcome = comm.with_windows(vector, &mut |_| panic!("nothing was to be lent"));
    assert!(outcome.is_err() && start.elapsed() < AT_ONCE, "{outcome:?}");
}

/// Rank 1 can open no further file: no memory is shared, then or later, and Adasum sends messages instead.
fn apart(comm: Comm) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut buffer = shared(world_size, WINDOW);
    let limit = getrlimit(Resource::Nofile);
    if rank == 1 {
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    }
    let lent = lend(&comm, &mut buffer, |_| panic!("nothing was to be lent"));
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(!lent.unwrap());
    assert!(!lend(&comm, &mut buffer, |_| panic!("nobody was to try again")).unwrap());
    numbers(&mut buffer).iter_mut().enumerate().for_each(|(index, value)| *value = (rank + index % 7) as f32);
    let mut mapped = GradientBuffer::new_shared(DType::F32, world_size, [("vector", [buffer.len()])]).unwrap();
    numbers(&mut mapped).copy_from_slice(numbers(&mut buffer));
    let by_messages = adasum_all_reduce(&comm, &mut buffer, AdasumOptions::default()).unwrap();
    let in_place = adasum_all_reduce(&fresh(), &mut mapped, AdasumOptions::default()).unwrap();
    assert_eq!(by_messages, in_place);
    assert_eq!(numbers(&mut buffer), numbers(&mut mapped));
}

/// The number of files that this process has mapped, its own and other ranks'.
fn mapped_files() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("/memfd:gradsync")).count()
}

/// Mappings of dropped buffers are evicted when new buffers are mapped, whether all ranks or only one replace theirs.
fn buffers_come_and_go(comm: &Comm, who: impl Fn(usize) -> bool) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let before = mapped_files();
    let mut kept = (!who(rank)).then(|| shared(world_size, WINDOW));
    for _ in 0..20 {
        let mut new = kept.is_none().then(|| shared(world_size, WINDOW));
        let buffer = new.as_mut().or(kept.as_mut()).unwrap();
        assert!(lend(comm, buffer, |_| Ok(())).unwrap());
        // Mappings may exist for the current buffers, and for the previous ones if another rank had not dropped its own yet.
        let files = mapped_files();
        assert!(files <= before + 2 * world_size, "{before} files before, {files} now");
    }
}

/// Rank 1 ends the inner of two nested epochs last, and fails right after it. The inner epoch succeeds on all ranks, and the others learn
/// of the failure in the outer epoch, at once.
fn fails_behind_an_inner_loan(comm: Comm) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (mut outer, mut inner) = (shared(world_size, WINDOW), shared(world_size, WINDOW));
    let start = Instant::now();
    let outcome = lend(&comm, &mut outer, |_| {
        let lent = lend(&comm, &mut inner, |_| {
            // The pause is long enough for the other ranks to sleep while they wait.
            sleep(Duration::from_millis(if rank == 1 { 50 } else { 0 }));
            Ok(())
        });
        assert!(lent.expect("the inner loan was good"));
        if rank == 1 {
            return Err(Error::InvalidArgument { operation: "work", reason: "it is wrong".into() });
        }
        comm.barrier()
    });
    assert!(start.elapsed() < AT_ONCE, "waited for the deadline");
    let error = outcome.expect_err("a rank failed");
    assert!(rank == 1 || matches!(error, Error::Comm(CommError::InvalidCall { rank: 1, .. })), "{error}");
}

/// A rank enters a collective of its epoch after another has given up: all ranks learn the reason, and all get their memory back.
fn late_in_a_collective(comm: Comm) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let comm = comm.with_deadline(Duration::from_millis(if rank + 1 == world_size { 1000 } else { 20_000 }));
    let outcome = lend(&comm, &mut shared(world_size, WINDOW), |_| {
        if rank == 0 {
            sleep(Duration::from_millis(1300));
        }
        comm.barrier()
    });
    assert_timeout(outcome.map(drop), &[0]);
}

/// A number for the machine of this rank.
fn machine() -> Option<u64> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
    Some(name.bytes().fold(0, |number, byte| number.wrapping_mul(31) + u64::from(byte)))
}

/// Whether this launch makes its ranks communicate as if on several machines.
fn messages_only() -> bool {
    std::env::var(MESSAGES_ONLY).is_ok_and(|value| value != "0")
}

pub(crate) fn run(cases: &mut Cases) {
    let rank = cases.rank();
    cases.check("memory of another kind is an error on every rank", |comm| {
        let tensors = [("vector", [WINDOW])];
        let make = if rank == 1 { GradientBuffer::new } else { GradientBuffer::new_shared };
        let mut buffer = make(DType::F32, comm.world_size(), tensors).unwrap();
        let error = adasum_all_reduce(comm, &mut buffer, AdasumOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("shared memory") && text.contains("memory of its own"), "{text}");
    });
    if !fresh().shares_memory() {
        cases.check("ranks that do not share memory lend nothing", |comm| {
            let lent = lend(comm, &mut shared(comm.world_size(), WINDOW), |_| panic!("nothing was to be lent"));
            assert!(!lent.unwrap());
        });
        cases.check("those of one machine still do, among themselves", |comm| {
            let Some(group) = comm.split(machine(), 0).unwrap().filter(|group| group.world_size() > 1) else { return };
            assert!(group.shares_memory() != messages_only());
            if group.shares_memory() {
                each_rank_has_its_window(&group);
            }
        });
        return cases.done("windows, of which none are lent: the cases of those that are have not run");
    }
    cases.check("each rank has its window of every vector", each_rank_has_its_window);
    cases.check("collectives and further loans run inside", collectives_and_loans_run_inside);
    cases.check("buffers come and go", |comm| buffers_come_and_go(comm, |_| true));
    cases.check("one rank's buffers come and go", |comm| buffers_come_and_go(comm, |rank| rank == 0));
    cases.check_fresh("a rank is late in a collective", late_in_a_collective);
    cases.check_fresh("a rank panics with what it was lent", |comm| {
        stays(comm, || panic!("on purpose"), |error| matches!(error, Error::Comm(CommError::PeerGone { rank: 1, .. })));
    });
    cases.check_fresh("a rank's work fails", |comm| {
        let refuse = || Err(Error::InvalidArgument { operation: "work", reason: "it is wrong".into() });
        stays(comm, refuse, |error| {
            matches!(error, Error::Comm(CommError::InvalidCall { rank: 1, .. })) && error.to_string().contains("wrong")
        });
    });
    // Rank 1 considers its work done, while the others still have a collective to call.
    cases.check_fresh("a rank's work ends early", |comm| {
        stays(comm, || Ok(()), |error| matches!(error, Error::Comm(CommError::Mismatch { .. })));
    });
    for _ in 0..5 {
        cases.check_fresh("a rank fails behind an inner loan", fails_behind_an_inner_loan);
    }
    cases.check_fresh("a vector without windows", |comm| what_has_no_windows(comm, false));
    cases.check_fresh("vectors of other lengths", |comm| what_has_no_windows(comm, true));
    cases.check_fresh("memory that cannot be mapped", apart);
    cases.check("other vectors than a shared buffer's", |comm| {
        let (mut own, mut buffer) = (vec![0.0f32; 2 * comm.world_size()], shared(comm.world_size(), WINDOW));
        assert!(buffer.is_shared());
        assert!(!comm.with_windows((&mut own).into(), &mut |_| panic!("nothing was to be lent")).unwrap());
        let end = buffer.as_mut_slice().range_mut(comm.world_size()..2 * comm.world_size());
        assert!(!comm.with_windows(end, &mut |_| panic!("nothing was to be lent")).unwrap());
    });
    cases.done("windows");
}
