//! Exposure epochs of processes: ranks fall back where memory cannot be mapped, mappings come and go with buffers, and ranks have
//! deadlines of their own.

use std::thread::sleep;
use std::time::Duration;

use gradsync::comm::{Communicator, Ranks, Split};
use gradsync::internal::memory::SharedWindows;
use gradsync::ops::{AdasumOptions, adasum_all_reduce};
use gradsync::{DType, GradientBuffer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Processes;
use crate::suite::failures::assert_timeout;
use crate::suite::windows::{self, WINDOW, each_rank_has_its_window, lend, numbers, shared};
use crate::suite::{DEADLINE, Suite};

/// Rank 1 can open no further file: no memory is shared, then or later, and Adasum sends messages instead.
fn apart(comm: &dyn Communicator, another: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut buffer = shared(world_size, WINDOW);
    let limit = getrlimit(Resource::Nofile);
    if rank == 1 {
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    }
    let lent = lend(comm, &mut buffer, |_| panic!("nothing was to be lent"));
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(!lent.unwrap());
    assert!(!lend(comm, &mut buffer, |_| panic!("nobody was to try again")).unwrap());
    numbers(&mut buffer).iter_mut().enumerate().for_each(|(index, value)| *value = (rank + index % 7) as f32);
    let mut mapped = GradientBuffer::new_shared(DType::F32, world_size, [("vector", [buffer.len()])]).unwrap();
    numbers(&mut mapped).copy_from_slice(numbers(&mut buffer));
    let by_messages = adasum_all_reduce(comm, &mut buffer, AdasumOptions::default()).unwrap();
    let in_place = adasum_all_reduce(another, &mut mapped, AdasumOptions::default()).unwrap();
    assert_eq!(by_messages, in_place);
    assert_eq!(numbers(&mut buffer), numbers(&mut mapped));
}

/// The number of files that this process has mapped, its own and other ranks'.
fn mapped_files() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("/memfd:gradsync")).count()
}

/// Mappings of dropped buffers are evicted when new buffers are mapped, whether all ranks or only one replace theirs.
fn buffers_come_and_go(comm: &dyn Communicator, who: impl Fn(usize) -> bool) {
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

/// A rank enters a collective of its epoch after another has given up: all ranks learn the reason, and all get their memory back.
fn late_in_a_collective(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let outcome = lend(comm, &mut shared(world_size, WINDOW), |_| {
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
fn messages_only<T: Processes>() -> bool {
    std::env::var(T::MESSAGES_ONLY).is_ok_and(|value| value != "0")
}

pub(super) fn run<T: Processes>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    suite.check("memory of another kind is an error on every rank", |comm| {
        let tensors = [("vector", [WINDOW])];
        let make = if rank == 1 { GradientBuffer::new } else { GradientBuffer::new_shared };
        let mut buffer = make(DType::F32, world_size, tensors).unwrap();
        let error = adasum_all_reduce(comm, &mut buffer, AdasumOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("shared memory") && text.contains("memory of its own"), "{text}");
    });
    if suite.comm.sharing().is_none() {
        suite.check("ranks that do not share memory lend nothing", |comm| {
            let mut buffer = shared(world_size, WINDOW);
            let lent = comm.with_windows(buffer.as_mut_slice(), &mut |_| panic!("nothing was to be lent"));
            assert!(!lent.unwrap());
        });
        suite.check("those of one machine still do, among themselves", |comm| {
            let Some(group) = comm.split(machine(), 0).unwrap().filter(|group| group.world_size() > 1) else { return };
            assert!(group.sharing().is_some() != messages_only::<T>());
            if group.sharing().is_some() {
                each_rank_has_its_window(&group);
            }
        });
        return suite.done("windows, of which none are lent: the cases of those that are have not run");
    }
    windows::run(suite);
    suite.check("buffers come and go", |comm| buffers_come_and_go(comm, |_| true));
    suite.check("one rank's buffers come and go", |comm| buffers_come_and_go(comm, |rank| rank == 0));
    let deadline = Duration::from_millis(if rank + 1 == world_size { 1000 } else { 20_000 });
    suite.check_within(deadline, "a rank is late in a collective", |comm| late_in_a_collective(&comm));
    suite.check_with("memory that cannot be mapped", |suite| {
        let fresh = || suite.transport.fresh(DEADLINE);
        apart(&fresh(), &fresh());
    });
    suite.check("other vectors than a shared buffer's", |comm| {
        let (mut own, mut buffer) = (vec![0.0f32; 2 * world_size], shared(world_size, WINDOW));
        assert!(buffer.is_shared());
        assert!(!comm.with_windows((&mut own).into(), &mut |_| panic!("nothing was to be lent")).unwrap());
        let end = buffer.as_mut_slice().range_mut(world_size..2 * world_size);
        assert!(!comm.with_windows(end, &mut |_| panic!("nothing was to be lent")).unwrap());
    });
    suite.done("windows between processes");
}
