//! The suites that the rank program lists, and the launches of them that this machine and the command line allow.
//!
//! This module decides, and starts nothing. Launches that lack a resource are in the plan too, with the reason.

use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::layout::Layout;

/// One line of `multi-gpu list`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Suite {
    #[serde(rename = "suite")]
    pub(crate) name: String,
    /// The world sizes of its launches.
    pub(crate) ranks: Vec<usize>,
    pub(crate) mode: Mode,
    /// The ranks with processes that are expected to fail.
    #[serde(default)]
    pub(crate) victims: Vec<usize>,
    /// The deadline of one launch.
    pub(crate) seconds: u64,
    /// Whether it is useful under compute-sanitizer.
    pub(crate) sanitizer: bool,
    /// The reason why it does not run if ranks share GPUs, if so.
    #[serde(default)]
    needs_own_gpus: Option<String>,
    /// The reason why it does not run on several nodes, if so.
    #[serde(default)]
    needs_one_node: Option<String>,
}

/// The kind of a launch's processes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// One rank.
    Processes,
    /// All ranks, as threads of one process.
    Threads,
    /// `mpirun`, which starts a process for each rank; rank 0 reports for all ranks, and the others report only failures.
    Mpirun,
}

/// A process of a launch, by its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Rank(usize),
    AllRanks,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(rank) => write!(f, "rank {rank}"),
            Self::AllRanks => f.write_str("the process of all ranks"),
        }
    }
}

impl Suite {
    /// Whether it runs with this many ranks: every victim must be a rank, and at least one rank must not be a victim.
    fn runs_with(&self, world: usize) -> bool {
        let victims = self.victims.iter().all(|&victim| victim < world) && self.victims.len() < world;
        self.ranks.contains(&world) && victims
    }

    /// The world sizes with which it runs, in the order of its list.
    fn worlds(&self) -> Vec<usize> {
        self.ranks.iter().copied().filter(|&world| self.runs_with(world)).collect()
    }

    /// The reason why it does not run with this many ranks in this layout, if so.
    fn refuses(&self, world: usize, layout: Layout) -> Option<String> {
        let Layout { nodes, .. } = layout;
        if layout.shares_gpus() && self.needs_own_gpus.is_some() {
            return self.needs_own_gpus.clone();
        }
        if nodes == 1 {
            return None;
        }
        let of_mode = match self.mode {
            Mode::Processes => None,
            Mode::Threads => Some("its ranks are one process, which is on one node"),
            Mode::Mpirun => Some("MPI finds nodes by itself, and takes this machine for one"),
        };
        let uneven = || (world % nodes != 0).then(|| format!("{world} ranks are not as many on each of {nodes} nodes"));
        of_mode.map(str::to_owned).or_else(|| self.needs_one_node.clone()).or_else(uneven)
    }

    /// The processes of a launch, each with a flag whether it is a victim.
    pub(crate) fn processes(&self, world: usize) -> Vec<(Who, bool)> {
        match self.mode {
            Mode::Processes => (0..world).map(|rank| (Who::Rank(rank), self.victims.contains(&rank))).collect(),
            Mode::Threads | Mode::Mpirun => vec![(Who::AllRanks, false)],
        }
    }
}

/// Parses the output of `multi-gpu list`.
pub(crate) fn parse(list: &str) -> Result<Vec<Suite>> {
    let mut suites: Vec<Suite> = Vec::new();
    for line in list.lines().filter(|line| !line.trim().is_empty()) {
        let suite: Suite = serde_json::from_str(line).with_context(|| format!("in the list of suites: {line}"))?;
        let name = &suite.name;
        ensure!(suites.iter().all(|other| other.name != *name), "the list of suites has {name} twice");
        ensure!(!suite.worlds().is_empty(), "suite {name} runs with no number of ranks: {line}");
        ensure!(!suite.ranks.contains(&0), "suite {name} asks for 0 ranks: {line}");
        let repeated = suite.victims.iter().enumerate().any(|(index, victim)| suite.victims[..index].contains(victim));
        ensure!(!repeated, "suite {name} has a victim twice: {line}");
        if suite.mode != Mode::Processes && !suite.victims.is_empty() {
            bail!("suite {name} is one process, and cannot have victims: {line}");
        }
        suites.push(suite);
    }
    ensure!(!suites.is_empty(), "the rank program lists no suite");
    Ok(suites)
}

