//! Ranks that cannot form a communicator together: refused on every rank, by name, before NCCL is called.

use gradsync::Error;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::driver::Queue;

use super::Groups;
use crate::context::DEADLINE;
use crate::report::Report;

pub(super) fn run(groups: &mut Groups<'_>, report: &mut Report) {
    report.case("one GPU for all", || {
        let queue = Queue::new(0).unwrap();
        let options = groups.context.options().with_shared_gpu(false);
        let reason = refused(groups, &queue, &options);
        let hints = ["ranks 0 and 1", "same GPU", "NcclOptions::shared_gpu", "NCCL_MULTI_RANK_GPU_ENABLE=1", "2.30"];
        assert!(hints.iter().all(|hint| reason.contains(hint)), "{reason}");
        groups.renew();
    });
    report.case("GPUs may be shared on one rank alone", || {
        let last = groups.world_size() - 1;
        let queue = groups.queue().clone();
        let options = groups.context.options().with_shared_gpu(groups.context.rank == last);
        let reason = refused(groups, &queue, &options);
        assert!(reason.contains(&format!("rank 0 has false as shared_gpu, rank {last} has true")), "{reason}");
        groups.renew();
    });
    report.case("checks on one rank alone", || {
        let last = groups.world_size() - 1;
        let queue = groups.queue().clone();
        let options = groups.context.options().with_checks(groups.context.rank == last);
        let reason = refused(groups, &queue, &options);
        assert!(reason.contains(&format!("rank 0 has false as checks, rank {last} has true")), "{reason}");
        groups.renew();
    });
    report.case("another number of blocks on one rank", || {
        let last = groups.world_size() - 1;
        let queue = groups.queue().clone();
        let min_ctas = (groups.context.rank == last).then_some(8);
        let reason = refused(groups, &queue, &groups.context.options().with_min_ctas(min_ctas));
        assert!(reason.contains(&format!("rank {last} has (Some(8), None)")), "{reason}");
        groups.renew();
    });
    report.case("numbers of blocks that contradict each other", || {
        let queue = groups.queue().clone();
        let options = groups.context.options().with_min_ctas(Some(9)).with_max_ctas(Some(8));
        let reason = refused(groups, &queue, &options);
        assert!(reason.contains("min_ctas is 9") && reason.contains("max_ctas, 8"), "{reason}");
        groups.renew();
    });
}

/// The reason for which a new communicator is refused.
fn refused(groups: &mut Groups<'_>, queue: &Queue, options: &NcclOptions) -> String {
    let generation = groups.next();
    let member = groups.context.join(groups.rank(), groups.world_size(), generation, DEADLINE).unwrap();
    match NcclCommunicator::new(member, queue, options) {
        Err(Error::InvalidArgument { reason, .. }) => reason,
        other => panic!("in place of a refusal: {other:?}"),
    }
}
