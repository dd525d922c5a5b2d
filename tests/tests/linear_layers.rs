//! Linear layers of candle, split over ranks with gradsync's tensor-parallel operations, against the same layers on one
//! rank.
//!
//! Outputs are compared, and gradients with respect to the input and to every weight: for a weight split by output rows, for a weight split
//! by input columns, and for both in a row, as in a transformer's block. Needs the feature `candle`.
//!
//! # Bounds
//!
//! Each compared value is a product of two or three matrices, with its inner sums cut into parts. A sum of n products, in any order and
//! with or without fused multiplications, errs by at most `γ_n` times the sum of the magnitudes. Adding the ranks' parts in `f64` and
//! rounding once is one more rounding for a narrower dtype, and P roundings for `f64` itself. Let `n` be the lengths of all inner sums
//! together plus one for each rank. Then the split and the plain result are each within `γ_n |A||B||C|` of the exact result, and within
//! twice this bound of each other, where `|A|` holds the magnitudes of the elements of `A`.

#![forbid(unsafe_code)]

use candle_core::{Device, Tensor, Var};
use gradsync::comm::{Communicator, Ranks};
use gradsync::ops::tensor_parallel::{AllReduce, AllReduceGradient, OwnedTensor, Pipeline, TensorOp};
use gradsync::{DType, Result};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};
use std::sync::{Arc, Mutex};

const BATCH: usize = 6;
const INPUTS: usize = 40;
const HIDDEN: usize = 24;
const OUTPUTS: usize = 16;

/// A matrix in row-major order.
#[derive(Clone, Debug)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn random(format: Format, rows: usize, columns: usize, seed: u64) -> Self {
        Self { rows, columns, values: vector(format, rows * columns, seed) }
    }

    fn of(rows: usize, columns: usize, value: impl Fn(usize, usize) -> f64) -> Self {
        let values = (0..rows * columns).map(|place| value(place / columns, place % columns)).collect();
        Self { rows, columns, values }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns + column]
    }

    fn transposed(&self) -> Self {
        Self::of(self.columns, self.rows, |row, column| self.at(column, row))
    }

    fn magnitudes(&self) -> Self {
        Self::of(self.rows, self.columns, |row, column| self.at(row, column).abs())
    }

    fn times(&self, other: &Self) -> Self {
        assert_eq!(self.columns, other.rows);
        let inner = |row: usize, column: usize| (0..self.columns).map(|k| self.at(row, k) * other.at(k, column)).sum();
        Self::of(self.rows, other.columns, inner)
    }

    /// The rows of this rank's part.
    fn rows_of(&self, rank: usize, world_size: usize) -> Self {
        let rows = self.rows / world_size;
        Self::of(rows, self.columns, |row, column| self.at(rank * rows + row, column))
    }

    /// The columns of this rank's part.
    fn columns_of(&self, rank: usize, world_size: usize) -> Self {
        self.transposed().rows_of(rank, world_size).transposed()
    }

    fn tensor(&self, format: Format) -> Tensor {
        let tensor = Tensor::from_slice(&self.values, (self.rows, self.columns), &Device::Cpu).unwrap();
        tensor.to_dtype(candle_dtype(format)).unwrap()
    }

    fn read(tensor: &Tensor) -> Self {
        let (rows, columns) = tensor.dims2().unwrap();
        let tensor = tensor.to_dtype(candle_core::DType::F64).unwrap().flatten_all().unwrap();
        Self { rows, columns, values: tensor.to_vec1().unwrap() }
    }
}

fn candle_dtype(format: Format) -> candle_core::DType {
    match format {
        Format::F64 => candle_core::DType::F64,
        Format::F32 => candle_core::DType::F32,
        Format::F16 | Format::BF16 => panic!("candle multiplies halves in an order that has no simple bound"),
    }
}

fn to_candle(tensor: OwnedTensor) -> Tensor {
    let shape = tensor.shape().to_vec();
    match tensor.dtype() {
        DType::F64 => Tensor::from_vec(tensor.into_vec::<f64>().unwrap(), shape, &Device::Cpu),
        _ => Tensor::from_vec(tensor.into_vec::<f32>().unwrap(), shape, &Device::Cpu),
    }
    .unwrap()
}

fn to_host(tensor: &Tensor) -> OwnedTensor {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        candle_core::DType::F64 => OwnedTensor::new(flat.to_vec1::<f64>().unwrap(), tensor.dims()),
        _ => OwnedTensor::new(flat.to_vec1::<f32>().unwrap(), tensor.dims()),
    }
    .unwrap()
}

