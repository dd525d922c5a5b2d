//! Test cases for sends, receives and pipelines of host memory, shared by every transport.
//!
//! All ranks of a communicator run a case. The cases of [`GOOD`] leave the communicator usable, even after errors. Each case of [`FATAL`]
//! makes its communicator unusable, and so needs a separate one. Cases never start ranks.

use gradsync::comm::{Collectives, Communicator};
use gradsync::ops::send_recv::{
    Bundle, Expected, SendRecv, WireTensor, WireTensorMut, recv, recv_described, run_schedule, send,
};
use gradsync::plan::bundle::{Limits, TensorSpec, encode};
use gradsync::plan::schedule::{RankSchedule, Schedule};
use gradsync::{CommError, DType, Error, GradientBuffer, Result};

use crate::inputs::Random;

pub mod pipeline;
mod refusals;

pub use pipeline::pipeline;

/// A test case that all ranks run, with the number of ranks that it needs.
pub struct Case {
    /// The name, for messages.
    pub name: &'static str,
    /// The smallest number of ranks.
    pub ranks: usize,
    /// The function to run.
    pub run: fn(&dyn Communicator),
}

const fn case(name: &'static str, run: fn(&dyn Communicator)) -> Case {
    Case { name, ranks: 2, run }
}

/// Cases that leave the communicator usable.
pub const GOOD: &[Case] = &[
    case("the layout of upstream", upstream_layout),
    case("every type and shape", every_type),
    case("payloads as long as a head", head_lengths),
    case("long headers", long_headers),
    case("passed on from where it lies", passed_on),
    case("everybody with everybody, at once", everybody),
    case("a schedule", schedule),
    case("a schedule of another rank", refusals::foreign_schedule),
    case("signals, peers and empty lists", refusals::own_mistakes),
    case("limits and tags", refusals::limits_and_tags),
    case("refused among others", refusals::refused_among_others),
    case("memory that a sender does not get", refusals::withdrawn),
    case("what is no header", refusals::no_header),
    case("headers of strangers", refusals::strangers),
    case("one forward, one backward", pipeline),
];

/// Cases after which the communicator has failed on both ranks.
pub const FATAL: &[Case] = &[
    case("known shapes of other lengths", refusals::other_lengths),
    case("described, and known to the receiver", refusals::described_to_one_who_knows),
    case("known, and described to the receiver", refusals::known_to_one_who_asks),
];

/// A tensor of arbitrary bytes; floating-point elements may be NaN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: Vec<u8>,
}

impl Owned {
    /// A tensor with pseudo-random bytes that depend on all arguments.
    pub fn new(dtype: DType, shape: &[usize], seed: u64) -> Self {
        let len = shape.iter().product::<usize>() * dtype.size_bytes();
        let mut random = Random::new(seed * 1000 + len as u64 + dtype.size_bytes() as u64);
        Self { dtype, shape: shape.to_vec(), bytes: (0..len).map(|_| random.bits() as u8).collect() }
    }

    /// A tensor of equal type and shape, with other bytes.
    pub fn blank(&self) -> Self {
        Self { bytes: vec![0x77; self.bytes.len()], ..self.clone() }
    }

    /// The tensor as an argument of a send.
    pub fn tensor(&self) -> WireTensor<'_> {
        WireTensor::new(self.dtype, &self.shape[..], &self.bytes).expect("the shape's bytes")
    }

    fn tensor_mut(&mut self) -> WireTensorMut<'_> {
        WireTensorMut::new(self.dtype, &self.shape[..], &mut self.bytes).expect("the shape's bytes")
    }
}

impl From<WireTensor<'_>> for Owned {
    fn from(tensor: WireTensor<'_>) -> Self {
        Self { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes: tensor.bytes().to_vec() }
    }
}

/// A bundle of all tensors.
pub fn bundle(tensors: &[Owned]) -> Bundle<'_> {
    Bundle::new(tensors.iter().map(Owned::tensor)).expect("at least one tensor")
}

