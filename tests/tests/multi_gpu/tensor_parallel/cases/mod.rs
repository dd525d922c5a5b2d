//! Cases of tensor-parallel operations on device memory for any transport. They need a communicator, a queue, and the same call on every
//! rank.
//!
//! No case leaves the communicator broken, and none depends on how it was created.

mod layers;
mod passes;
mod places;
mod refusals;

use std::hash::{DefaultHasher, Hash, Hasher};

use gradsync::Result;
use gradsync::comm::Communicator;
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::tensor_parallel::{AllGather, AllReduce, AllReduceGradient, OwnedTensor, ReduceScatter, TensorOp};
use gradsync_tests::array::{Array, patterns_of};
use gradsync_tests::oracle::Format;

/// One case.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The smallest world size of the case.
    ranks: usize,
    pub(crate) run: fn(&RankContext<'_>),
}

impl Case {
    const fn new(name: &'static str, ranks: usize, run: fn(&RankContext<'_>)) -> Self {
        Case { name, ranks, run }
    }
}

const ALL: [Case; 17] = [
    Case::new("every direction and dtype, of small integers", 1, passes::exact),
    Case::new("all-reduce of x[P, 32, 32]", 1, passes::all_reduce_of_32),
    Case::new("all-gather of x[P, 32, 32]", 1, passes::all_gather_of_32),
    Case::new("reduce-scatter of x[P, 32, 32]", 1, passes::reduce_scatter_of_32),
    Case::new("the way back is the adjoint", 1, passes::adjoint),
    Case::new("tensors stay where they are", 1, places::stay),
    Case::new("what the caller keeps is not written", 1, places::kept),
    Case::new("memory of another owner", 1, places::lent),
    Case::new("a shape has to fit its elements", 1, places::fits),
    Case::new("dimension 0 is missing or not divided", 2, refusals::dimension_0),
    Case::new("another shape", 2, refusals::shape),
    Case::new("another dtype", 2, refusals::dtype),
    Case::new("another operation", 2, refusals::operation),
    Case::new("a pipeline goes back only where it came from", 2, refusals::pipeline),
    Case::new("a block of two layers", 1, layers::tensor_parallel),
    Case::new("a block of two layers, whose rows are shared out", 1, layers::sequence_parallel),
    Case::new("no elements", 1, passes::no_elements),
];

/// The cases for this many ranks, in the order in which every rank runs them.
pub(crate) fn of(world_size: usize) -> impl Iterator<Item = Case> {
    ALL.into_iter().filter(move |case| case.ranks <= world_size)
}

/// The context of this rank.
pub(crate) struct RankContext<'c> {
    pub(crate) comm: &'c dyn Communicator<Cuda>,
    /// A queue on the communicator's device.
    pub(crate) queue: &'c Queue,
}

/// The shape and the bits of a tensor.
type Seen = (Vec<usize>, Vec<u64>);

impl RankContext<'_> {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    pub(crate) fn tensor(&self, format: Format, values: &[f64], shape: &[usize]) -> OwnedTensor<Cuda> {
        OwnedTensor::from_host(self.queue, &host_tensor(format, values, shape)).unwrap()
    }

    /// Small integers that differ between ranks: every sum over a few of them is exact in every dtype.
    fn integers(&self, format: Format, seed: usize, shape: &[usize]) -> OwnedTensor<Cuda> {
        self.tensor(format, &integers(seed, shape.iter().product()), shape)
    }

    /// The tensor on the host, after the device's work on it.
    fn read(&self, tensor: &OwnedTensor<Cuda>) -> OwnedTensor {
        self.comm.synchronize(tensor.queue()).unwrap();
        tensor.to_host().unwrap()
    }

    pub(crate) fn seen(&self, tensor: &OwnedTensor<Cuda>) -> Seen {
        let host = self.read(tensor);
        (host.shape().to_vec(), patterns_of(host.as_slice()))
    }

    /// Asserts that all ranks have the same bits.
    fn assert_same_everywhere(&self, what: &str, seen: &Seen) {
        let mut hasher = DefaultHasher::new();
        seen.hash(&mut hasher);
        let all = self.comm.gather_words(&[hasher.finish()]).unwrap();
        let different = all.iter().position(|other| *other != all[0]);
        assert_eq!(different, None, "{what}: this rank differs from rank 0");
    }
}

fn host_tensor(format: Format, values: &[f64], shape: &[usize]) -> OwnedTensor {
    match Array::new(format, values) {
        Array::F64(data) => OwnedTensor::new(data, shape),
        Array::F32(data) => OwnedTensor::new(data, shape),
        Array::F16(data) => OwnedTensor::new(data, shape),
        Array::BF16(data) => OwnedTensor::new(data, shape),
    }
    .unwrap()
}

/// Integers from −5 to 5; a few of them have an exact sum in every dtype.
fn integers(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|index| ((index * 7 + seed * 5) % 11) as f64 - 5.0).collect()
}

/// The bits of numbers of a format.
fn bits(format: Format, values: &[f64]) -> Vec<u64> {
    values.iter().map(|&value| format.encode(value)).collect()
}

type Pass = fn(OwnedTensor<Cuda>, &dyn Communicator<Cuda>) -> Result<OwnedTensor<Cuda>>;

/// Every direction of every operation, grouped by its effect.
const SUMS: [Pass; 2] = [|t, comm| AllReduce.forward(t, comm), |t, comm| AllReduceGradient.backward(t, comm)];
const GATHERS: [Pass; 2] = [|t, comm| AllGather.forward(t, comm), |t, comm| ReduceScatter.backward(t, comm)];
const SCATTERS: [Pass; 2] = [|t, comm| ReduceScatter.forward(t, comm), |t, comm| AllGather.backward(t, comm)];
const IDENTITIES: [Pass; 2] = [|t, comm| AllReduceGradient.forward(t, comm), |t, comm| AllReduce.backward(t, comm)];
