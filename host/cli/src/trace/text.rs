//! The findings as text, for readers who did not write the program.

use std::fmt;

use gradsync::trace::CallState;
use gradsync_cli::text::shown;

use super::analysis::{Analysis, Difference, Last, Wait, Who};

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
        let missing = match &self.silent[..] {
            [] => String::new(),
            silent => format!("; {} {} written none", ranks(silent), verb(silent, "has", "have")),
        };
        let plural = if self.world_size == 1 { "" } else { "s" };
        writeln!(f, "the last calls of {} rank{plural}{missing}", self.world_size)?;
        self.differences.iter().try_for_each(|difference| write!(f, "{difference}"))?;
        for cause in &self.causes {
            writeln!(f, "Rank {} holds up others: {}.", cause.rank, shown(&cause.state))?;
        }
        if !self.cycle.is_empty() {
            writeln!(f, "{} wait for each other, and nobody else holds them up.", capital(&ranks(&self.cycle)))?;
        }
        self.waits.iter().try_for_each(|wait| write!(f, "{wait}"))?;
        if self.waits.is_empty() && self.differences.is_empty() {
            writeln!(f, "No rank waits for another, and no calls differ.")?;
        }
        for failure in &self.failures {
            writeln!(f, "Failure of {}: {}", ranks(&failure.ranks), shown(&failure.text))?;
        }
        if !self.last.is_empty() {
            writeln!(f, "The last call of each rank:")?;
        }
        self.last.iter().try_for_each(|last| write!(f, "{last}"))
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.has_failed {
            true => "waited in vain",
            false => verb(&self.waiting, "waits", "wait"),
        };
        let (waiting, awaited) = (capital(&ranks(&self.waiting)), ranks(&self.awaited));
        let (call, group) = (shown(&self.call), shown(&self.group));
        let (seconds, sequence) = (self.seconds, self.sequence);
        writeln!(f, "{waiting} {verb} for {awaited}, for {seconds:.1} s, in call {sequence} of {group}: {call}.")
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "The first calls that differ are number {} of {}:", self.sequence, shown(&self.group))?;
        for (call, of) in &self.calls {
            writeln!(f, "    {}: {}", ranks(of), shown(call))?;
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
        let (call, group) = (shown(&self.call), shown(&self.group));
        writeln!(f, "    rank {}: call {} of {group}, {call}: {state} {:.1} s", self.rank, self.sequence, self.seconds)
    }
}
