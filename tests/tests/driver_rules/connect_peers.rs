//! Memory that the kernels of peers reach: its end where setting it up fails half-way, where it is dropped during a recording, and where
//! its queue has no owner any more. Recorded kernels keep their part of the GPU.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use gradsync::comm::{Call, Collective, Communicator, Ranks, ReduceOp};
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::kernels::cuda;
use gradsync::internal::memory::{PeerMemory, SharedMemory};
use gradsync::memory::Cuda;
use gradsync::ops::OrderedAllReduce;
use gradsync::{DType, Error, GradientBuffer, Result};

use crate::{after, lines, queue, queue_of, say};

/// The number of elements of a gradient buffer: enough for all blocks that fit on a GPU.
const LEN: usize = 1 << 20;
/// Longer than the interval at which pending releases are checked.
const PAUSE: Duration = Duration::from_millis(30);

/// Rank 0 of two. The simulated peer offers memory of its own for each offer of this rank, and releases this rank's memory when it is told
/// to.
struct Pair {
    peer: Queue,
    /// The addresses that this rank has offered, in order; `of_peer` holds the peer's memory.
    offers: RefCell<Vec<u64>>,
    of_peer: RefCell<Vec<DeviceBuffer>>,
    fault: Cell<Option<(usize, Fault)>>,
}

/// The outcome of the offer with a given number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The ranks agree that one of them cannot reach the memory.
    Unreachable,
    /// The answer of the other rank is lost.
    Broken,
}

impl Pair {
    fn new(peer: Queue) -> Self {
        Self { peer, offers: RefCell::default(), of_peer: RefCell::default(), fault: Cell::new(None) }
    }

    fn offers(&self) -> Vec<u64> {
        self.offers.borrow().clone()
    }

    /// Whether this rank has told the peer that it has released its memory. The first offer is the list of flags.
    fn has_let_go(&self) -> bool {
        let list = self.of_peer.borrow()[0].as_slice().address() as *const u64;
        // SAFETY: The driver's memory is host memory; the list has a number for each rank.
        unsafe { list.read_volatile() != 0 }
    }

    /// Sets the flag by which the peer reports that it has released this rank's memory.
    fn let_go(&self) {
        let list = self.offers()[0] as *mut u64;
        // SAFETY: as above.
        unsafe { list.add(1).write_volatile(1) };
    }
}

impl Ranks for Pair {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        2
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        Ok([words, words].concat())
    }
}

impl Communicator<Cuda> for Pair {
    fn run(&self, _: Collective<'_, Cuda>) -> Result<()> {
        unreachable!("kernels need no transport")
    }

    fn exchange(&self, _: &[(usize, DeviceSlice<'_>)], _: &mut [(usize, DeviceSliceMut<'_>)]) -> Result<()> {
        unreachable!("kernels need no transport")
    }

    fn sharing(&self) -> Option<&(dyn PeerMemory + 'static)> {
        Some(self)
    }
}

// SAFETY: this driver runs no kernels, so that nothing is written to the addresses.
unsafe impl PeerMemory for Pair {
    fn share(&self, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>> {
        self.offers.borrow_mut().push(data.address());
        match self.fault.get() {
            Some((number, Fault::Unreachable)) if number == self.offers().len() => return Ok(None),
            Some((number, Fault::Broken)) if number == self.offers().len() => {
                return Err(Error::InvalidArgument { operation: "share", reason: "nothing is heard".into() });
            }
            _ => {}
        }
        let of_peer = DeviceBuffer::zeroed(&self.peer, data.dtype(), data.len())?;
        let addresses = vec![data.address(), of_peer.as_slice().address()];
        self.of_peer.borrow_mut().push(of_peer);
        // SAFETY: this driver runs no kernels.
        unsafe { SharedMemory::new(data.queue(), addresses) }.map(Some)
    }

    fn run_kernels(&self, _: Call, _: &Queue, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        launch()
    }
}

fn buffer(queue: &Queue) -> GradientBuffer<Cuda> {
    GradientBuffer::on_queue(queue, DType::F32, 2, [("tensor", [LEN])]).unwrap()
}

/// An all-reduce by kernels that access the peer's memory.
fn connect_peers<'c>(pair: &'c Pair, buffer: &GradientBuffer<Cuda>) -> OrderedAllReduce<'c> {
    let ordered = connect(pair, buffer).unwrap();
    assert!(ordered.uses_peers(), "there is no fault");
    ordered
}

fn connect<'c>(pair: &'c Pair, buffer: &GradientBuffer<Cuda>) -> Result<OrderedAllReduce<'c>> {
    OrderedAllReduce::new(pair, buffer, ReduceOp::Sum)
}

