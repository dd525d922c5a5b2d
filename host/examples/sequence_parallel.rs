//! Sequence parallelism: between tensor-parallel layers, each rank has the activations of some tokens instead of all.
//!
//! `cargo run --example sequence_parallel` runs a block on one rank and on four, which are threads, and compares them:
//!
//! ```text
//! 4 ranks with 2 of 8 tokens each: loss 104448 and all gradients as on one rank
//! ```
//!
//! The block is `tokens + down(relu(up(scale × tokens)))`; `scale` is in the place of a norm, dropout or another
//! function of single tokens. The two layers in the middle are those of the example `tensor_parallel`. The all-reduce
//! behind `down` becomes a reduce-scatter of tokens, and an all-gather of tokens comes before `up`: the same bytes, but
//! whatever lies outside takes a part of the memory and time on each rank. `AllGather` and `ReduceScatter` are each
//! other's adjoints, along dimension 0. All numbers are integers, so no sum is rounded.

#![forbid(unsafe_code)]

use gradsync::ops::tensor_parallel::{AllGather, OwnedTensor, ReduceScatter, TensorOp};
use gradsync::prelude::*;

const TOKENS: usize = 8;
const WIDTH: usize = 4;
const HIDDEN: usize = 8;

/// A matrix of small integers, equal on all ranks.
fn integers(rows: usize, columns: usize, seed: usize) -> Vec<f64> {
    (0..rows * columns).map(|index| ((index * 5 + index / 3 + seed) % 7) as f64 - 3.0).collect()
}

/// The rows of a matrix that belong to this rank.
fn own(comm: &dyn Communicator, matrix: Vec<f64>) -> Vec<f64> {
    let len = matrix.len() / comm.world_size();
    matrix[comm.rank() * len..][..len].to_vec()
}

/// The product of two matrices in row-major order; `inner` is the number of columns of the first one and of rows of the
/// second one.
fn product(left: &[f64], inner: usize, right: &[f64]) -> Vec<f64> {
    let columns = right.len() / inner;
    let element = |row: &[f64], column: usize| (0..inner).map(|k| row[k] * right[k * columns + column]).sum();
    left.chunks(inner).flat_map(|row| (0..columns).map(move |column| element(row, column))).collect()
}

fn transposed(matrix: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}

/// The products of elements; a row on the right serves all rows on the left.
fn times(left: &[f64], right: &[f64]) -> Vec<f64> {
    left.iter().zip(right.iter().cycle()).map(|(left, right)| left * right).collect()
}

fn tensor(tokens: Vec<f64>) -> Result<OwnedTensor, Error> {
    let count = tokens.len() / WIDTH;
    OwnedTensor::new(tokens, [count, WIDTH])
}

/// The loss, and its gradients: of `scale`, which is whole on every rank, of this rank's tokens, and of its parts of
/// both weights.
struct Pass {
    loss: f64,
    scale: Vec<f64>,
    parts: [Vec<f64>; 3],
}

fn pass(comm: &dyn Communicator) -> Result<Pass, Error> {
    let units = HIDDEN / comm.world_size();
    let scale = integers(1, WIDTH, 5);
    let tokens = own(comm, integers(TOKENS, WIDTH, 3));
    // Each rank has the weights of some hidden units.
    let (up, down) = (own(comm, integers(HIDDEN, WIDTH, 1)), own(comm, integers(HIDDEN, WIDTH, 2)));

    let all = AllGather.forward(tensor(times(&tokens, &scale))?, comm)?.into_vec()?;
    let mut hidden = product(&all, WIDTH, &transposed(&up, WIDTH));
    hidden.iter_mut().for_each(|value| *value = value.max(0.0));
    let output = ReduceScatter.forward(tensor(product(&hidden, units, &down))?, comm)?.into_vec::<f64>()?;
    let output: Vec<f64> = output.iter().zip(&tokens).map(|(output, token)| output + token).collect();
    let loss = comm.all_reduce_scalar(times(&output, &output).iter().sum::<f64>() / 2.0, ReduceOp::Sum)?;

    // The gradient of the loss with respect to an output is that output.
    let of_all = ReduceScatter.backward(tensor(output.clone())?, comm)?.into_vec()?;
    let of_down = product(&transposed(&hidden, units), TOKENS, &of_all);
    let mut of_hidden = product(&of_all, WIDTH, &transposed(&down, WIDTH));
    of_hidden.iter_mut().zip(&hidden).filter(|(_, hidden)| **hidden == 0.0).for_each(|(gradient, _)| *gradient = 0.0);
    let of_up = product(&transposed(&of_hidden, units), TOKENS, &all);
    let of_scaled = AllGather.backward(tensor(product(&of_hidden, units, &up))?, comm)?.into_vec::<f64>()?;
    let mut of_tokens = times(&of_scaled, &scale);
    of_tokens.iter_mut().zip(&output).for_each(|(gradient, direct)| *gradient += direct);
    // Each rank has seen its own tokens alone, so gradients of parameters that all ranks have are summed over them.
    let products = times(&of_scaled, &tokens);
    let mut of_scale: Vec<f64> = (0..WIDTH).map(|column| products.iter().skip(column).step_by(WIDTH).sum()).collect();
    comm.all_reduce(&mut of_scale, ReduceOp::Sum)?;
    Ok(Pass { loss, scale: of_scale, parts: [of_tokens, of_up, of_down] })
}

fn main() -> Result<(), Error> {
    let whole = local::run(1, |comm| pass(&comm))?.remove(0);
    let ranks = local::run(4, |comm| pass(&comm))?;
    assert!(ranks.iter().all(|rank| rank.loss == whole.loss && rank.scale == whole.scale));
    for part in 0..3 {
        let joined: Vec<f64> = ranks.iter().flat_map(|rank| rank.parts[part].clone()).collect();
        assert_eq!(joined, whole.parts[part]);
    }
    let (loss, tokens) = (whole.loss, TOKENS / ranks.len());
    println!("4 ranks with {tokens} of {TOKENS} tokens each: loss {loss} and all gradients as on one rank");
    Ok(())
}
