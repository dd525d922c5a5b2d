//! Operations on any communicator: Send and Recv, collectives of many tensors, reducers, and the groups of a topology.

use gradsync::comm::{Ranks, Split};
use gradsync::groups::{GroupKind, Groups, Sizes, Topology};

use super::groups::members;
use super::operands::OnHost;
use super::{DEADLINE, Suite, Transport, owned_tensors};
use crate::transfers::HostRank;
use crate::{out_of_range, reducer, start, tensors, transfers};

/// All cases.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    if suite.world_size() > 1 {
        for (index, (name, _)) in transfers::good::<HostRank<'_>>().into_iter().enumerate() {
            suite.check(name, |comm| transfers::good()[index].1(&HostRank(comm)));
        }
        for (index, (name, _)) in transfers::fatal::<HostRank<'_>>().into_iter().enumerate() {
            suite.check_with(name, |suite| {
                let comm = suite.transport.fresh(DEADLINE);
                transfers::fatal()[index].1(&HostRank(&comm));
                // No rank leaves before all have heard of the failure.
                suite.transport.fresh(DEADLINE).barrier().expect("another communicator");
            });
        }
    }
    suite.done("send and recv");
    super::tensors::run(&OnHost(&suite.comm), &mut suite.report);
    owned_tensors::run(&OnHost(&suite.comm), &mut suite.report);
    for case in tensors::ALL.iter().chain(out_of_range::ALL) {
        suite.check(case.name, |comm| (case.run)(comm));
    }
    suite.done("tensors");
    for case in reducer::ALL.iter().chain(start::ALL) {
        suite.check(case.name, |comm| (case.run)(comm));
    }
    suite.done("reducers");
    groups(suite);
}

/// Every kind of group has the ranks of its plan.
fn groups<T: Transport>(suite: &mut Suite<T>) {
    let world = suite.world_size();
    let (data, horizontal) = if world % 2 == 0 { (world / 2, 2) } else { (world, 1) };
    let sizes = Sizes { world, local: world.div_ceil(2), data, horizontal, pipeline: 1 };
    suite.check("the groups of a topology", |comm| {
        let comm = comm.split(Some(0), comm.rank() as i64).unwrap().expect("a colour");
        let (rank, groups) = (comm.rank(), Groups::new(comm, sizes).unwrap());
        let topology = Topology::new(rank, sizes).unwrap();
        for kind in GroupKind::ALL {
            let Ok(planned) = topology.group(kind) else {
                assert!(groups.get(kind).is_err(), "{kind}: a group that cannot be");
                continue;
            };
            let group = groups.get(kind).unwrap();
            assert_eq!((group.rank(), members(group, rank)), (planned.index, planned.ranks), "{kind}");
            assert!(std::ptr::eq(group, groups.get(kind).unwrap()), "{kind}: made twice");
        }
    });
    suite.done("groups of a topology");
}
