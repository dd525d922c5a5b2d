//! Operations on many tensors: ONNX Runtime's bundles, gradient buffers, ZeRO, and the all-reduce with a fixed order of additions.

mod buffers;
mod disagreements;
pub(crate) mod ordered;
mod peers;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::tensors::uniform;
use gradsync_tests::suite::{owned_tensors, tensors};

use crate::context::Context;
use crate::placed::OnDevice;
use crate::report::Report;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let world = World { context, comm: &comm };
    let operands = OnDevice { queue: &context.queue, comm: &comm };
    tensors::run(&operands, report);
    owned_tensors::run(&operands, report);
    buffers::run(&world, report);
    ordered::run(&world, report);
    peers::run(&world, report);
    disagreements::run(&world, report);
}

struct World<'c> {
    context: &'c Context,
    comm: &'c NcclCommunicator,
}

impl World<'_> {
    fn rank(&self) -> usize {
        self.context.rank
    }

    fn size(&self) -> usize {
        self.context.world_size
    }

    /// Every rank's tensors, `[rank][tensor]`, uniform between -10 and 10; all ranks compute the same list.
    fn tensors(&self, format: Format, lens: &[usize], seed: u64) -> Vec<Vec<Vec<f64>>> {
        (0..self.size()).map(|rank| uniform(format, lens, seed * 100 + rank as u64)).collect()
    }
}
