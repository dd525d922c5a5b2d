//! Operands of a case in any memory, between guards that reveal a write beside them.

use std::rc::Rc;

use gradsync::comm::{Communicator, ReduceOp, Scaling};
use gradsync::kernels::KernelMemory;
use gradsync::memory::{Host, Memory};
use gradsync::{Slice, SliceMut};

use super::checks::Expected;
use super::collectives::reduced_once;
use crate::array::Array;
use crate::oracle::Format;

/// The communicator of a rank, and memory that it takes operands in.
pub trait Operands {
    /// The kind of memory.
    type Memory: KernelMemory;
    /// The data of one operand.
    type Placed;

    /// The communicator.
    fn comm(&self) -> &dyn Communicator<Self::Memory>;

    /// Data that begin `begin` elements after an aligned address.
    fn place(&self, data: &Array, begin: usize) -> Self::Placed;

    /// The data, to read.
    fn slice(placed: &Self::Placed) -> <Self::Memory as Memory>::Slice<'_>;

    /// The data, to write.
    fn slice_mut(placed: &mut Self::Placed) -> <Self::Memory as Memory>::SliceMut<'_>;

    /// Waits for the communicator's work, and returns the data.
    ///
    /// # Panics
    /// If memory beside the data has been written.
    fn read(&self, placed: &Self::Placed) -> Array;

    /// The result of a reduction of one vector per rank, as precisely as the transport documents it.
    fn reduced(&self, op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Rc<Expected>;

    /// Room in which unwritten elements are visible.
    fn room(&self, format: Format, len: usize, begin: usize) -> Self::Placed {
        self.place(&Array::unwritten(format, len), begin)
    }
}

/// Operands in host memory.
pub struct OnHost<'c>(pub &'c dyn Communicator);

/// The number of guard elements after the data.
const BEHIND: usize = 3;

/// Data in host memory, with guards before and behind them.
pub struct Guarded {
    whole: Array,
    begin: usize,
}

impl Operands for OnHost<'_> {
    type Memory = Host;
    type Placed = Guarded;

    fn comm(&self) -> &dyn Communicator {
        self.0
    }

    fn place(&self, data: &Array, begin: usize) -> Guarded {
        let guard = |len: usize| Array::unwritten(data.format(), len);
        Guarded { whole: Array::concat(&[guard(begin), data.clone(), guard(BEHIND)]), begin }
    }

    fn slice(placed: &Guarded) -> Slice<'_> {
        placed.whole.part(placed.begin..placed.whole.len() - BEHIND)
    }

    fn slice_mut(placed: &mut Guarded) -> SliceMut<'_> {
        let end = placed.whole.len() - BEHIND;
        placed.whole.part_mut(placed.begin..end)
    }

    fn read(&self, placed: &Guarded) -> Array {
        let Guarded { whole, begin } = placed;
        let end = whole.len() - BEHIND;
        let guards = [whole.range(0..*begin), whole.range(end..whole.len())];
        assert!(guards.iter().all(|guard| *guard == Array::unwritten(whole.format(), guard.len())), "a write beside");
        whole.range(*begin..end)
    }

    fn reduced(&self, op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Rc<Expected> {
        Rc::new(reduced_once(op, format, scaling, inputs))
    }
}
