//! [`SegmentWorkspace`]: reductions over the segments of an arena, and Adasum's weights, all on the device.
//!
//! The tables and the workspace of a set of segments are created once and used in every step of a training loop.

mod grid;
mod peer;

use std::ops::Range;

use gradsync_device::abi::{
    COPY_TILES, EMPTY_BYTE, GRAM_CROSS_WIDTH, GRAM_WIDTHS, LAYER_THREADS, combine_suffix, tile_len, tree_row,
};
use gradsync_device::math::adasum::{Criterion, LEVELS, Pair, pairs, products};
use gradsync_device::math::precise;

use self::grid::Grids;
pub(super) use self::peer::width;
pub(crate) use self::peer::{MOST_RANKS, PeerAddresses, PeerGroup, PeerKernel, PeerSums};
use super::{pointer, pointer_mut, upload_words};
use crate::driver::{Argument, DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue, Table};
use crate::dtype::DType;
use crate::error::{Error, Result, check_float, same_len};
use crate::kernels::cpu::Coefficients;
use crate::plan::divided_layers::DividedLayers;
use crate::plan::segments;

/// The segments ("layers") of arenas of one length, with device memory for their inner products and weights.
#[derive(Debug)]
pub struct SegmentWorkspace {
    queue: Queue,
    len: usize,
    count: usize,
    world_size: usize,
    grids: Grids,
    /// The partial sums `[sum][chunk]`, for the widest launch; between launches on vectors of this device, all bytes are [`EMPTY_BYTE`].
    partials: DeviceBuffer,
    /// The totals `[row][product]`: a row for each layer, followed by the rows of divided layers' chunks.
    totals: DeviceBuffer,
    /// The number of rows of the totals.
    rows: usize,
    /// The layers that other shards have chunks of too, if there are any.
    divided: Option<Divided>,
    /// The weights `[layer][rank]`.
    weights: DeviceBuffer,
    /// The flags of cancelled layers, `[layer]`, one u32 each.
    cancelled: DeviceBuffer,
    /// The flags of short layers, `[layer]`, one u32 each: whether the layer, with all ranks' shards, takes the exact path in `f64` because
    /// it is short.
    short: DeviceBuffer,
    /// A [`tree_row`] for each layer: the coefficients of the combination tree, of the first level, or of all levels where a layer has
    /// cancelled.
    tree: DeviceBuffer,
    /// The dtype of the vectors of the last Gram matrices.
    dtype: DType,
    /// The addresses of the vectors of the last launch, on the host and on the device.
    vectors: Option<(Vec<u64>, Table)>,
    /// Whether all segments together are one layer.
    is_shared: bool,
    /// The tables that copy this layer's weights to the rows of all segments, where kernels read them.
    spread: Option<Spread>,
}

/// Layers that several shards divide.
#[derive(Debug)]
struct Divided {
    count: usize,
    /// The numbers of the layers.
    layers: DeviceBuffer,
}

/// Tables of copies from the first segment's rows to all other rows.
#[derive(Debug)]
struct Spread {
    /// Copies of weights and trees, in f64.
    weights: DeviceBuffer,
    /// Copies of flags, in f32.
    flags: DeviceBuffer,
}

/// The number of blocks that copy a row of `len` numbers from one layer to another.
fn row_blocks(len: usize) -> usize {
    len.div_ceil(COPY_TILES * tile_len(DType::F64, DType::F64))
}

/// The narrowest Gram tile that holds `vectors` vectors, or else the widest.
fn tile_width(vectors: usize) -> usize {
    let widest = GRAM_WIDTHS[GRAM_WIDTHS.len() - 1];
    GRAM_WIDTHS.into_iter().find(|&width| width >= vectors).unwrap_or(widest)
}

/// For each length, a u32 on the device: whether a layer of `f64` of this length always takes the exact path.
pub(super) fn short_flags(queue: &Queue, lens: &[usize]) -> Result<DeviceBuffer> {
    let is_short = |len| Criterion::of(true, len) == Criterion::ShortDouble;
    let flags: Vec<f32> = lens.iter().map(|&len| f32::from_bits(is_short(len).into())).collect();
    let mut buffer = DeviceBuffer::zeroed(queue, DType::F32, lens.len())?;
    buffer.as_mut_slice().copy_from_host((&flags).into())?;
    Ok(buffer)
}

