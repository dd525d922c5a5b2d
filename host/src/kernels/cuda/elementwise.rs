//! Float-wise kernels on the device: [`zero`], [`cast`], [`accumulate`], [`scale`], [`all_finite`], and kernels on many tensors in one
//! launch: [`zero_all`], [`cast_all`], [`accumulate_all`], [`pack`], [`unpack`].
//!
//! Any alignment of the dtype is supported; multiples of 16 bytes are fast.

use gradsync_device::abi::{COPY_TILES, CopySpan, ZERO_TILE_BYTES, finite_tile_len, tile_len};

use super::{pointer, pointer_mut, upload_words, words_of};
use crate::driver::{Argument, DeviceSlice, DeviceSliceMut, Queue};
use crate::error::{Result, check_float, same_len};
use crate::kernels::{Overlap, check_offsets};

/// Enqueues setting every element to zero. Any dtype and length.
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda).
pub fn zero(dst: DeviceSliceMut<'_>) -> Result<()> {
    let view = dst.as_slice();
    let bytes = view.len() * view.dtype().size_bytes();
    let arguments = [pointer_mut(&dst), bytes.into()];
    // SAFETY: the slice is borrowed mutably and belongs to this queue.
    Ok(unsafe { view.queue().launch("zero", zero_tiles(view.address(), bytes), &arguments) }?)
}

/// The number of tiles, and of blocks of `zero`, that clear `bytes` bytes at `address`, counted from the aligned address at or before it.
fn zero_tiles(address: u64, bytes: usize) -> u64 {
    let skipped = address as usize % gradsync_device::abi::VECTOR_BYTES;
    if bytes == 0 { 0 } else { (skipped + bytes).div_ceil(ZERO_TILE_BYTES) as u64 }
}

/// Launches one of the streaming kernels for two dtypes.
fn stream(
    operation: &'static str,
    name: String,
    dst: &DeviceSliceMut<'_>,
    src: DeviceSlice<'_>,
    more: &[Argument],
) -> Result<()> {
    let view = dst.as_slice();
    same_len(operation, ("destination", view.len()), ("source", src.len()))?;
    view.queue().check_same(operation, src.queue())?;
    check_float(operation, view.dtype()).and_then(|()| check_float(operation, src.dtype()))?;
    let blocks = view.len().div_ceil(tile_len(view.dtype(), src.dtype())) as u64;
    let mut arguments = vec![pointer_mut(dst), pointer(src), view.len().into()];
    arguments.extend_from_slice(more);
    // SAFETY: both slices have that length, are borrowed, and belong to this queue.
    Ok(unsafe { view.queue().launch(&name, blocks, &arguments) }?)
}

/// Enqueues `dst[i] = D(src[i])`, with the numerics of [`cpu::cast`](crate::kernels::cpu::cast).
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch); [`Error::InvalidArgument`](crate::Error::InvalidArgument) for operands of
/// different queues; [`Error::Cuda`](crate::Error::Cuda).
pub fn cast(dst: DeviceSliceMut<'_>, src: DeviceSlice<'_>) -> Result<()> {
    let name = format!("cast_{}_{}", src.dtype(), dst.as_slice().dtype());
    stream("cast", name, &dst, src, &[])
}

/// Enqueues `sum[i] = T(sum[i] + value[i])`, with the numerics of [`cpu::accumulate`](crate::kernels::cpu::accumulate).
///
/// # Errors
/// The errors of [`cast`].
pub fn accumulate(sum: DeviceSliceMut<'_>, value: DeviceSlice<'_>) -> Result<()> {
    let name = format!("accumulate_{}_{}", sum.as_slice().dtype(), value.dtype());
    stream("accumulate", name, &sum, value, &[])
}

/// Enqueues `dst[i] = D(src[i] × factor)`, with the numerics of [`cpu::scale`](crate::kernels::cpu::scale).
///
/// # Errors
/// The errors of [`cast`].
pub fn scale(dst: DeviceSliceMut<'_>, src: DeviceSlice<'_>, factor: f64) -> Result<()> {
    let name = format!("scale_{}_{}", src.dtype(), dst.as_slice().dtype());
    stream("scale", name, &dst, src, &[Argument::F64(factor)])
}

