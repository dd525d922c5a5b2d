//! Operations on many tensors: ONNX Runtime's bundles, gradient buffers, ZeRO, and the all-reduce with a fixed order of additions.

mod buffers;
mod disagreements;
pub(crate) mod ordered;
mod owned;
mod peers;
mod plain;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::driver::{DeviceSlice, DeviceSliceMut};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;

use crate::context::Context;
use crate::placed::Placed;
use crate::report::Report;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.communicator(0, &context.options())));
    let Some(comm) = comm else { return };
    let world = World { context, comm: &comm };
    plain::run(&world, report);
    owned::run(&world, report);
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

    /// This rank's tensors on the device, each in memory of its own.
    fn place(&self, format: Format, tensors: &[Vec<f64>]) -> Vec<Placed> {
        let place = |(index, tensor): (usize, &Vec<f64>)| {
            Placed::new(&self.context.queue, &Array::new(format, tensor), index % 2)
        };
        tensors.iter().enumerate().map(place).collect()
    }
}

/// Tensors of numbers between -10 and 10.
fn uniform(format: Format, lens: &[usize], seed: u64) -> Vec<Vec<f64>> {
    let mut random = Random::new(seed);
    lens.iter().map(|&len| (0..len).map(|_| format.round(20.0 * random.unit() - 10.0)).collect()).collect()
}

/// One of the tensors, on every rank.
fn of_all(ranks: &[Vec<Vec<f64>>], tensor: usize) -> Vec<Vec<f64>> {
    ranks.iter().map(|tensors| tensors[tensor].clone()).collect()
}

fn slices(tensors: &[Placed]) -> Vec<DeviceSlice<'_>> {
    tensors.iter().map(Placed::slice).collect()
}

fn slices_mut(tensors: &mut [Placed]) -> Vec<DeviceSliceMut<'_>> {
    tensors.iter_mut().map(Placed::slice_mut).collect()
}
