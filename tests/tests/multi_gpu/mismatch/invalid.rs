//! A call that is invalid on one rank by itself: that rank's own error gives the reason, and the others' errors name the rank.

use std::time::Instant;

use gradsync::comm::{Collectives, Communicator, Operation, Ranks, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, DeviceSlice, Queue};
use gradsync::{CommError, DType, Error};

use super::{Groups, QUICK, SUM, Step, comm_error, f32s};
use crate::report::Report;

/// A call that is invalid on any rank, and its error there.
struct Invalid {
    name: &'static str,
    step: Step,
    is_own: fn(&Error) -> bool,
}

const CASES: [Invalid; 6] = [
    Invalid {
        name: "lengths that do not fit",
        step: |comm, queue| {
            let (input, mut output) = (f32s(queue, 5), f32s(queue, 6));
            comm.all_reduce_into(input.as_slice(), output.as_mut_slice(), ReduceOp::Sum, Scaling::NONE)
        },
        is_own: |error| matches!(error, Error::LengthMismatch { left: 5, right: 6, .. }),
    },
    Invalid {
        name: "dtypes that do not fit",
        step: |comm, queue| {
            let input = f32s(queue, 5);
            let mut output = DeviceBuffer::zeroed(queue, DType::F16, 5).unwrap();
            comm.all_reduce_into(input.as_slice(), output.as_mut_slice(), ReduceOp::Sum, Scaling::NONE)
        },
        is_own: |error| matches!(error, Error::DTypeMismatch { left: DType::F32, right: DType::F16, .. }),
    },
    Invalid {
        name: "a length without equal shards",
        step: |comm, queue| {
            let len = 3 * comm.world_size() + 1;
            comm.reduce_scatter_in_place(f32s(queue, len).as_mut_slice(), ReduceOp::Sum)
        },
        is_own: |error| matches!(error, Error::LengthMismatch { .. }),
    },
    Invalid {
        name: "a root that is no rank",
        step: |comm, queue| comm.broadcast(f32s(queue, 5).as_mut_slice(), 99),
        is_own: |error| matches!(error, Error::Comm(CommError::InvalidPeer { peer: 99, .. })),
    },
    Invalid {
        name: "operands of two queues",
        step: |comm, queue| {
            let other = Queue::new(queue.ordinal()).unwrap();
            let (input, mut output) = (f32s(&other, 5), f32s(queue, 5));
            comm.all_reduce_into(input.as_slice(), output.as_mut_slice(), ReduceOp::Sum, Scaling::NONE)
        },
        is_own: |error| matches!(error, Error::InvalidArgument { reason, .. } if reason.contains("different queues")),
    },
    Invalid {
        name: "a sum of a type that is only moved",
        step: |comm, queue| {
            let data = f32s(queue, 5);
            let address = data.as_slice().address();
            // SAFETY: the memory has room for as many elements, and nothing else uses it.
            unsafe {
                let input = DeviceSlice::from_raw_parts(queue, address, DType::I16, 5);
                comm.all_reduce_raw(input, address, ReduceOp::Sum)
            }
        },
        is_own: |error| matches!(error, Error::InvalidArgument { reason, .. } if reason.contains("elements of i16")),
    },
];

pub(super) fn run(groups: &mut Groups<'_>, report: &mut Report) {
    for (index, invalid) in CASES.iter().enumerate() {
        let odd = if index % 2 == 0 { groups.world_size() - 1 } else { 0 };
        report.case(invalid.name, || {
            let (rank, queue) = (groups.rank(), groups.queue().clone());
            let failure = groups.fail(|comm| {
                let begun = Instant::now();
                let error = if rank == odd {
                    let own = (invalid.step)(comm, &queue).expect_err("no rank can make this call");
                    assert!((invalid.is_own)(&own), "{own:?}");
                    let later = comm_error(SUM(comm, &queue).expect_err("it has failed"));
                    assert!(later.to_string().ends_with(&own.to_string()), "\"{later}\" does not say \"{own}\"");
                    later
                } else {
                    let outcome = SUM(comm, &queue).and_then(|()| comm.synchronize(&queue));
                    comm_error(outcome.expect_err("another rank makes an invalid call"))
                };
                assert!(begun.elapsed() < QUICK, "{error}: only after {:?}", begun.elapsed());
                let sum = Operation::AllReduce(ReduceOp::Sum);
                let is_named = matches!(
                    &error,
                    CommError::InvalidCall { operation, rank, .. } if (*operation, *rank) == (sum, odd)
                );
                assert!(is_named, "{error:?}, where rank {odd} made an invalid call");
            });
            assert_eq!(failure.blamed(), [odd]);
        });
    }
}
