//! Adasum and sums by peer kernels for every world size that they support, two to eight, with threads that share one GPU as ranks. This
//! covers world sizes for which no machine with as many GPUs is available.
//!
//! The launches wait for each other, so all of them have to be resident on the GPU at once. Vectors are small for that reason: with eight
//! ranks, each launch has about ten blocks that wait, beside blocks that send and end, and a multiprocessor has room for one block.
//!
//! The cases run once with the kernels' assembled code, if there is some for the GPU, and once with their PTX, which other GPUs use.

use cust::CudaApiVersion;
use cust::device::{Device, DeviceAttribute};
use gradsync::Result;
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Call, Collective, Communicator, Ranks, ReduceOp};
use gradsync::driver::{DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::driver::KernelSource;
use gradsync::internal::memory::{PeerMemory, SharedMemory};
use gradsync::memory::Cuda;
use gradsync::ops::{Algorithm, Granularity, OrderedAllReduce};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::on_ranks;
use gradsync_tests::tolerance::assert_equal;

use super::device::{Runner, Way};
use super::layout_independence::Tensors;
use super::{Case, gaps};
use crate::context::Context;
use crate::report::Report;

/// Streams that share one of the driver's channels to the GPU wait for each other; the default is eight channels.
pub(crate) const ENVIRONMENT: &[(&str, &str)] = &[CONNECTIONS, ("GRADSYNC_FORCE_PTX", "0")];
/// The variables that [`run_from_ptx`] needs.
pub(crate) const ENVIRONMENT_PTX: &[(&str, &str)] = &[CONNECTIONS, ("GRADSYNC_FORCE_PTX", "1")];
const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// The number of multiprocessors that hold all waiting blocks: 80 with eight ranks.
const MULTIPROCESSORS: i32 = 100;

/// At most as many layers as one block computes weights for, windows of several tiles and chunks, and window borders inside layers.
const SHAPES: [&[usize]; 4] = [&[37], &[0], &[5, 51], &[9000]];

/// Layers that are divided over ranks and layers that are not, of one chunk and of several.
const LENS: [usize; 4] = [9000, 37, 600, 2100];

/// Layers for two blocks.
const MORE_LAYERS: [&[usize]; 6] = [&[1], &[300], &[64], &[2, 7], &[], &[900]];

const KINDS: [Kind; 5] =
    [Kind::Random, Kind::Opposite, Kind::NearlyOpposite(1e-6), Kind::NearlyOpposite(0.0), Kind::OneRankZero];

pub(crate) fn run(context: &Context, report: &mut Report) {
    let device = context.queue.ordinal();
    let is_assembled_for = matches!(attribute(device, DeviceAttribute::ComputeCapabilityMajor), 8..=10);
    // A driver loads code from the assemblers of its own CUDA major version, whatever the minor version, and of earlier ones; the code in
    // the crate is of CUDA 12.
    let is_new_enough = CudaApiVersion::get().expect("the driver's version").major() >= 12;
    let source = if is_assembled_for && is_new_enough { KernelSource::Cubin } else { KernelSource::Ptx };
    sweep(device, 2..=8, source, report);
}

/// Runs one world size for each width of the kernels.
pub(crate) fn run_from_ptx(context: &Context, report: &mut Report) {
    sweep(context.queue.ordinal(), [2, 4, 8], KernelSource::Ptx, report);
}

fn attribute(device: u32, attribute: DeviceAttribute) -> i32 {
    let device = Device::get_device(device).expect("a device, which the queue is on");
    device.get_attribute(attribute).expect("what every device has")
}

fn sweep(device: u32, world_sizes: impl IntoIterator<Item = usize>, source: KernelSource, report: &mut Report) {
    let multiprocessors = attribute(device, DeviceAttribute::MultiprocessorCount);
    for world_size in world_sizes {
        for format in Format::ALL {
            let name = format!("{} by {world_size} ranks", format.name());
            if multiprocessors < MULTIPROCESSORS {
                let why = format!("it needs {MULTIPROCESSORS} multiprocessors, and here are {multiprocessors}");
                report.not_run(&name, &why);
                continue;
            }
            report.case(&name, || {
                on_ranks(world_size, |host| check(device, &OneGpu { host }, format, source));
            });
        }
    }
}

fn check(device: u32, comm: &OneGpu, format: Format, source: KernelSource) {
    let queue = Queue::new(device).unwrap();
    let world_size = comm.world_size();
    let runner = Runner { queue: &queue, comm, way: Way::Peers };
    for granularity in [Granularity::Tensor, Granularity::Whole] {
        for kind in KINDS {
            for shapes in [&SHAPES[..], &MORE_LAYERS] {
                let case = Case::of(kind, format, world_size, shapes, world_size as u64);
                runner.check(&case.with(Algorithm::Gram, granularity), &format!("{kind:?}"));
            }
        }
        let case = Case::of(Kind::Orthogonal, format, world_size, &gaps::SHAPES, 8);
        gaps::check(&runner, &case.with(Algorithm::Gram, granularity));
    }
    sums(&runner, &Case::of(Kind::Random, format, world_size, &SHAPES, 1));
    for kind in [Kind::Random, Kind::NearlyOpposite(1e-6)] {
        let tensors = Tensors::new(kind, format, world_size, &LENS);
        tensors.check_ways(&queue, comm, &[Way::Peers]);
        tensors.check_sums(&queue, comm, false);
    }

    let loaded: Vec<_> = gradsync::internal::driver::loaded_kernels(&queue)
        .into_iter()
        .filter(|kernel| kernel.name.starts_with("peer_adasum"))
        .collect();
    assert!(matches!(&loaded[..], [kernel] if kernel.source == source), "not one from {source:?}: {loaded:?}");
}

/// Sums in rank order, rounded once.
fn sums(runner: &Runner<'_>, case: &Case) {
    let label = format!("sum, {}", case.name());
    let mut buffer = runner.buffer(case);
    let mut ordered = OrderedAllReduce::new(runner.comm, &buffer, ReduceOp::Sum).unwrap();
    assert!(ordered.uses_peers(), "kernels reach all buffers");
    ordered.all_reduce(&mut buffer).unwrap();
    let got = case.layers_of(&runner.bits(case, &buffer));
    let inputs: Vec<Vec<f64>> = case.inputs.iter().map(|layers| layers.concat()).collect();
    let sum = |index: usize| case.format.round(inputs.iter().fold(0.0, |sum, input| sum + input[index]));
    let expected: Vec<f64> = (0..inputs[0].len()).map(sum).collect();
    assert_equal(&label, &got.concat(), &expected);
}

/// Ranks on one GPU. Only the kernels may transfer data: every collective fails.
struct OneGpu {
    host: LocalCommunicator,
}

impl Ranks for OneGpu {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn world_size(&self) -> usize {
        self.host.world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        self.host.gather_words(words)
    }
}

impl Communicator<Cuda> for OneGpu {
    fn run(&self, _: Collective<'_, Cuda>) -> Result<()> {
        moved()
    }

    fn exchange(&self, _: &[(usize, DeviceSlice<'_>)], _: &mut [(usize, DeviceSliceMut<'_>)]) -> Result<()> {
        moved()
    }

    fn sharing(&self) -> Option<&(dyn PeerMemory + 'static)> {
        Some(self)
    }

    fn synchronize(&self, queue: &Queue) -> Result<()> {
        Ok(queue.synchronize()?)
    }
}

// SAFETY: There is one address per rank, in the order of ranks; rank and world size are the thread's number and the number of threads.
unsafe impl PeerMemory for OneGpu {
    fn share(&self, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>> {
        let addresses = self.gather_words(&[data.address()])?;
        // SAFETY: The memory is on the one GPU, and ranks keep their buffers until all of them have compared the results of the last run.
        unsafe { SharedMemory::new(data.queue(), addresses) }.map(Some)
    }

    fn run_kernels(&self, _: Call, _: &Queue, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        launch()
    }
}

fn moved() -> ! {
    panic!("the peers' kernels need no transport");
}
