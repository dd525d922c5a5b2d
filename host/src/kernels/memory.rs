//! [`KernelMemory`]: the kernels that operations use on either memory.

use gradsync_device::math::step::{STEP_MEMORY_LEN, StepMemory, StepRules};

use super::cpu::{self, Fingerprint};
#[cfg(feature = "cuda")]
use super::cuda;
use super::optimizer::{TensorUpdate, UpdateRule};
#[cfg(feature = "cuda")]
use crate::driver::{DeviceBuffer, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::{Host, HostBuffer, Memory};
use crate::slice::{Slice, SliceMut, check_floats};

/// The element-wise kernels on one kind of memory, [`Host`] or `Cuda`, for operations that are written once for both.
///
/// On a GPU the kernel is enqueued into the queue of its operands, one launch serves all tensors of a list with the same dtypes, and
/// functions may also return `Error::Cuda`, or [`Error::InvalidArgument`](crate::Error::InvalidArgument) for operands of different queues.
/// Lengths and offsets are in elements.
///
/// Operands may have any floating-point dtypes. Functions that cast or compute return
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for integers, `bool`, and elements that are not aligned. Where dtypes differ, or
/// where numbers are added or multiplied, the working precision is `f64` if one of the dtypes is `f64`, else `f32`, and results are rounded
/// once, to nearest with ties to even. After an error that is not the driver's, nothing has been written.
pub trait KernelMemory: Memory {
    /// Sets every element to zero.
    ///
    /// # Errors
    /// `Error::Cuda`; never on the host.
    fn zero(dst: Self::SliceMut<'_>) -> Result<()>;

    /// Computes `dst[i] = D(src[i])`, where `D` is the dtype of `dst`: exact if `D` can represent the value, otherwise rounded once.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for operands of different lengths.
    fn cast(dst: Self::SliceMut<'_>, src: Self::Slice<'_>) -> Result<()>;

    /// Computes `sum[i] = T(sum[i] + value[i])`, where `T` is the dtype of `sum`: added in the working precision, rounded once.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for operands of different lengths.
    fn accumulate(sum: Self::SliceMut<'_>, value: Self::Slice<'_>) -> Result<()>;

    /// Computes `dst[i] = D(src[i] × factor)`, where `D` is the dtype of `dst`: multiplied in the working precision, to which `factor` is
    /// rounded first, and rounded once.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for operands of different lengths.
    fn scale(dst: Self::SliceMut<'_>, src: Self::Slice<'_>, factor: f64) -> Result<()>;

    /// Returns whether no element is NaN or infinite; true for no elements, and for integers. On a GPU the call waits for the queue.
    ///
    /// # Errors
    /// `Error::Cuda`, also for earlier work of the queue that failed; never on the host.
    fn all_finite(src: Self::Slice<'_>) -> Result<bool>;

    /// Sets every element of all tensors to zero.
    ///
    /// # Errors
    /// `Error::Cuda`, and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for tensors of different queues; never on the host.
    fn zero_all(tensors: &mut [Self::SliceMut<'_>]) -> Result<()>;

    /// Computes `destinations[t] = sources[t]` for every tensor `t`, like [`cast`](Self::cast).
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for lists of different lengths, or naming a tensor whose lengths differ.
    fn cast_all(destinations: &mut [Self::SliceMut<'_>], sources: &[Self::Slice<'_>]) -> Result<()>;

    /// Computes `sums[t] += values[t]` for every tensor `t`, like [`accumulate`](Self::accumulate).
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for lists of different lengths, or naming a tensor whose lengths differ.
    fn accumulate_all(sums: &mut [Self::SliceMut<'_>], values: &[Self::Slice<'_>]) -> Result<()>;

    /// Copies source `t` to element `offsets[t]` of the arena `dst`, like [`cast`](Self::cast). The rest of the arena is left unchanged.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless there is one offset per source;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming a source that ends beyond the arena, or two that overlap in it.
    fn pack(dst: Self::SliceMut<'_>, offsets: &[usize], sources: &[Self::Slice<'_>]) -> Result<()>;

    /// Copies destination `t` from element `offsets[t]` of the arena `src`, like [`cast`](Self::cast). Ranges in the arena may overlap.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless there is one offset per destination;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming a destination that ends beyond the arena.
    fn unpack(destinations: &mut [Self::SliceMut<'_>], src: Self::Slice<'_>, offsets: &[usize]) -> Result<()>;

    /// A hash of all bits, and the first element that is not finite; on a GPU it waits for the queue.
    #[doc(hidden)]
    fn fingerprint(src: Self::Slice<'_>) -> Result<Fingerprint>;

    /// Allocates `len` zeros, on the queue of `near`.
    #[doc(hidden)]
    fn zeros_near(operation: &'static str, near: Self::Slice<'_>, dtype: DType, len: usize) -> Result<Self::Buffer>;

    /// Allocates `len` zeros with the dtype of `like`, on its queue.
    #[doc(hidden)]
    fn zeros_like(operation: &'static str, like: Self::Slice<'_>, len: usize) -> Result<Self::Buffer> {
        Self::zeros_near(operation, like, Self::dtype(like), len)
    }

    /// Allocates `len` elements with the dtype of `like`, on its queue; their values are unspecified.
    #[doc(hidden)]
    fn room_like(operation: &'static str, like: Self::Slice<'_>, len: usize) -> Result<Self::Buffer> {
        Self::zeros_like(operation, like, len)
    }

    /// Computes the sum of squares of each chunk of the tensors, in the order of `gradsync_device::math::sums`. A tensor's sums, of `f64`, begin
    /// at its number of `first_chunks`.
    #[doc(hidden)]
    fn square_sums(sums: Self::SliceMut<'_>, first_chunks: &[usize], tensors: &[Self::Slice<'_>]) -> Result<()>;

    /// Computes the memory of an optimizer's next step from the sums of all chunks.
    #[doc(hidden)]
    fn advance_step(step: Self::SliceMut<'_>, rules: &StepRules, sums: Self::Slice<'_>) -> Result<()>;

    /// Refuses dtypes that no kernel updates: of weights and state, and of gradients, and of the output, if there is one: a copy of the weights or
    /// `deltas`.
    #[doc(hidden)]
    fn check_update(
        operation: &'static str,
        name: &str,
        inputs: [DType; 2],
        output: Option<DType>,
        deltas: bool,
    ) -> Result<()>;

    /// Updates tensors in a step.
    #[doc(hidden)]
    fn update(rule: UpdateRule, step: Self::Slice<'_>, tensors: Vec<TensorUpdate<'_, Self>>) -> Result<()>;

    /// All slices as one slice, if each is known to begin at the end of the preceding one in the same allocation.
    #[doc(hidden)]
    fn joined<'a>(slices: &'a mut [Self::SliceMut<'_>]) -> Option<Self::SliceMut<'a>>;
}

/// The kernels that are the same functions in both modules.
macro_rules! kernels_of {
    ($kernels:ident) => {
        fn cast(dst: Self::SliceMut<'_>, src: Self::Slice<'_>) -> Result<()> {
            $kernels::cast(dst, src)
        }

        fn accumulate(sum: Self::SliceMut<'_>, value: Self::Slice<'_>) -> Result<()> {
            $kernels::accumulate(sum, value)
        }

        fn scale(dst: Self::SliceMut<'_>, src: Self::Slice<'_>, factor: f64) -> Result<()> {
            $kernels::scale(dst, src, factor)
        }

        fn cast_all(destinations: &mut [Self::SliceMut<'_>], sources: &[Self::Slice<'_>]) -> Result<()> {
            $kernels::cast_all(destinations, sources)
        }

        fn accumulate_all(sums: &mut [Self::SliceMut<'_>], values: &[Self::Slice<'_>]) -> Result<()> {
            $kernels::accumulate_all(sums, values)
        }

        fn pack(dst: Self::SliceMut<'_>, offsets: &[usize], sources: &[Self::Slice<'_>]) -> Result<()> {
            $kernels::pack(dst, offsets, sources)
        }

        fn unpack(destinations: &mut [Self::SliceMut<'_>], src: Self::Slice<'_>, offsets: &[usize]) -> Result<()> {
            $kernels::unpack(destinations, src, offsets)
        }
    };
}

/// Refuses floating-point numbers that are not aligned; integers are all finite.
fn check_numbers(operation: &'static str, src: Slice<'_>) -> Result<()> {
    if src.dtype().is_float() { check_floats(operation, src) } else { Ok(()) }
}

/// Numbers that the library has allocated as `f64`.
fn numbers(data: SliceMut<'_>) -> &mut [f64] {
    data.typed().expect("numbers of f64")
}

impl KernelMemory for Host {
    kernels_of!(cpu);

    fn zero(dst: Self::SliceMut<'_>) -> Result<()> {
        cpu::zero(dst);
        Ok(())
    }

    fn all_finite(src: Self::Slice<'_>) -> Result<bool> {
        check_numbers("all_finite", src)?;
        Ok(cpu::all_finite(src))
    }

    fn zero_all(tensors: &mut [Self::SliceMut<'_>]) -> Result<()> {
        cpu::zero_all(tensors);
        Ok(())
    }

    fn fingerprint(src: Self::Slice<'_>) -> Result<Fingerprint> {
        check_numbers("fingerprint", src)?;
        Ok(Fingerprint::of(src))
    }

    fn zeros_near(operation: &'static str, _: Self::Slice<'_>, dtype: DType, len: usize) -> Result<HostBuffer> {
        HostBuffer::zeroed(operation, dtype, len)
    }

    fn square_sums(sums: Self::SliceMut<'_>, first_chunks: &[usize], tensors: &[Self::Slice<'_>]) -> Result<()> {
        cpu::optimizer::square_sums(numbers(sums), first_chunks, tensors);
        Ok(())
    }

    fn advance_step(step: Self::SliceMut<'_>, rules: &StepRules, sums: Self::Slice<'_>) -> Result<()> {
        let step: &mut [f64; STEP_MEMORY_LEN] = numbers(step).try_into().expect("the memory of a step");
        let sums = sums.typed().expect("sums of f64");
        *step = cpu::optimizer::advance_step(&StepMemory::from_numbers(*step), rules, sums).to_numbers();
        Ok(())
    }

    /// The CPU updates any dtypes.
    fn check_update(_: &'static str, _: &str, _: [DType; 2], _: Option<DType>, _: bool) -> Result<()> {
        Ok(())
    }

    fn update(rule: UpdateRule, step: Self::Slice<'_>, tensors: Vec<TensorUpdate<'_, Self>>) -> Result<()> {
        let step: &[f64] = step.typed().expect("numbers of f64");
        let step = StepMemory::from_numbers(step.try_into().expect("the memory of a step"));
        cpu::optimizer::update(rule, &step, tensors);
        Ok(())
    }

    /// Only a single slice: whether two slices belong to one allocation is unknown on the host.
    fn joined<'a>(slices: &'a mut [Self::SliceMut<'_>]) -> Option<Self::SliceMut<'a>> {
        let [only] = slices else { return None };
        Some(only.reborrow())
    }
}

#[cfg(feature = "cuda")]
impl KernelMemory for Cuda {
    kernels_of!(cuda);

    fn zero(dst: Self::SliceMut<'_>) -> Result<()> {
        cuda::zero(dst)
    }

    fn all_finite(src: Self::Slice<'_>) -> Result<bool> {
        cuda::all_finite(src)
    }

    fn zero_all(tensors: &mut [Self::SliceMut<'_>]) -> Result<()> {
        cuda::zero_all(tensors)
    }

    fn fingerprint(src: Self::Slice<'_>) -> Result<Fingerprint> {
        const PIECE_BYTES: usize = 64 * cpu::BLOCK_BYTES;
        let piece_len = PIECE_BYTES / src.dtype().size_bytes();
        let mut piece = HostBuffer::zeroed("fingerprint", src.dtype(), piece_len.min(src.len()))?;
        let mut fingerprint = Fingerprint::default();
        for begin in (0..src.len()).step_by(piece_len) {
            let range = begin..src.len().min(begin + piece_len);
            let mut read = piece.as_mut_slice().range_mut(0..range.len());
            src.range(range).copy_to_host(read.reborrow())?;
            fingerprint.add(read.as_slice());
        }
        Ok(fingerprint)
    }

    fn zeros_near(_: &'static str, near: Self::Slice<'_>, dtype: DType, len: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::zeroed(near.queue(), dtype, len)
    }

    fn room_like(_: &'static str, like: Self::Slice<'_>, len: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::of_any_type(like.queue(), like.dtype(), len)
    }

    fn square_sums(sums: Self::SliceMut<'_>, first_chunks: &[usize], tensors: &[Self::Slice<'_>]) -> Result<()> {
        cuda::optimizer::square_sums(sums, first_chunks, tensors)
    }

    fn advance_step(step: Self::SliceMut<'_>, rules: &StepRules, sums: Self::Slice<'_>) -> Result<()> {
        cuda::optimizer::advance_step(step, rules, sums)
    }

    fn check_update(
        operation: &'static str,
        name: &str,
        inputs: [DType; 2],
        output: Option<DType>,
        deltas: bool,
    ) -> Result<()> {
        cuda::optimizer::check_update(operation, name, inputs, output, deltas)
    }

    fn update(rule: UpdateRule, step: Self::Slice<'_>, tensors: Vec<TensorUpdate<'_, Self>>) -> Result<()> {
        cuda::optimizer::update(rule, step, tensors)
    }

    fn joined<'a>(slices: &'a mut [Self::SliceMut<'_>]) -> Option<Self::SliceMut<'a>> {
        let ranges: Vec<(u64, usize)> =
            slices.iter().map(|slice| slice.as_slice()).map(|view| (view.address(), view.len())).collect();
        let first = slices.first()?.as_slice();
        let (address, len) = joined_range(&ranges, first.dtype().size_bytes())?;
        // Two allocations may lie side by side, and a slice is never of more than one.
        if ranges.iter().filter(|(_, len)| *len > 0).count() > 1 {
            let (begin, bytes) = first.queue().allocation_of(address).ok()?;
            if address + (len * first.dtype().size_bytes()) as u64 > begin + bytes as u64 {
                return None;
            }
        }
        // SAFETY: the slices are borrowed mutably, belong to one queue and one allocation, and fill this range without a gap.
        Some(unsafe { DeviceSliceMut::from_raw_parts(first.queue(), address, first.dtype(), len) })
    }
}

/// The address and the length of the range that slices with these addresses and lengths fill without gaps, in order, of elements of `size`
/// bytes. Slices without elements may have any address.
#[cfg(feature = "cuda")]
fn joined_range(slices: &[(u64, usize)], size: usize) -> Option<(u64, usize)> {
    let mut filled = slices.iter().filter(|(_, len)| *len > 0);
    let begin = filled.clone().next().map_or(0, |(address, _)| *address);
    let len =
        filled.try_fold(0, |end, (address, len)| (*address == begin + (end * size) as u64).then_some(end + len))?;
    Some((begin, len))
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn joined_range_takes_slices_without_gaps_and_in_order() {
        let begin = 1 << 20;
        let of = |slices: &[(u64, usize)]| joined_range(slices, 2);
        assert_eq!(of(&[]), Some((0, 0)));
        assert_eq!(of(&[(begin, 7)]), Some((begin, 7)));
        assert_eq!(of(&[(begin, 7), (begin + 14, 1), (begin + 16, 3)]), Some((begin, 11)));
        assert_eq!(of(&[(begin, 7), (begin + 14, 1), (begin + 18, 3)]), None);
        assert_eq!(of(&[(begin + 14, 1), (begin, 7)]), None);
        // Slices without elements have any address or none.
        assert_eq!(of(&[(0, 0), (0, 0)]), Some((0, 0)));
        assert_eq!(of(&[(3, 0), (begin, 7), (0, 0), (begin + 14, 1), (9, 0)]), Some((begin, 8)));
        assert_eq!(of(&[(begin, 7), (0, 0), (begin + 256, 1)]), None);
    }
}