/// The expectation of a receiver that knows the tensors' types and shapes.
pub fn known(tensors: &[Owned]) -> Expected {
    Expected::known(tensors.iter().map(|tensor| (tensor.dtype, tensor.shape.clone())))
}

/// Bundles of every type, with empty tensors and scalars, alone and together; equal seeds give equal bundles.
pub fn bundles(seed: u64) -> Vec<Vec<Owned>> {
    let shapes: [&[usize]; 7] = [&[], &[1], &[0], &[75], &[3, 5], &[2, 0, 9], &[4, 1, 33]];
    let mut all: Vec<Vec<Owned>> = Vec::new();
    for (index, dtype) in DType::ALL.into_iter().enumerate() {
        all.push(shapes.iter().map(|shape| Owned::new(dtype, shape, seed + index as u64)).collect());
        all.push(vec![Owned::new(dtype, shapes[index % shapes.len()], seed)]);
    }
    all.push(DType::ALL.into_iter().map(|dtype| Owned::new(dtype, &[7, 3], seed)).collect());
    all.push(vec![Owned::new(DType::F32, &[0], seed), Owned::new(DType::I8, &[0, 4], seed)]);
    // The empty tensor at the end begins at the next multiple of 256.
    all.push(vec![Owned::new(DType::U8, &[5], seed), Owned::new(DType::U8, &[0], seed)]);
    all.push(vec![Owned::new(DType::F64, &[1 << 15, 3], seed), Owned::new(DType::BF16, &[1], seed)]);
    all
}

/// The ring neighbours of this rank: it sends to the next rank and receives from the previous one, at the same time.
fn neighbours(comm: &dyn Communicator) -> (usize, usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    ((rank + 1) % world_size, (rank + world_size - 1) % world_size)
}

/// Rank 0 sends a bundle three times, and rank 1 receives it in each of the three ways.
fn over(comm: &dyn Communicator, tensors: &[Owned], label: &str) {
    match comm.rank() {
        0 => {
            for _ in 0..2 {
                assert!(send(&SendRecv::new(comm), true, 1, &bundle(tensors)).unwrap().wait().unwrap());
            }
            assert!(send(&SendRecv::new(comm), true, 1, &bundle(tensors).described(9)).unwrap().wait().unwrap());
        }
        1 => {
            let mut given: Vec<Owned> = tensors.iter().map(Owned::blank).collect();
            let mut places: Vec<WireTensorMut<'_>> = given.iter_mut().map(Owned::tensor_mut).collect();
            assert!(recv(&SendRecv::new(comm), true, 0, &mut places).unwrap().wait().unwrap());
            assert_eq!(given, tensors, "{label}, into given tensors");
            let new = SendRecv::new(comm).exchange(&[], &[(0, known(tensors))]).unwrap().1.remove(0);
            assert_eq!(new.tensors().map(Owned::from).collect::<Vec<_>>(), tensors, "{label}, known");
            let (completion, new) = recv_described(&SendRecv::new(comm), true, 0, 9, &Limits::default()).unwrap();
            assert!(completion.wait().unwrap());
            assert_eq!(new.tensors().map(Owned::from).collect::<Vec<_>>(), tensors, "{label}, described");
        }
        _ => {}
    }
}

/// Section 5 of the specification: the offsets are 0, 256 and 768, and there is no padding at the end.
fn upstream_layout(comm: &dyn Communicator) {
    let tensors: Vec<Owned> = [1, 75, 64].map(|len| Owned::new(DType::F32, &[len], 3)).to_vec();
    match comm.rank() {
        0 => {
            assert_eq!(bundle(&tensors).len_bytes(), 1024);
            assert!(send(&SendRecv::new(comm), true, 1, &bundle(&tensors)).unwrap().wait().unwrap());
        }
        1 => {
            let mut payload = vec![0; 1024];
            comm.recv(&mut payload[..], 0).unwrap();
            for (tensor, begin) in tensors.iter().zip([0, 256, 768]) {
                assert_eq!(payload[begin..begin + tensor.bytes.len()], tensor.bytes);
            }
        }
        _ => {}
    }
}

