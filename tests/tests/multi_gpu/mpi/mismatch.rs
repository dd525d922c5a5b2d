//! Ranks with different calls, with operands that do not match, or absent ranks: an error on every rank, in time.

use std::time::Duration;

use gradsync::comm::mpi::device::{MpiDeviceCommunicator, MpiDeviceOptions, MpiPath};
use gradsync::comm::{Collectives, CommError, Communicator, Ranks, ReduceOp, Scaling};
use gradsync::driver::DeviceBuffer;
use gradsync::{DType, Error, Result};

use crate::context::Context;
use crate::report::Report;

type Comm = MpiDeviceCommunicator;
type Action = fn(&Context, &Comm) -> Result<()>;

fn f32s(context: &Context, len: usize) -> DeviceBuffer {
    DeviceBuffer::zeroed(&context.queue, DType::F32, len).unwrap()
}

fn sum(context: &Context, comm: &Comm, len: usize, scaling: Scaling) -> Result<()> {
    comm.all_reduce_scaled(f32s(context, len).as_mut_slice(), ReduceOp::Sum, scaling)
}

/// The call of most ranks, the different call of the last rank, and a word of each that the error must hold.
const MISMATCHES: [(Action, Action, [&str; 2]); 7] = [
    (
        |context, comm| sum(context, comm, 1010, Scaling::NONE),
        |context, comm| sum(context, comm, 1011, Scaling::NONE),
        ["1010", "1011"],
    ),
    (
        |context, comm| sum(context, comm, 5, Scaling { before: 0.5, after: 1.0 }),
        |context, comm| sum(context, comm, 5, Scaling { before: 0.25, after: 1.0 }),
        ["0.5", "0.25"],
    ),
    (
        |context, comm| comm.broadcast(f32s(context, 5).as_mut_slice(), 0),
        |context, comm| comm.broadcast(f32s(context, 5).as_mut_slice(), 1),
        ["root 0", "root 1"],
    ),
    (
        |context, comm| comm.all_gather_in_place(f32s(context, 840).as_mut_slice()),
        |context, comm| comm.reduce_scatter_in_place(f32s(context, 840).as_mut_slice(), ReduceOp::Max),
        ["all_gather", "reduce_scatter(max)"],
    ),
    (
        |context, comm| comm.broadcast(f32s(context, 6).as_mut_slice(), 0),
        |context, comm| {
            let mut data = DeviceBuffer::zeroed(&context.queue, DType::BF16, 6).unwrap();
            comm.broadcast(data.as_mut_slice(), 0)
        },
        ["f32", "bf16"],
    ),
    (
        |context, comm| sum(context, comm, 5, Scaling::NONE),
        |context, comm| comm.send(f32s(context, 5).as_slice(), 0),
        ["all_reduce", "send"],
    ),
    (
        |_, comm| comm.gather_words(&[5]).map(drop),
        |_, comm| comm.gather_words(&[5, 6]).map(drop),
        ["exchange", "exchange"],
    ),
];

/// Invalid operands that only the last rank can detect, and a word of its error.
const INVALID: [(Action, Action, &str); 4] = [
    (
        |context, comm| comm.all_gather_in_place(f32s(context, 840).as_mut_slice()),
        |context, comm| comm.all_gather_in_place(f32s(context, 1237).as_mut_slice()),
        "1237",
    ),
    (
        |context, comm| sum(context, comm, 5, Scaling::NONE),
        |context, comm| sum(context, comm, 5, Scaling { before: 1.0, after: f64::NAN }),
        "NaN",
    ),
    (
        |context, comm| comm.broadcast(f32s(context, 5).as_mut_slice(), 0),
        |context, comm| comm.broadcast(f32s(context, 5).as_mut_slice(), 77),
        "77",
    ),
    (
        |context, comm| {
            let (input, mut output) = (f32s(context, 840), f32s(context, 840));
            comm.all_to_all(input.as_slice(), output.as_mut_slice())
        },
        |context, comm| {
            let (input, mut output) = (f32s(context, 840 * 2), f32s(context, 840));
            comm.all_to_all(input.as_slice(), output.as_mut_slice())
        },
        "1680",
    ),
];

