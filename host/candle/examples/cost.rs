//! The time of a training step of the example's GPT with and without gradsync, in turns, on any number of ranks.
//!
//! ```sh
//! cargo build --release --example cost # with `--features cuda` for GPUs
//! gradsync launch -n 1 -- target/release/examples/cost
//! ```

use candle_core::{DType, Device};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use gradsync::bootstrap::Launch;
use gradsync::comm::Communicator;
use gradsync::train::ReducerOptions;
use gradsync_candle::{DataParallel, Result, TensorMemory};

#[allow(dead_code)] // the model without the program
#[path = "gpt.rs"]
mod gpt;

/// The number of blocks of steps of each kind, of which the median counts.
const BLOCKS: usize = 15;
const STEPS: usize = 20;
const BATCH: usize = 8;

fn measure<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) -> Result<()> {
    let text = include_bytes!("gpt.rs");
    let windows: Vec<usize> = (0..BATCH).collect();
    let (plain, reduced) = (VarMap::new(), VarMap::new());
    let model = |variables: &VarMap| gpt::Gpt::new(VarBuilder::from_varmap(variables, DType::F32, device));
    let (plain_model, reduced_model) = (model(&plain)?, model(&reduced)?);
    let mut parallel = DataParallel::new(&reduced, comm, ReducerOptions::default())?;
    parallel.broadcast()?;
    let mut plain_optimizer = AdamW::new_lr(plain.all_vars(), 1e-3)?;
    let mut reduced_optimizer = AdamW::new_lr(reduced.all_vars(), 1e-3)?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..=BLOCKS {
        for (kind, times) in times.iter_mut().enumerate() {
            device.synchronize()?;
            let begun = std::time::Instant::now();
            for _ in 0..STEPS {
                if kind == 0 {
                    plain_optimizer.step(&plain_model.loss(text, &windows)?.backward()?)?;
                } else {
                    reduced_optimizer.step(&parallel.backward(&reduced_model.loss(text, &windows)?)?)?;
                }
            }
            device.synchronize()?;
            times.push(begun.elapsed().as_secs_f64() / STEPS as f64 * 1e3);
        }
    }
    let [plain, reduced] = times.map(|mut times| {
        times.remove(0); // the first block has everything that is done once
        times.sort_by(f64::total_cmp);
        times[BLOCKS / 2]
    });
    if comm.rank() == 0 {
        let (ranks, ratio) = (comm.world_size(), reduced / plain);
        println!("{ranks} ranks: a step takes {plain:.3} ms without gradsync, {reduced:.3} ms with it ({ratio:.3})");
    }
    Ok(())
}

fn main() -> Result<()> {
    let launch = Launch::from_env()?;
    #[cfg(not(feature = "cuda"))]
    let (comm, device) = (gradsync::comm::process::ProcessCommunicator::new(launch.join()?)?, Device::Cpu);
    #[cfg(feature = "cuda")]
    let (comm, device) = {
        use gradsync::{comm::nccl::*, driver};
        let gpus = driver::Device::count()?;
        let (device, is_shared) = (launch.device() % gpus, launch.world_size > gpus as usize);
        let (queue, options) = (driver::Queue::new(device)?, NcclOptions::default().with_shared_gpu(is_shared));
        (NcclCommunicator::new(launch.join()?, &queue, &options)?, Device::new_cuda_with_stream(device as usize)?)
    };
    measure(&comm, &device)
}
