//! `gradsync doctor`: joins the ranks of a launch, and checks for the usual problems of a first start; each has a remedy.
//!
//! Every rank sends its facts to the others ([`facts`]), all derive the same problems ([`diagnosis`]), and rank 0 prints them ([`table`]).

mod clock;
mod diagnosis;
mod exchange;
mod facts;
mod join;
mod memory;
mod table;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use gradsync_cli::messages::{Listener, complain};
use gradsync_cli::text::printable_json;
use serde::Serialize;

use self::clock::Offset;
use self::diagnosis::Problem;
use self::exchange::Exchange;
use self::facts::Facts;
use self::join::Joined;

/// The arguments of `gradsync doctor`.
#[derive(Args)]
pub(crate) struct Doctor {
    /// Start so many ranks on this machine. Without it, this is one rank of a launch: srun, mpirun, torchrun or gradsync launch start one on each place.
    #[cfg(target_os = "linux")]
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=crate::launch::MOST_RANKS))]
    ranks: Option<u32>,

    /// Seconds in which all ranks have to come.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS", value_parser = deadline)]
    deadline: f64,

    /// Rank 0 prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

fn deadline(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "it must be a number of seconds".to_owned())?;
    if (0.0..=1e9).contains(&seconds) { Ok(seconds) } else { Err("it must be from 0 to 1e9 seconds".into()) }
}

/// The output of rank 0.
#[derive(Serialize)]
struct Report<'a> {
    ranks: &'a [Facts],
    /// The clock of each rank, compared with the clock of rank 0.
    clocks: &'a [Offset],
    /// How each rank exchanges host memory with the other ranks of its machine.
    exchanges: &'a [Exchange],
    problems: &'a [Problem],
}

impl Doctor {
    /// Exit code 1 if a problem was found.
    pub(crate) fn run(&self) -> Result<ExitCode, String> {
        #[cfg(target_os = "linux")]
        if let Some(ranks) = self.ranks {
            return self.launch(ranks);
        }
        let deadline = Duration::from_secs_f64(self.deadline);
        let Joined { launch, member, mpi_shares_memory } = match join::join(deadline) {
            Ok(joined) => joined,
            Err(Problem { problem, remedy }) => {
                complain(format_args!("{problem}\n  remedy: {remedy}"));
                return Ok(ExitCode::FAILURE);
            }
        };
        let told = |error: gradsync::CommError| format!("after all ranks had joined: {error}");
        let own = Facts::gather(&launch, member.rank(), member.world_size());
        let bytes = postcard::to_stdvec(&own).map_err(|error| error.to_string())?;
        let all = member.all_gather(&bytes, deadline).map_err(told)?;
        let ranks = all.iter().map(|bytes| postcard::from_bytes(bytes)).collect::<Result<Vec<Facts>, _>>();
        let ranks = ranks.map_err(|error| format!("a rank runs another version of this program: {error}"))?;
        let clocks = clock::offsets(&member, deadline).map_err(told)?;
        let exchanges = Exchange::of(&member, &ranks, mpi_shares_memory, deadline).map_err(told)?;
        let problems = diagnosis::problems(&ranks, &clocks, &exchanges);
        if member.rank() == 0 {
            let report = Report { ranks: &ranks, clocks: &clocks, exchanges: &exchanges, problems: &problems };
            self.show(&report).map_err(|error| error.to_string())?;
        }
        // Rank 0 stays until all have reached this point: without it, they would fail here.
        member.all_gather(&[], deadline).map_err(told)?;
        Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn show(&self, report: &Report<'_>) -> std::io::Result<()> {
        if self.json {
            return Listener::Stdout.print(&(printable_json(&serde_json::to_string(report)?).into_owned() + "\n"));
        }
        Listener::Stdout.print(&table::text(report))
    }

    /// Starts the ranks, each of which is this command without `-n`.
    #[cfg(target_os = "linux")]
    fn launch(&self, ranks: u32) -> Result<ExitCode, String> {
        // This very program, even if another file has its name by now.
        let mut arguments =
            vec!["/proc/self/exe".into(), "doctor".into(), "--deadline".into(), self.deadline.to_string().into()];
        arguments.extend(self.json.then(|| "--json".into()));
        crate::launch::Launch::of(ranks, arguments).run()
    }
}