impl SegmentWorkspace {
    /// Prepares reductions over `segments` of vectors of `len` elements, of up to `world_size` vectors at once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for segments that overlap, descend or exceed `len`, or a world size of 0 or above 4096; [`Error::Cuda`].
    pub fn new(queue: &Queue, len: usize, segments: &[Range<usize>], world_size: usize) -> Result<Self> {
        segments::check("layers", segments, len)?;
        Self::of_shard(queue, &DividedLayers::new(segments, segments.len(), 0), 0..len, world_size)
    }

    /// Like [`new`](Self::new), for segments that together are one layer: their products are added, and they share its weights.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn new_shared(queue: &Queue, len: usize, segments: &[Range<usize>], world_size: usize) -> Result<Self> {
        segments::check("layers", segments, len)?;
        Self::of_shard(queue, &DividedLayers::new(segments, segments.len().min(1), 0), 0..len, world_size)
    }

    /// Prepares reductions over a shard of an arena whose layers extend into other shards: each layer is a tensor, or all tensors are
    /// one. [`adasum_of_shards`](Self::adasum_of_shards) adds the shard's sums to the sums of the layers.
    pub(crate) fn of_shard(
        queue: &Queue,
        layers: &DividedLayers,
        shard: Range<usize>,
        world_size: usize,
    ) -> Result<Self> {
        let grids = |queue: &Queue| Grids::new(queue, layers, shard.clone(), world_size);
        let mut workspace = Self::on(grids, queue, layers, shard.len(), world_size)?;
        if workspace.is_shared {
            workspace.spread = Some(workspace.spread_tables()?);
        }
        Ok(workspace)
    }

    /// Like [`of_shard`](Self::of_shard), with the grids that `grids` creates for a queue, and for kernels that compute weights per
    /// layer.
    fn on(
        grids: impl FnOnce(&Queue) -> Result<Grids>,
        queue: &Queue,
        layers: &DividedLayers,
        len: usize,
        world_size: usize,
    ) -> Result<Self> {
        const MOST: usize = 1 << LEVELS;
        if world_size == 0 || world_size > MOST {
            let reason = format!("the world size is {world_size}, and must be from 1 to {MOST}");
            return Err(Error::InvalidArgument { operation: "layers", reason });
        }
        let grids = grids(queue)?;
        let (count, rows) = (layers.tensors(), layers.rows());
        // The sides of a pair have three sums, or for `f64` the slices of those. The pairs of a level, at most half as many as ranks, are
        // summed together.
        let sums = products(world_size).max(precise::SUMS * world_size.div_ceil(2));
        // A launch leaves the sums of a whole tile: the narrowest that holds all vectors, or else the widest.
        let widest = products(tile_width(world_size)).max(precise::SUMS);
        let zeroed = |len| DeviceBuffer::zeroed(queue, DType::F64, len);
        let divided: Vec<u64> = layers.divided().map(|layer| layer as u64).collect();
        let divided = match divided.len() {
            0 => None,
            count => Some(Divided { count, layers: upload_words(queue, &divided)? }),
        };
        Ok(Self {
            queue: queue.clone(),
            len,
            count,
            world_size,
            partials: DeviceBuffer::filled(queue, DType::F64, widest * grids.chunks(), EMPTY_BYTE)?,
            grids,
            totals: zeroed(sums * rows)?,
            rows,
            divided,
            weights: zeroed(world_size * count)?,
            cancelled: DeviceBuffer::zeroed(queue, DType::F32, count)?,
            short: short_flags(queue, &layers.lens())?,
            tree: zeroed(tree_row(world_size) * count)?,
            dtype: DType::F32,
            vectors: None,
            is_shared: layers.layers() != count,
            spread: None,
        })
    }

    /// Creates the tables of copies from the first segment's rows to all other rows.
    fn spread_tables(&self) -> Result<Spread> {
        let row = |buffer: &DeviceBuffer, bytes: usize, row: u64| buffer.as_slice().address() + row * bytes as u64;
        let piece = |buffer: &DeviceBuffer, size: usize, len: usize, index: u64, block: u64| {
            [row(buffer, len * size, index), row(buffer, 0, 0), len as u64, block]
        };
        let (width, nodes) = (self.world_size, tree_row(self.world_size));
        let (mut weights, mut flags, mut block) = (Vec::new(), Vec::new(), 0);
        for index in 1..self.count as u64 {
            weights.extend(piece(&self.weights, 8, width, index, block));
            block += row_blocks(width) as u64;
            weights.extend(piece(&self.tree, 8, nodes, index, block));
            block += row_blocks(nodes) as u64;
            flags.extend(piece(&self.cancelled, 4, 1, index, index - 1));
        }
        Ok(Spread { weights: upload_words(&self.queue, &weights)?, flags: upload_words(&self.queue, &flags)? })
    }

    /// The same layers for one pair of the tree, which is the algorithm of ONNX Runtime: layers of `f64` take the exact path only where
    /// squared norms overflow.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn of_tree(self) -> Result<Self> {
        let short = short_flags(&self.queue, &vec![0; self.short.as_slice().len()])?;
        Ok(Self { short, ..self })
    }

    /// Computes `[a·b, |a|², |b|²]` of each layer on the device, for [`read_totals`](Self::read_totals)`(3)`.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::DTypeMismatch`], [`Error::InvalidArgument`] for vectors of another queue,
    /// [`Error::Cuda`].
    pub fn dots(&mut self, a: DeviceSlice<'_>, b: DeviceSlice<'_>) -> Result<()> {
        let dtype = self.check("dots", &[a, b])?;
        // SAFETY: the vectors are checked; the workspace holds three products per chunk.
        unsafe { self.reduce(&format!("dots_{dtype}"), dtype, 3, 0, &[pointer(a), pointer(b)]) }
    }

    /// Computes `|a|²` of each layer on the device, for [`read_totals`](Self::read_totals)`(1)`.
    ///
    /// # Errors
    /// The errors of [`dots`](Self::dots).
    pub fn squared_norms(&mut self, a: DeviceSlice<'_>) -> Result<()> {
        let dtype = self.check("squared_norms", &[a])?;
        // SAFETY: the vector is checked; the workspace holds more than one product per chunk.
        unsafe { self.reduce(&format!("squared_norms_{dtype}"), dtype, 1, 0, &[pointer(a)]) }
    }

    /// Computes the `P(P+1)/2` inner products of each layer on the device, for [`read_totals`](Self::read_totals). Up to eight vectors are
    /// read once; more are processed in tiles.
    ///
    /// # Errors
    /// The errors of [`dots`](Self::dots), and [`Error::LengthMismatch`] unless there are as many vectors as ranks.
    pub fn gram(&mut self, vectors: &[DeviceSlice<'_>]) -> Result<()> {
        let queue = self.queue.clone();
        let _held = queue.hold();
        let (dtype, table) = self.vectors("gram", vectors)?;
        self.dtype = dtype;
        let ranks = self.world_size;
        let widest = GRAM_WIDTHS[GRAM_WIDTHS.len() - 1];
        for first in (0..ranks).step_by(widest) {
            let count = widest.min(ranks - first);
            let width = tile_width(count);
            let own = [(&table).into(), first.into(), count.into(), ranks.into()];
            // SAFETY: the vectors are checked; the workspace holds a tile's sums and all products; the table has every vector.
            unsafe { self.reduce(&format!("gram_{dtype}_p{width}"), dtype, products(width), 0, &own) }?;
        }
        // The products of vectors of different tiles.
        let cells = || (0..ranks).step_by(GRAM_CROSS_WIDTH);
        let cross = cells().flat_map(|left| cells().map(move |right| (left, right)));
        for (left, right) in cross.filter(|(left, right)| left / widest < right / widest) {
            let width = |first: usize| Argument::from(GRAM_CROSS_WIDTH.min(ranks - first));
            let own = [(&table).into(), left.into(), width(left), right.into(), width(right), ranks.into()];
            let sums = GRAM_CROSS_WIDTH * GRAM_CROSS_WIDTH;
            // SAFETY: as above.
            unsafe { self.reduce(&format!("gram_cross_{dtype}"), dtype, sums, 0, &own) }?;
        }
        Ok(())
    }

    /// Computes Adasum's weights of each layer on the device, from the products of [`gram`](Self::gram). The weights of cancelled layers
    /// are the weights after the first level of their trees, where the exact path continues, or before it for `f64`.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn coefficients(&mut self) -> Result<()> {
        let own = [
            pointer_mut(&self.weights.as_mut_slice()),
            pointer_mut(&self.tree.as_mut_slice()),
            pointer_mut(&self.cancelled.as_mut_slice()),
            pointer(self.short.as_slice()),
            pointer(self.totals.as_slice()),
            self.layer_count().into(),
            self.world_size.into(),
            usize::from(self.is_double()).into(),
        ];
        self.per_layer("coefficients", &own)?;
        self.spread()
    }

    /// Computes Adasum of the vectors in each layer on the device: [`gram`](Self::gram), [`coefficients`](Self::coefficients),
    /// [`combine`](Self::combine), and the exact path for the layers that lost digits to cancellation, which the other kernels skip. The
    /// host does not wait.
    ///
    /// # Errors
    /// The errors of [`combine`](Self::combine), and [`Error::DTypeMismatch`] for a destination of another dtype than the vectors.
    pub fn adasum(&mut self, dst: DeviceSliceMut<'_>, vectors: &[DeviceSlice<'_>]) -> Result<()> {
        self.adasum_of_shards(dst, vectors, |_| Ok(()))
    }

    /// Like [`adasum`](Self::adasum), for vectors that are divided among the ranks: `add_up` replaces a table of sums over this rank's shard
    /// by the sum of all ranks' tables, on the device, in any order, since each number is zero on all ranks but one. The destination may be
    /// the memory of one of the vectors.
    pub(crate) fn adasum_of_shards(
        &mut self,
        mut dst: DeviceSliceMut<'_>,
        vectors: &[DeviceSlice<'_>],
        mut add_up: impl FnMut(DeviceSliceMut<'_>) -> Result<()>,
    ) -> Result<()> {
        let left = dst.as_slice().dtype();
        if let Some(right) = vectors.first().map(DeviceSlice::dtype).filter(|&right| right != left) {
            let what = "the destination and the vectors".into();
            return Err(Error::DTypeMismatch { operation: "adasum", what, left, right });
        }
        self.gram(vectors)?;
        add_up(self.totals_mut(products(self.world_size)))?;
        self.fold(products(self.world_size), 0)?;
        self.coefficients()?;
        let (sums, is_double) = (self.sums(), self.is_double());
        let pairs: Vec<Pair> = pairs(self.world_size).filter(|pair| is_double || !pair.joins_ranks()).collect();
        // The pairs of one level are independent: their sums are exchanged together.
        for level in pairs.chunk_by(|one, other| one.middle - one.begin == other.middle - other.begin) {
            for (number, &pair) in level.iter().enumerate() {
                self.tree_dots(vectors, pair, number)?;
            }
            add_up(self.totals_mut(sums * level.len()))?;
            for (number, &pair) in level.iter().enumerate() {
                self.fold(sums, number)?;
                self.set_pair(pair, number)?;
            }
            self.spread()?;
        }
        self.combine(dst.reborrow(), vectors)?;
        self.tree_combine(dst, vectors)
    }

    /// The first `count` sums of each row of the last reductions.
    fn totals_mut(&mut self, count: usize) -> DeviceSliceMut<'_> {
        let len = count * self.rows;
        self.totals.as_mut_slice().range_mut(0..len)
    }

    /// Adds the rows of divided layers, `width` sums per row, which start behind `number` groups of as many sums.
    fn fold(&mut self, width: usize, number: usize) -> Result<()> {
        let Some(Divided { count, layers }) = &self.divided else { return Ok(()) };
        let behind = self.behind(width * number);
        let totals = pointer_mut(&self.totals.as_mut_slice().range_mut(behind));
        let spans = self.grids.of_reductions(self.dtype).spans();
        // SAFETY: the table lists layers with rows, of which there are `width` sums each.
        unsafe {
            self.queue.launch(
                "fold_sums",
                (count * width) as u64,
                &[totals, spans, pointer(layers.as_slice()), width.into()],
            )
        }?;
        Ok(())
    }

    /// Whether the exact path has twice the precision of `f64`.
    fn is_double(&self) -> bool {
        self.dtype == DType::F64
    }

    /// The number of sums of a pair on the exact path.
    fn sums(&self) -> usize {
        if self.is_double() { precise::SUMS } else { 3 }
    }

    /// The number of layers with weights of their own: one, where all segments share a layer.
    pub(crate) fn layer_count(&self) -> usize {
        if self.is_shared { self.count.min(1) } else { self.count }
    }

    /// Copies the weights of the first segment to all others, where all are one layer.
    fn spread(&self) -> Result<()> {
        let Some(Spread { weights, flags }) = &self.spread else { return Ok(()) };
        let copy = |name: &str, table: &DeviceBuffer, blocks: usize| {
            let pieces = table.as_slice().len() / 4;
            // SAFETY: the tables list addresses in this object's own buffers.
            unsafe { self.queue.launch(name, blocks as u64, &[pointer(table.as_slice()), pieces.into()]) }
        };
        let others = self.count.saturating_sub(1);
        let blocks = others * (row_blocks(self.world_size) + row_blocks(tree_row(self.world_size)));
        copy("cast_segments_f64_f64", weights, blocks)?;
        Ok(copy("cast_segments_f32_f32", flags, others)?)
    }

    /// Computes the sums of the two sides of a pair on the device, `[u·v, |u|², |v|²]` or for `f64` the slices of those, as number `number`
    /// of such groups of sums, for cancelled layers; others are not read. The pairs below it must have been set.
    fn tree_dots(&mut self, vectors: &[DeviceSlice<'_>], pair: Pair, number: usize) -> Result<()> {
        let queue = self.queue.clone();
        let _held = queue.hold();
        let (dtype, table) = self.vectors("tree_dots", vectors)?;
        let own = [
            (&table).into(),
            pointer(self.tree.as_slice()),
            pointer(self.cancelled.as_slice()),
            pair.begin.into(),
            pair.middle.into(),
            pair.end.into(),
            self.world_size.into(),
        ];
        let sums = self.sums();
        // SAFETY: the vectors are checked; the workspace holds that many sums per chunk.
        unsafe { self.reduce(&format!("tree_dots_{dtype}"), dtype, sums, sums * number, &own) }
    }

    /// Sets a pair's coefficients, from the sums of [`tree_dots`](Self::tree_dots), and applies them to the weights of
    /// cancelled layers.
    fn set_pair(&mut self, pair: Pair, number: usize) -> Result<()> {
        let own = [
            pointer_mut(&self.weights.as_mut_slice()),
            pointer_mut(&self.tree.as_mut_slice()),
            pointer(self.cancelled.as_slice()),
            pointer(self.totals.as_slice().range(self.behind(self.sums() * number))),
            self.layer_count().into(),
            self.world_size.into(),
            pair.begin.into(),
            pair.middle.into(),
            pair.end.into(),
            usize::from(self.is_double()).into(),
        ];
        self.per_layer("combine_pair", &own)
    }

    /// The range of the totals behind the first `count` sums of each row.
    fn behind(&self, count: usize) -> Range<usize> {
        count * self.rows..self.totals.as_slice().len()
    }

    /// Writes the roots of the combination trees of cancelled layers, once all pairs are set; leaves other layers unchanged.
    fn tree_combine(&mut self, dst: DeviceSliceMut<'_>, vectors: &[DeviceSlice<'_>]) -> Result<()> {
        let queue = self.queue.clone();
        let _held = queue.hold();
        let (dtype, table) = self.vectors("tree_combine", vectors)?;
        self.check_destination("tree_combine", &dst)?;
        let grid = self.grids.of_sums(dtype);
        let arguments = [
            pointer_mut(&dst),
            (&table).into(),
            self.world_size.into(),
            pointer(self.tree.as_slice()),
            pointer(self.cancelled.as_slice()),
            grid.spans(),
            self.count.into(),
            grid.block_len.into(),
        ];
        let name = format!("tree_combine_{dtype}");
        // SAFETY: vectors and destination are checked; trees and spans belong to this object.
        Ok(unsafe { self.queue.launch(&name, grid.blocks, &arguments) }?)
    }

    /// Computes the weighted sum of the vectors in each layer with the weights on the device, with the numerics of
    /// [`cpu::combine`](crate::kernels::cpu::combine). Cancelled layers are left unchanged.
    ///
    /// # Errors
    /// The errors of [`gram`](Self::gram), and [`Error::LengthMismatch`] for a destination of another length.
    pub fn combine(&mut self, dst: DeviceSliceMut<'_>, vectors: &[DeviceSlice<'_>]) -> Result<()> {
        let weights = pointer(self.weights.as_slice());
        self.combine_weighted(weights, dst, vectors)
    }

    /// Like [`combine`](Self::combine), with other weights on the device: `layers × P` numbers of `f64`.
    ///
    /// # Errors
    /// The errors of [`combine`](Self::combine), and [`Error::LengthMismatch`] for another number of weights.
    pub(crate) fn combine_by(
        &mut self,
        weights: &DeviceBuffer,
        dst: DeviceSliceMut<'_>,
        vectors: &[DeviceSlice<'_>],
    ) -> Result<()> {
        let (weights, count) = (weights.as_slice(), self.layer_count() * self.world_size);
        same_len("combine", ("weights", weights.len()), ("layers × ranks", count))?;
        self.queue.check_same("combine", weights.queue())?;
        self.combine_weighted(pointer(weights), dst, vectors)
    }

    fn combine_weighted(
        &mut self,
        weights: Argument,
        dst: DeviceSliceMut<'_>,
        vectors: &[DeviceSlice<'_>],
    ) -> Result<()> {
        let queue = self.queue.clone();
        let _held = queue.hold();
        let (dtype, table) = self.vectors("combine", vectors)?;
        self.check_destination("combine", &dst)?;
        let grid = self.grids.of_sums(dtype);
        let arguments = [
            pointer_mut(&dst),
            (&table).into(),
            self.world_size.into(),
            weights,
            pointer(self.cancelled.as_slice()),
            grid.spans(),
            self.count.into(),
            grid.block_len.into(),
        ];
        let to = dst.as_slice().dtype();
        let name = format!("combine_{dtype}_{to}{}", combine_suffix(self.world_size, to == dtype));
        // SAFETY: vectors and destination are checked, and weights if they are the caller's; the spans belong to this object.
        Ok(unsafe { self.queue.launch(&name, grid.blocks, &arguments) }?)
    }

    /// Replaces the weights on the device, `layers × P`, and the flags of cancelled layers.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`]; [`Error::Cuda`].
    pub fn write_coefficients(&mut self, coefficients: &Coefficients) -> Result<()> {
        self.weights.as_mut_slice().copy_from_host((&coefficients.weights).into())?;
        let flags: Vec<f32> = coefficients.cancelled.iter().map(|&flag| f32::from_bits(flag.into())).collect();
        self.cancelled.as_mut_slice().copy_from_host((&flags).into())
    }

    /// Waits for the queue, and returns the weights on the device with the flags of cancelled layers.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn read_coefficients(&self) -> Result<Coefficients> {
        let count = self.layer_count();
        let mut weights = vec![0.0; count * self.world_size];
        self.weights.as_slice().range(0..weights.len()).copy_to_host((&mut weights).into())?;
        let mut flags = vec![0.0f32; count];
        self.cancelled.as_slice().range(0..count).copy_to_host((&mut flags).into())?;
        Ok(Coefficients { weights, cancelled: flags.into_iter().map(|flag| flag.to_bits() != 0).collect() })
    }

    /// Waits for the queue, and returns the totals of the last reduction: `layers × count` numbers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more numbers than any reduction here computes; [`Error::Cuda`].
    pub fn read_totals(&self, count: usize) -> Result<Vec<f64>> {
        let capacity = self.totals.as_slice().len();
        if self.layer_count().checked_mul(count).is_none_or(|wanted| wanted > capacity) {
            let reason = format!(
                "{count} numbers for each of {} layers are asked for, and at most {capacity} in all were computed",
                self.layer_count()
            );
            return Err(Error::InvalidArgument { operation: "read_totals", reason });
        }
        let mut totals = vec![0.0; self.layer_count() * count];
        self.totals.as_slice().range(0..totals.len()).copy_to_host((&mut totals).into())?;
        Ok(totals)
    }

    /// The totals of the last reduction on the device, `layers × count` numbers of `f64`, in the order of the queue.
    pub(crate) fn totals(&self, count: usize) -> DeviceSlice<'_> {
        self.totals.as_slice().range(0..self.layer_count() * count)
    }

    /// Launches a reduction of vectors of a dtype into `width` sums per chunk; its totals start behind `number` other sums of each row.
    ///
    /// # Safety
    /// The conditions of `Queue::launch` for the kernel's own parameters. Partials and totals hold as many products as it may write.
    unsafe fn reduce(&mut self, name: &str, dtype: DType, width: usize, number: usize, own: &[Argument]) -> Result<()> {
        let grid = self.grids.of_reductions(dtype);
        let behind = self.behind(number);
        let totals = pointer_mut(&self.totals.as_mut_slice().range_mut(behind));
        let head = [pointer_mut(&self.partials.as_mut_slice()), totals];
        let counts = [self.count, self.layer_count()].map(Argument::from);
        let tail = [grid.spans(), counts[0], counts[1], grid.blocks.into(), grid.chunks.into()];
        let blocks = grid.blocks + (self.layer_count() * width) as u64;
        // SAFETY: the caller's promise; the grid belongs to this object's segments, and partials are empty between launches.
        Ok(unsafe { self.queue.launch(name, blocks, &[&head, own, &tail].concat()) }?)
    }

    fn per_layer(&self, name: &str, arguments: &[Argument]) -> Result<()> {
        // SAFETY: the arguments are this object's own buffers, which hold every layer.
        Ok(unsafe { self.queue.launch(name, self.layer_count().div_ceil(LAYER_THREADS as usize) as u64, arguments) }?)
    }

    fn check_destination(&self, operation: &'static str, dst: &DeviceSliceMut<'_>) -> Result<()> {
        let view = dst.as_slice();
        same_len(operation, ("destination", view.len()), ("each vector", self.len))?;
        check_float(operation, view.dtype()).and_then(|()| view.queue().check_same(operation, &self.queue))
    }

    /// Checks vectors and returns their dtype.
    fn check(&self, operation: &'static str, vectors: &[DeviceSlice<'_>]) -> Result<DType> {
        let dtype = vectors[0].dtype();
        for (rank, vector) in vectors.iter().enumerate() {
            same_len(operation, ("the layers' arena", self.len), (&format!("vector {rank}"), vector.len()))?;
            self.queue.check_same(operation, vector.queue())?;
            if vector.dtype() != dtype {
                let what = format!("vector 0 and vector {rank}");
                return Err(Error::DTypeMismatch { operation, what, left: dtype, right: vector.dtype() });
            }
        }
        check_float(operation, dtype).map(|()| dtype)
    }

    /// Checks one vector per rank; returns their dtype, and their addresses on the device, for a launch by a call that holds the queue.
    fn vectors(&mut self, operation: &'static str, vectors: &[DeviceSlice<'_>]) -> Result<(DType, Table)> {
        same_len(operation, ("ranks", self.world_size), ("vectors", vectors.len()))?;
        let dtype = self.check(operation, vectors)?;
        let addresses: Vec<u64> = vectors.iter().map(DeviceSlice::address).collect();
        if let Some((_, table)) = self.vectors.as_ref().filter(|(last, _)| *last == addresses) {
            self.queue.record_reader(table)?;
            return Ok((dtype, table.clone()));
        }
        let table = self.queue.table(&addresses)?;
        self.vectors = Some((addresses, table.clone()));
        Ok((dtype, table))
    }
}