pub(super) fn run(context: &Context, report: &mut Report) {
    let last = context.world_size - 1;
    let fresh = || context.mpi_communicator(MpiDeviceOptions::default());
    for (index, (usual, odd, words)) in MISMATCHES.into_iter().enumerate() {
        report.case(&format!("mismatch {index}, {words:?}"), || {
            let comm = fresh();
            let error = if context.rank == last { odd } else { usual }(context, &comm).expect_err("the calls differ");
            assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
            let text = error.to_string();
            for word in words.into_iter().chain([format!("rank {last}").as_str()]) {
                assert!(text.contains(word), "\"{text}\" does not name {word}");
            }
            assert_sticks(context, &comm);
        });
    }
    for (usual, odd, word) in INVALID {
        report.case(&format!("operands that do not fit, {word}"), || {
            let comm = fresh();
            let error =
                if context.rank == last { odd } else { usual }(context, &comm).expect_err("operands do not fit");
            assert!(error.to_string().contains(word), "{error} does not name {word}");
            if context.rank != last {
                let is_invalid = matches!(&error, Error::Comm(CommError::InvalidCall { rank, .. }) if *rank == last);
                assert!(is_invalid, "{error:?}");
            }
            assert_sticks(context, &comm);
        });
    }
    report.case("transfers of different lengths", || {
        let (comm, mut data) = (fresh(), f32s(context, 1011));
        let outcome = match context.rank {
            0 => comm.send(data.as_slice().range(0..1010), 1),
            1 => comm.recv(data.as_mut_slice(), 0),
            _ => sum(context, &comm, 5, Scaling::NONE),
        };
        let error = outcome.expect_err("the lengths differ");
        assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
        assert!(["1010", "1011"].iter().all(|word| error.to_string().contains(word)), "{error}");
        assert_sticks(context, &comm);
    });
    report.case("a rank that does not come", || {
        let world = context.world().with_deadline(Duration::from_secs(1));
        let comm = Comm::new(world, &context.queue, MpiDeviceOptions::default()).unwrap();
        if context.rank == last {
            std::thread::sleep(Duration::from_secs(3));
        }
        let error = sum(context, &comm, 5, Scaling::NONE).expect_err("a rank is late");
        let is_named = matches!(&error, Error::Comm(CommError::Timeout { missing, .. }) if *missing == [last]);
        assert!(is_named, "{error:?}");
        assert_sticks(context, &comm);
    });
    report.case("paths that differ", || {
        let path = if context.rank == last { MpiPath::Auto } else { MpiPath::Staged };
        let made = Comm::new(context.world(), &context.queue, MpiDeviceOptions::default().with_path(path));
        let error = made.expect_err("the paths differ");
        let expected = format!("rank 0 has the path Staged, rank {last} has Auto");
        assert!(error.to_string().contains(&expected), "{error}");
    });
    report.case("the direct path is there, or refused with a reason", || {
        let auto = fresh();
        let options = MpiDeviceOptions::default().with_path(MpiPath::Direct);
        match Comm::new(context.world(), &context.queue, options) {
            Ok(direct) => assert!(direct.is_direct() && auto.is_direct()),
            Err(Error::InvalidArgument { reason, .. }) => {
                assert!(!auto.is_direct() && reason.contains("MPIX_Query_cuda_support"), "{reason}");
            }
            Err(error) => panic!("{error:?}"),
        }
    });
}

/// A communicator that has failed refuses every call, at once.
#[track_caller]
fn assert_sticks(context: &Context, comm: &Comm) {
    let again = sum(context, comm, 5, Scaling::NONE).expect_err("a communicator that has failed");
    assert!(matches!(again, Error::Comm(_)), "{again:?}");
    let waited = comm.synchronize(&context.queue).expect_err("a communicator that has failed");
    assert!(matches!(waited, Error::Comm(_)), "{waited:?}");
    let gathered = comm.gather_words(&[1]).expect_err("a communicator that has failed");
    assert!(matches!(gathered, Error::Comm(_)), "{gathered:?}");
}
