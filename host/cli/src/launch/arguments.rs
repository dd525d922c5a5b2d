//! The command line of `gradsync launch`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

/// The most ranks of a group, in the library.
pub(crate) const MOST_RANKS: i64 = 65_536;

/// The arguments of `gradsync launch`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Launch {
    /// The ranks on this machine.
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS))]
    pub(super) ranks: u32,

    /// The machines of the job; run the same command on each.
    #[arg(long, default_value_t = 1, value_name = "MACHINES", value_parser = clap::value_parser!(u32).range(1..), requires = "master")]
    pub(super) nodes: u32,

    /// The number of this machine among them, from 0.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub(super) node_rank: u32,

    /// Where machine 0 listens for the others: its name or address, and a free port.
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) master: Option<String>,

    /// The port at which rank 0 listens for the other ranks. A free one unless given; with several machines, machine 0 chooses it.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) rank_port: Option<u16>,

    /// A file with a secret of `gradsync secret`, which only its owner can read. With several machines it or GRADSYNC_SECRET is needed, the same on
    /// all; with one, a fresh secret is made.
    #[arg(long, value_name = "FILE")]
    pub(super) secret_file: Option<PathBuf>,

    /// How often all ranks are started again after a failure.
    #[arg(long, default_value_t = 0, value_name = "TIMES")]
    pub(super) restarts: u32,

    /// Bind each rank to its share of the cores.
    #[arg(long)]
    pub(super) affinity: bool,

    /// Write the output of rank N to rank-N.out and rank-N.err in this folder as well.
    #[arg(long, value_name = "FOLDER")]
    pub(super) log_dir: Option<PathBuf>,

    /// Show no output of ranks but the last lines of one that fails.
    #[arg(long, requires = "log_dir")]
    pub(super) quiet: bool,

    /// Seconds from SIGTERM to SIGKILL, for ranks that have to end and for processes that ranks leave behind.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(super) grace: f64,

    /// Seconds in which the launchers of all machines, and then all ranks, have to join. GRADSYNC_JOIN_DEADLINE or 600 unless given.
    #[arg(long, value_name = "SECONDS", value_parser = deadline, allow_negative_numbers = true)]
    pub(super) join_deadline: Option<f64>,

    /// Seconds for which a call of a rank waits for the other ranks, unless the program sets a deadline. GRADSYNC_DEADLINE or 600 unless given.
    #[arg(long, value_name = "SECONDS", value_parser = deadline, allow_negative_numbers = true)]
    pub(super) deadline: Option<f64>,

    /// Whether the ranks speak for themselves: no numbers before their lines, and no report of a failure.
    #[arg(skip)]
    pub(super) is_plain: bool,

    /// The program with its arguments, behind all options of the launcher; `--` may stand before it.
    #[arg(trailing_var_arg = true, required = true, num_args = 1.., value_name = "PROGRAM")]
    pub(super) program: Vec<OsString>,
}

/// A number of seconds, and at most so many that a clock can count to them.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let most = 1e9;
    let seconds: f64 = text.parse().map_err(|_| "it must be a number of seconds".to_owned())?;
    if (0.0..=most).contains(&seconds) { Ok(seconds) } else { Err(format!("it must be from 0 to {most:e} seconds")) }
}

/// A number of seconds that a rank can wait.
fn deadline(text: &str) -> Result<f64, String> {
    match seconds(text) {
        Ok(0.0) | Err(_) if text.parse::<f64>().is_ok() => Err("it must be above 0 seconds, and at most 1e9".into()),
        other => other,
    }
}

impl Launch {
    /// A launch of ranks of one machine which speak for themselves, for other commands of this program.
    pub(crate) fn of(ranks: u32, program: Vec<OsString>) -> Self {
        Launch {
            ranks,
            nodes: 1,
            node_rank: 0,
            master: None,
            rank_port: None,
            secret_file: None,
            restarts: 0,
            affinity: false,
            log_dir: None,
            quiet: false,
            grace: 10.0,
            join_deadline: None,
            deadline: None,
            is_plain: true,
            program,
        }
    }
}
