//! `cargo xtask ptxas`: runs NVIDIA's assembler over every PTX file, for every architecture that the file serves.
//!
//! The check needs no GPU. It reports registers, and fails on spills and stack frames: both would mean local memory, which no kernel may
//! use. Also, host/cubin/ must equal the assembler's output, for the families and architectures that it contains.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, anyhow, bail};

use crate::{
    flags,
    process::root,
    ptx::{builder::Arch, cubin},
    toolchain::{Need, Toolchain, python},
};

impl flags::Ptxas {
    pub(crate) fn run(self) -> Result<()> {
        Toolchain::new(&self.setup).provide(&[Need::Ptxas])?;
        println!("{}", assemble_all()?);
        Ok(())
    }
}

/// One PTX file for one architecture.
struct Job {
    path: PathBuf,
    family: String,
    sm: u32,
}

/// The resource usage of one entry or function, from ptxas.
#[derive(Debug, Default, PartialEq, Eq)]
struct Usage {
    function: String,
    registers: u32,
    stack: u32,
    spills: u32,
}

/// Assembles everything, prints the table, and returns a summary line.
pub(crate) fn assemble_all() -> Result<String> {
    let ptxas = python::ptxas().context("no ptxas here")?;
    let jobs = jobs()?;
    if jobs.is_empty() {
        bail!("host/ptx holds no PTX; run `cargo xtask ptx`");
    }
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = usages(&ptxas, job);
            results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((job, result));
        }
    };
    thread::scope(|scope| {
        (0..thread::available_parallelism().map_or(2, usize::from)).for_each(|_| drop(scope.spawn(work)));
    });

    let results = results.into_inner().map_err(|_| anyhow!("an assembling thread panicked"))?;
    let mut table: BTreeMap<&str, BTreeMap<u32, u32>> = BTreeMap::new();
    let (mut rejected, mut functions) = (Vec::new(), 0);
    let mut local: BTreeMap<(&str, u32, u32), Vec<String>> = BTreeMap::new();
    for (job, result) in &results {
        match result {
            Err(error) => rejected.push(format!("{error:#}")),
            Ok(usages) => {
                for usage in usages {
                    functions += 1;
                    let cell = table.entry(&job.family).or_default().entry(job.sm).or_default();
                    *cell = usage.registers.max(*cell);
                    if usage.stack > 0 || usage.spills > 0 {
                        let key = (usage.function.as_str(), usage.stack, usage.spills);
                        local.entry(key).or_default().push(format!("sm_{}", job.sm));
                    }
                }
            }
        }
    }
    print_table(&table);
    rejected.sort();
    if !rejected.is_empty() {
        bail!("ptxas rejects {} files:\n  {}", rejected.len(), rejected.join("\n  "));
    }
    if !local.is_empty() {
        let lines: Vec<String> = local
            .into_iter()
            .map(|((function, stack, spills), mut sms)| {
                sms.sort_by_key(|sm| (sm.len(), sm.clone()));
                format!("{function}: {stack} bytes of stack, {spills} bytes spilled ({})", sms.join(" "))
            })
            .collect();
        bail!("{} functions use local memory:\n  {}", lines.len(), lines.join("\n  "));
    }
    let cubins = cubin::compare(&ptxas)?;
    Ok(format!("{} files assembled, {functions} functions, no spills, no stack; {cubins}", results.len()))
}

fn jobs() -> Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for arch in Arch::ALL {
        let folder = root().join("host/ptx").join(arch.name());
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "ptx") {
                continue;
            }
            let family = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            jobs.extend(arch.assembled_for().iter().map(|&sm| Job { path: path.clone(), family: family.clone(), sm }));
        }
    }
    // Long jobs come first, so that the threads finish at about the same time.
    jobs.sort_by_cached_key(|job| std::cmp::Reverse(fs::metadata(&job.path).map_or(0, |data| data.len())));
    Ok(jobs)
}

fn usages(ptxas: &Path, job: &Job) -> Result<Vec<Usage>> {
    let text = fs::read_to_string(&job.path).with_context(|| format!("cannot read {}", job.path.display()))?;
    let said = cubin::assemble(ptxas, &job.family, &text, job.sm)?.said;
    let usages = parse(&said);
    if usages.is_empty() {
        bail!("{} for sm_{}: cannot understand what ptxas says:\n{said}", job.path.display(), job.sm);
    }
    Ok(usages)
}

/// Parses the output of `ptxas -v`: one line names the function, one has stack and spills, and one has the registers (of entries only).
fn parse(text: &str) -> Vec<Usage> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in text.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            usages.push(Usage { function: name.trim().to_owned(), ..Usage::default() });
        }
        let Some(usage) = usages.last_mut() else { continue };
        let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        for window in words.windows(4) {
            match *window {
                [bytes, "bytes", "stack", "frame"] => usage.stack = bytes.parse().unwrap_or(u32::MAX),
                [bytes, "bytes", "spill", _] => {
                    usage.spills = usage.spills.saturating_add(bytes.parse().unwrap_or(u32::MAX));
                }
                _ => {}
            }
        }
        for window in words.windows(3) {
            if let ["Used", registers, "registers"] = *window {
                usage.registers = registers.parse().unwrap_or(u32::MAX);
            }
        }
    }
    usages
}

fn print_table(table: &BTreeMap<&str, BTreeMap<u32, u32>>) {
    let columns: BTreeSet<u32> = table.values().flat_map(|row| row.keys().copied()).collect();
    print!("{:<20}", "registers, at most");
    columns.iter().for_each(|sm| print!("{:>8}", format!("sm_{sm}")));
    println!();
    for (family, row) in table {
        print!("{family:<20}");
        for sm in &columns {
            print!("{:>8}", row.get(sm).map_or_else(|| "-".to_owned(), u32::to_string));
        }
        println!();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_parses_the_output_of_ptxas() {
        let text = "ptxas info    : 0 bytes gmem\n\
                    ptxas info    : Compiling entry function 'zero_f32' for 'sm_80'\n\
                    ptxas info    : Function properties for zero_f32\n    \
                    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
                    ptxas info    : Used 20 registers, used 0 barriers, 376 bytes cmem[0]\n";
        let expected = Usage { function: "zero_f32".into(), registers: 20, stack: 16, spills: 12 };
        assert_eq!(parse(text), [expected]);
    }
}
