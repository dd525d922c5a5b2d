//! `cargo xtask bench`: the standing set of measurements, and `target/bench/report.html` of them.
//!
//! `gradsync perf` measures, judges and draws; here it is built, started once for each part of the set, and put together. A part that
//! this machine cannot run is listed with the reason.

mod page;

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    bundle, flags, libcuda,
    multi_gpu::{self, mpirun::Mpirun},
    process::{Cmd, target},
    toolchain::{self, Need, Toolchain},
};

/// Ranks of the parts that run under mpirun.
const MPI_RANKS: usize = 8;
/// For one part.
const DEADLINE: Duration = Duration::from_secs(3600);

/// What a part needs beyond this machine's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    Mpi,
    Gpus(usize),
}

/// One run of `gradsync perf`.
struct Part {
    /// Names its files.
    name: &'static str,
    title: &'static str,
    needs: Needs,
    arguments: &'static [&'static str],
    /// The sizes, and those of `--quick`.
    sizes: [&'static [&'static str]; 2],
}

const KERNEL_SIZES: [&[&str]; 2] = [&["-b", "1M", "-e", "256M", "-f", "16"], &["-b", "1M", "-e", "4M", "-f", "4"]];
const PAIR_SIZES: [&[&str]; 2] = [&["-b", "256M"], &["-b", "4M"]];
const RANK_SIZES: [&[&str]; 2] = [&["-b", "64K", "-e", "64M", "-f", "8"], &["-b", "64K", "-e", "512K", "-f", "8"]];
const GPU_SIZES: [&[&str]; 2] = [&["-b", "1M", "-e", "1G", "-f", "4"], &["-b", "1M", "-e", "16M", "-f", "4"]];
const GPU_PAIR_SIZES: [&[&str]; 2] = [&["-b", "1G"], &["-b", "16M"]];
const NO_SIZES: [&[&str]; 2] = [&[], &["-n", "5"]];

const PARTS: [Part; 13] = [
    Part {
        name: "cpu-pairs",
        title: "Casts and sums on the CPU, every pair of dtypes",
        needs: Needs::Nothing,
        arguments: &["cast", "accumulate", "--backend", "cpu", "-d", "all"],
        sizes: PAIR_SIZES,
    },
    Part {
        name: "cpu-kernels",
        title: "Zero and reductions on the CPU",
        needs: Needs::Nothing,
        arguments: &["zero", "dots", "gram", "combine", "--backend", "cpu", "-d", "all", "-g", "4,8"],
        sizes: KERNEL_SIZES,
    },
    Part {
        name: "cpu-resnet50",
        title: "ResNet-50's 161 tensors on the CPU",
        needs: Needs::Nothing,
        arguments: &["--tensors", "resnet50", "--backend", "cpu"],
        sizes: NO_SIZES,
    },
    Part {
        name: "cpu-bert-large",
        title: "BERT-large's 398 tensors on the CPU",
        needs: Needs::Nothing,
        arguments: &["--tensors", "bert-large", "--backend", "cpu"],
        sizes: NO_SIZES,
    },
    Part {
        name: "local",
        title: "Collectives of 8 threads",
        needs: Needs::Nothing,
        arguments: &[
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "send_recv",
            "--transport",
            "local",
            "-d",
            "f32,bf16",
            "-g",
            "8",
        ],
        sizes: RANK_SIZES,
    },
    Part {
        name: "local-adasum",
        title: "Adasum of 2, 4 and 8 threads",
        needs: Needs::Nothing,
        arguments: &["adasum", "--transport", "local", "-d", "f32,f16,bf16", "--algorithm", "gram,tree", "-g", "2,4,8"],
        sizes: RANK_SIZES,
    },
    Part {
        name: "mpi",
        title: "Collectives and Adasum of 8 MPI processes",
        needs: Needs::Mpi,
        arguments: &[
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "send_recv",
            "adasum",
            "--transport",
            "mpi",
        ],
        sizes: RANK_SIZES,
    },
    Part {
        name: "cuda-pairs",
        title: "Casts and sums on a GPU, every pair of dtypes",
        needs: Needs::Gpus(1),
        arguments: &["cast", "accumulate", "--backend", "cuda", "-d", "all"],
        sizes: GPU_PAIR_SIZES,
    },
    Part {
        name: "cuda-kernels",
        title: "Zero and reductions on a GPU",
        needs: Needs::Gpus(1),
        arguments: &["zero", "dots", "gram", "combine", "--backend", "cuda", "-d", "all", "-g", "4,8"],
        sizes: GPU_SIZES,
    },
    Part {
        name: "cuda-resnet50",
        title: "ResNet-50's 161 tensors on a GPU",
        needs: Needs::Gpus(1),
        arguments: &["--tensors", "resnet50", "--backend", "cuda"],
        sizes: NO_SIZES,
    },
    Part {
        name: "cuda-bert-large",
        title: "BERT-large's 398 tensors on a GPU",
        needs: Needs::Gpus(1),
        arguments: &["--tensors", "bert-large", "--backend", "cuda"],
        sizes: NO_SIZES,
    },
    Part {
        name: "nccl",
        title: "Collectives and Adasum of all GPUs over NCCL",
        needs: Needs::Gpus(2),
        arguments: &[
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "send_recv",
            "adasum",
            "--transport",
            "nccl",
            "--algorithm",
            "gram,tree",
            "-d",
            "f32,bf16",
        ],
        sizes: GPU_SIZES,
    },
    Part {
        name: "peer",
        title: "All-reduce and Adasum of all GPUs by peer access",
        needs: Needs::Gpus(2),
        arguments: &["all_reduce", "adasum", "--transport", "peer", "-d", "f32,bf16"],
        sizes: GPU_SIZES,
    },
];

