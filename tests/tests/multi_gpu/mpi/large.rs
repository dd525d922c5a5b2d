//! More than 2³¹ elements, and bytes, in one call.

use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use gradsync::{DType, bf16};
use gradsync_tests::oracle::Format;

use super::Cases;
use crate::large;
use crate::report::Report;

/// The length in bf16: 2³¹ and some elements.
const LEN: usize = (1 << 31) + 1025;
/// The period of the numbers is a prime.
const PERIOD: usize = 1_000_003;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let peer = 1 - rank;
    let mut data = None;
    report.case(&cases.name("memory"), || data = Some(DeviceBuffer::zeroed(queue, DType::BF16, LEN).unwrap()));
    let Some(mut data) = data else { return };
    report.case(&cases.name("all_reduce of 2³¹ bf16"), || {
        fill(data.as_mut_slice(), rank);
        comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
        comm.synchronize(queue).unwrap();
        check(data.as_slice(), |index| number(0, index) + number(1, index));
    });
    report.case(&cases.name("broadcast of 2³¹ bf16"), || {
        fill(data.as_mut_slice(), rank + 2);
        comm.broadcast(data.as_mut_slice(), 1).unwrap();
        comm.synchronize(queue).unwrap();
        check(data.as_slice(), |index| number(3, index));
    });
    // Each direction transfers half of it, which is still more than 2³¹ bytes.
    report.case(&cases.name("2³¹ bytes exchanged"), || {
        let half = LEN / 2;
        fill(data.as_mut_slice().range_mut(0..half), rank + 4);
        let place = |begin: usize| {
            let address = data.as_slice().address() + (begin * 2) as u64;
            // SAFETY: the bytes of one half of the memory.
            unsafe { DeviceSlice::from_raw_parts(queue, address, DType::U8, half * 2) }
        };
        // SAFETY: two halves of memory that nothing else uses.
        unsafe { crate::transfers::exchange_raw(comm, &[(peer, place(0))], &[(peer, place(half))]) }.unwrap();
        comm.synchronize(queue).unwrap();
        check(data.as_slice().range(half..2 * half), |index| number(peer + 4, index));
    });
}

/// A rank's number at an index: an integer small enough for sums of two to be exact.
fn number(rank: usize, index: usize) -> f32 {
    (((index % PERIOD) * 7919 + rank * 613) % 127) as f32 - 63.0
}

fn fill(data: DeviceSliceMut<'_>, rank: usize) {
    let pattern: Vec<bf16> = (0..PERIOD).map(|index| bf16::from_f32(number(rank, index))).collect();
    let pattern = DeviceBuffer::from_host(data.as_slice().queue(), (&pattern).into()).unwrap();
    large::fill(data, &pattern);
}

fn check(data: DeviceSlice<'_>, expected: impl Fn(usize) -> f32) {
    for (window, got) in large::windows(data, Format::BF16, &[]) {
        let expected: Vec<f64> = window.clone().map(|index| expected(index).into()).collect();
        assert_eq!(got, expected, "elements {window:?}");
    }
}