fn every_type(comm: &dyn Communicator) {
    for (index, tensors) in bundles(11).iter().enumerate() {
        over(comm, tensors, &format!("bundle {index}"));
    }
}

fn head_lengths(comm: &dyn Communicator) {
    for len in [1008, 1015, 1016, 1017, 1024, 256] {
        over(comm, &[Owned::new(DType::U8, &[len], 5)], &format!("{len} bytes"));
        let pair = [Owned::new(DType::U8, &[5], 5), Owned::new(DType::U8, &[len - 256], 6)];
        assert_eq!(bundle(&pair).len_bytes(), len);
        over(comm, &pair, &format!("{len} bytes in two"));
    }
}

fn long_headers(comm: &dyn Communicator) {
    // The first message describes at most 61 vectors.
    for count in [30, 31, 61, 62, 300] {
        let tensors: Vec<Owned> = (0..count).map(|seed| Owned::new(DType::I32, &[seed % 4], seed as u64)).collect();
        over(comm, &tensors, &format!("{count} vectors"));
    }
    let deep: Vec<Owned> = (0..40).map(|seed| Owned::new(DType::F16, &[1, 2, 1, 1, 1], seed)).collect();
    over(comm, &deep, "40 tensors of 5 dimensions");
}

/// Received tensors are forwarded to the next rank, and a gradient buffer is sent unchanged, including its gaps.
fn passed_on(comm: &dyn Communicator) {
    let last = comm.world_size() - 1;
    let tensors = bundles(23);
    for tensors in &tensors[..6] {
        let mut received = None;
        if comm.rank() > 0 {
            received = SendRecv::new(comm).exchange(&[], &[(comm.rank() - 1, known(tensors))]).unwrap().1.pop();
        }
        if comm.rank() < last {
            let own = received.as_ref().map_or_else(|| bundle(tensors), Bundle::from);
            assert!(send(&SendRecv::new(comm), true, comm.rank() + 1, &own).unwrap().wait().unwrap());
        }
        if let Some(received) = received {
            assert_eq!(received.tensors().map(Owned::from).collect::<Vec<_>>(), *tensors, "rank {}", comm.rank());
        }
    }
    let shapes = [("a", vec![3usize, 5]), ("b", vec![0]), ("c", vec![100]), ("d", vec![])];
    let mut buffer = GradientBuffer::new(DType::BF16, 3, shapes.clone()).unwrap();
    for (index, (_, shape)) in shapes.iter().enumerate() {
        let own = Owned::new(DType::BF16, shape, index as u64);
        buffer.tensor_mut(index).into_data().as_bytes_mut().copy_from_slice(&own.bytes);
    }
    match comm.rank() {
        0 => assert!(
            send(&SendRecv::new(comm), true, 1, &Bundle::of_buffer(&buffer).unwrap().described(1))
                .unwrap()
                .wait()
                .unwrap()
        ),
        1 => {
            let (_, received) = recv_described(&SendRecv::new(comm), true, 0, 1, &Limits::default()).unwrap();
            for (index, tensor) in received.tensors().enumerate() {
                assert_eq!(tensor.shape(), shapes[index].1);
                assert_eq!(tensor.bytes(), buffer.tensor(index).data().as_bytes());
            }
        }
        _ => {}
    }
}

