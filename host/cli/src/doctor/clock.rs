//! The clocks of ranks, compared by exchanges over the control channel.
//!
//! In an exchange every rank reads its clock before and after. An exchange returns after all ranks have entered it, so the time at which
//! the last rank entered is between the two readings of every rank. That bounds the difference of two clocks from both sides, and several
//! exchanges narrow the bounds.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gradsync::CommError;
use gradsync::bootstrap::Member;
use serde::Serialize;

/// The number of exchanges: the first ones take longer, until all ranks are awake.
const ROUNDS: usize = 16;

/// The lead of a clock over the clock of rank 0, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Offset {
    pub(super) seconds: f64,
    /// The largest possible error of `seconds`.
    pub(super) uncertainty: f64,
}

/// Nanoseconds before and after each exchange, since the Unix epoch.
type Readings = Vec<(i128, i128)>;

fn now() -> i128 {
    // Times before 1970 are negative.
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => since.as_nanos() as i128,
        Err(error) => -(error.duration().as_nanos() as i128),
    }
}

/// The offset of every rank.
pub(super) fn offsets(member: &Member, deadline: Duration) -> Result<Vec<Offset>, CommError> {
    let mut own = Readings::new();
    for _ in 0..ROUNDS {
        let before = now();
        member.all_gather(&[], deadline)?;
        own.push((before, now()));
    }
    let bytes = postcard::to_stdvec(&own).expect("plain data");
    let all = member.all_gather(&bytes, deadline)?;
    let parsed = all.iter().map(|bytes| postcard::from_bytes(bytes).unwrap_or_default()).collect::<Vec<Readings>>();
    Ok(parsed.iter().map(|readings| offset(&parsed[0], readings)).collect())
}

fn offset(first: &Readings, readings: &Readings) -> Offset {
    let pairs = || first.iter().zip(readings);
    let least = pairs().map(|((_, after), (before, _))| before - after).max().unwrap_or_default();
    let most = pairs().map(|((before, _), (_, after))| after - before).min().unwrap_or_default();
    let seconds = |nanoseconds: i128| nanoseconds as f64 / 2e9;
    Offset { seconds: seconds(least + most), uncertainty: seconds(most - least).max(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 1's clock is 5 s ahead; its exchanges take 2 ms, 4 ms and 2 ms, and rank 0's take other times.
    #[test]
    fn offset_joins_the_bounds_of_several_exchanges() {
        const MS: i128 = 1_000_000;
        let ahead = 5000 * MS;
        let first = vec![(0, 10 * MS), (20 * MS, 24 * MS), (30 * MS, 33 * MS)];
        let other = vec![
            (ahead + 7 * MS, ahead + 9 * MS),
            (ahead + 19 * MS, ahead + 23 * MS),
            (ahead + 31 * MS, ahead + 33 * MS),
        ];
        let Offset { seconds, uncertainty } = offset(&first, &other);
        assert!((seconds - 5.0).abs() <= uncertainty && uncertainty < 0.003, "{seconds} ± {uncertainty}");
        let own = offset(&first, &first);
        assert!(own.seconds.abs() <= own.uncertainty, "{own:?}");
    }
}
