//! [`KernelMemory`]: the kernels that operations use on either memory.

use super::cpu;
#[cfg(feature = "cuda")]
use super::cuda;
#[cfg(feature = "cuda")]
use crate::driver::{DeviceBuffer, DeviceSliceMut};
use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::{Host, HostBuffer, Memory};

/// Memory on which the element-wise kernels run: [`Host`] and `Cuda`. Each function is the kernel of its name, of [`cpu`] and of `cuda`, with its
/// errors; on a GPU it is put into the queue of its operands, and one launch serves all tensors of a list.
#[allow(missing_docs)] // each function is the kernel of its name
pub trait KernelMemory: Memory {
    fn zero(dst: Self::SliceMut<'_>) -> Result<()>;
    fn cast(dst: Self::SliceMut<'_>, src: Self::Slice<'_>) -> Result<()>;
    fn accumulate(sum: Self::SliceMut<'_>, value: Self::Slice<'_>) -> Result<()>;
    fn scale(dst: Self::SliceMut<'_>, src: Self::Slice<'_>, factor: f64) -> Result<()>;
    fn all_finite(src: Self::Slice<'_>) -> Result<bool>;
    fn zero_all(tensors: &mut [Self::SliceMut<'_>]) -> Result<()>;
    fn cast_all(destinations: &mut [Self::SliceMut<'_>], sources: &[Self::Slice<'_>]) -> Result<()>;
    fn accumulate_all(sums: &mut [Self::SliceMut<'_>], values: &[Self::Slice<'_>]) -> Result<()>;
    fn pack(dst: Self::SliceMut<'_>, offsets: &[usize], sources: &[Self::Slice<'_>]) -> Result<()>;
    fn unpack(destinations: &mut [Self::SliceMut<'_>], src: Self::Slice<'_>, offsets: &[usize]) -> Result<()>;

    /// Zeros of the dtype of other elements, ordered as they are.
    #[doc(hidden)]
    fn zeros_like(operation: &'static str, like: Self::Slice<'_>, len: usize) -> Result<Self::Buffer>;

    /// Room for elements of the dtype of others, ordered as they are; its contents are unspecified.
    #[doc(hidden)]
    fn room_like(operation: &'static str, like: Self::Slice<'_>, len: usize) -> Result<Self::Buffer> {
        Self::zeros_like(operation, like, len)
    }

    /// The elements of all slices as one, if each begins where the one before ends, as far as that can be told.
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

impl KernelMemory for Host {
    kernels_of!(cpu);

    fn zero(dst: Self::SliceMut<'_>) -> Result<()> {
        cpu::zero(dst);
        Ok(())
    }

    fn all_finite(src: Self::Slice<'_>) -> Result<bool> {
        Ok(cpu::all_finite(src))
    }

    fn zero_all(tensors: &mut [Self::SliceMut<'_>]) -> Result<()> {
        cpu::zero_all(tensors);
        Ok(())
    }

    fn zeros_like(operation: &'static str, like: Self::Slice<'_>, len: usize) -> Result<HostBuffer> {
        HostBuffer::zeroed(operation, like.dtype(), len)
    }

    /// Of slices of the host only one alone: nobody knows whether two belong to one allocation.
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

    fn zeros_like(_: &'static str, like: Self::Slice<'_>, len: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::zeroed(like.queue(), like.dtype(), len)
    }

    fn room_like(_: &'static str, like: Self::Slice<'_>, len: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::allocate(like.queue(), like.dtype(), len)
    }

    fn joined<'a>(slices: &'a mut [Self::SliceMut<'_>]) -> Option<Self::SliceMut<'a>> {
        let places: Vec<(u64, usize)> =
            slices.iter().map(|slice| slice.as_slice()).map(|view| (view.address(), view.len())).collect();
        let first = slices.first()?.as_slice();
        let (address, len) = joined_range(&places, first.dtype().size_bytes())?;
        // SAFETY: the slices are borrowed mutably, belong to one queue, and fill this range without a gap.
        Some(unsafe { DeviceSliceMut::from_raw_parts(first.queue(), address, first.dtype(), len) })
    }
}

/// The address and the length of one range that slices with these addresses and lengths fill, of elements of `size` bytes. Slices without
/// elements lie anywhere.
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
    fn slices_are_one_only_without_gaps_and_in_order() {
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