/// `y = x Wᵀ` in candle, on one rank's part of the weight, without any knowledge of ranks.
struct Linear {
    weight: Var,
    /// The input and the output of the last forward pass.
    saved: Option<(Var, Tensor)>,
    weight_gradient: Arc<Mutex<Option<Matrix>>>,
}

impl Linear {
    fn new(weight: &Matrix, format: Format) -> (Self, Arc<Mutex<Option<Matrix>>>) {
        let weight_gradient = Arc::new(Mutex::new(None));
        let weight = Var::from_tensor(&weight.tensor(format)).unwrap();
        (Self { weight, saved: None, weight_gradient: weight_gradient.clone() }, weight_gradient)
    }
}

impl TensorOp for Linear {
    fn name(&self) -> &str {
        "Linear"
    }

    fn forward(&mut self, input: OwnedTensor, _: &dyn Communicator) -> Result<OwnedTensor> {
        let input = Var::from_tensor(&to_candle(input)).unwrap();
        let output = input.matmul(&self.weight.t().unwrap()).unwrap();
        let host = to_host(&output);
        self.saved = Some((input, output));
        Ok(host)
    }

    fn backward(&mut self, gradient: OwnedTensor, _: &dyn Communicator) -> Result<OwnedTensor> {
        let (input, output) = self.saved.take().expect("the pipeline goes forward first");
        // By the chain rule, the gradient of ⟨y, g⟩ is the gradient that g propagates.
        let gradients = (output * to_candle(gradient)).unwrap().sum_all().unwrap().backward().unwrap();
        *self.weight_gradient.lock().unwrap() = Some(Matrix::read(gradients.get(&self.weight).unwrap()));
        Ok(to_host(gradients.get(&input).unwrap()))
    }
}

/// The output, the gradient of the input, and the gradients of the weights on one rank.
type Results = (Matrix, Matrix, Vec<Matrix>);

/// Runs `layers` between the pipelines `before` and `after`: forward on `x` and backward on the output's gradient.
fn run(
    comm: &dyn Communicator,
    format: Format,
    before: impl TensorOp + 'static,
    layers: &[Matrix],
    after: impl TensorOp + 'static,
    (x, y): (&Matrix, &Matrix),
) -> Results {
    let mut pipeline = Pipeline::new().then(before);
    let mut weight_gradients = Vec::new();
    for weight in layers {
        let (layer, gradient) = Linear::new(weight, format);
        pipeline = pipeline.then(layer);
        weight_gradients.push(gradient);
    }
    let mut pipeline = pipeline.then(after);
    let output = pipeline.forward(to_host(&x.tensor(format)), comm).unwrap();
    let gradient = pipeline.backward(to_host(&y.tensor(format)), comm).unwrap();
    let weight_gradients = weight_gradients.into_iter().map(|gradient| gradient.lock().unwrap().take().unwrap());
    (Matrix::read(&to_candle(output)), Matrix::read(&to_candle(gradient)), weight_gradients.collect())
}

/// Runs the whole layers on one rank.
fn plain(format: Format, layers: &[Matrix], data: (&Matrix, &Matrix)) -> Results {
    on_ranks(1, |comm| run(&comm, format, Pipeline::new(), layers, Pipeline::new(), data)).remove(0)
}

/// Asserts the bound of the module's documentation for the product of `factors`.
fn assert_close(what: &str, format: Format, world_size: usize, got: &Matrix, plain: &Matrix, factors: &[&Matrix]) {
    let mut magnitude = factors[0].magnitudes();
    let mut roundings = world_size;
    for factor in &factors[1..] {
        roundings += magnitude.columns;
        magnitude = magnitude.times(&factor.magnitudes());
    }
    let unit = roundings as f64 * format.unit_roundoff();
    let gamma = unit / (1.0 - unit);
    assert_eq!((got.rows, got.columns), (plain.rows, plain.columns), "{what}");
    for ((got, plain), magnitude) in got.values.iter().zip(&plain.values).zip(&magnitude.values) {
        let bound = 2.0 * gamma * magnitude;
        assert!((got - plain).abs() <= bound, "{what}: {got:e} and {plain:e} are more than {bound:e} apart");
    }
}

fn everywhere(check: impl Fn(Format, usize)) {
    for format in [Format::F64, Format::F32] {
        for world_size in [1, 2, 4] {
            check(format, world_size);
        }
    }
}

