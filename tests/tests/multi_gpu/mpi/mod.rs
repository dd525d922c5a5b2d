//! MPI on device memory, in jobs that `mpirun` starts: every operation against the host transport's bits or exact numbers, on the staged
//! path and, where MPI accepts device memory, on the direct path.

mod collectives;
mod exchange;
mod groups;
mod large;
mod mismatch;
pub(crate) mod operations;
mod streams;

use std::rc::Rc;

use gradsync::comm::mpi::device::{MpiDeviceCommunicator, MpiDeviceOptions, MpiPath};
use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::driver::{DeviceSlice, DeviceSliceMut};
use gradsync::memory::Cuda;
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Expected;
use gradsync_tests::suite::collectives::{patterns, reduced_once};
use gradsync_tests::suite::operands::Operands;

use crate::context::Context;
use crate::placed::Placed;
use crate::report::Report;
use crate::{SEVERAL, Suite};

pub(crate) fn suites() -> Vec<Suite> {
    const RANKS: &[usize] = &[1, 2, 4, 8];
    let suites = [
        Suite::new("mpi-collectives", RANKS, |context, report| {
            on_each_path(context, report, collectives::run);
        }),
        Suite::new("mpi-exchange", SEVERAL, |context, report| on_each_path(context, report, exchange::run)),
        Suite::new("mpi-streams", RANKS, |context, report| on_each_path(context, report, streams::run)),
        Suite {
            seconds: 300,
            ..Suite::new("mpi-large", &[2], |context, report| on_each_path(context, report, large::run))
        },
        Suite::new("mpi-mismatch", SEVERAL, mismatch::run),
        Suite::new("mpi-groups", RANKS, groups::run),
        Suite { seconds: 240, ..Suite::new("mpi-operations", RANKS, operations::run) },
    ];
    suites.into_iter().map(|suite| Suite { in_job: true, ..suite }).collect()
}

/// The communicator and the path of the cases.
struct Cases<'c> {
    context: &'c Context,
    comm: &'c MpiDeviceCommunicator,
    path: &'static str,
}

/// Lengths; the last but one takes several windows, and the last takes more windows than there are blocks of pinned memory.
const LENS: [usize; 6] = [0, 1, 33, 4097, 1_500_007, 10_485_779];
/// The lengths that every case uses.
const SHORT: &[usize] = &[0, 1, 33, 4097];

fn on_each_path(context: &Context, report: &mut Report, run: impl Fn(&Cases<'_>, &mut Report)) {
    let options = MpiDeviceOptions::default();
    let mut comms = None;
    report.case("communicators", || {
        let staged = context.mpi_communicator(options.with_path(MpiPath::Staged));
        assert!(!staged.is_direct(), "asked not to be");
        comms = Some((staged, context.mpi_communicator(options)));
    });
    let Some((staged, auto)) = comms else { return };
    run(&Cases { context, comm: &staged, path: "staged" }, report);
    if auto.is_direct() {
        run(&Cases { context, comm: &auto, path: "direct" }, report);
    } else {
        report.not_run("everything on the direct path", "this MPI does not take device memory");
    }
}

impl Cases<'_> {
    fn rank(&self) -> usize {
        self.context.rank
    }

    fn world_size(&self) -> usize {
        self.context.world_size
    }

    /// The name of a case, with its path.
    fn name(&self, what: &str) -> String {
        format!("{what}, {}", self.path)
    }

    /// A vector of arbitrary bits for each rank, NaN with payloads among them; all ranks compute the same vectors.
    fn patterns(&self, format: Format, len: usize) -> Vec<Array> {
        patterns(format, self.world_size(), len)
    }

    /// Data on the device, at an offset that depends on the length.
    fn placed(&self, array: &Array) -> Placed {
        Placed::new(&self.context.queue, array, array.len() % 3)
    }

    /// Memory in which an unwritten element is recognisable.
    fn room(&self, format: Format, len: usize) -> Placed {
        Placed::unwritten(&self.context.queue, format, len, (len + 1) % 3)
    }

    /// Waits for the communicator's work, and compares the data.
    #[track_caller]
    fn assert_holds(&self, what: &str, placed: &Placed, expected: &Array) {
        self.comm.synchronize(&self.context.queue).unwrap();
        assert!(placed.read_after_failure() == *expected, "{what}: other bits than expected");
    }
}

/// Reductions on the device have the bits of reductions on the host over the same MPI; with factors, those of a single rounding.
impl Operands for Cases<'_> {
    type Memory = Cuda;
    type Placed = Placed;

    fn comm(&self) -> &dyn Communicator<Cuda> {
        self.comm
    }

    fn place(&self, data: &Array, begin: usize) -> Placed {
        Placed::new(&self.context.queue, data, begin)
    }

    fn slice(placed: &Placed) -> DeviceSlice<'_> {
        placed.slice()
    }

    fn slice_mut(placed: &mut Placed) -> DeviceSliceMut<'_> {
        placed.slice_mut()
    }

    fn read(&self, placed: &Placed) -> Array {
        placed.read(self.comm)
    }

    fn reduced(&self, op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Rc<Expected> {
        if scaling != Scaling::NONE {
            return Rc::new(reduced_once(op, format, scaling, inputs));
        }
        let mut expected = Array::new(format, &inputs[self.rank()]);
        self.context.job().all_reduce(expected.slice_mut(), op).unwrap();
        Expected::bits(expected)
    }
}
