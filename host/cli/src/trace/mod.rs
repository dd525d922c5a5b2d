//! `gradsync trace`: compares the last calls of all ranks, which [`gradsync::trace`] writes, and reports where they differ.

mod analysis;
mod files;
mod text;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use gradsync::internal::trace::RankTrace;
use gradsync_cli::messages::Listener;
use gradsync_cli::text::{printable_json, shown};
use serde::{Deserialize, Serialize};

use self::analysis::Analysis;
pub(crate) use self::files::{JobFiles, MOST_RANKS, Version};

/// The arguments of `gradsync trace`.
#[derive(Args)]
pub(crate) struct Trace {
    /// The folder that GRADSYNC_TRACE_DIR named.
    folder: PathBuf,

    /// How many ranks there were, if more than the record tells.
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS as i64))]
    ranks: Option<u32>,

    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// The knowledge of a launcher about a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    /// It has ended by itself, in these words.
    Ended(String),
    /// It runs, or was ended by its launcher.
    Runs,
    /// It was asked for its record, and has not written it yet.
    IsLate,
    /// It is stopped, as by SIGSTOP.
    IsStopped,
}

/// The ranks that launchers have started.
pub(crate) type Ends = BTreeMap<usize, End>;

/// The rank that a launcher blames for the end of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Blamed {
    pub(crate) rank: usize,
    /// The exit status of a launcher for it.
    pub(crate) code: u8,
    /// Whether the rank has failed because of another one, as its record says.
    pub(crate) is_follower: bool,
}

/// The last calls of ranks, and how ranks have ended, as far as their launchers know.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) traces: BTreeMap<usize, RankTrace>,
    pub(crate) ends: Ends,
    pub(crate) blamed: Option<Blamed>,
}

impl Record {
    /// Says where ranks part, if any of them has written its last calls.
    pub(crate) fn explanation(&self, world_size: usize) -> Option<String> {
        (!self.traces.is_empty()).then(|| Analysis::of(&self.traces, world_size, &self.ends).to_string())
    }
}

/// The record of several machines.
impl FromIterator<Record> for Record {
    fn from_iter<I: IntoIterator<Item = Record>>(records: I) -> Self {
        records.into_iter().fold(Record::default(), |mut all, record| {
            all.traces.extend(record.traces);
            all.ends.extend(record.ends);
            let is_cause = |blamed: &Option<Blamed>| blamed.as_ref().map(|blamed| !blamed.is_follower);
            if is_cause(&record.blamed) > is_cause(&all.blamed) {
                all.blamed = record.blamed;
            }
            all
        })
    }
}

