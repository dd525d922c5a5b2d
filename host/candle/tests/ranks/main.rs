//! Tests of training with candle on threads as ranks. Cases take any communicator, so that other transports can run them too.
//!
//! Where possible, numbers are integers over powers of two, few enough that no sum and no product is rounded: then the ranks' results equal
//! the results of one rank bit for bit, and no tolerance is needed.

#![deny(unsafe_code)]

#[allow(unsafe_code)] // an allocator
mod allocations;
mod data_parallel;
mod declared;
mod fused;
mod gpt;
mod lora;
mod optimizers;
mod refused;
mod replicas;
mod steps;
mod tensor_parallel;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use candle_core::{Device, Var};
use gradsync::bootstrap::Launch;
use gradsync::comm::Communicator;
use gradsync::memory::Host;
use gradsync_candle::{TensorMemory, Variables};
use gradsync_tests::programs::{Finished, built};
use gradsync_tests::ranks::{guarded, on_processes, on_ranks};

/// The deadline of every call.
const DEADLINE: Duration = Duration::from_secs(600);

/// A case that all ranks run, with tensors on this device, which is of the communicator's memory.
pub(crate) struct Case<M: TensorMemory = Host> {
    name: &'static str,
    run: fn(&dyn Communicator<M>, &Device),
}

/// Whether this is the last rank: the one that differs from the others where a case has several.
fn is_last<M: TensorMemory>(comm: &dyn Communicator<M>) -> bool {
    comm.rank() + 1 == comm.world_size()
}

/// Whether a text names the last rank.
fn names_last<M: TensorMemory>(comm: &dyn Communicator<M>, text: &str) -> bool {
    text.contains(&format!("rank {}", comm.world_size() - 1))
}

fn named<const N: usize>(vars: [(&str, &Var); N]) -> Variables {
    vars.into_iter().map(|(name, var)| (name, var.clone())).collect()
}

fn on_ranks_of(world_sizes: &'static [usize], cases: Vec<Case>) {
    guarded(240, move || {
        for case in &cases {
            for &world_size in world_sizes {
                println!("{} on {world_size}", case.name);
                on_ranks(world_size, |comm| (case.run)(&comm, &Device::Cpu));
            }
        }
    });
}

/// All cases of several ranks on the host.
fn on_host() -> impl Iterator<Item = Case> {
    let cases = data_parallel::on_host().into_iter().chain(replicas::on_host());
    let cases = cases.chain(optimizers::on_host());
    cases.chain(declared::all()).chain(steps::all()).chain(refused::all()).chain([lora::of_losses()])
}

/// An owned communicator, the argument of groups.
type Owned = Box<dyn Communicator + Send>;

#[test]
fn data_parallel_on_several_ranks() {
    on_ranks_of(&[1, 2, 4], data_parallel::on_host());
}

#[test]
fn optimizer_on_several_ranks() {
    on_ranks_of(&[1, 2, 4], optimizers::on_host());
}

#[test]
fn data_parallel_refusals_are_errors_of_all_ranks() {
    on_ranks_of(&[2, 3], refused::all());
}

#[test]
fn data_parallel_of_declared_and_unknown_variables() {
    on_ranks_of(&[1, 2, 3], declared::all());
}

#[test]
fn data_parallel_steps_that_differ_between_ranks() {
    on_ranks_of(&[1, 2, 3], steps::on_host());
}

#[test]
fn data_parallel_keeps_variables_equal_on_all_ranks() {
    on_ranks_of(&[1, 2, 3, 4], replicas::on_host());
}

#[test]
fn data_parallel_of_a_gpt() {
    on_ranks_of(&[2, 4], vec![gpt::of_gradients()]);
    on_ranks_of(&[2], vec![gpt::of_learning()]);
}

#[test]
fn data_parallel_of_a_lora() {
    on_ranks_of(&[1, 2, 3, 4], vec![lora::of_losses()]);
}

#[test]
fn data_parallel_of_ranks_that_connect_as_processes() {
    guarded(240, || {
        for case in on_host() {
            println!("{}", case.name);
            on_processes(2, DEADLINE, |comm| (case.run)(&comm, &Device::Cpu));
        }
        on_processes(2, DEADLINE, |comm| tensor_parallel::on_host(Box::new(comm)));
    });
}