/// Enqueues `data[i] = D(data[i] × factor)` like [`scale`].
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda).
pub(crate) fn scale_in_place(data: DeviceSliceMut<'_>, factor: f64) -> Result<()> {
    let view = data.as_slice();
    // SAFETY: the same elements, which are borrowed mutably; each is read before it is written, in one thread.
    let source = unsafe { DeviceSlice::from_raw_parts(view.queue(), view.address(), view.dtype(), view.len()) };
    let name = format!("scale_{0}_{0}", view.dtype());
    stream("scale", name, &data, source, &[Argument::F64(factor)])
}

/// Returns whether no element is NaN or infinite; true for no elements and for integers. Waits for the queue.
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda).
pub fn all_finite(src: DeviceSlice<'_>) -> Result<bool> {
    const FINITE: u64 = 1;
    if !src.dtype().is_float() {
        return Ok(true);
    }
    let queue = src.queue();
    let flag = upload_words(queue, &[FINITE])?;
    let blocks = src.len().div_ceil(finite_tile_len(src.dtype())) as u64;
    let arguments = [pointer(flag.as_slice()), pointer(src), src.len().into()];
    // SAFETY: the flag has 8 bytes, 4 of which the kernel writes, and lives until the copy below has waited for the launch.
    unsafe { queue.launch(&format!("all_finite_{}", src.dtype()), blocks, &arguments) }?;
    let mut words = [0.0f64];
    flag.as_slice().copy_to_host((&mut words[..]).into())?;
    Ok(words[0].to_bits() == FINITE)
}

/// Enqueues setting every element of many tensors to zero, in one launch. The tensors may differ in dtype.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for tensors of different queues; [`Error::Cuda`](crate::Error::Cuda).
pub fn zero_all(tensors: &mut [DeviceSliceMut<'_>]) -> Result<()> {
    let mut spans = CopySpans::new("zero_all");
    for tensor in tensors.iter() {
        let view = tensor.as_slice();
        let bytes = view.len() * view.dtype().size_bytes();
        spans.push(view.queue(), view.address(), 0, bytes, zero_tiles(view.address(), bytes))?;
    }
    // SAFETY: the tensors are borrowed mutably and belong to the queue that `spans` found.
    unsafe { spans.launch("zero_segments") }
}

/// Enqueues a copy of each source to its offset in the arena, in elements, with the numerics of [`cast`]; one launch for each dtype of the
/// sources.
///
/// # Errors
/// The errors of [`cpu::pack`](crate::kernels::cpu::pack); [`Error::InvalidArgument`](crate::Error::InvalidArgument) for operands of
/// different queues; [`Error::Cuda`](crate::Error::Cuda).
pub fn pack(dst: DeviceSliceMut<'_>, offsets: &[usize], sources: &[DeviceSlice<'_>]) -> Result<()> {
    let arena = dst.as_slice();
    check_offsets("pack", arena.len(), offsets, sources.iter().map(DeviceSlice::len), Overlap::Refused)?;
    let moves = offsets.iter().zip(sources).map(|(&offset, &source)| {
        let destination = arena.range(offset..offset + source.len());
        (destination, source)
    });
    update_all("pack", Update::Cast, moves.collect())
}

