//! Starts the ranks of one turn on this machine, and returns the standard output of rank 0.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gradsync::bootstrap::Secret;

use crate::mpirun;
use crate::perf::arguments::TransportChoice;
use crate::perf::plan::Place;

/// The deadline of an MPI job.
const DEADLINE: Duration = Duration::from_secs(300);

/// Runs a program to its end, with as many ranks as the place has; fails unless every rank succeeded.
pub(super) fn run(place: Place, ranks: usize, command: &Command) -> Result<String> {
    match place {
        Place::Ranks(TransportChoice::Mpi) => {
            let mut job = mpirun::command(ranks, DEADLINE, command.get_program().as_ref());
            end(start(job.args(command.get_args()))?, &job)
        }
        Place::Ranks(_) => by_variables(ranks, command),
        _ => {
            let mut alone = Command::new(command.get_program());
            end(start(alone.args(command.get_args()))?, &alone)
        }
    }
}

/// Starts the ranks with torchrun's variables and a fresh secret.
fn by_variables(ranks: usize, command: &Command) -> Result<String> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().to_string();
    let (secret, world_size) = (Secret::generate()?.reveal(), ranks.to_string());
    let mut processes = Vec::new();
    for rank in 0..ranks {
        let mut process = Command::new(command.get_program());
        process.args(command.get_args()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        process.env("GRADSYNC_SECRET", &secret).env("RANK", rank.to_string()).env("WORLD_SIZE", &world_size);
        process.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", &world_size);
        processes.push((start(&mut process)?, process));
    }
    // Ranks print little, so that none waits for the reader of its pipes.
    let ends: Vec<Result<String>> = processes.into_iter().map(|(child, process)| end(child, &process)).collect();
    let mut outputs = ends.into_iter().collect::<Result<Vec<String>>>()?.into_iter();
    outputs.next().context("no rank")
}

fn start(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().with_context(|| format!("cannot start {command:?}"))
}

fn end(child: Child, command: &Command) -> Result<String> {
    let output = child.wait_with_output().with_context(|| format!("cannot wait for {command:?}"))?;
    let (printed, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        bail!("{command:?} ended with {}\n{printed}{complaints}", output.status);
    }
    Ok(printed.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_gives_every_rank_its_number_and_shows_rank_0() {
        let place = Place::Ranks(TransportChoice::Process);
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            run(place, 3, &command)
        };
        let printed = shell("test \"$RANK\" -lt 3 && echo \"$RANK of $WORLD_SIZE, $LOCAL_RANK\"").expect("three ranks");
        assert_eq!(printed, "0 of 3, 0\n");
        let error = shell("echo reason >&2; exit \"$RANK\"").expect_err("rank 1 fails").to_string();
        assert!(error.contains("RANK=\"1\"") && error.contains("reason"), "{error}");
    }
}
