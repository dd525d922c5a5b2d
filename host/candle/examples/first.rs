//! The program of the project's README: a linear model on any number of ranks.
//!
//! ```sh
//! cargo build --release --example first # with `--features cuda` for GPUs
//! gradsync launch -n 4 -- target/release/examples/first
//! ```
#![forbid(unsafe_code)]

use candle_core::{DType, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
use gradsync::comm::Ranks;
use gradsync::train::{Reduction, mean_over_ranks};
use gradsync_candle::{AdamW, DataParallel, Error, join_or_alone};

fn main() -> Result<(), Error> {
    let (comm, device) = join_or_alone()?; // with the ranks of a launcher, or as the only rank
    let variables = VarMap::new();
    let model = linear(8, 1, VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let mut parallel = DataParallel::new(&variables, &comm, Reduction::Mean)?; // rank 0's weights
    let mut optimizer = AdamW::new(&variables, 0.05)?;
    for step in 1..=100 {
        let examples = Tensor::rand(-1f32, 1f32, (32, 8), &device)?; // each rank has its own
        let loss = mse(&model.forward(&examples)?, &examples.sum_keepdim(1)?)?;
        parallel.at(step).step(&loss, &mut optimizer)?; // with the mean of all ranks' gradients
        let loss = mean_over_ranks(&comm, loss.to_scalar::<f32>()?.into(), 1)?.expect("a loss");
        if step % 20 == 0 && comm.rank() == 0 {
            println!("step {step:3}: loss {loss:.4}");
        }
    }
    Ok(())
}
