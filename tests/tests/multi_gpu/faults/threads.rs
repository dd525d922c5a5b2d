//! Ranks as threads of one process, one of which returns early or panics.

use super::act::Act;
use super::{Fault, connect, familiarize, survivor};
use crate::context::{Context, DEADLINE};
use crate::report::Report;

pub(super) fn run(context: &Context, report: &mut Report) {
    // All ranks synchronise here after each case, so that the lost rank does not enter the next case while the others still rebuild.
    let mut referee = None;
    report.case("set-up", || {
        referee = Some(context.join(context.rank, context.world_size, 0, DEADLINE).unwrap());
        familiarize(context, Fault::new(Act::Leave), 1);
    });
    let Some(referee) = referee else { return };
    for (index, (name, act)) in [("returns early", Act::Leave), ("panics", Act::Panic)].into_iter().enumerate() {
        report.case(name, || {
            let (fault, generation) = (Fault { are_threads: true, ..Fault::new(act) }, 2 + 2 * index as u64);
            let comm = connect(context, fault, generation);
            if context.rank == fault.rank {
                Act::perform(fault, &context.queue, comm);
            } else {
                survivor::endure(fault, &context.queue, comm);
                survivor::rebuild(context, fault.rank, generation + 1);
            }
            referee.all_gather(&[], 2 * DEADLINE).unwrap();
        });
    }
}
