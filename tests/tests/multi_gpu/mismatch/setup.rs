//! Ranks that cannot form a communicator together: refused on every rank, by name, before NCCL is asked.

use gradsync::Error;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::driver::Queue;

use super::Groups;
use crate::context::DEADLINE;
use crate::report::Report;

pub(super) fn run(groups: &mut Groups<'_>, report: &mut Report) {
    report.case("one GPU for all", || {
        let queue = Queue::new(0).unwrap();
        let reason = refused(groups, &queue, true);
        assert!(reason.contains("ranks 0 and 1") && reason.contains("same GPU"), "{reason}");
        groups.renew();
    });
    report.case("checks on one rank alone", || {
        let last = groups.world_size() - 1;
        let queue = groups.queue().clone();
        let reason = refused(groups, &queue, groups.context.rank == last);
        assert!(reason.contains(&format!("ranks 0 and {last}")) && reason.contains("checked"), "{reason}");
        groups.renew();
    });
}

/// Why a new communicator is refused.
fn refused(groups: &mut Groups<'_>, queue: &Queue, checks: bool) -> String {
    let generation = groups.next();
    let member = groups.context.join(groups.rank(), groups.world_size(), generation, DEADLINE).unwrap();
    let options = NcclOptions { checks, ..groups.context.options() };
    match NcclCommunicator::new(member, queue, &options) {
        Err(Error::InvalidArgument { reason, .. }) => reason,
        other => panic!("in place of a refusal: {other:?}"),
    }
}
