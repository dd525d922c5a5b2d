//! Two linear layers in a row, the first split by output rows and the second by input columns, with gradsync's
//! operations around them, against the same layers on one rank.
//!
//! The layers multiply on the host, in `f64`. All initial values are −1, 0 or 1, so that every sum is an integer of at most 144 and exact
//! in every dtype.

use std::sync::{Arc, Mutex};

use gradsync::Result;
use gradsync::comm::Communicator;
use gradsync::memory::Cuda;
use gradsync::ops::tensor_parallel::{
    AllGather, AllReduce, AllReduceGradient, OwnedTensor, Pipeline, ReduceScatter, TensorOp,
};
use gradsync_tests::array::values_of;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;

use super::{RankContext, host_tensor};

/// These sizes are multiples of every world size.
const BATCH: usize = 24;
const INPUTS: usize = 24;
const HIDDEN: usize = 24;
const OUTPUTS: usize = 24;

/// A matrix in row-major order.
#[derive(Clone, Debug, PartialEq)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(rows: usize, columns: usize, mut value: impl FnMut(usize, usize) -> f64) -> Self {
        let values = (0..rows * columns).map(|place| value(place / columns, place % columns)).collect();
        Self { rows, columns, values }
    }

    fn random(rows: usize, columns: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        Self::of(rows, columns, |_, _| random.below(3) as f64 - 1.0)
    }

    fn transposed(&self) -> Self {
        Self::of(self.columns, self.rows, |row, column| self.values[column * self.columns + row])
    }

    fn times(&self, other: &Self) -> Self {
        assert_eq!(self.columns, other.rows);
        Self::of(self.rows, other.columns, |row, column| {
            (0..self.columns)
                .map(|k| self.values[row * self.columns + k] * other.values[k * other.columns + column])
                .sum()
        })
    }

    /// The rows of this rank's part.
    fn rows_of(&self, ranks: &RankContext<'_>) -> Self {
        assert_eq!(self.rows % ranks.world_size(), 0, "the sizes are multiples of every world size");
        let rows = self.rows / ranks.world_size();
        let part = self.values.chunks_exact(rows * self.columns).nth(ranks.rank()).expect("a part for every rank");
        Self { rows, columns: self.columns, values: part.to_vec() }
    }

    /// The columns of this rank's part.
    fn columns_of(&self, ranks: &RankContext<'_>) -> Self {
        self.transposed().rows_of(ranks).transposed()
    }

    fn tensor(&self, ranks: &RankContext<'_>, format: Format) -> OwnedTensor<Cuda> {
        ranks.tensor(format, &self.values, &[self.rows, self.columns])
    }

    /// The matrix, after the device's work on it.
    fn read(tensor: &OwnedTensor<Cuda>, comm: &dyn Communicator<Cuda>) -> Result<Self> {
        comm.synchronize(tensor.queue())?;
        let host = tensor.to_host()?;
        let [rows, columns] = *host.shape() else { panic!("{host:?} is no matrix") };
        Ok(Self { rows, columns, values: values_of(host.as_slice()) })
    }
}

/// `y = x Wᵀ` on one rank's part of the weight, without any knowledge of ranks.
struct Linear {
    format: Format,
    weight: Matrix,
    /// The input of the last forward pass.
    input: Option<Matrix>,
    weight_gradient: Arc<Mutex<Option<Matrix>>>,
}

impl Linear {
    /// Computes on the host, in place of a kernel.
    fn on_host(
        &self,
        tensor: &OwnedTensor<Cuda>,
        comm: &dyn Communicator<Cuda>,
        product: impl FnOnce(&Matrix) -> Matrix,
    ) -> Result<(Matrix, OwnedTensor<Cuda>)> {
        let matrix = Matrix::read(tensor, comm)?;
        let result = product(&matrix);
        let host = host_tensor(self.format, &result.values, &[result.rows, result.columns]);
        Ok((matrix, OwnedTensor::from_host(tensor.queue(), &host)?))
    }
}

impl TensorOp<Cuda> for Linear {
    fn name(&self) -> &str {
        "Linear"
    }

    fn forward(&mut self, input: OwnedTensor<Cuda>, comm: &dyn Communicator<Cuda>) -> Result<OwnedTensor<Cuda>> {
        let (input, output) = self.on_host(&input, comm, |x| x.times(&self.weight.transposed()))?;
        self.input = Some(input);
        Ok(output)
    }

