//! A rank that is absent, at each stage of a communicator's life: the others name it when the deadline has passed, or at once if it has
//! left.

use std::time::{Duration, Instant};

use gradsync::bootstrap::BootstrapError;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Communicator, Departure, Operation, ReduceOp};
use gradsync::internal::MemberCalls;
use gradsync::{CommError, Error};

use super::{Groups, QUICK, SUM, comm_error};
use crate::context::DEADLINE;
use crate::report::Report;

/// The deadline of calls that the absent rank does not join.
const LIMIT: Duration = Duration::from_secs(3);
/// The time that an error may take beyond the deadline, and by which a rank may start later than others.
const SLACK: Duration = Duration::from_secs(2);
/// The absent rank; it cannot be rank 0, to which the others connect.
const ABSENT: usize = 1;

pub(super) fn run(groups: &mut Groups<'_>, report: &mut Report) {
    report.case("never joins", || {
        let (generation, begun) = (groups.next(), Instant::now());
        if groups.rank() == ABSENT {
            // The absent rank waits, so that it does not disturb this group by joining the next one too early.
            std::thread::sleep(LIMIT + SLACK);
        } else {
            let outcome = groups.context.join(groups.rank(), groups.world_size(), generation, LIMIT);
            let took = begun.elapsed();
            let is_named = matches!(
                &outcome,
                Err(Error::Bootstrap(BootstrapError::Missing { missing, .. })) if *missing == [ABSENT]
            );
            assert!(is_named, "a join without rank {ABSENT} gave {:?}", outcome.err());
            assert!(took < LIMIT + SLACK, "only after {took:?}");
        }
        groups.renew();
    });
    report.case("never sets up", || {
        let member = join(groups);
        if groups.rank() == ABSENT {
            assert!(member.wait_failure(LIMIT + SLACK).is_some(), "the others do not give up");
        } else {
            let (error, took) = refused(groups, member);
            assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [ABSENT]), "{error}");
            assert!(took < LIMIT + SLACK, "{error}: only after {took:?}");
        }
        groups.renew();
    });
    report.case("leaves before the set-up", || {
        let member = join(groups);
        if groups.rank() == ABSENT {
            drop(member);
            // Rank 0 may still be listening for this group.
            std::thread::sleep(Duration::from_millis(200));
        } else {
            let (error, took) = refused(groups, member);
            let left = CommError::PeerGone { operation: Operation::SetUp, rank: ABSENT, departure: Departure::Left };
            assert_eq!(error, left);
            assert!(took < LIMIT, "{error}: only after {took:?}");
        }
        groups.renew();
    });
    report.case("never calls", || {
        let generation = groups.next();
        let comm = groups.context.communicator(generation, &options(groups));
        if groups.rank() == ABSENT {
            let failure = comm.member().wait_failure(LIMIT + QUICK);
            assert!(failure.is_some_and(|error| error.blamed() == [ABSENT]), "the others do not give up");
        } else {
            let begun = Instant::now();
            let outcome = SUM(&comm, groups.queue()).and_then(|()| comm.synchronize(groups.queue()));
            let error = comm_error(outcome.expect_err("a rank is missing"));
            let took = begun.elapsed();
            let (operation, missing) = (Operation::AllReduce(ReduceOp::Sum), vec![ABSENT]);
            assert_eq!(error, CommError::Timeout { operation, missing, deadline: LIMIT });
            assert!((LIMIT / 2..LIMIT + SLACK).contains(&took), "{error}: after {took:?}");
        }
        drop(comm);
        groups.renew();
    });
}

fn options(groups: &Groups<'_>) -> NcclOptions {
    groups.context.options().with_deadline(LIMIT)
}

fn join(groups: &mut Groups<'_>) -> gradsync::bootstrap::Member {
    let generation = groups.next();
    groups.context.join(groups.rank(), groups.world_size(), generation, DEADLINE).unwrap()
}

/// The failure of a communicator's set-up, and the time that it took.
fn refused(groups: &Groups<'_>, member: gradsync::bootstrap::Member) -> (CommError, Duration) {
    let begun = Instant::now();
    let outcome = NcclCommunicator::new(member, groups.queue(), &options(groups));
    let error = comm_error(outcome.expect_err("a rank is missing"));
    (error, begun.elapsed())
}
