//! The findings as text, for readers who did not write the program.

use std::collections::{HashMap, HashSet};
use std::fmt;

use gradsync::internal::trace::CallState;
use gradsync_cli::text::one_line;

use super::analysis::{Analysis, Cause, Difference, Last, Wait, Who};

/// Ranks as text: `rank 3`, `ranks 0, 2 to 5`.
fn ranks(ranks: &[Who]) -> String {
    let mut runs: Vec<(Who, Who)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |&(first, last): &(Who, Who)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    };
    let all = runs.iter().map(run).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {all}") } else { format!("ranks {all}") }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// `waits` or `wait`.
fn verb(ranks: &[Who], one: &'static str, several: &'static str) -> &'static str {
    if ranks.len() == 1 { one } else { several }
}

impl fmt::Display for Analysis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (late, none): (Vec<Who>, Vec<Who>) = self.silent.iter().partition(|rank| self.late.contains(rank));
        let missing = |found: &[Who], what: &str| match found {
            [] => String::new(),
            found => format!("; {} {} {what}", ranks(found), verb(found, "has", "have")),
        };
        let missing = missing(&none, "written none") + &missing(&late, "not written theirs yet");
        let plural = if self.world_size == 1 { "" } else { "s" };
        writeln!(f, "the last calls of {} rank{plural}{missing}", self.world_size)?;
        self.differences.iter().try_for_each(|difference| write!(f, "{difference}"))?;
        for (causes, state) in self.causes_by_state() {
            let (whom, state) = (capital(&ranks(&causes)), one_line(state));
            match causes[..] {
                [_] => writeln!(f, "{whom} holds up others: {state}.")?,
                _ => writeln!(f, "{whom} hold up others, each for the same reason: {state}.")?,
            }
        }
        if !self.cycle.is_empty() {
            writeln!(f, "{} wait for each other, and nobody else holds them up.", capital(&ranks(&self.cycle)))?;
        }
        self.waits.iter().try_for_each(|wait| write!(f, "{wait}"))?;
        if self.waits.is_empty() && self.differences.is_empty() {
            writeln!(f, "No rank waits for another, and no calls differ.")?;
        }
        if let Some((waiting, seconds)) = &self.device_waits {
            let (who, waits) = (capital(&ranks(waiting)), verb(waiting, "waits", "wait"));
            writeln!(
                f,
                "{who} {waits} for work on a GPU that was enqueued and has not completed, for {seconds:.1} s. If all calls above are over, \
                 the work is not a call of gradsync: another library's, or a kernel of the program."
            )?;
        }
        for failure in &self.failures {
            writeln!(f, "Failure of {}: {}", ranks(&failure.ranks), one_line(&failure.text))?;
        }
        let last = self.last_with_news();
        if !last.is_empty() {
            writeln!(f, "Other last calls:")?;
        }
        for (ranks_of_it, last) in last {
            writeln!(f, "    {}: {last}", ranks(&ranks_of_it))?;
        }
        Ok(())
    }
}

impl Analysis {
    /// The states of the ranks that hold up others, each with its ranks.
    fn causes_by_state(&self) -> Vec<(Vec<Who>, &str)> {
        let (mut found, mut indices) = (Vec::<(Vec<Who>, &str)>::new(), HashMap::new());
        for Cause { rank, state, .. } in &self.causes {
            let index = *indices.entry(state).or_insert(found.len());
            if index == found.len() {
                found.push((Vec::new(), state));
            }
            found[index].0.push(*rank);
        }
        found
    }

    /// The last calls of ranks about which no other line has told, each with its ranks and the longest time.
    fn last_with_news(&self) -> Vec<(Vec<Who>, Last)> {
        let mut told = HashSet::new();
        for Wait { waiting, group, sequence, .. } in &self.waits {
            told.extend(waiting.iter().map(|rank| (*rank, group, *sequence)));
        }
        for Difference { calls, group, sequence, .. } in &self.differences {
            told.extend(calls.iter().flat_map(|(_, ranks)| ranks).map(|rank| (*rank, group, *sequence)));
        }
        for Cause { rank, call, .. } in &self.causes {
            told.extend(call.iter().map(|(group, sequence)| (*rank, group, *sequence)));
        }
        let (mut found, mut indices) = (Vec::<(Vec<Who>, Last)>::new(), HashMap::new());
        for last in self.last.iter().filter(|last| !told.contains(&(last.rank, &last.group, last.sequence))) {
            let Last { rank, group, call, sequence, state, seconds } = last;
            let index = *indices.entry((group, call, sequence, *state as u8)).or_insert(found.len());
            if index == found.len() {
                found.push((Vec::new(), last.clone()));
            }
            let (ranks, longest) = &mut found[index];
            ranks.push(*rank);
            longest.seconds = longest.seconds.max(*seconds);
        }
        found.iter_mut().for_each(|(ranks, _)| ranks.sort_unstable());
        found
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.has_failed {
            true => "waited in vain",
            false => verb(&self.waiting, "waits", "wait"),
        };
        let (waiting, awaited) = (capital(&ranks(&self.waiting)), ranks(&self.awaited));
        let (call, group) = (one_line(&self.call), one_line(&self.group));
        let (seconds, sequence) = (self.seconds, self.sequence);
        writeln!(f, "{waiting} {verb} for {awaited}, for {seconds:.1} s, in call {sequence} of {group}: {call}.")
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "The first calls that differ are number {} of {}:", self.sequence, one_line(&self.group))?;
        for (call, of) in &self.calls {
            writeln!(f, "    {}: {}", ranks(of), one_line(call))?;
        }
        if self.without.is_empty() { Ok(()) } else { writeln!(f, "    {}: none so far", ranks(&self.without)) }
    }
}

impl fmt::Display for Last {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            CallState::Posted => "waiting for",
            CallState::Matched => "moving data for",
            CallState::Finished => "over since",
            CallState::Failed => "failed since",
            _ => "in another state since",
        };
        let (call, group) = (one_line(&self.call), one_line(&self.group));
        write!(f, "call {} of {group}, {call}: {state} {:.1} s", self.sequence, self.seconds)
    }
}
