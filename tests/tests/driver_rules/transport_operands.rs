//! Operations over a transport, told apart by the memory that they give it.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gradsync::comm::{Collective, Communicator, Operands, Ranks, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::memory::Cuda;
use gradsync::ops::{OrderedAllReduce, all_reduce_tensors};
use gradsync::{DType, GradientBuffer, Result};

use crate::{after, lines, queue, say};

/// Rank 0 of two, which records the memory of its calls and moves nothing.
#[derive(Default)]
struct Transport {
    /// The addresses, lengths and dtypes.
    used: RefCell<Vec<(u64, usize, DType)>>,
    panics: Cell<bool>,
}

fn of(data: DeviceSlice<'_>) -> (u64, usize, DType) {
    (data.address(), data.len(), data.dtype())
}

impl Ranks for Transport {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        2
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        Ok([words, words].concat())
    }
}

impl Communicator<Cuda> for Transport {
    fn run(&self, collective: Collective<'_, Cuda>) -> Result<()> {
        let Collective::AllReduce { operands: Operands::InPlace(data), .. } = collective else {
            unreachable!("an all-reduce in place")
        };
        self.used.borrow_mut().push(of(data.as_slice()));
        Ok(())
    }

    fn exchange(&self, sends: &[(usize, DeviceSlice<'_>)], _: &mut [(usize, DeviceSliceMut<'_>)]) -> Result<()> {
        assert!(!self.panics.get(), "the transport panics");
        self.used.borrow_mut().extend(sends.iter().map(|(_, data)| of(*data)));
        Ok(())
    }
}

#[test]
fn case_of_a_panic() {
    let Some(queue) = queue() else { return };
    let transport = Transport::default();
    let mut buffer = GradientBuffer::on_queue(&queue, DType::F32, 2, [("tensor", [1000])]).unwrap();
    let mut sum = OrderedAllReduce::over_transport(&transport, &buffer, DType::BF16, ReduceOp::Sum).unwrap();
    transport.panics.set(true);
    catch_unwind(AssertUnwindSafe(|| sum.all_reduce(&mut buffer))).expect_err("the transport panics");
    transport.panics.set(false);
    sum.all_reduce(&mut buffer).unwrap();
    let used = transport.used.take();
    assert!(used.len() == 2 && used.iter().all(|(_, _, dtype)| *dtype == DType::BF16), "{used:?}");
    say("the end");
}

#[test]
fn ordered_all_reduce_keeps_its_wire_dtype_after_a_panic() {
    after(&lines("transport_operands::case_of_a_panic"), "the end");
}

/// All-reduces two tensors of 512 elements side by side, where the first one begins `elements` after a page of 1024. Returns whether both
/// were one operand.
fn are_one_operand(queue: &Queue, elements: usize) -> bool {
    let buffer = DeviceBuffer::zeroed(queue, DType::F32, 4096).unwrap();
    let page = buffer.as_slice().address().next_multiple_of(4096);
    let tensor = |index: usize| {
        let address = page + 4 * (elements + 512 * index) as u64;
        // SAFETY: within the buffer, which outlives the call; this driver runs no kernels.
        unsafe { DeviceSliceMut::from_raw_parts(queue, address, DType::F32, 512) }
    };
    let (transport, mut tensors) = (Transport::default(), [tensor(0), tensor(1)]);
    all_reduce_tensors(&transport, &mut tensors, ReduceOp::Sum, Scaling::NONE).unwrap();
    let used = transport.used.take();
    assert!(used.len() == 1 && used[0].1 == 1024, "{used:?}");
    used[0].0 == page + 4 * elements as u64
}

#[test]
fn case_of_neighbours() {
    let Some(queue) = queue() else { return };
    assert!(are_one_operand(&queue, 0), "both are one page");
    assert!(!are_one_operand(&queue, 512), "the second one is another allocation");
    assert!(!are_one_operand(&queue, 100), "the second one ends in another allocation");
    say("the end");
}

#[test]
fn all_reduce_tensors_never_joins_two_allocations() {
    after(&lines("transport_operands::case_of_neighbours"), "the end");
}
