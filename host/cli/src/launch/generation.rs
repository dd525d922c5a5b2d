//! One start of all ranks of this machine, until the last of them has ended.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, thread};

use gradsync_cli::messages::{complain, say};
use gradsync_cli::text::shown;
use tempfile::TempDir;

use super::guard::{FOLDER_PREFIX, Guarded};
use super::machines::Machines;
use super::nodes::Nodes;
use super::output::Places;
use super::rank::{Common, Rank};
use super::signals::{ENDING, Event, Listener};
use super::status::{self, Status};
use super::timing::{LAST_LINES, LOOK_FOR_TRACES, RECORDS, SIMULTANEOUS, TRACES};
use super::{Launch, affinity};
use crate::trace::{self, Record};

/// The outcome of one start of all ranks.
pub(super) enum Outcome {
    Succeeded,
    /// The exit status of the first failure.
    Failed(u8),
    /// A signal to the launcher ended the ranks; the exit status for it.
    Stopped(u8),
}

/// The reason why ranks are being ended.
#[derive(Debug)]
enum Cause {
    /// This rank on this machine failed first.
    Rank(usize),
    Signal(i32),
    OtherMachine,
}

/// The folder of the ranks' traces.
enum Folder {
    Private(TempDir),
    Given(PathBuf),
}

impl Folder {
    fn path(&self) -> &Path {
        match self {
            Folder::Private(folder) => folder.path(),
            Folder::Given(path) => path,
        }
    }
}

pub(super) struct Generation<'a> {
    launch: &'a Launch,
    events: &'a Listener,
    number: u32,
    started: Instant,
    folder: Folder,
    guard: Guarded,
    ranks: Vec<Rank>,
    world_size: usize,
    /// The launchers of several machines.
    machines: Option<Arc<Machines>>,
    /// Why the ranks are being ended, and when those that still run are killed.
    ending: Option<(Cause, Instant)>,
    /// While ranks are being ended, the ranks that had ended before.
    ended_before: Option<Vec<usize>>,
    are_all_done: bool,
    /// Whether the comparison of the ranks' traces has been shown.
    is_explained: bool,
}

impl<'a> Generation<'a> {
    /// Starts all ranks.
    pub(super) fn start(launch: &'a Launch, nodes: &Nodes, number: u32, events: &'a Listener) -> Result<Self, String> {
        let (place, machines) = nodes.meet(launch, number, events)?;
        let folder = folder(number).map_err(|error| format!("no folder for the record of calls: {error}"))?;
        let private = if let Folder::Private(folder) = &folder { Some(folder.path()) } else { None };
        let guard = Guarded::start(private).map_err(|error| format!("cannot start the guard: {error}"))?;
        let places = Places::new(launch, number, place.world_size)?;
        let shares = || affinity::shares(place.local_world_size).map_err(|error| format!("--affinity: {error}"));
        let processors = launch.affinity.then(shares).transpose()?;
        let mut generation = Generation {
            launch,
            events,
            number,
            started: Instant::now(),
            folder,
            guard,
            ranks: Vec::new(),
            world_size: place.world_size,
            machines,
            ending: None,
            ended_before: None,
            are_all_done: false,
            is_explained: false,
        };
        let (traces, sender) = (generation.folder.path().to_owned(), events.sender());
        let common = Common { launch, place: &place, places: &places, traces: &traces, processors, events: sender };
        for local_rank in 0..place.local_world_size {
            match Rank::start(&common, local_rank) {
                Ok(rank) => {
                    generation.guard.add(rank.pid);
                    generation.ranks.push(rank);
                }
                Err(reason) => {
                    // The ranks that already run end when this object is dropped.
                    generation.tell_machines(&reason);
                    return Err(reason);
                }
            }
        }
        Ok(generation)
    }

