//! Tensor parallelism: a network of two layers whose hidden units are divided among ranks, forward and backward.
//!
//! `cargo run --example tensor_parallel` runs it on one rank and on four, which are threads, and compares them:
//!
//! ```text
//! 4 ranks with 2 of 8 hidden units each: loss 6042.125 and all gradients as on one rank
//! ```
//!
//! | layer | weight | forward | backward |
//! |---|---|---|---|
//! | `up`, column-parallel | each rank has some of the outputs | nothing | the sum of the ranks' gradients of the input |
//! | `down`, row-parallel | each rank has the same of the inputs | the sum of the ranks' outputs | nothing |
//!
//! So one block takes one all-reduce in each direction (Megatron-LM's *f* and *g*), and a rank holds a part of the
//! weights, of their gradients and of the optimizer's state. All numbers are integers over powers of two: no sum is
//! rounded, and results are equal, not close.
//!
//! `ops::tensor_parallel` has the two collectives as pairs of a forward and a backward pass, on GPUs too, and
//! gradsync-candle has both layers for candle's autograd.

#![forbid(unsafe_code)]

use gradsync::prelude::*;

const EXAMPLES: usize = 4;
const INPUTS: usize = 6;
const HIDDEN: usize = 8;
const OUTPUTS: usize = 2;

/// A matrix of small integers, equal on all ranks.
fn integers(rows: usize, columns: usize, seed: usize) -> Vec<f32> {
    (0..rows * columns).map(|index| ((index * 5 + index / 3 + seed) % 7) as f32 - 3.0).collect()
}

/// The product of two matrices in row-major order; `inner` is the number of columns of the first one and of rows of the
/// second one.
fn product(left: &[f32], inner: usize, right: &[f32]) -> Vec<f32> {
    let columns = right.len() / inner;
    let element = |row: &[f32], column: usize| (0..inner).map(|k| row[k] * right[k * columns + column]).sum();
    left.chunks(inner).flat_map(|row| (0..columns).map(move |column| element(row, column))).collect()
}

fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}

/// The loss, and its gradients: of the input, which is whole on every rank, and of this rank's parts of both weights.
struct Pass {
    loss: f32,
    input: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

fn pass(comm: &dyn Communicator) -> Result<Pass, Error> {
    // A row of `up` and a row of `down` belong to one hidden unit, and each rank has some of these rows: all inputs of
    // its units, and their contributions to all outputs.
    let units = HIDDEN / comm.world_size();
    let own = |whole: Vec<f32>, columns: usize| whole[comm.rank() * units * columns..][..units * columns].to_vec();
    let (up, down) = (own(integers(HIDDEN, INPUTS, 1), INPUTS), own(integers(HIDDEN, OUTPUTS, 2), OUTPUTS));
    let (input, target) = (integers(EXAMPLES, INPUTS, 3), integers(EXAMPLES, OUTPUTS, 4));

    let mut hidden = product(&input, INPUTS, &transposed(&up, INPUTS));
    hidden.iter_mut().for_each(|value| *value = value.max(0.0));
    let mut output = product(&hidden, units, &down);
    comm.all_reduce(&mut output, ReduceOp::Sum)?; // the contributions of all units
    let error: Vec<f32> = output.iter().zip(&target).map(|(output, target)| output - target).collect();
    let loss = error.iter().map(|error| error * error).sum::<f32>() / (2 * EXAMPLES) as f32;

    let of_output: Vec<f32> = error.iter().map(|error| error / EXAMPLES as f32).collect();
    let of_down = product(&transposed(&hidden, units), EXAMPLES, &of_output);
    let mut of_hidden = product(&of_output, OUTPUTS, &transposed(&down, OUTPUTS));
    of_hidden.iter_mut().zip(&hidden).filter(|(_, hidden)| **hidden == 0.0).for_each(|(gradient, _)| *gradient = 0.0);
    let of_up = product(&transposed(&of_hidden, units), EXAMPLES, &input);
    let mut of_input = product(&of_hidden, units, &up);
    comm.all_reduce(&mut of_input, ReduceOp::Sum)?; // an input acts through all units
    Ok(Pass { loss, input: of_input, up: of_up, down: of_down })
}

fn main() -> Result<(), Error> {
    let whole = local::run(1, |comm| pass(&comm))?.remove(0);
    let ranks = local::run(4, |comm| pass(&comm))?;
    assert!(ranks.iter().all(|rank| rank.loss == whole.loss && rank.input == whole.input));
    let joined = |part: fn(&Pass) -> &Vec<f32>| ranks.iter().flat_map(part).copied().collect::<Vec<f32>>();
    assert_eq!(joined(|rank| &rank.up), whole.up);
    assert_eq!(joined(|rank| &rank.down), whole.down);
    let (loss, units) = (whole.loss, HIDDEN / ranks.len());
    println!("4 ranks with {units} of {HIDDEN} hidden units each: loss {loss} and all gradients as on one rank");
    Ok(())
}