impl Trace {
    pub(crate) fn run(&self) -> Result<(), String> {
        let read = files::read(&self.folder).map_err(|error| format!("{}: {error}", shown(&self.folder)))?;
        read.unreadable.iter().for_each(|reason| gradsync_cli::messages::say("warning", reason));
        if read.traces.is_empty() {
            return Err(format!(
                "{}: there is no record, rank-N.json or rank-N.JOB.json; ranks write one when a call fails, and on SIGUSR1, into the folder that {} names",
                shown(&self.folder),
                gradsync::internal::trace::DIRECTORY
            ));
        }
        let analysis = Analysis::of(&read.traces, self.ranks.unwrap_or(0) as usize, &BTreeMap::new());
        let output = if self.json {
            let json = serde_json::to_string(&analysis).map_err(|error| error.to_string())?;
            printable_json(&json).into_owned() + "\n"
        } else {
            analysis.to_string()
        };
        Listener::Stdout.print(&output).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gradsync::internal::trace::RankTrace;
    use serde_json::{Value, json};

    use super::analysis::Analysis;
    use super::{Blamed, End, Ends, Record};

    /// A collective with this number, state, and time of its last change.
    fn call(sequence: u64, state: &str, changed: f64) -> Value {
        json!({"sequence": sequence, "state": state, "posted": changed, "changed": changed, "operation": "barrier", "to": null, "from": null,
               "len": 0, "bytes": 0, "dtype": null, "within": null, "tensors": null})
    }

    /// The traces of these ranks of `world_size`, with their calls, written at second 10.
    fn traces(world_size: usize, ranks: &[(usize, Vec<Value>)]) -> BTreeMap<usize, RankTrace> {
        let members: Vec<usize> = (0..world_size).collect();
        let trace = |(rank, calls): &(usize, Vec<Value>)| {
            let group = json!({"group": "channel 0", "rank": rank, "members": members, "in_process": false, "failure": null,
                               "has_left": false, "calls": calls});
            let trace = json!({"version": "0", "rank": rank, "host": "h", "pid": 1, "written": 10.0, "reason": "r", "groups": [group]});
            (*rank, serde_json::from_value(trace).unwrap())
        };
        ranks.iter().map(trace).collect()
    }

    fn text(traces: &BTreeMap<usize, RankTrace>, world_size: usize, known: &[(usize, End)]) -> String {
        let known: Ends = known.iter().cloned().collect();
        Analysis::of(traces, world_size, &known).to_string()
    }

    /// Ranks 0 and 2 wait, rank 1 is in no call, and rank 3 has no file.
    fn one_is_slow() -> BTreeMap<usize, RankTrace> {
        let waits = || vec![call(1, "finished", 1.0), call(2, "posted", 2.0)];
        traces(4, &[(0, waits()), (1, vec![call(1, "finished", 1.0)]), (2, waits())])
    }

    #[test]
    fn explanation_blames_no_rank_for_a_late_record() {
        let known = |end| [(0, End::Runs), (1, End::Runs), (2, End::Runs), (3, end)];
        let late = text(&one_is_slow(), 4, &known(End::IsLate));
        assert!(late.starts_with("the last calls of 4 ranks; rank 3 has not written theirs yet\n"), "{late}");
        assert!(late.contains("Rank 1 holds up others: it is in no call"), "{late}");
        assert!(late.contains("Ranks 0, 2 wait for rank 1, for 8.0 s, in call 2"), "{late}");
        assert!(!late.contains("Rank 3 holds up"), "{late}");
        let stopped = text(&one_is_slow(), 4, &known(End::IsStopped));
        assert!(stopped.contains("Rank 3 holds up others: it is stopped"), "{stopped}");
        assert!(stopped.contains("wait for ranks 1, 3"), "{stopped}");
        // Where no other rank is awaited, the late one is named, with its state.
        let waits = || vec![call(1, "posted", 2.0)];
        let alone = text(&traces(2, &[(0, waits())]), 2, &[(0, End::Runs), (1, End::IsLate)]);
        assert!(alone.contains("Rank 1 holds up others: it runs, and has not written its record yet."), "{alone}");
    }

    #[test]
    fn explanation_names_ranks_that_wait_for_their_gpus() {
        let mut traces = traces(3, &[0, 1, 2].map(|rank| (rank, vec![call(1, "finished", 1.0)])));
        assert!(!text(&traces, 3, &[]).contains("GPU"));
        for (rank, since) in [(0, 4.0), (2, 3.5)] {
            let mut trace = serde_json::to_value(&traces[&rank]).unwrap();
            trace["device_waits"] = json!([{"device": 0, "since": since}]);
            traces.insert(rank, serde_json::from_value(trace).unwrap());
        }
        let told = text(&traces, 3, &[]);
        assert!(
            told.contains("Ranks 0, 2 wait for work on a GPU that was enqueued and has not completed, for 6.5 s"),
            "{told}"
        );
    }

    #[test]
    fn explanation_repeats_no_line() {
        let told = text(&one_is_slow(), 4, &[]);
        assert!(!told.contains("last calls:"), "{told}");
        let finished = || vec![call(1, "finished", 4.0)];
        let mut calm = vec![(0, finished()), (1, finished()), (2, finished())];
        calm.push((3, vec![call(1, "finished", 1.0)]));
        let calm = text(&traces(4, &calm), 4, &[]);
        let expected = "No rank waits for another, and no calls differ.\nOther last calls:\n    ranks 0 to 3: call 1 of channel 0, barrier: over since 9.0 s\n";
        assert!(calm.ends_with(expected), "{calm}");
    }

    #[test]
    fn explanation_joins_ranks_that_block_for_the_same_reason() {
        let shared = text(&traces(64, &[(5, vec![call(1, "posted", 2.0)])]), 64, &[]);
        assert_eq!(shared.matches("hold").count(), 1, "{shared}");
        assert!(shared.contains("Ranks 0 to 4, 6 to 63 hold up others, each for the same reason: it has"), "{shared}");
    }

    #[test]
    fn explanation_has_no_negative_time_after_a_clock_was_set_back() {
        let waits = |changed| vec![call(1, "posted", changed)];
        let set_back = text(&traces(2, &[(0, waits(1e6))]), 2, &[]);
        assert!(set_back.contains("for 0.0 s"), "{set_back}");
        assert!(!set_back.contains('-'), "{set_back}");
    }

    #[test]
    fn explanation_shows_texts_as_they_were_written() {
        let mut traces = traces(1, &[(0, vec![call(1, "failed", 1.0)])]);
        let group = &mut traces.get_mut(&0).unwrap().groups[0];
        group.failure = Some("tensor 3 \"layer.weight\"\u{1b}[2J\nforged".into());
        let text = text(&traces, 1, &[]);
        assert!(text.contains("Failure of rank 0: tensor 3 \"layer.weight\"\\u{1b}[2J\\nforged\n"), "{text}");
    }

    #[test]
    fn blamed_is_the_rank_that_did_not_follow_on_any_machine() {
        let record =
            |rank, is_follower| Record { blamed: Some(Blamed { rank, code: 1, is_follower }), ..Record::default() };
        let blamed = |records: [Record; 3]| records.into_iter().collect::<Record>().blamed.map(|blamed| blamed.rank);
        assert_eq!(blamed([record(0, true), record(5, false), record(6, false)]), Some(5));
        assert_eq!(blamed([Record::default(), record(5, true), record(6, true)]), Some(5));
        assert_eq!(blamed([(); 3].map(|()| Record::default())), None);
    }
}
