//! `cargo xtask bench --peer gloo`: compares the all-reduce of processes with PyTorch's over Gloo, in turns, if PyTorch is installed.

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::{process::Cmd, toolchain::hex};

const SCRIPT: &str = include_str!("gloo.py");
const RANKS: [usize; 3] = [2, 4, 8];
const SIZES: [usize; 7] = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// The largest size with `--quick`.
const SMALL: usize = 1 << 20;
/// Launches of each program; the programs alternate.
const ROUNDS: usize = 3;
const ITERATIONS: usize = 20;

/// Seconds of each launch, by size in bytes.
type Times = BTreeMap<usize, Vec<f64>>;

/// Measures, prints the table, and writes it to `out`.
pub(super) fn run(program: &Path, quick: bool, out: &Path) -> Result<()> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let (has_torch, text) =
        Cmd::new(&python).args(["-c", "import torch.distributed as d; assert d.is_gloo_available()"]).probe();
    if !has_torch {
        let why = text.lines().last().unwrap_or("no answer").trim();
        bail!(
            "{python} has no PyTorch with Gloo ({why}): `{python} -m pip install torch` brings it, or PYTHON names another Python"
        );
    }
    let version = Cmd::new(&python).args(["-c", "import torch; print(torch.__version__)"]).quiet().read()?;
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let sizes: Vec<usize> = SIZES.into_iter().filter(|&size| !quick || size <= SMALL).collect();
    let iterations = if quick { 3 } else { ITERATIONS };
    let mut lines = vec![
        format!(
            "all_reduce of f32 sums, PyTorch {} over Gloo and gradsync's processes, {ROUNDS} launches of each in turns",
            version.trim()
        ),
        "ranks       bytes     gloo ms   gradsync ms   gloo / gradsync   least … most".into(),
    ];
    for ranks in RANKS {
        let (mut gloo, mut ours) = (Times::new(), Times::new());
        for round in 0..ROUNDS {
            let mut theirs = Command::new(&python);
            theirs.args(["-c", SCRIPT, &iterations.to_string()]).args(sizes.iter().map(usize::to_string));
            for line in launch(&theirs, ranks)?.lines() {
                let (size, seconds) = line.split_once(' ').context("a line of the script")?;
                gloo.entry(size.parse()?).or_default().push(seconds.parse()?);
            }
            for &size in &sizes {
                let json = out.join(format!("gloo-{ranks}-{round}-{size}.json"));
                let bytes = size.to_string();
                let mut own = Command::new(program);
                own.args([
                    "perf",
                    "all_reduce",
                    "--transport",
                    "process",
                    "--backend",
                    "cpu",
                    "-d",
                    "f32",
                    "-b",
                    &bytes,
                    "-e",
                    &bytes,
                ]);
                own.args(["-w", "5", "-n", &iterations.to_string(), "--json"]).arg(&json);
                launch(&own, ranks)?;
                ours.entry(size).or_default().push(time_in(&json)?);
            }
        }
        for (&size, gloo) in &gloo {
            let ours = &ours[&size];
            let ratios: Vec<f64> = sorted(gloo.iter().zip(ours).map(|(gloo, ours)| gloo / ours).collect());
            let (gloo, ours) = (median(gloo) * 1e3, median(ours) * 1e3);
            let (ratio, least, most) = (median(&ratios), ratios[0], ratios[ratios.len() - 1]);
            lines.push(format!(
                "{ranks:>5} {size:>11} {gloo:>11.3} {ours:>13.3} {ratio:>17.2}   {least:.2} … {most:.2}"
            ));
            println!("{}", lines[lines.len() - 1]);
        }
    }
    let path = out.join("gloo.txt");
    let text = lines.join("\n") + "\n";
    fs::write(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("\n{text}\n{}", path.display());
    Ok(())
}

/// Runs a command as `ranks` ranks, and returns the output of rank 0.
fn launch(command: &Command, ranks: usize) -> Result<String> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let secret = secret()?;
    let start = |rank: usize| -> Result<Child> {
        let mut start = Command::new(command.get_program());
        start.args(command.get_args()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        start.env("GRADSYNC_SECRET", &secret).env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        start.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        start.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
        start.spawn().with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))
    };
    let mut processes = (0..ranks).map(start).collect::<Result<Vec<_>>>()?;
    let mut text = String::new();
    processes[0].stdout.take().context("it is piped")?.read_to_string(&mut text)?;
    for (rank, process) in processes.iter_mut().enumerate() {
        let status = process.wait()?;
        ensure!(status.success(), "rank {rank} of {ranks} of {:?} ended with {status}", command.get_program());
    }
    Ok(text)
}

/// A secret for one launch, in the form that `gradsync secret` prints.
fn secret() -> Result<String> {
    let mut bytes = [0; 32];
    fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).context("no random bytes")?;
    let text = format!("gradsync-secret-{}", hex(&bytes));
    let check = hex(&Sha256::digest(&text));
    Ok(text + &check[..8])
}

/// The time of the document's only row, in seconds.
fn time_in(path: &PathBuf) -> Result<f64> {
    let document: serde_json::Value = serde_json::from_slice(&fs::read(path)?)?;
    let time = document["measurements"][0]["in_place"]["time_us"].as_f64();
    Ok(time.with_context(|| format!("no time in {}", path.display()))? / 1e6)
}

fn sorted(mut numbers: Vec<f64>) -> Vec<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers
}

fn median(numbers: &[f64]) -> f64 {
    sorted(numbers.to_vec())[numbers.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_the_documented_form() {
        let secret = secret().unwrap();
        let (text, check) = secret.split_at(secret.len() - 8);
        assert_eq!(text.len(), "gradsync-secret-".len() + 64);
        assert_eq!(check, &hex(&Sha256::digest(text))[..8]);
        assert_ne!(secret, super::secret().unwrap());
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn a_launch_gives_every_rank_its_number_and_returns_what_rank_0_prints() {
        let mut command = Command::new("sh");
        command.args(["-c", "test \"$RANK\" -lt 3 && echo \"$RANK of $WORLD_SIZE, $LOCAL_RANK\""]);
        assert_eq!(launch(&command, 3).unwrap(), "0 of 3, 0\n");
        let error = launch(Command::new("sh").args(["-c", "exit \"$RANK\""]), 2).unwrap_err();
        assert!(error.to_string().contains("rank 1 of 2"), "{error}");
    }
}