    fn backward(&mut self, gradient: OwnedTensor<Cuda>, comm: &dyn Communicator<Cuda>) -> Result<OwnedTensor<Cuda>> {
        let (gradient, result) = self.on_host(&gradient, comm, |dy| dy.times(&self.weight))?;
        let input = self.input.take().expect("the pipeline goes forward first");
        *self.weight_gradient.lock().unwrap() = Some(gradient.transposed().times(&input));
        Ok(result)
    }
}

/// The input and the whole layers, on one rank: `z = x Vᵀ Wᵀ` and its gradients for `dz`.
struct Whole {
    x: Matrix,
    dz: Matrix,
    v: Matrix,
    w: Matrix,
    z: Matrix,
    dx: Matrix,
    dv: Matrix,
    dw: Matrix,
}

impl Whole {
    fn new(seed: u64) -> Self {
        let (x, dz) = (Matrix::random(BATCH, INPUTS, seed), Matrix::random(BATCH, OUTPUTS, seed + 1));
        let (v, w) = (Matrix::random(HIDDEN, INPUTS, seed + 2), Matrix::random(OUTPUTS, HIDDEN, seed + 3));
        let hidden = x.times(&v.transposed());
        let z = hidden.times(&w.transposed());
        let dw = dz.transposed().times(&hidden);
        let dhidden = dz.times(&w);
        let dv = dhidden.transposed().times(&x);
        let dx = dhidden.times(&v);
        for matrix in [&hidden, &z, &dw, &dhidden, &dv, &dx] {
            assert!(matrix.values.iter().all(|value| value.abs() <= 256.0), "more than bf16 has digits for");
        }
        Self { x, dz, v, w, z, dx, dv, dw }
    }
}

/// Checks the block between `before` and `after`; `part` selects a rank's part of the batch.
fn check(
    ranks: &RankContext<'_>,
    before: impl TensorOp<Cuda> + Copy + 'static,
    after: impl TensorOp<Cuda> + Copy + 'static,
    part: impl Fn(&Matrix) -> Matrix,
) {
    for format in Format::ALL {
        let whole = Whole::new(5);
        let gradients = [(); 2].map(|()| Arc::new(Mutex::new(None)));
        let linear = |weight: Matrix, gradient: &Arc<Mutex<Option<Matrix>>>| Linear {
            format,
            weight,
            input: None,
            weight_gradient: gradient.clone(),
        };
        let mut pipeline = Pipeline::new()
            .then(before)
            .then(linear(whole.v.rows_of(ranks), &gradients[0]))
            .then(linear(whole.w.columns_of(ranks), &gradients[1]))
            .then(after);
        // In the second step, the ranks have compared the calls before.
        for step in 0..2 {
            let label = |name: &str| format!("{name} in {format:?}, step {step}, rank {}", ranks.rank());
            let output = pipeline.forward(part(&whole.x).tensor(ranks, format), ranks.comm).unwrap();
            assert_eq!(Matrix::read(&output, ranks.comm).unwrap(), part(&whole.z), "{}", label("output"));
            let gradient = pipeline.backward(part(&whole.dz).tensor(ranks, format), ranks.comm).unwrap();
            assert_eq!(Matrix::read(&gradient, ranks.comm).unwrap(), part(&whole.dx), "{}", label("input"));
            let [dv, dw] = gradients.each_ref().map(|cell| cell.lock().unwrap().take().expect("a pass backward"));
            assert_eq!(dv, whole.dv.rows_of(ranks), "{}", label("first weight"));
            assert_eq!(dw, whole.dw.columns_of(ranks), "{}", label("second weight"));
        }
    }
}

/// Every rank has the whole batch: one sum in each direction (Megatron-LM).
pub(super) fn tensor_parallel(ranks: &RankContext<'_>) {
    check(ranks, AllReduceGradient, AllReduce, Matrix::clone);
}

/// Outside of the block, every rank has its rows of the batch (Megatron-LM's sequence parallelism).
pub(super) fn sequence_parallel(ranks: &RankContext<'_>) {
    check(ranks, AllGather, ReduceScatter, |matrix| matrix.rows_of(ranks));
}
