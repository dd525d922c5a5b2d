//! Tests of training with candle on threads as ranks. Cases take any communicator, so that other transports can run them too.
//!
//! Where possible, numbers are integers over powers of two, few enough that no sum and no product is rounded: then the ranks' results equal
//! the results of one rank bit for bit, and no tolerance is needed.

mod allocations;
mod data_parallel;
mod gpt;
mod refused;
mod tensor_parallel;

use std::process::Command;

use gradsync::comm::{Communicator, DEFAULT_DEADLINE};
use gradsync_tests::programs::{Finished, built};
use gradsync_tests::ranks::{guarded, on_processes, on_ranks};
use gradsync_tests::tensors::Case;

fn on_ranks_of(world_sizes: &'static [usize], cases: &'static [Case]) {
    guarded(240, move || {
        for case in cases {
            for &world_size in world_sizes {
                println!("{} on {world_size}", case.name);
                on_ranks(world_size, |comm| (case.run)(&comm));
            }
        }
    });
}

/// An owned communicator, the argument of groups.
type Owned = Box<dyn Communicator + Send>;

#[test]
fn data_parallel_on_several_ranks() {
    on_ranks_of(&[1, 2, 4], data_parallel::ALL);
}

#[test]
fn refusals_are_errors_of_all_ranks() {
    on_ranks_of(&[2, 3], refused::ALL);
}

#[test]
fn a_gpt_on_several_ranks() {
    on_ranks_of(&[2, 4], &[gpt::GRADIENTS]);
    on_ranks_of(&[2], &[gpt::LEARNS]);
}

#[test]
fn ranks_that_connect_as_processes() {
    guarded(240, || {
        for case in data_parallel::ALL.iter().chain(refused::ALL) {
            println!("{}", case.name);
            on_processes(2, DEFAULT_DEADLINE, |comm| (case.run)(&comm));
        }
        on_processes(2, DEFAULT_DEADLINE, |comm| tensor_parallel::all(Box::new(comm)));
    });
}

#[test]
fn layers_divided_over_ranks() {
    guarded(120, || {
        for world_size in [1, 2, 4] {
            on_ranks(world_size, |comm| tensor_parallel::all(Box::new(comm)));
        }
    });
}

/// One rank of the MPI job that `cargo xtask test --only demo` starts, or the only one.
#[cfg(feature = "mpi")]
#[test]
fn rank_of_an_mpi_job() {
    let comm = gradsync::comm::mpi::MpiCommunicator::world().unwrap();
    for case in data_parallel::ALL.iter().chain(refused::ALL).chain(&[gpt::GRADIENTS]) {
        (case.run)(&comm);
    }
    tensor_parallel::all(Box::new(comm));
}

/// One rank of a job whose ranks have GPUs, or share one, over NCCL; the launcher's variables say which rank.
#[cfg(feature = "cuda")]
#[test]
fn rank_of_an_nccl_job() {
    use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
    use gradsync::driver::Queue;

    let launch = gradsync::bootstrap::Launch::from_env().unwrap();
    let gpus = gradsync::driver::Device::count().unwrap();
    let (device, is_shared) = (launch.device() % gpus, launch.world_size > gpus as usize);
    let queue = Queue::new(device).unwrap();
    let options = NcclOptions::default().with_shared_gpu(is_shared);
    let comm = NcclCommunicator::new(launch.join().unwrap(), &queue, &options).unwrap();
    let device = candle_core::Device::new_cuda_with_stream(device as usize).unwrap();
    gpt::gradients(&comm, &device);
    gpt::learns(&comm, &device);
}

/// README's first program, as its reader starts it.
#[test]
fn the_first_example_learns() {
    let (launcher, first) =
        (built("gradsync-cli", "--bin", "gradsync", &[]), built("gradsync-candle", "--example", "first", &[]));
    let mut launch = Command::new(launcher);
    let job = Finished::of(launch.args(["launch", "-n", "4", "--"]).arg(first)).succeeded("four ranks");
    let (_, loss) = job.stdout.split_once("[0] step 100: loss ").expect("rank 0 tells its last loss");
    let loss: f32 = loss.trim().parse().expect("a number");
    // The examples' sums have a variance of 8 / 3, the loss of a model that has learnt nothing.
    assert!(loss < 0.1, "{loss}");
}