/// The launches that the command line selects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// Only with this many ranks.
    pub(crate) ranks: Option<usize>,
    /// Only these suites, or all if the list is empty.
    pub(crate) suites: &'a [String],
    pub(crate) sanitizer: bool,
    pub(crate) layout: Layout,
}

/// The resources of this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here<'a> {
    pub(crate) gpus: usize,
    /// The reason why there is no `mpirun`, if so.
    pub(crate) no_mpirun: Option<&'a str>,
}

/// One suite with one number of ranks.
#[derive(Debug)]
pub(crate) struct Planned<'a> {
    pub(crate) suite: &'a Suite,
    pub(crate) world: usize,
    /// The reason why it is not run, if so.
    pub(crate) not_run: Option<String>,
}

/// All launches in order, including launches that are not run. Numbers of ranks that the command line excludes are left out.
pub(crate) fn plan<'a>(suites: &'a [Suite], wanted: Wanted<'_>, here: Here<'_>) -> Result<Vec<Planned<'a>>> {
    let (gpus, layout) = (here.gpus, wanted.layout);
    for name in wanted.suites {
        if suites.iter().all(|suite| suite.name != *name) {
            let known: Vec<&str> = suites.iter().map(|suite| suite.name.as_str()).collect();
            bail!("there is no suite {name}; there are {}", known.join(", "));
        }
    }
    let mut planned = Vec::new();
    for suite in suites.iter().filter(|suite| wanted.suites.is_empty() || wanted.suites.contains(&suite.name)) {
        for world in wanted.ranks.map_or_else(|| suite.worlds(), |ranks| vec![ranks]) {
            let not_run = if !suite.runs_with(world) {
                let worlds: Vec<String> = suite.worlds().iter().map(usize::to_string).collect();
                Some(format!("it runs with {} ranks only", worlds.join(", ")))
            } else if world > gpus.saturating_mul(layout.ranks_per_gpu) {
                let each =
                    if layout.shares_gpus() { format!(", for {} each", layout.ranks_per_gpu) } else { String::new() };
                Some(format!("it needs {world} GPUs, and here {} {gpus}{each}", if gpus == 1 { "is" } else { "are" }))
            } else if let Some(why) = suite.refuses(world, layout) {
                Some(why)
            } else if wanted.sanitizer && !suite.sanitizer {
                Some("it makes no sense under compute-sanitizer".to_owned())
            } else {
                let why = here.no_mpirun.filter(|_| suite.mode == Mode::Mpirun);
                why.map(|why| format!("it needs mpirun, and there is none here: {why}"))
            };
            planned.push(Planned { suite, world, not_run });
        }
    }
    Ok(planned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"
        {"suite":"sums","ranks":[1,2,4],"mode":"processes","victims":[],"seconds":5,"sanitizer":true}
        {"suite":"faults","ranks":[1,2,3],"mode":"processes","victims":[1],"seconds":5,"sanitizer":false,"needs_one_node":"it needs peers"}
        {"suite":"threads","ranks":[2],"mode":"threads","victims":[],"seconds":5,"sanitizer":true}
        {"suite":"job","ranks":[2,4],"mode":"mpirun","victims":[],"seconds":5,"sanitizer":true,"needs_own_gpus":"it measures"}"#;

    const ANY: Wanted<'static> = Wanted { ranks: None, suites: &[], sanitizer: false, layout: Layout::PLAIN };
    const ALL: Here<'static> = Here { gpus: 4, no_mpirun: None };

    /// Each launch as "suite ranks", followed by "- reason" if it is not run.
    fn planned(wanted: Wanted<'_>, here: Here<'_>) -> Vec<String> {
        let suites = parse(LIST).unwrap();
        let show = |Planned { suite, world, not_run }: Planned<'_>| {
            let reason = not_run.map(|why| format!(" - {why}")).unwrap_or_default();
            format!("{} {world}{reason}", suite.name)
        };
        plan(&suites, wanted, here).unwrap().into_iter().map(show).collect()
    }

    #[test]
    fn plan_runs_every_number_of_ranks_or_has_a_reason() {
        let expected = [
            "sums 1",
            "sums 2",
            "sums 4 - it needs 4 GPUs, and here are 2",
            "faults 2",
            "faults 3 - it needs 3 GPUs, and here are 2",
            "threads 2",
            "job 2",
            "job 4 - it needs 4 GPUs, and here are 2",
        ];
        assert_eq!(planned(ANY, Here { gpus: 2, ..ALL }), expected);
        let shared = Layout { ranks_per_gpu: 2, nodes: 1 };
        let expected = [
            "sums 1",
            "sums 2",
            "sums 4 - it needs 4 GPUs, and here is 1, for 2 each",
            "faults 2",
            "faults 3 - it needs 3 GPUs, and here is 1, for 2 each",
            "threads 2",
            "job 2 - it measures",
            "job 4 - it needs 4 GPUs, and here is 1, for 2 each",
        ];
        assert_eq!(planned(Wanted { layout: shared, ..ANY }, Here { gpus: 1, ..ALL }), expected);
    }

    #[test]
    fn plan_leaves_threads_and_peers_out_on_several_nodes() {
        let layout = Layout { ranks_per_gpu: 1, nodes: 2 };
        let expected = [
            "sums 1 - 1 ranks are not as many on each of 2 nodes",
            "sums 2",
            "sums 4",
            "faults 2 - it needs peers",
            "faults 3 - it needs peers",
            "threads 2 - its ranks are one process, which is on one node",
            "job 2 - MPI finds nodes by itself, and takes this machine for one",
            "job 4 - MPI finds nodes by itself, and takes this machine for one",
        ];
        assert_eq!(planned(Wanted { layout, ..ANY }, ALL), expected);
    }

    #[test]
    fn plan_follows_wishes_and_gives_the_sanitizers_reasons() {
        let suites = ["faults".to_owned(), "sums".to_owned()];
        let wanted = Wanted { ranks: Some(2), suites: &suites, sanitizer: true, ..ANY };
        assert_eq!(planned(wanted, ALL), ["sums 2", "faults 2 - it makes no sense under compute-sanitizer"]);
        let one = Wanted { ranks: Some(1), suites: &suites[..1], ..ANY };
        assert_eq!(planned(one, ALL), ["faults 1 - it runs with 2, 3 ranks only"]);
    }

    #[test]
    fn plan_refuses_an_unknown_suite() {
        let suites = parse(LIST).unwrap();
        let wanted = Wanted { suites: &["som".to_owned()], ..ANY };
        let error = plan(&suites, wanted, ALL).unwrap_err().to_string();
        assert_eq!(error, "there is no suite som; there are sums, faults, threads, job");
    }

    #[test]
    fn parse_takes_a_victim_as_one_process_of_several() {
        let suites = parse(LIST).unwrap();
        assert_eq!(suites[1].processes(2), [(Who::Rank(0), false), (Who::Rank(1), true)]);
        assert_eq!(suites[2].processes(2), [(Who::AllRanks, false)]);
        assert_eq!(suites[3].processes(2), [(Who::AllRanks, false)]);
    }

    #[test]
    fn plan_needs_mpirun_for_jobs_alone() {
        let suites = ["threads".to_owned(), "job".to_owned()];
        let wanted = Wanted { ranks: Some(2), suites: &suites, ..ANY };
        let here = Here { no_mpirun: Some("not found"), ..ALL };
        let expected = ["threads 2", "job 2 - it needs mpirun, and there is none here: not found"];
        assert_eq!(planned(wanted, here), expected);
    }

    #[test]
    fn parse_refuses_a_list_without_sense() {
        let refusal = |list: &str| format!("{:#}", parse(list).unwrap_err());
        let suite = |ranks: &str, mode: &str, victims: &str| {
            format!(
                r#"{{"suite":"a","ranks":{ranks},"mode":"{mode}","victims":{victims},"seconds":5,"sanitizer":true}}"#
            )
        };
        assert!(refusal("").contains("lists no suite"));
        assert!(refusal("NCCL version 2").contains("in the list of suites: NCCL version 2"));
        assert!(refusal(&suite("[1]", "processes", "[1]")).contains("no number of ranks"));
        assert!(refusal(&suite("[1]", "processes", "[0]")).contains("no number of ranks"));
        assert!(refusal(&suite("[0,1]", "processes", "[]")).contains("0 ranks"));
        assert!(refusal(&suite("[3]", "processes", "[1,1]")).contains("a victim twice"));
        assert!(refusal(&suite("[2]", "threads", "[1]")).contains("cannot have victims"));
        assert!(refusal(&suite("[2]", "mpirun", "[1]")).contains("cannot have victims"));
        assert!(refusal(&suite("[2]", "fibres", "[]")).contains("fibres"));
        let twice = [suite("[2]", "threads", "[]"), suite("[1]", "threads", "[]")].join("\n");
        assert!(refusal(&twice).contains("has a twice"));
    }
}
