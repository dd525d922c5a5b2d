//! Data parallelism on plain slices: processes train one model on parts of the data, with the mean of their gradients.
//!
//! ```sh
//! cargo build --release --example processes
//! gradsync launch -n 4 -- target/release/examples/processes
//! ```
//!
//! Any number of ranks takes the same steps, since the mean of the ranks' gradients is the gradient of all data. The
//! launcher prints the rank before each line:
//!
//! ```text
//! [0] step  20: loss 0.2150
//! [0] step  40: loss 0.0136
//! [0] step  60: loss 0.0009
//! [0] step  80: loss 0.0001
//! [0] step 100: loss 0.0000
//! [0] 4 ranks have learnt y = 3.00 x - 1.00
//! ```
//!
//! Without the launcher it is one rank. Threads run the same `train`, and processes of MPI with the feature `mpi`.

#![forbid(unsafe_code)]

use gradsync::prelude::*;

/// The number of points, which 1, 2, 4, 8 or 16 ranks share evenly. For uneven shares, `all_reduce_weighted` takes the
/// ranks' numbers of points.
const POINTS: usize = 64;
const RATE: f32 = 0.1;

/// A point of the line that is to be learnt.
fn point(index: usize) -> (f32, f32) {
    let x = index as f32 * 2.0 / POINTS as f32 - 1.0;
    (x, 3.0 * x - 1.0)
}

/// Returns the mean squared error of `y = weights[0] x + weights[1]` on some points, and its gradient.
fn gradient(weights: &[f32], indices: &[usize]) -> (f32, Vec<f32>) {
    let (mut loss, mut gradient) = (0.0, vec![0.0; weights.len()]);
    for (x, y) in indices.iter().map(|&index| point(index)) {
        let error = weights[0] * x + weights[1] - y;
        loss += error * error / indices.len() as f32;
        gradient[0] += 2.0 * error * x / indices.len() as f32;
        gradient[1] += 2.0 * error / indices.len() as f32;
    }
    (loss, gradient)
}

fn train(comm: &dyn Communicator) -> Result<(), Error> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    // The points of this rank.
    let own: Vec<usize> = (rank..POINTS).step_by(world_size).collect();
    // Ranks may start with different weights, random ones for example: all continue with those of rank 0.
    let mut weights = vec![rank as f32; 2];
    comm.broadcast(&mut weights, 0)?;
    for step in 1..=100 {
        let (loss, mut gradients) = gradient(&weights, &own);
        // One call for all gradients. Every rank gets the same bits, so the weights stay equal.
        comm.all_reduce(&mut gradients, ReduceOp::Mean)?;
        weights.iter_mut().zip(&gradients).for_each(|(weight, gradient)| *weight -= RATE * gradient);
        let loss = comm.all_reduce_scalar(loss, ReduceOp::Mean)?;
        if step % 20 == 0 && rank == 0 {
            println!("step {step:3}: loss {loss:.4}");
        }
    }
    if rank == 0 {
        println!("{world_size} ranks have learnt y = {:.2} x - {:.2}", weights[0], -weights[1]);
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    train(&gradsync::join_or_alone()?) // with the ranks of the launcher, or as the only rank
}