/// One known and two described bundles to every other rank in one call; one of the described bundles has a long header.
fn everybody(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let peers: Vec<usize> = (0..world_size).filter(|&peer| peer != rank).collect();
    let tensors = |from: usize, to: usize| -> [Vec<Owned>; 3] {
        let seed = (from * world_size + to) as u64;
        let many = (0..100).map(|index| Owned::new(DType::I8, &[from + 1, to, index], seed)).collect();
        [vec![Owned::new(DType::F32, &[from, 3], seed)], many, bundles(seed).swap_remove(4)]
    };
    let own: Vec<(usize, [Vec<Owned>; 3])> = peers.iter().map(|&peer| (peer, tensors(rank, peer))).collect();
    let mut sends = Vec::new();
    for (peer, [first, second, third]) in &own {
        sends.push((*peer, bundle(first).described(1)));
        sends.push((*peer, bundle(second).described(2)));
        sends.push((*peer, bundle(third)));
    }
    let mut receives = Vec::new();
    // Receives are in another order of peers than the sends.
    for &peer in peers.iter().rev() {
        receives.push((peer, Expected::described(1)));
        receives.push((peer, Expected::described(2)));
        receives.push((peer, known(&tensors(peer, rank)[2])));
    }
    let received = SendRecv::new(comm).exchange(&sends, &receives).unwrap().1;
    for (peer, received) in peers.iter().rev().zip(received.chunks(3)) {
        for (expected, received) in tensors(*peer, rank).iter().zip(received) {
            assert_eq!(received.tensors().map(Owned::from).collect::<Vec<_>>(), *expected, "from rank {peer}");
        }
    }
}

/// A schedule of transfers around the ring, two per slot, whose number of bytes grows with the slot.
pub fn ring(world_size: usize) -> Schedule<usize> {
    let mut schedule = Schedule::new(world_size).unwrap();
    for slot in 0..6 {
        for from in 0..world_size {
            let to = (from + 1) % world_size;
            schedule.transfer(3 * slot, from, to, 100 * slot).unwrap();
            schedule.transfer(3 * slot, from, to, 100 * slot + from).unwrap();
        }
    }
    schedule
}

/// The transfer handler for [`ring`].
struct Rounds {
    rank: usize,
    given: Vec<Owned>,
    taken: Vec<(usize, Owned)>,
    sent: usize,
}

impl gradsync::ops::send_recv::TransferHandler<usize> for Rounds {
    fn send(&self, to: usize, payload: &usize) -> Result<Bundle<'_>> {
        let _ = to;
        let tensor = self.given.iter().find(|tensor| tensor.bytes.len() == *payload).expect("planned");
        Ok(bundle(std::slice::from_ref(tensor)))
    }

    fn expect(&self, _: usize, payload: &usize) -> Result<Expected> {
        Ok(Expected::known([(DType::U8, vec![*payload])]))
    }

    fn received(&mut self, from: usize, payload: &usize, tensors: gradsync::ops::send_recv::Received) -> Result<()> {
        assert_eq!(tensors.tensor(0).shape(), [*payload]);
        self.taken.push((from, tensors.tensor(0).into()));
        Ok(())
    }

    fn sent(&mut self, to: usize, _: &usize) -> Result<()> {
        assert_ne!(to, self.rank);
        self.sent += 1;
        Ok(())
    }
}

fn schedule(comm: &dyn Communicator) {
    let (rank, plan) = (comm.rank(), ring(comm.world_size()));
    let (_, from) = neighbours(comm);
    let tensors = |rank: usize| -> Vec<Owned> {
        let lens = |slot: usize| [100 * slot, 100 * slot + rank];
        (0..6).flat_map(lens).map(|len| Owned::new(DType::U8, &[len], (rank + 70) as u64)).collect()
    };
    let mut work = Rounds { rank, given: tensors(rank), taken: Vec::new(), sent: 0 };
    let own: &RankSchedule<usize> = plan.rank(rank);
    run_schedule(&SendRecv::new(comm), own, &mut work).unwrap();
    assert_eq!(work.sent, 12);
    let expected: Vec<(usize, Owned)> = tensors(from).into_iter().map(|tensor| (from, tensor)).collect();
    assert_eq!(work.taken, expected);
}