#[test]
fn tensor_parallel_layers_equal_whole_layers() {
    guarded(120, || {
        for world_size in [1, 2, 4] {
            on_ranks(world_size, |comm| tensor_parallel::on_host(Box::new(comm)));
        }
    });
}

/// One rank of the MPI job of several ranks that `cargo xtask test --only demo` starts.
#[cfg(feature = "mpi")]
#[test]
fn rank_of_an_mpi_job() {
    let comm = Launch::from_env().and_then(|launch| launch.join_host()).unwrap();
    for case in on_host().chain([gpt::of_gradients()]) {
        (case.run)(&comm, &Device::Cpu);
    }
    tensor_parallel::on_host(Box::new(comm));
}

/// One rank of a job whose ranks have GPUs, or share them, over NCCL; a launcher's variables say which rank. Without a launcher there is no
/// job. A case that fails on all ranks alike does not keep the next one from running.
#[cfg(feature = "cuda")]
#[test]
fn rank_of_an_nccl_job() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use gradsync::comm::Ranks;
    use gradsync_candle::tensor_parallel::TensorParallel;

    if std::env::var_os("WORLD_SIZE").is_none() {
        println!("not run: no launcher has started this process");
        return;
    }
    let (comm, device) = gradsync_candle::join().unwrap();
    let mut failed = Vec::new();
    let mut run = |name: &'static str, body: &dyn Fn()| {
        println!("{name}");
        let has_passed = catch_unwind(AssertUnwindSafe(body)).is_ok();
        println!("{name}: {}", if has_passed { "passed" } else { "FAILED" });
        failed.extend((!has_passed).then_some(name));
    };
    let mut cases = data_parallel::all();
    cases.extend(replicas::all().into_iter().chain(optimizers::all()).chain(declared::all()).chain(steps::all()));
    cases.extend([gpt::of_gradients(), gpt::of_learning(), lora::of_losses()]);
    if comm.world_size() > 1 {
        cases.extend(refused::all()); // which need ranks that differ
    }
    for case in cases {
        run(case.name, &|| (case.run)(&comm, &device));
    }
    let group = TensorParallel::on_gpu(comm, &device).unwrap();
    for (name, case) in tensor_parallel::ALL {
        run(name, &|| case(&group, &device));
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

fn example(name: &str) -> PathBuf {
    built("gradsync-candle", "--example", name, &[])
}

/// The launcher with four ranks of this program.
fn four_of(program: &Path) -> Command {
    let mut launch = Command::new(built("gradsync-cli", "--bin", "gradsync", &[]));
    launch.args(["launch", "-n", "4", "--"]).arg(program);
    launch
}

/// The loss behind these words, in the output of rank 0.
fn loss_behind(words: &str, printed: &str) -> f32 {
    let (_, loss) = printed.split_once(words).unwrap_or_else(|| panic!("no {words:?}: {printed}"));
    loss.trim().parse().unwrap_or_else(|_| panic!("no number: {loss}"))
}

/// README's first program, as its reader starts it: by the launcher, and by itself. Half of a launcher's variables never mean one rank.
#[test]
fn first_example_learns() {
    let first = example("first");
    let mut alone = Command::new(&first);
    Launch::variables().for_each(|variable| _ = alone.env_remove(variable));
    for (mut command, start) in [(four_of(&first), "[0] step 100: loss "), (alone, "step 100: loss ")] {
        let loss = loss_behind(start, &Finished::of(&mut command).succeeded("the example").stdout);
        // The examples' sums have a variance of 8 / 3, the loss of a model that has learnt nothing.
        assert!(loss < 0.1, "{loss}");
    }
    let mut half = Command::new(&first);
    Launch::variables().for_each(|variable| _ = half.env_remove(variable));
    Finished::of(half.env("LOCAL_RANK", "1")).refused("half of a launcher", &["LOCAL_RANK", "WORLD_SIZE"]);
}

#[test]
fn lora_example_learns() {
    let printed = Finished::of(&mut four_of(&example("lora"))).succeeded("four ranks").stdout;
    assert!(printed.contains("[0] 146 numbers are trained, and 321 are frozen\n"), "{printed}");
    // As above: numbers from -1 to 1.
    let loss = loss_behind("[0] step 200: loss ", &printed);
    assert!(loss < 0.5, "{loss}");
}
