//! Send and Recv on device memory over NCCL, with and without comparison of calls, and transfers that break a communicator.

mod device;
mod rank;

use gradsync_tests::transfers::{Case, fatal, good};

use crate::context::Context;
use crate::report::Report;
pub(crate) use rank::DeviceRank;

/// The cases for any transport, after which the communicator works as before.
pub(crate) fn cases<'c>() -> impl Iterator<Item = Case<DeviceRank<'c>>> {
    good().into_iter().chain(device::cases())
}

pub(crate) fn run(context: &Context, report: &mut Report) {
    for (generation, checks) in [true, false].into_iter().enumerate() {
        let how = if checks { "compared" } else { "not compared" };
        let mut comm = None;
        report.case(&format!("communicator, {how}"), || {
            let options = context.options().with_checks(checks);
            comm = Some(context.communicator(generation as u64, &options));
        });
        let Some(comm) = comm else { return };
        let rank = DeviceRank { comm: &comm, queue: &context.queue };
        for (name, case) in cases() {
            report.case(&format!("{name}, {how}"), || case(&rank));
        }
    }
    for (index, (name, _)) in fatal::<DeviceRank<'_>>().into_iter().enumerate() {
        report.case(name, || {
            let comm = context.communicator(2 + index as u64, &context.options());
            fatal()[index].1(&DeviceRank { comm: &comm, queue: &context.queue });
            // The other ranks hear of the failure too, and have to stay until ranks 0 and 1 have.
            while context.rank > 1 && comm.failure().is_none() {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        });
    }
}
