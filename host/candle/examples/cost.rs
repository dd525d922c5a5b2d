//! What a training step costs with gradsync: the GPT of the example `gpt`, trained without it, with it and candle's optimizer, and with its
//! own optimizer, in turns; and what one step reduces when.
//!
//! ```sh
//! cargo build --release --example cost # with `--features cuda` for GPUs
//! gradsync launch -n 1 -- target/release/examples/cost
//! ```

#![forbid(unsafe_code)]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use gradsync::comm::Communicator;
use gradsync::train::ReducerOptions;
use gradsync_candle::{AdamW, DataParallel, Result, TensorMemory};

#[allow(dead_code)] // the model without the program
#[path = "gpt.rs"]
mod gpt;

/// The number of measured blocks of each kind, an odd one.
const BLOCKS: usize = 11;
/// The number of steps of a block.
const STEPS: usize = 20;
const BATCH: usize = 8;

/// Runs a block of steps, and returns the milliseconds that one takes.
fn block(device: &Device, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..STEPS {
        step()?;
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() * 1e3 / STEPS as f64)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) -> Result<()> {
    let windows: Vec<usize> = (0..BATCH).collect();
    let loss = |model: &gpt::Gpt| -> Result<Tensor> { model.loss(include_bytes!("gpt.rs"), &windows) };
    let (plain, reduced) = (VarMap::new(), VarMap::new());
    let model = |variables| gpt::Gpt::new(VarBuilder::from_varmap(variables, DType::F32, device));
    let (plain_model, reduced_model) = (model(&plain)?, model(&reduced)?);
    for (name, var) in reduced.data().lock().expect("no thread panics").iter() {
        var.set(&plain.data().lock().expect("no thread panics")[name])?;
    }
    let mut parallel = DataParallel::new(&reduced, comm, ReducerOptions::default())?;
    let of_candle = |variables: &VarMap| candle_nn::AdamW::new_lr(variables.all_vars(), 1e-3);
    let (mut alone, mut of_candle) = (of_candle(&plain)?, of_candle(&reduced)?);
    let mut optimizer = AdamW::new(&reduced, 1e-3)?;
    let (mut without, mut with, mut fused) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..=BLOCKS {
        without.push(block(device, || Ok(alone.backward_step(&loss(&plain_model)?)?))?);
        with.push(block(device, || Ok(of_candle.step(&parallel.backward(&loss(&reduced_model)?)?)?))?);
        fused.push(block(device, || parallel.step(&loss(&reduced_model)?, &mut optimizer))?);
    }
    // The first blocks contain what is done once.
    let [without, with, fused] = [without, with, fused].map(|times| median(times[1..].to_vec()));
    if comm.rank() == 0 {
        let (ranks, ratio) = (comm.world_size(), with / without);
        println!(
            "{ranks} ranks: a step takes {without:.3} ms without gradsync, {with:.3} ms with it, ratio {ratio:.3}, \
             {fused:.3} ms with its AdamW"
        );
    }
    parallel.record_times(true);
    parallel.step(&loss(&reduced_model)?, &mut optimizer)?;
    if let Some(times) = parallel.times()?.filter(|_| comm.rank() == 0) {
        println!("since the backward pass was enqueued, ms: all gradients {:.3}", times.gradients * 1e3);
        for bucket in times.buckets {
            let (bytes, begin, end) = (bucket.bytes, bucket.begin * 1e3, bucket.end * 1e3);
            println!("  a bucket of {bytes} bytes from {begin:.3} to {end:.3}");
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let (comm, device) = gradsync_candle::join_or_alone()?;
    measure(&comm, &device)
}