#[test]
fn case_of_half_a_set_up() {
    let Some(peer) = queue() else { return };
    for (number, fault) in (1..=4).flat_map(|number| [(number, Fault::Unreachable), (number, Fault::Broken)]) {
        let what = format!("{fault:?} at offer {number}");
        // Each round has a queue of its own, so that its memory is not mistaken for another round's.
        let queue = queue().expect("as before");
        // The mappings of this round are leaked, so that they cannot disturb the next round.
        let pairs: &[Pair; 3] = Box::leak(Box::new([0, 1, 2].map(|_| Pair::new(peer.clone()))));
        pairs[0].fault.set(Some((number, fault)));
        let first = buffer(&queue);
        let outcome = connect(&pairs[0], &first);
        match fault {
            Fault::Unreachable => assert!(outcome.is_ok_and(|ordered| !ordered.uses_peers()), "{what}"),
            Fault::Broken => {
                assert!(outcome.is_err_and(|error| error.to_string().contains("nothing is heard")), "{what}")
            }
        }
        drop(first);
        let offered = pairs[0].offers();
        assert_eq!(offered.len(), number, "{what}");

        let second = buffer(&queue);
        let connected = connect_peers(&pairs[1], &second);
        let is_used_again = |address: &u64| pairs[1].offers().contains(address);
        if (number, fault) == (1, Fault::Unreachable) {
            assert!(is_used_again(&offered[0]), "nobody has the list of flags");
        } else {
            assert!(!offered.iter().any(is_used_again), "{what}: a peer may have it mapped");
        }
        if number > 1 {
            assert!(pairs[0].has_let_go(), "{what}: the peer waits for that");
            pairs[0].let_go();
            std::thread::sleep(PAUSE);
            queue.synchronize().unwrap();
            let third = buffer(&queue);
            let connected = connect_peers(&pairs[2], &third);
            let again = pairs[2].offers();
            assert!(offered.iter().all(|address| again.contains(address)), "{what}: {offered:?} is none of {again:?}");
            std::mem::forget((connected, third));
        }
        std::mem::forget((connected, second));
    }
    say("the end");
}

#[test]
fn connect_peers_failing_half_way_keeps_the_memory() {
    after(&lines("connect_peers::case_of_half_a_set_up"), "the end");
}

#[test]
fn case_of_a_drop_in_a_recording() {
    let (Some(queue), Some(peer)) = (queue(), queue()) else { return };
    let pair = Pair::new(peer);
    let gradients = buffer(&queue);
    let connected = connect_peers(&pair, &gradients);
    let mut data = DeviceBuffer::zeroed(&queue, DType::F32, 100).unwrap();
    cuda::zero(data.as_mut_slice()).unwrap();
    let graph = queue.capture(|| {
        drop((connected, gradients));
        cuda::zero(data.as_mut_slice())
    });
    let graph = graph.expect("dropping something spoils no recording");
    assert!(!pair.has_let_go(), "work of the recording may be on the peer's memory");
    graph.launch().unwrap();
    drop(graph);
    std::thread::sleep(PAUSE);
    queue.synchronize().unwrap();
    assert!(pair.has_let_go());
    say("the end");
}

#[test]
fn connect_peers_dropped_in_a_recording_lives_with_the_graph() {
    after(&lines("connect_peers::case_of_a_drop_in_a_recording"), "the end");
}

/// The context that is current on this thread.
fn context() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle.
    let status = unsafe { cust::sys::cuCtxGetCurrent(&mut context) };
    assert_eq!(status as u32, 0);
    context.addr()
}

#[test]
fn case_of_another_thread() {
    let (Some(own), Some(peer)) = (queue(), queue_of(1)) else { return };
    let rank = move || {
        let (queue, pair) = (queue_of(1).expect("as before"), Pair::new(peer));
        let gradients = buffer(&queue);
        let connected = connect_peers(&pair, &gradients);
        drop((connected, gradients, queue));
        pair
    };
    let pair = std::thread::spawn(rank).join().expect("no panic");
    own.synchronize().unwrap();
    let before = context();
    pair.let_go();
    std::thread::sleep(PAUSE);
    say("a thread of another device");
    own.synchronize().unwrap();
    assert_eq!(context(), before, "this thread's context");
    say("a queue of that device ends");
    drop(queue_of(1));
    say("the end");
}

#[test]
fn queue_without_an_owner_is_destroyed_outside_of_recordings() {
    let lines = lines("connect_peers::case_of_another_thread");
    assert!(after(&lines, "a thread of another device").is_empty(), "{lines:?}");
    // Stream 1 is the thread's own, 2 is the peer's, 3 is the abandoned one, and 4 carries the flags.
    assert_eq!(after(&lines, "a queue of that device ends"), ["stream 3 ends", "stream 5 ends"], "{lines:?}");
}

#[test]
fn case_of_a_later_communicator() {
    let (Some(queue), Some(peer)) = (queue(), queue()) else { return };
    let pairs = [0, 1, 2].map(|_| Pair::new(peer.clone()));
    let mut gradients = [0, 1, 2].map(|_| buffer(&queue));
    let mut first = connect_peers(&pairs[0], &gradients[0]);
    first.all_reduce(&mut gradients[0]).unwrap();
    let graph = queue.capture(|| first.all_reduce(&mut gradients[0])).unwrap();
    let error = connect(&pairs[1], &gradients[1]).expect_err("the graph has all blocks");
    assert!(matches!(&error, Error::Cuda(cuda) if cuda.code == 720), "{error}");
    for part in ["device 0", "264 blocks", "132 are left", "record it again"] {
        assert!(error.to_string().contains(part), "no {part:?} in {error}");
    }
    graph.launch().unwrap();
    drop(graph);
    let _second = connect_peers(&pairs[2], &gradients[2]);
    let graph = queue.capture(|| first.all_reduce(&mut gradients[0])).unwrap();
    graph.launch().unwrap();
    say("the end");
}

#[test]
fn graph_keeps_its_part_of_the_gpu() {
    after(&lines("connect_peers::case_of_a_later_communicator"), "the end");
}
