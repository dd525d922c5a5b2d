//! One rank of the multi-GPU tests: `multi-gpu list` lists the suites, `multi-gpu run SUITE` runs one rank of one, and `multi-gpu probe`
//! tells whether a GPU is usable.
//!
//! `cargo xtask test-multi-gpu` starts it, as one process per rank, as one process for all ranks, or by `mpirun`, and reads its output:
//! lines that begin with `@` are results. It never starts ranks in other processes itself, and never decides whether the whole run passed.

mod adasum;
mod ballast;
mod bundles;
mod checks;
mod collectives;
mod context;
mod faults;
mod graphs;
mod large;
mod layout;
mod lifecycle;
mod low_latency;
mod mismatch;
mod mpi;
mod ownership;
mod placed;
#[allow(dead_code)] // the example without its program
#[path = "../../../host/examples/raw_stream.rs"]
mod raw_stream;
mod reducer;
mod report;
mod send_recv;
mod smoke;
mod streams;
mod tensor_parallel;
mod transfers;
mod updates;

use std::process::ExitCode;

use context::Context;
use report::Report;

/// A set of cases that run in one launch.
struct Suite {
    name: &'static str,
    /// The world sizes that it runs with.
    ranks: &'static [usize],
    /// Whether all ranks are threads of one process.
    in_threads: bool,
    /// Whether ranks are the processes of an MPI job, which `mpirun` starts.
    in_job: bool,
    /// Ranks whose process is expected to end abnormally.
    victims: &'static [usize],
    /// The time limit of a launch, in seconds.
    seconds: u64,
    /// Whether a run under compute-sanitizer is useful.
    sanitizer: bool,
    /// The reason, if any, for which it does not run where ranks share GPUs.
    needs_own_gpus: Option<&'static str>,
    /// The reason, if any, for which it does not run on several nodes.
    needs_one_node: Option<&'static str>,
    /// Variables for the driver and the libraries.
    environment: &'static [(&'static str, &'static str)],
    run: fn(&Context, &mut Report),
}

impl Suite {
    const fn new(name: &'static str, ranks: &'static [usize], run: fn(&Context, &mut Report)) -> Self {
        Suite {
            name,
            ranks,
            in_threads: false,
            in_job: false,
            victims: &[],
            seconds: 120,
            sanitizer: false,
            needs_own_gpus: None,
            needs_one_node: None,
            environment: &[],
            run,
        }
    }
}

const ANY: &[usize] = &[1, 2, 3, 4, 8];
/// Every world size except one.
const SEVERAL: &[usize] = &[2, 3, 4, 8];
/// Found by experiment on 2 and 4 ranks, which wait for each other until a deadline passes.
const ONE_CONTEXT: Option<&str> = Some(
    "ranks that are threads share a context of the driver on one GPU, in which loading a kernel and freeing memory wait for the kernels of all",
);
const PEERS: Option<&str> = Some("kernels that reach into the memory of peers do so inside a node");
const ONE_RANK: Option<&str> = Some("it has one rank, which is one node");

fn suites() -> Vec<Suite> {
    let mut suites = vec![
        Suite { sanitizer: true, ..Suite::new("smoke", ANY, smoke::run) },
        Suite { in_threads: true, ..Suite::new("smoke-threads", ANY, smoke::run) },
        Suite { sanitizer: true, ..Suite::new("collectives", ANY, collectives::run) },
        Suite { in_threads: true, ..Suite::new("collectives-threads", ANY, collectives::run_threads) },
        Suite { seconds: 300, ..Suite::new("collectives-large", ANY, collectives::run_large) },
        Suite::new("streams", &[2, 4, 8], streams::run),
        Suite { sanitizer: true, ..Suite::new("bundles", ANY, bundles::run) },
        Suite { needs_one_node: PEERS, sanitizer: true, ..Suite::new("low-latency", ANY, low_latency::run) },
        Suite { needs_one_node: PEERS, seconds: 300, ..Suite::new("low-latency-many", &[2, 4], low_latency::run_many) },
        Suite::new("large", &[2, 4], large::run),
        Suite { sanitizer: true, ..Suite::new("adasum", ANY, adasum::run) },
        Suite {
            in_threads: true,
            needs_own_gpus: ONE_CONTEXT,
            ..Suite::new("adasum-threads", ANY, adasum::run_threads)
        },
        Suite {
            environment: adasum::ONE_GPU,
            needs_one_node: ONE_RANK,
            seconds: 300,
            ..Suite::new("adasum-on-one-gpu", &[1], adasum::run_on_one_gpu)
        },
        Suite {
            environment: adasum::ONE_GPU_PTX,
            needs_one_node: ONE_RANK,
            seconds: 300,
            ..Suite::new("adasum-on-one-gpu-ptx", &[1], adasum::run_on_one_gpu_ptx)
        },
        Suite { seconds: 300, ..Suite::new("adasum-layouts", SEVERAL, adasum::run_layouts) },
        Suite { sanitizer: true, ..Suite::new("adasum-nodes", ANY, adasum::run_nodes) },
        Suite { seconds: 300, ..Suite::new("adasum-large", &[2, 4], adasum::run_large) },
        // The matrices are few elements wide, so that sums are exact in every dtype, and they divide by at most 4 ranks.
        Suite { sanitizer: true, ..Suite::new("tensor-parallel", &[1, 2, 3, 4], tensor_parallel::run) },
        Suite::new("tensor-parallel-remembered", SEVERAL, tensor_parallel::run_remembered),
        Suite { seconds: 240, sanitizer: true, ..Suite::new("send-recv", SEVERAL, send_recv::run) },
        Suite { seconds: 240, ..Suite::new("mismatch", SEVERAL, mismatch::run) },
        Suite::new("graphs", ANY, graphs::run),
        Suite { sanitizer: true, ..Suite::new("reducer", ANY, reducer::run) },
        Suite::new("lifecycle", ANY, lifecycle::run),
        Suite { needs_one_node: PEERS, sanitizer: true, ..Suite::new("ownership", ANY, ownership::run) },
        Suite { needs_one_node: PEERS, in_threads: true, ..Suite::new("ownership-threads", ANY, ownership::run) },
    ];
    suites.extend(faults::suites());
    suites.extend(mpi::suites());
    suites
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["list"] => {
            for suite in suites() {
                let mode = match suite {
                    Suite { in_threads: true, .. } => "threads",
                    Suite { in_job: true, .. } => "mpirun",
                    _ => "processes",
                };
                let line = serde_json::json!({
                    "suite": suite.name,
                    "ranks": suite.ranks,
                    "mode": mode,
                    "victims": suite.victims,
                    "seconds": suite.seconds,
                    "sanitizer": suite.sanitizer,
                    "needs_own_gpus": suite.needs_own_gpus,
                    "needs_one_node": suite.needs_one_node,
                });
                println!("{line}");
            }
            ExitCode::SUCCESS
        }
        ["probe"] => context::probe(),
        ["run", name] => match suites().into_iter().find(|suite| suite.name == name) {
            Some(suite) => {
                for (name, value) in suite.environment {
                    // SAFETY: there is no other thread yet.
                    unsafe { std::env::set_var(name, value) };
                }
                context::run(&suite)
            }
            None => {
                eprintln!("there is no suite called {name:?}; `list` names them");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!(
                "usage: multi-gpu list | multi-gpu probe | multi-gpu run SUITE, as `cargo xtask test-multi-gpu` does"
            );
            ExitCode::FAILURE
        }
    }
}