/// Enqueues a copy of each destination from its offset in the arena, in elements, with the numerics of [`cast`]; one launch for each of
/// their dtypes.
///
/// # Errors
/// The errors of [`pack`], but ranges in the arena may overlap.
pub fn unpack(destinations: &mut [DeviceSliceMut<'_>], src: DeviceSlice<'_>, offsets: &[usize]) -> Result<()> {
    let lens = destinations.iter().map(|tensor| tensor.as_slice().len());
    check_offsets("unpack", src.len(), offsets, lens, Overlap::Allowed)?;
    let moves = offsets.iter().zip(destinations.iter()).map(|(&offset, tensor)| {
        let tensor = tensor.as_slice();
        (tensor, src.range(offset..offset + tensor.len()))
    });
    update_all("unpack", Update::Cast, moves.collect())
}

/// Enqueues `destinations[t] = sources[t]` for many tensors, with the numerics of [`cast`]; one launch for each pair of dtypes. Tensors `t`
/// have equal lengths.
///
/// # Errors
/// The errors of [`accumulate_all`].
pub fn cast_all(destinations: &mut [DeviceSliceMut<'_>], sources: &[DeviceSlice<'_>]) -> Result<()> {
    update_pairs("cast_all", Update::Cast, ("destination", destinations), ("source", sources))
}

/// Enqueues `sums[t] += values[t]` for many tensors, with the numerics of [`accumulate`]; one launch for each pair of dtypes. Tensors `t`
/// have equal lengths.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming the tensor; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for
/// operands of different queues; [`Error::Cuda`](crate::Error::Cuda).
pub fn accumulate_all(sums: &mut [DeviceSliceMut<'_>], values: &[DeviceSlice<'_>]) -> Result<()> {
    update_pairs("accumulate_all", Update::Accumulate, ("sum", sums), ("value", values))
}

/// Updates tensor by tensor. Each side comes with the noun for one of its tensors.
fn update_pairs(
    operation: &'static str,
    update: Update,
    (to_name, to): (&str, &mut [DeviceSliceMut<'_>]),
    (from_name, from): (&str, &[DeviceSlice<'_>]),
) -> Result<()> {
    same_len(operation, (&format!("{to_name}s"), to.len()), (&format!("{from_name}s"), from.len()))?;
    for (index, (to, from)) in to.iter().zip(from).enumerate() {
        let (left, right) = (format!("{to_name} {index}"), format!("{from_name} {index}"));
        same_len(operation, (&left, to.as_slice().len()), (&right, from.len()))?;
    }
    let pairs = to.iter().zip(from).map(|(to, &from)| (to.as_slice(), from));
    update_all(operation, update, pairs.collect())
}

/// The operation that a launch applies to each of many tensors.
#[derive(Clone, Copy)]
enum Update {
    Cast,
    Accumulate,
}

/// Updates `(to, from)` pairs of equal lengths; the caller holds the destinations mutably.
fn update_all(operation: &'static str, update: Update, tensors: Vec<(DeviceSlice<'_>, DeviceSlice<'_>)>) -> Result<()> {
    let mut kinds: Vec<_> = tensors.iter().map(|(to, from)| (to.dtype(), from.dtype())).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for &(to_dtype, from_dtype) in &kinds {
        check_float(operation, to_dtype).and_then(|()| check_float(operation, from_dtype))?;
    }
    for (to_dtype, from_dtype) in kinds {
        let mut spans = CopySpans::new(operation);
        for (to, from) in tensors.iter().filter(|(to, from)| (to.dtype(), from.dtype()) == (to_dtype, from_dtype)) {
            to.queue().check_same(operation, from.queue())?;
            let tiles = to.len().div_ceil(tile_len(to_dtype, from_dtype)) as u64;
            spans.push(to.queue(), to.address(), from.address(), to.len(), tiles)?;
        }
        let name = match update {
            Update::Cast => format!("cast_segments_{from_dtype}_{to_dtype}"),
            Update::Accumulate => format!("accumulate_segments_{to_dtype}_{from_dtype}"),
        };
        // SAFETY: lengths agree, both sides are borrowed and belong to the queue that `spans` found.
        unsafe { spans.launch(&name) }?;
    }
    Ok(())
}

/// The table of a launch over many tensors.
struct CopySpans<'a> {
    operation: &'static str,
    queue: Option<&'a Queue>,
    spans: Vec<CopySpan>,
    blocks: u64,
}

impl<'a> CopySpans<'a> {
    fn new(operation: &'static str) -> Self {
        Self { operation, queue: None, spans: Vec::new(), blocks: 0 }
    }

    /// Adds a tensor of `tiles` tiles.
    fn push(&mut self, queue: &'a Queue, destination: u64, source: u64, len: usize, tiles: u64) -> Result<()> {
        self.queue.get_or_insert(queue).check_same(self.operation, queue)?;
        self.spans.push(CopySpan { destination, source, len: len as u64, first_block: self.blocks });
        self.blocks += tiles.div_ceil(COPY_TILES as u64);
        Ok(())
    }

    /// # Safety
    /// The conditions of [`Queue::launch`]; the spans must satisfy the contract of the kernel.
    unsafe fn launch(self, name: &str) -> Result<()> {
        let Some(queue) = self.queue.filter(|_| self.blocks > 0) else { return Ok(()) };
        let _held = queue.hold();
        let table = queue.table(&words_of(&self.spans))?;
        let arguments = [(&table).into(), self.spans.len().into()];
        // SAFETY: the caller's promise; the table has that many rows.
        Ok(unsafe { queue.launch(name, self.blocks, &arguments) }?)
    }
}