#[test]
fn a_weight_split_by_output_rows() {
    guarded(120, || {
        everywhere(|format, world_size| {
            let what = |part: &str| format!("{part}, {format:?} over {world_size}");
            let (x, weight) = (Matrix::random(format, BATCH, INPUTS, 1), Matrix::random(format, OUTPUTS, INPUTS, 2));
            let y = Matrix::random(format, BATCH, OUTPUTS, 3);
            let whole = plain(format, std::slice::from_ref(&weight), (&x, &y));
            for (rank, (output, gradient, weights)) in on_ranks(world_size, |comm| {
                let rank = comm.rank();
                let layers = [weight.rows_of(rank, world_size)];
                let data = (&x, &y.columns_of(rank, world_size));
                run(&comm, format, AllReduceGradient, &layers, Pipeline::new(), data)
            })
            .into_iter()
            .enumerate()
            {
                let (own_y, own_weight) = (y.columns_of(rank, world_size), weight.rows_of(rank, world_size));
                let expected = whole.0.columns_of(rank, world_size);
                assert_close(&what("output"), format, world_size, &output, &expected, &[&x, &own_weight.transposed()]);
                assert_close(&what("input"), format, world_size, &gradient, &whole.1, &[&y, &weight]);
                let expected = whole.2[0].rows_of(rank, world_size);
                assert_close(&what("weight"), format, world_size, &weights[0], &expected, &[&own_y.transposed(), &x]);
            }
        });
    });
}

#[test]
fn a_weight_split_by_input_columns() {
    guarded(120, || {
        everywhere(|format, world_size| {
            let what = |part: &str| format!("{part}, {format:?} over {world_size}");
            let (x, weight) = (Matrix::random(format, BATCH, INPUTS, 1), Matrix::random(format, OUTPUTS, INPUTS, 2));
            let y = Matrix::random(format, BATCH, OUTPUTS, 3);
            let whole = plain(format, std::slice::from_ref(&weight), (&x, &y));
            for (rank, (output, gradient, weights)) in on_ranks(world_size, |comm| {
                let rank = comm.rank();
                let layers = [weight.columns_of(rank, world_size)];
                let data = (&x.columns_of(rank, world_size), &y);
                run(&comm, format, Pipeline::new(), &layers, AllReduce, data)
            })
            .into_iter()
            .enumerate()
            {
                let (own_x, own_weight) = (x.columns_of(rank, world_size), weight.columns_of(rank, world_size));
                assert_close(&what("output"), format, world_size, &output, &whole.0, &[&x, &weight.transposed()]);
                let expected = whole.1.columns_of(rank, world_size);
                assert_close(&what("input"), format, world_size, &gradient, &expected, &[&y, &own_weight]);
                let expected = whole.2[0].columns_of(rank, world_size);
                assert_close(&what("weight"), format, world_size, &weights[0], &expected, &[&y.transposed(), &own_x]);
            }
        });
    });
}

/// `z = x Vᵀ Wᵀ`: V by output rows, W by input columns, and one sum in each direction.
#[test]
fn a_block_of_both() {
    guarded(120, || {
        everywhere(|format, world_size| {
            let what = |part: &str| format!("{part}, {format:?} over {world_size}");
            let (x, y) = (Matrix::random(format, BATCH, INPUTS, 1), Matrix::random(format, BATCH, OUTPUTS, 3));
            let (v, w) = (Matrix::random(format, HIDDEN, INPUTS, 4), Matrix::random(format, OUTPUTS, HIDDEN, 5));
            let whole = plain(format, &[v.clone(), w.clone()], (&x, &y));
            let results = on_ranks(world_size, |comm| {
                let layers = [v.rows_of(comm.rank(), world_size), w.columns_of(comm.rank(), world_size)];
                run(&comm, format, AllReduceGradient, &layers, AllReduce, (&x, &y))
            });
            for (rank, (output, gradient, weights)) in results.into_iter().enumerate() {
                let (own_v, own_w) = (v.rows_of(rank, world_size), w.columns_of(rank, world_size));
                let factors = [&x, &v.transposed(), &w.transposed()];
                assert_close(&what("output"), format, world_size, &output, &whole.0, &factors);
                assert_close(&what("input"), format, world_size, &gradient, &whole.1, &[&y, &w, &v]);
                let expected = whole.2[0].rows_of(rank, world_size);
                let factors = [&own_w.transposed(), &y.transposed(), &x];
                assert_close(&what("first weight"), format, world_size, &weights[0], &expected, &factors);
                let expected = whole.2[1].columns_of(rank, world_size);
                let factors = [&y.transposed(), &x, &own_v.transposed()];
                assert_close(&what("second weight"), format, world_size, &weights[1], &expected, &factors);
            }
        });
    });
}
