//! `cargo xtask study`: runs the example that trains with every reduction, and publishes its results on request.
//!
//! Runs are stored in target/study, one per line, so that an interrupted study continues. Its protocol is in
//! `tests/examples/convergence/study.rs`; this command does not read the results.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};

use crate::{
    bundle::executable,
    demo::example,
    flags,
    process::{Cmd, root, target},
    toolchain::{Need, Toolchain, images},
};

/// The study's runs on this machine, in target/study.
const RUNS: &str = "runs.jsonl";
/// The published runs, which are under version control.
const PUBLISHED: &str = "tests/measured/convergence/runs.jsonl";

impl flags::Study {
    pub(crate) fn run(self) -> Result<()> {
        Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Images])?;
        let Some(images) = images::fashion_mnist() else {
            bail!("the study needs Fashion-MNIST: name the folder of its four files in {}", images::VARIABLE);
        };
        let commit = Cmd::new("git").args(["rev-parse", "--short", "HEAD"]).folder(root()).read();
        let commit = commit.map_or("unknown".into(), |commit| commit.trim().to_owned());
        if let Some(folder) = &self.bundle {
            return bundle(folder, &images.arguments()[1], &commit);
        }
        let name = match (self.quick, self.ranks.is_empty() && self.seeds.is_empty()) {
            (true, _) => "quick.jsonl",
            (false, true) => RUNS,
            (false, false) => "others.jsonl",
        };
        let results = target("study").join(name);
        fs::create_dir_all(target("study")).context("target/study cannot be created")?;
        let mut run = example("run").args(["--", "study", "--commit", &commit]).args(images.arguments());
        run = run.arg("--results").arg(&results);
        if self.quick {
            run = run.arg("--quick");
        }
        for (flag, value) in [
            ("--ranks", joined(&self.ranks)),
            ("--seeds", joined(&self.seeds)),
            ("--threads", self.threads.map(|threads| threads.to_string())),
            ("--within", self.within.map(|seconds| seconds.to_string())),
        ] {
            if let Some(value) = value {
                run = run.arg(flag).arg(value);
            }
        }
        run.run()?;
        if self.publish { publish(&results) } else { Ok(()) }
    }
}

fn joined<T: ToString>(values: &[T]) -> Option<String> {
    let values: Vec<String> = values.iter().map(T::to_string).collect();
    (!values.is_empty()).then(|| values.join(","))
}

fn publish(results: &Path) -> Result<()> {
    let published = root().join(PUBLISHED);
    copy(results, &published)?;
    example("run").args(["--", "page", "--results"]).arg(published).arg("--root").arg(root()).run()
}

/// A folder that runs the study on a machine without Rust.
fn bundle(folder: &Path, images: &str, commit: &str) -> Result<()> {
    let data = folder.join("images");
    fs::create_dir_all(&data).with_context(|| format!("{} cannot be created", data.display()))?;
    copy(&executable(example("build"), "convergence")?, &folder.join("convergence"))?;
    for file in fs::read_dir(images).with_context(|| format!("{images} cannot be read"))? {
        let file = file.with_context(|| format!("{images} cannot be read"))?;
        copy(&file.path(), &data.join(file.file_name()))?;
    }
    // Finished runs are copied, so that they are not repeated.
    let runs = target("study").join(RUNS);
    if runs.is_file() {
        copy(&runs, &folder.join(RUNS))?;
    }
    let script = format!(
        "#!/bin/sh\n# Makes the runs of the study that {RUNS} beside it does not have yet; takes --within SECONDS, --threads N.\n\
         cd \"$(dirname \"$0\")\" && exec ./convergence study --images images --results {RUNS} --commit {commit} \"$@\"\n"
    );
    let run = folder.join("run");
    fs::write(&run, script).with_context(|| format!("{} cannot be written", run.display()))?;
    Cmd::new("chmod").arg("+x").arg(&run).run()?;
    println!(
        "{}: carry it, and start ./run; then bring {RUNS} back to target/study, for cargo xtask study --publish",
        folder.display()
    );
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("{} cannot be copied to {}", from.display(), to.display()))?;
    Ok(())
}