/// How a part ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Measured,
    NotRun(String),
    Failed(String),
}

/// A part as the report shows it.
struct Shown<'a> {
    part: &'a Part,
    ended: Ended,
    /// What the program printed.
    text: String,
    svg: Option<String>,
    json: Option<serde_json::Value>,
}

impl flags::Bench {
    pub(crate) fn run(self) -> Result<()> {
        let folder = target("bench");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let program = match &self.program {
            Some(program) => program.clone(),
            None => build(&self.setup)?,
        };
        let gpus = multi_gpu::gpus();
        let mpirun = if toolchain::mpi::is_here() { Mpirun::find() } else { Err("there is no MPI here".to_owned()) };
        let mut shown = Vec::new();
        for part in PARTS.iter().filter(|part| self.only.is_empty() || self.only.iter().any(|name| name == part.name)) {
            println!("\n=== {}: {} ===", part.name, part.title);
            let missing = match (part.needs, &mpirun, &gpus) {
                (Needs::Mpi, Err(why), _) | (Needs::Gpus(_), _, Err(why)) => Some(why.clone()),
                (Needs::Gpus(needed), _, Ok(found)) if *found < needed => {
                    Some(format!("it needs {needed} GPUs, and there are {found}"))
                }
                _ => None,
            };
            shown.push(match missing {
                Some(why) => {
                    println!("not run: {why}");
                    Shown { part, ended: Ended::NotRun(why), text: String::new(), svg: None, json: None }
                }
                None => measure(part, &program, mpirun.as_ref().ok(), &folder, self.quick)?,
            });
        }
        if shown.is_empty() {
            let names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
            bail!("--only names no part: there are {}", names.join(", "));
        }
        let model = model(&program, &folder, &shown);
        let report = folder.join("report.html");
        fs::write(&report, page::page(&shown, &model)).with_context(|| format!("cannot write {}", report.display()))?;
        println!("\nwrote {}", report.display());
        let failed: Vec<_> =
            shown.iter().filter(|shown| matches!(shown.ended, Ended::Failed(_))).map(|shown| shown.part.name).collect();
        if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
    }
}

/// The program, with all that this machine can build.
fn build(setup: &flags::Setup) -> Result<PathBuf> {
    Toolchain::new(setup).provide(&[Need::CCompiler])?;
    let features = if toolchain::mpi::is_here() { "cuda,mpi" } else { "cuda" };
    let package = ["--package", "gradsync", "--bin", "gradsync", "--features", features];
    bundle::executable(libcuda::linked(Cmd::cargo("build").arg("--release").args(package))?, "gradsync")
}

fn measure(
    part: &'static Part,
    program: &Path,
    mpirun: Option<&Mpirun>,
    folder: &Path,
    quick: bool,
) -> Result<Shown<'static>> {
    let [json, svg, text] = ["json", "svg", "txt"].map(|extension| folder.join(part.name).with_extension(extension));
    for file in [&json, &svg, &text] {
        if file.exists() {
            fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
        }
    }
    let mut command = match mpirun.filter(|_| part.needs == Needs::Mpi) {
        Some(mpirun) => {
            let mut command = mpirun.command(MPI_RANKS, DEADLINE);
            command.arg(program);
            command
        }
        None => Command::new(program),
    };
    command.arg("perf").args(part.arguments).args(part.sizes[usize::from(quick)]);
    command.arg("--json").arg(&json).arg("--plot").arg(&svg);
    println!("$ {command:?}");
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start {command:?}"))?;
    let mut printed = String::new();
    for line in BufReader::new(child.stdout.take().context("no standard output")?).lines() {
        let line = line.context("the program printed something that is not UTF-8")?;
        println!("{line}");
        printed += &(line + "\n");
    }
    let status = child.wait().context("cannot wait for the program")?;
    fs::write(&text, &printed).with_context(|| format!("cannot write {}", text.display()))?;
    let read = |path: &Path| fs::read_to_string(path).ok();
    let document = read(&json).and_then(|text| serde_json::from_str(&text).ok());
    let ended = match &document {
        _ if !status.success() => Ended::Failed(format!("`gradsync perf` ended with {status}")),
        None => Ended::Failed(format!("no JSON at {}", json.display())),
        Some(_) => Ended::Measured,
    };
    Ok(Shown { part, ended, text: printed, svg: read(&svg), json: document })
}

/// The cost model, fitted to what NCCL was measured with where it was.
fn model(program: &Path, folder: &Path, shown: &[Shown<'_>]) -> String {
    let mut command =
        Cmd::new(program).args(["perf", "--model", "-b", "1M", "-e", "1G", "-f", "32", "--layers", "398"]);
    let is_measured = |name: &str| shown.iter().any(|shown| shown.part.name == name && shown.ended == Ended::Measured);
    for name in ["nccl", "cuda-kernels"].into_iter().filter(|name| is_measured("nccl") && is_measured(name)) {
        command = command.arg("--fit").arg(folder.join(name).with_extension("json"));
    }
    command.read().unwrap_or_else(|error| format!("the model failed: {error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_names_of_their_own() {
        let mut names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PARTS.len());
    }
}