    /// Waits until all ranks have ended, and ends them when one fails.
    pub(super) fn watch(mut self) -> Result<Outcome, String> {
        while self.ranks.iter().any(Rank::is_running) || self.awaits_machines() {
            match self.events.next(self.patience()) {
                Some(Event::Ended(generation, rank)) if generation == self.number => self.ended(rank)?,
                Some(Event::AllMachines(generation, outcome)) if generation == self.number => {
                    self.machines_done(outcome)
                }
                Some(Event::Signal(signal)) => self.signal(signal),
                Some(_) => {}
                None => self.look(),
            }
            self.kill_late_ones();
        }
        Ok(self.outcome())
    }

    /// Whether the ranks of this machine have succeeded, while ranks of other machines may still fail.
    fn awaits_machines(&self) -> bool {
        self.machines.is_some() && self.ending.is_none() && !self.are_all_done
    }

    fn patience(&self) -> Duration {
        let kill = self.ending.as_ref().map(|(_, end)| end.saturating_duration_since(Instant::now()));
        kill.map_or(LOOK_FOR_TRACES, |kill| kill.clamp(Duration::from_millis(1), LOOK_FOR_TRACES))
    }

    fn ended(&mut self, index: usize) -> Result<(), String> {
        let rank = &mut self.ranks[index];
        let status = rank.reap(LAST_LINES).map_err(|error| format!("rank {}: {error}", rank.number))?;
        let pid = rank.pid;
        self.guard.remove(pid);
        if status.is_success() {
            if !self.ranks.iter().any(Rank::is_running) {
                self.await_machines();
            }
            return Ok(());
        }
        if self.ending.is_none() {
            self.failed(index)?;
        }
        Ok(())
    }

    /// Handles the first failure of a rank: finds the cause, and ends the others.
    fn failed(&mut self, first: usize) -> Result<(), String> {
        let after = self.started.elapsed().as_secs_f64();
        // Ranks that end from now on are no further causes.
        self.ending = Some((Cause::Rank(first), Instant::now() + Duration::from_secs_f64(self.launch.grace)));
        self.ask_for_traces();
        // A dying rank closes its connections before it has ended, so its peers may fail and end first.
        let (mut later, end) = (Vec::new(), Instant::now() + SIMULTANEOUS);
        while let Some(event) = self.events.next(end.saturating_duration_since(Instant::now())) {
            match event {
                Event::Ended(generation, rank) if generation == self.number => self.ended(rank)?,
                other => later.push(other),
            }
        }
        let failed: Vec<usize> = (0..self.ranks.len()).filter(|&rank| self.ranks[rank].has_failed()).collect();
        // A rank that gradsync notified of a failure writes a trace and ends because of it; the cause was not notified.
        let is_cause = |rank: &usize| !trace::has_failure(self.folder.path(), self.ranks[*rank].number);
        let cause = failed.into_iter().find(is_cause).unwrap_or(first);
        let rank = &self.ranks[cause];
        let how = format!("rank {} {}", rank.number, rank.status.unwrap_or(Status::Code(1)));
        if !self.launch.is_plain {
            complain(format_args!("{how}, first of all, after {after:.1} s; the others are ended"));
        }
        self.tell_machines(&how);
        self.end(Cause::Rank(cause), libc::SIGTERM);
        later.into_iter().for_each(|event| self.events.repeat(event));
        Ok(())
    }

    /// Handles the success of this machine's ranks: waits for the other machines, concurrently with other events.
    fn await_machines(&self) {
        let Some(machines) = self.machines.clone().filter(|_| self.ending.is_none()) else { return };
        let (sender, generation) = (self.events.sender(), self.number);
        thread::spawn(move || {
            // Nobody listens only if the launcher ends.
            let _ = sender.send(Event::AllMachines(generation, machines.wait_for_all()));
        });
    }

