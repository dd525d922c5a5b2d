//! The rank that is blamed for the end of a job: the others failed because of it, as the records of calls tell, or after it.
//!
//! A dying rank closes its connections before its process has ended, so ranks that need it may end first. Such a rank has a record of a failure,
//! which may name the rank that it misses.

use std::collections::{BTreeMap, HashSet};

use gradsync::comm::Departure;
use gradsync::internal::trace::RankTrace;

use super::records::has_failure;

/// A rank that a record names as the cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) rank: usize,
    pub(super) departure: Option<Departure>,
}

/// The rank that the record of `rank` names.
fn named_by(trace: &RankTrace) -> Option<Named> {
    // A group whose ranks have other numbers than the launcher's cannot tell a rank of the launcher.
    let has_numbers_of_launcher = |group: &&gradsync::internal::trace::GroupTrace| {
        !group.in_process && group.members.get(group.rank) == Some(&trace.rank)
    };
    let groups = trace.groups.iter().filter(has_numbers_of_launcher);
    let named = groups.filter_map(|group| match group.blamed[..] {
        [rank] if group.failure.is_some() && rank != trace.rank => Some(Named { rank, departure: group.departure }),
        _ => None,
    });
    // The kind of its departure may be known to one group only.
    named.max_by_key(|named| match named.departure {
        Some(Departure::Panicked) => 3,
        Some(Departure::Left) => 2,
        Some(_) => 1,
        None => 0,
    })
}

/// The rank at the end of the chain of records that begins with the record of `first`, if that names another rank.
pub(super) fn named_in_records(first: usize, traces: &BTreeMap<usize, RankTrace>) -> Option<Named> {
    let (mut seen, mut last) = (HashSet::from([first]), None);
    while let Some(named) = traces.get(&last.map_or(first, |last: Named| last.rank)).and_then(named_by) {
        if !seen.insert(named.rank) {
            break;
        }
        last = Some(named);
    }
    last
}

/// The first of these ranks, in the order in which they have failed, that has failed by itself; else the first one.
pub(super) fn first_without_failure(ranks: &[usize], traces: &BTreeMap<usize, RankTrace>) -> Option<usize> {
    let is_cause = |rank: &&usize| !traces.get(rank).is_some_and(has_failure);
    ranks.iter().find(is_cause).or(ranks.first()).copied()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The traces of four ranks; each of the pairs is a rank, and the ranks that its failure blames, with a departure.
    fn traces(failures: &[(usize, &[usize], Option<&str>)]) -> BTreeMap<usize, RankTrace> {
        let trace = |&(rank, blamed, departure): &(usize, &[usize], Option<&str>)| {
            let group = json!({"group": "channel 0", "rank": rank, "members": [0, 1, 2, 3], "in_process": false, "failure": "why",
                               "blamed": blamed, "departure": departure, "has_left": false, "calls": []});
            let trace = json!({"version": "0", "job": "a", "rank": rank, "host": "h", "pid": 1, "written": 1.0, "reason": "why",
                               "groups": [group]});
            (rank, serde_json::from_value(trace).unwrap())
        };
        failures.iter().map(trace).collect()
    }

    #[test]
    fn named_in_records_follows_the_records_to_their_end() {
        let panicked = Some(Departure::Panicked);
        let one = traces(&[(2, &[1], Some("Panicked")), (0, &[1], Some("Panicked"))]);
        assert_eq!(named_in_records(2, &one), Some(Named { rank: 1, departure: panicked }));
        assert_eq!(named_in_records(3, &one), None, "it has no record");
        let chain = traces(&[(2, &[0], Some("Left")), (0, &[1], Some("Panicked"))]);
        assert_eq!(named_in_records(2, &chain), Some(Named { rank: 1, departure: panicked }));
        let circle = traces(&[(2, &[0], Some("Left")), (0, &[2], Some("Left"))]);
        assert_eq!(named_in_records(2, &circle).unwrap().rank, 0);
        let several = traces(&[(2, &[0, 1], None), (1, &[1], None)]);
        assert_eq!([named_in_records(2, &several), named_in_records(1, &several)], [None, None]);
    }

    #[test]
    fn first_without_failure_keeps_the_order_of_the_ends() {
        let followers = traces(&[(2, &[], None), (0, &[], None)]);
        assert_eq!(first_without_failure(&[2, 3, 1], &followers), Some(3));
        assert_eq!(first_without_failure(&[2, 0], &followers), Some(2));
        assert_eq!(first_without_failure(&[3, 0, 1], &BTreeMap::new()), Some(3));
    }
}
