//! The texts of errors, over processes.

use gradsync::comm::Split;
use gradsync_tests::words;

use super::cases::Cases;

pub(crate) fn run(cases: &mut Cases) {
    let rank = cases.rank();
    cases.check("every rank is told the first difference", |comm| words::disagreements(comm));
    cases.check("another call is told by what was called", |comm| {
        let pair = |rank: usize| comm.split((rank < 2).then_some(0), 0).unwrap();
        // Each case breaks a group of its own; the other ranks only take part in creating the groups.
        if rank < 2 {
            words::another_call(rank, || pair(rank).expect("a colour"));
        } else {
            (0..2 * words::OPERATIONS).for_each(|_| assert!(pair(rank).is_none()));
        }
    });
    cases.done("words");
}