    fn machines_done(&mut self, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.are_all_done = true,
            Err(reason) => self.other_machine_failed(&reason),
        }
    }

    fn other_machine_failed(&mut self, reason: &str) {
        if self.ending.is_none() {
            complain(format_args!("{reason}; the ranks of this machine are ended"));
            self.ask_for_traces();
            self.end(Cause::OtherMachine, libc::SIGTERM);
        }
    }

    /// Checks for failures without an event: a failure on another machine, or a rank's report of a failure that has not ended the rank.
    fn look(&mut self) {
        if let Some(reason) = self.machines.as_ref().and_then(|machines| machines.failure()) {
            self.other_machine_failed(&reason);
        }
        if self.ending.is_some() || self.is_explained || self.launch.is_plain {
            return;
        }
        if let Some((rank, reason)) = trace::reported_failure(self.folder.path()) {
            complain(format_args!("rank {rank} reports: {reason}"));
            self.ask_for_traces();
            self.explain();
        }
    }

    fn signal(&mut self, signal: i32) {
        let name = status::name(signal);
        match signal {
            _ if ENDING.contains(&signal) && self.ending.is_some() => {
                say("info", format_args!("{name} again: the ranks are killed"));
                self.ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
            }
            _ if ENDING.contains(&signal) => {
                say("info", format_args!("{name} is passed on to the ranks"));
                self.tell_machines(&format!("{name} to its launcher"));
                self.end(Cause::Signal(signal), signal);
            }
            libc::SIGTSTP => {
                self.ranks.iter().for_each(|rank| rank.signal(libc::SIGSTOP));
                // Returns when this process is continued.
                let _ = signal_hook::low_level::emulate_default_handler(libc::SIGTSTP);
            }
            libc::SIGCONT => self.ranks.iter().for_each(|rank| rank.signal(libc::SIGCONT)),
            _ => {
                for rank in self.ranks.iter().filter(|rank| rank.is_running()) {
                    if rank.handles(signal) {
                        rank.signal(signal);
                    } else {
                        say("warning", format_args!("rank {} does not handle {name}, which would end it", rank.number));
                    }
                }
                if signal == libc::SIGUSR1 {
                    self.await_traces(SystemTime::now());
                    self.explain();
                    // Each request gets an answer.
                    self.is_explained = false;
                }
            }
        }
    }

    /// Ends the remaining ranks: by this signal, and by SIGKILL after the grace period.
    fn end(&mut self, cause: Cause, signal: i32) {
        let grace = Duration::from_secs_f64(self.launch.grace);
        self.ended_before = Some(self.ranks.iter().filter(|rank| !rank.is_running()).map(|rank| rank.number).collect());
        self.ending = Some((cause, Instant::now() + grace));
        self.ranks.iter().for_each(|rank| rank.signal(signal));
        // A stopped rank must be continued before it can end.
        self.ranks.iter().for_each(|rank| rank.signal(libc::SIGCONT));
    }

    fn kill_late_ones(&mut self) {
        let Some((_, end)) = &mut self.ending else { return };
        if Instant::now() < *end {
            return;
        }
        *end = Instant::now() + Duration::from_secs(1);
        for rank in self.ranks.iter().filter(|rank| rank.is_running()) {
            say(
                "warning",
                format_args!("rank {} has not ended within {} s, and is killed", rank.number, self.launch.grace),
            );
            rank.signal(libc::SIGKILL);
        }
    }

    /// Requests the traces of all remaining ranks, and waits a moment for them.
    fn ask_for_traces(&self) {
        let start = SystemTime::now();
        self.ranks.iter().filter(|rank| rank.handles(libc::SIGUSR1)).for_each(|rank| rank.signal(libc::SIGUSR1));
        self.await_traces(start);
    }

    /// Waits a moment for the traces of all ranks that write one.
    fn await_traces(&self, asked: SystemTime) {
        const LOOK: Duration = Duration::from_millis(10);
        let end = Instant::now() + TRACES;
        let ranks: Vec<usize> =
            self.ranks.iter().filter(|rank| rank.handles(libc::SIGUSR1)).map(|rank| rank.number).collect();
        let is_missing = |rank: &usize| !trace::has_file(self.folder.path(), *rank, asked);
        while ranks.iter().any(is_missing) && Instant::now() < end {
            thread::sleep(LOOK);
        }
    }

    fn tell_machines(&self, reason: &str) {
        self.machines.iter().for_each(|machines| machines.tell_failure(reason.to_owned()));
    }

    /// Shows where ranks part, by the last calls that the ranks of this machine have written.
    fn explain(&mut self) {
        if !std::mem::replace(&mut self.is_explained, true) {
            show(&self.record(), self.world_size);
        }
    }

    /// The same at the end, for the ranks of all machines.
    fn explain_end(&mut self) {
        let Some(machines) = &self.machines else { return self.explain() };
        show(&self.exchange_records(machines), self.world_size);
    }

    /// Gives other machines the record of this one, and takes theirs; if they do not come, this machine's alone.
    fn exchange_records(&self, machines: &Machines) -> Record {
        let own = self.record();
        let deadline = Duration::from_secs_f64(self.launch.grace) + RECORDS;
        let exchanged = serde_json::to_vec(&own).map_err(|error| error.to_string()).and_then(|bytes| {
            let all = machines.exchange(&bytes, deadline).map_err(|error| error.to_string())?;
            let parsed = all.iter().map(|bytes| serde_json::from_slice(bytes));
            parsed.collect::<Result<Vec<Record>, _>>().map_err(|error| error.to_string())
        });
        match exchanged {
            Ok(records) => records.into_iter().collect(),
            Err(reason) => {
                say("warning", format_args!("the record of calls has this machine's ranks only: {reason}"));
                own
            }
        }
    }

    fn record(&self) -> Record {
        let describe = |rank: &Rank| {
            let is_by_itself = self.ended_before.as_ref().is_none_or(|ended| ended.contains(&rank.number));
            (rank.number, rank.status.filter(|_| is_by_itself).map(|status| status.to_string()))
        };
        Record::of(self.folder.path(), self.ranks.iter().map(describe).collect())
    }

    fn outcome(&mut self) -> Outcome {
        let Some((cause, _)) = self.ending.take() else { return Outcome::Succeeded };
        match cause {
            Cause::Rank(index) => {
                let status = self.ranks[index].status.unwrap_or(Status::Code(1));
                if self.launch.is_plain {
                    return Outcome::Failed(status.code());
                }
                self.explain_end();
                let rank = &self.ranks[index];
                let lines = rank.output.last_lines();
                let failed = format!("rank {} (process {}) {status}", rank.number, rank.pid.as_raw_nonzero());
                if lines.is_empty() {
                    complain(format_args!("{failed}, and had printed nothing"));
                } else {
                    let lines: String = lines.iter().map(|line| format!("\n    {}", shown(line))).collect();
                    complain(format_args!("{failed}; its last lines:{lines}"));
                }
                Outcome::Failed(status.code())
            }
            Cause::OtherMachine => {
                self.explain_end();
                Outcome::Failed(1)
            }
            Cause::Signal(signal) => {
                // The other machines explain why their ranks end.
                self.machines.iter().for_each(|machines| _ = self.exchange_records(machines));
                let is_success = |rank: &Rank| rank.status.is_some_and(Status::is_success);
                let is_success = self.ranks.iter().all(is_success);
                Outcome::Stopped(if is_success { 0 } else { Status::Signal { number: signal, has_core: false }.code() })
            }
        }
    }
}

impl Drop for Generation<'_> {
    /// No rank stays when the launcher gives up.
    fn drop(&mut self) {
        self.ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_running()) {
            if let Err(error) = rank.reap(LAST_LINES) {
                tracing::warn!(%error, rank = rank.number, "a rank was not reaped");
            }
        }
    }
}

/// Prints the comparison of the last calls of ranks, if there are any.
fn show(record: &Record, world_size: usize) {
    if let Some(text) = record.explanation(world_size) {
        say("record of calls", text);
    }
}

/// The folder of traces: the user's, or a private one. Traces of earlier starts are removed.
fn folder(generation: u32) -> std::io::Result<Folder> {
    let given = std::env::var_os(gradsync::trace::DIRECTORY).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let Some(folder) = given else {
        return Ok(Folder::Private(tempfile::Builder::new().prefix(FOLDER_PREFIX).tempdir()?));
    };
    let folder = if generation == 0 { folder } else { folder.join(format!("restart-{generation}")) };
    fs::create_dir_all(&folder)?;
    for path in trace::files(&folder)? {
        fs::remove_file(path)?;
    }
    Ok(Folder::Given(folder))
}
