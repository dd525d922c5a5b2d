//! The contract between the kernels and the code that launches them: entry points, their parameters, block sizes, tables.
//!
//! A name is `op_dtype`, `op_dtype_dtype` or `op_dtype_p<width>`. `cast`, `scale` and `combine` name the source first, as in
//! "from f32 to bf16"; `accumulate` names the sum first, as in `f32 += bf16`. Pointers are device addresses in a `u64`; any
//! address that the dtype's own alignment allows is right, a multiple of 16 bytes is fast. Every count is a `u64`.
//! Nothing here touches a device: it is data for both sides.

mod dtype;
mod peers;

pub use self::dtype::{DType, UnknownDType};
pub use self::peers::{
    MOST_PEERS, Mailboxes, PACKET_BLOCKS, PACKET_BYTES, PACKET_THREADS, PEER_LAYERS, PacketArena, PacketChunk,
    PacketChunks, Peers, Row, packet_adasum_is_full, packet_adasum_parts, packet_adasum_threads, packet_tree,
    peer_senders, peer_tile_shift,
};

/// The number of threads of a block, in every kernel without another constant. Small blocks start and end more evenly: on an H200, casts
/// and inner products of 256 MiB gain up to 5 % over 256 threads, and 64 are too few to fill a multiprocessor.
pub const THREADS: u32 = 128;
/// The number of threads of a block of the kernels over peers' memory, which have more loads and stores in flight at a time.
pub const PEER_THREADS: u32 = 256;
/// The number of threads of a block of an optimizer's update.
pub const UPDATE_THREADS: u32 = 128;
/// Threads of a warp on every architecture.
pub const WARP: u32 = 32;
/// Threads of a block of the per-layer kernels, where one thread handles one layer.
pub const LAYER_THREADS: u32 = 64;
/// The launch bounds of a kernel, like CUDA's `__launch_bounds__`: its blocks have this many threads, and the assembler may use all
/// registers that leave space for this many blocks on a multiprocessor.
///
/// Without bounds, the assembler saves registers by loading one vector after the other where the code loads all of them first: on an H200
/// that costs up to a tenth of the bandwidth. The counts of memory-bound kernels were measured there; the others have a margin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchBounds {
    /// The number of threads of a block: of every launch exactly these, except that kernels over packets accept fewer.
    pub threads: u32,
    /// The number of blocks that a multiprocessor must be able to hold.
    pub blocks: u32,
    /// Whether the assembler may unroll loops, in addition to the compiler.
    pub unroll: bool,
}

impl LaunchBounds {
    /// Streaming kernels.
    pub const STREAM: Self = Self::of(THREADS, 8);
    /// Inner products of one or two vectors, and the search for infinities.
    pub const REDUCE: Self = Self::of(THREADS, 7);
    /// Inner products of four vectors.
    pub const GRAM_OF_FOUR: Self = Self::of(THREADS, 5);
    /// Inner products of four vectors with four others.
    pub const GRAM_CROSS: Self = Self::of(THREADS, 4);
    /// Inner products of eight vectors, whose 36 sums per thread need 72 registers.
    pub const GRAM_OF_EIGHT: Self = Self::of(THREADS, 3);
    /// Weighted sums.
    pub const COMBINE: Self = Self::of(THREADS, 6);
    /// Weighted sums of four vectors, all of which a thread reads before it adds.
    pub const COMBINE_OF_FOUR: Self = Self::of(THREADS, 5);
    /// Weighted sums of eight vectors.
    pub const COMBINE_OF_EIGHT: Self = Self::of(THREADS, 4);
    /// Results of Adasum's exact path.
    pub const TREE: Self = Self::of(THREADS, 4);
    /// Inner products of Adasum's exact path. For `f64` they need a node of each level in twice the precision, and 12 sums, which are 76
    /// registers in all before any computation.
    pub const TREE_DOTS: Self = Self::of(THREADS, 2);
    /// Updates of optimizers.
    pub const UPDATE: Self = Self::of(UPDATE_THREADS, 8);
    /// Updates of AdamW in `f64`, whose divisions and roots take more registers.
    pub const UPDATE_WIDE: Self = Self::of(UPDATE_THREADS, 5);
    /// Kernels with one thread per layer.
    pub const LAYER: Self = Self::of(LAYER_THREADS, 8);
    /// Kernels over the memory of up to two, four or eight peers. The links are slower than their loops, and unrolling would add a third to
    /// the code that the driver compiles at their first use.
    pub const fn of_peers(width: usize) -> Self {
        Self { threads: PEER_THREADS, blocks: if width <= 4 { 2 } else { 1 }, unroll: false }
    }

    /// Kernels over packets in the mailboxes of peers.
    pub const PACKETS: Self = Self { threads: PACKET_THREADS, blocks: 1, unroll: false };

    /// Adasum over packets in the mailboxes of peers.
    pub const fn packet_adasum(element_bytes: usize) -> Self {
        Self { threads: packet_adasum_threads(element_bytes), blocks: 1, unroll: false }
    }

    const fn of(threads: u32, blocks: u32) -> Self {
        Self { threads, blocks, unroll: true }
    }
}

/// The number of bytes that one thread moves at once, where addresses are aligned.
pub const VECTOR_BYTES: usize = 16;
/// The number of vectors in flight for each operand of a streaming kernel: two where elements get narrower, else one. On an H200 that makes
/// casts up to 4 % faster than one or two for all, and more than two is slower.
pub const fn stream_unroll(to: DType, from: DType) -> usize {
    if from.size_bytes() > to.size_bytes() { 2 } else { 1 }
}
/// The largest number of elements per block of a reduction, for segments of `total` elements together, unless one chunk is longer: 4096 to
/// 8192 blocks, of at least 2048 elements. A block adds its chunks one by one, so that results do not depend on this number.
///
/// On an H200, larger parts of 256 MiB end so unevenly, and smaller ones start so often, that up to a tenth of the bandwidth is lost.
pub const fn reduce_stretch_len(total: usize) -> usize {
    let len = total >> 13;
    if len <= LEAST_BLOCK { LEAST_BLOCK } else { len.next_multiple_of(2 * LEAST_BLOCK) }
}
/// The least number of elements that is enough work for a block.
const LEAST_BLOCK: usize = 2048;

/// The number of elements that one block of a weighted sum of `vectors` vectors writes. Blocks leave no partial sums and can be short;
/// blocks of few bf16 vectors compute so much per byte read that short ones are slower, on an H200.
pub const fn combine_block_len(total: usize, from: DType, vectors: usize) -> usize {
    let is_slow = matches!(from, DType::BF16) && vectors <= 4;
    if is_slow && reduce_stretch_len(total) > LEAST_BLOCK { 2 * LEAST_BLOCK } else { LEAST_BLOCK }
}

/// The largest number of elements per job of the kernels over peers' memory: about 512 jobs, of up to 64 KiB. Jobs that multiply take at
/// least two chunks, one for each team of the block. Results do not depend on it.
pub const fn peer_stretch_len(total: usize, dtype: DType) -> usize {
    let most = (64 << 10) / dtype.size_bytes();
    let len = (total >> 9).next_power_of_two();
    if len < LEAST_BLOCK {
        LEAST_BLOCK
    } else if len > most {
        most
    } else {
        len
    }
}
/// The value of every byte of memory whose reader waits for other values, before they are written and after they are read: of partial sums,
/// and of packets of elements in [`Mailboxes`].
pub const EMPTY_BYTE: u8 = 0xff;
/// The bits of a word of such memory. As elements of any dtype they are NaN, in whose place kernels write other NaN.
pub const EMPTY: u64 = u64::from_ne_bytes([EMPTY_BYTE; 8]);
/// The widths of Gram tiles: a launch multiplies up to this many vectors with each other, reading each once.
pub const GRAM_WIDTHS: [usize; 3] = [2, 4, 8];
/// Vectors on each side of a cross tile, which multiplies the members of two different tiles.
pub const GRAM_CROSS_WIDTH: usize = 4;

/// The number of elements of one vector of a kernel over two dtypes: the wider one fills [`VECTOR_BYTES`].
#[inline(always)]
pub const fn vector_len(a: DType, b: DType) -> usize {
    VECTOR_BYTES / if a.size_bytes() > b.size_bytes() { a.size_bytes() } else { b.size_bytes() }
}

/// The number of elements per block of a streaming kernel; the grid has one block for each started tile.
#[inline(always)]
pub const fn tile_len(to: DType, from: DType) -> usize {
    THREADS as usize * vector_len(to, from) * stream_unroll(to, from)
}

/// The number of elements per block of `all_finite`.
#[inline(always)]
pub const fn finite_tile_len(dtype: DType) -> usize {
    THREADS as usize * vector_len(dtype, dtype) * 8
}

/// Vectors that a thread of `zero` writes.
pub const ZERO_UNROLL: usize = 2;
/// Bytes that one block of `zero` handles.
pub const ZERO_TILE_BYTES: usize = THREADS as usize * VECTOR_BYTES * ZERO_UNROLL;

/// Vectors that a thread of `sweep` has in flight.
pub const SWEEP_UNROLL: usize = 8;
/// Bytes that one block of `sweep` reads.
pub const SWEEP_TILE_BYTES: usize = THREADS as usize * VECTOR_BYTES * SWEEP_UNROLL;

/// The number of tiles per block of a launch over many tensors, in sequence: a look-up in the table costs as much as a tile.
pub const COPY_TILES: usize = 8;

/// A row of a table that the host uploads as it lies in its memory, and kernels read.
///
/// # Safety
/// The type is `#[repr(C)]` and consists of unsigned integers alone, without padding, so that it has one layout on hosts and GPUs. Its size is
/// a multiple of 8 bytes.
pub unsafe trait TableRow: Copy {}

/// Implements [`TableRow`] for structs whose fields, listed with their sizes in bytes, leave no padding.
macro_rules! table_rows {
    ($($row:ident $bytes:expr;)*) => {
        $(const _: () = assert!(size_of::<$row>() == $bytes && $bytes % 8 == 0);
        // SAFETY: `#[repr(C)]` of unsigned integers, whose sizes add up to the size of the struct.
        unsafe impl TableRow for $row {})*
    };
}
table_rows! {
    CopySpan 4 * 8;
    Span 3 * 8;
    ChunkedSpan 9 * 8;
    SquareRow 4 * 8;
    UpdateRow 10 * 8;
    Peers (14 + 5 * MOST_PEERS) * 8;
    Mailboxes (5 + MOST_PEERS) * 8;
    PacketChunks 2 * 4;
    PacketChunk 6 * 4;
    PacketArena (12 + MOST_PEERS) * 8;
}

/// The bytes of the rows of a table.
pub const fn bytes_of<T: TableRow>(rows: &[T]) -> &[u8] {
    // SAFETY: the promise of `TableRow`.
    unsafe { core::slice::from_raw_parts(rows.as_ptr().cast(), size_of_val(rows)) }
}

/// One tensor of a launch over many: its destination, its source, and its blocks.
///
/// `zero_segments` reads `len` as bytes and ignores `source`; all others read it as elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CopySpan {
    /// Device address of the first element written.
    pub destination: u64,
    /// Device address of the first element read.
    pub source: u64,
    /// Elements (or bytes, see above).
    pub len: u64,
    /// Index of the first block for this tensor: the number of tiles of all tensors before it.
    pub first_block: u64,
}

/// One segment ("layer") of an arena: a range of elements at the same offset in every vector of the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// First element, counted from the start of the arena.
    pub begin: u64,
    /// Elements.
    pub len: u64,
    /// Index of the first block for this segment: the number of blocks of all segments before it.
    pub first_block: u64,
}

/// One segment of a shard of an arena, in the form in which reductions look up their chunks.
///
/// A chunk's offset and length depend on its tensor alone. A layer in several shards has a row of sums for each chunk in all shards,
/// behind the rows of whole layers; this shard's chunks have consecutive rows. If all segments are one layer, the first has its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ChunkedSpan {
    /// First element, counted from the start of the shard.
    pub begin: u64,
    /// Elements.
    pub len: u64,
    /// Elements of a chunk; the last one may be shorter.
    pub chunk_len: u64,
    /// Index of its first chunk: the number of chunks of all segments before it.
    pub first_chunk: u64,
    /// The number of chunks per block; the last block may have fewer.
    pub chunks_of_block: u64,
    /// Index of the first block for this segment.
    pub first_block: u64,
    /// The first of the layer's rows for chunks, or 0 for a layer that is not divided.
    pub first_row: u64,
    /// The number of such rows of the layer.
    pub rows: u64,
    /// The number of those rows that belong to chunks in front of this shard.
    pub rows_before: u64,
}

/// One tensor whose squares `norms` adds, one block for each of its chunks ([`crate::math::sums`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SquareRow {
    /// Device address of the first element.
    pub address: u64,
    /// Elements.
    pub len: u64,
    /// Index of the first chunk among the chunks of all tensors of the step, which is the place of its sum.
    pub first_chunk: u64,
    /// Index of the first block for this tensor: the number of chunks of the launch before it.
    pub first_block: u64,
}

/// One tensor of an optimizer's update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct UpdateRow {
    /// Device address of the weights, in the precision of the optimizer's state.
    pub weights: u64,
    /// Device address of the gradients.
    pub gradients: u64,
    /// Device addresses of the state; 0 for a vector that the optimizer does not have.
    pub states: [u64; 2],
    /// Device address of the deltas, or of a copy of the weights in another dtype; 0 for no copy.
    pub output: u64,
    /// Elements.
    pub len: u64,
    /// Index of the first block for this tensor: the number of tiles of all tensors before it.
    pub first_block: u64,
    /// The bits of the `f64` that multiplies the step's rate.
    pub rate: u64,
    /// The bits of the weight decay, an `f64`.
    pub decay: u64,
    /// The bits of both in `f32`, the rate in the low half.
    pub narrow: u64,
}

impl UpdateRow {
    /// The factor of the rate and the weight decay, in `f64`.
    #[inline(always)]
    pub fn wide(&self) -> [f64; 2] {
        [f64::from_bits(self.rate), f64::from_bits(self.decay)]
    }

    /// The same in `f32`.
    #[inline(always)]
    pub fn narrow(&self) -> [f32; 2] {
        [f32::from_bits(self.narrow as u32), f32::from_bits((self.narrow >> 32) as u32)]
    }

    /// The row with this rate and this decay.
    pub fn with_rate(self, rate: f64, decay: f64) -> Self {
        let narrow = (rate as f32).to_bits() as u64 | ((decay as f32).to_bits() as u64) << 32;
        Self { rate: rate.to_bits(), decay: decay.to_bits(), narrow, ..self }
    }
}

/// The number of elements of one vector of an update, of the weights' dtype.
#[inline(always)]
pub const fn update_vector_len(weights: DType) -> usize {
    VECTOR_BYTES / weights.size_bytes()
}

/// The number of elements per block of an update.
#[inline(always)]
pub const fn update_tile_len(weights: DType) -> usize {
    UPDATE_THREADS as usize * update_vector_len(weights)
}

/// The type of a kernel parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Param {
    /// A device address.
    Pointer,
    /// A count or an index.
    U64,
    /// A scalar of a formula.
    F64,
}

impl Param {
    /// The type's name in PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Param::Pointer | Param::U64 => ".u64",
            Param::F64 => ".f64",
        }
    }
}

/// An entry point of the PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// Its name.
    pub name: &'static str,
    /// The operation: the part of the name before the dtypes; its PTX is in the file with that name.
    pub family: &'static str,
    /// Its launch bounds, for the compiler and for launches.
    pub bounds: LaunchBounds,
    /// Its parameters, in order.
    pub params: &'static [Param],
}

use Param::{F64, Pointer, U64};

/// One entry for each dtype.
macro_rules! dtypes_of {
    ($family:literal, $suffix:literal, $bounds:expr, $params:expr) => {
        dtypes_of!($family, $suffix, $bounds, $params, "f64" "f32" "f16" "bf16")
    };
    ($family:literal, $suffix:literal, $bounds:expr, $params:expr, $($dtype:literal)*) => {
        [$(EntryPoint { name: concat!($family, "_", $dtype, $suffix), family: $family, bounds: $bounds, params: $params }),*]
    };
}

/// Entries of which the first one, for `f64`, has launch bounds of its own.
const fn with_f64_bounds<const N: usize>(mut entries: [EntryPoint; N], bounds: LaunchBounds) -> [EntryPoint; N] {
    entries[0].bounds = bounds;
    entries
}

/// One entry for each ordered pair of dtypes.
macro_rules! pairs_of {
    ($family:literal, $suffix:literal, $bounds:expr, $params:expr) => {
        pairs_of!($family, $suffix, $bounds, $params,
            "f64_f64" "f64_f32" "f64_f16" "f64_bf16" "f32_f64" "f32_f32" "f32_f16" "f32_bf16"
            "f16_f64" "f16_f32" "f16_f16" "f16_bf16" "bf16_f64" "bf16_f32" "bf16_f16" "bf16_bf16")
    };
    ($family:literal, $suffix:literal, $bounds:expr, $params:expr, $($dtypes:literal)*) => {
        [$(EntryPoint { name: concat!($family, "_", $dtypes, $suffix), family: $family, bounds: $bounds, params: $params }),*]
    };
}

/// The entries of an optimizer's updates.
macro_rules! updates_of {
    (weights $family:literal, $params:expr) => {
        updates_of!($family, $params,
            "f64" "f32" "f16" "bf16" "f32_f16" "f16_f16" "bf16_f16" "f32_bf16" "f16_bf16" "bf16_bf16")
    };
    (deltas $family:literal, $params:expr) => {
        updates_of!($family, $params, "f64_f64" "f32_f32" "f32_f16" "bf16_f32" "f16_f16")
    };
    ($family:literal, $params:expr, $($dtypes:literal)*) => {
        [$(EntryPoint {
            name: concat!($family, "_", $dtypes), family: $family, bounds: LaunchBounds::UPDATE, params: $params
        }),*]
    };
}

/// `(destination, source, len)`.
const STREAM: &[Param] = &[Pointer, Pointer, U64];
/// `(pieces, piece count)`.
const COPIES: &[Param] = &[Pointer, U64];
/// `(partials, totals, inputs…, chunked spans, span count, layer count, block count, chunk count)`: the first and last parameters of
/// kernels that reduce. `block count` blocks reduce the chunks, followed by one for each layer and sum. `partials[sum][chunk]` are
/// [`EMPTY_BYTE`]s before and after; `totals[row][product]` has a row for each layer, and then the rows of divided layers
/// ([`ChunkedSpan`]). Rows of chunks in other shards become zero; `fold_sums` adds the rows.
const REDUCE_ONE: &[Param] = &[Pointer, Pointer, Pointer, Pointer, U64, U64, U64, U64];
const REDUCE_TWO: &[Param] = &[Pointer, Pointer, Pointer, Pointer, Pointer, U64, U64, U64, U64];

/// Streaming kernels over two dtypes.
pub const STREAM_ENTRIES: [[EntryPoint; 16]; 5] = [
    // (destination, source, len)
    pairs_of!("cast", "", LaunchBounds::STREAM, STREAM),
    // (sum, value, len)
    pairs_of!("accumulate", "", LaunchBounds::STREAM, STREAM),
    // (destination, source, len, factor)
    pairs_of!("scale", "", LaunchBounds::STREAM, &[Pointer, Pointer, U64, F64]),
    pairs_of!("cast_segments", "", LaunchBounds::STREAM, COPIES),
    pairs_of!("accumulate_segments", "", LaunchBounds::STREAM, COPIES),
];

/// `combine`: `(destination, table of vectors, vector count, weights, cancelled, spans, span count, block length)`; leaves cancelled layers
/// unchanged. The destination may be one of the vectors. [`combine_suffix`] selects the entry for a number of vectors.
pub const COMBINE_ENTRIES: [[EntryPoint; 16]; 2] = [
    pairs_of!("combine", "_p2", LaunchBounds::COMBINE, COMBINE),
    pairs_of!("combine", "", LaunchBounds::COMBINE, COMBINE),
];
/// The entries of [`COMBINE_ENTRIES`] for several vectors, where the sum has their dtype.
pub const COMBINE_WIDE_ENTRIES: [[EntryPoint; 4]; 2] = [
    dtypes_of!("combine", "_p4", LaunchBounds::COMBINE_OF_FOUR, COMBINE, "f64_f64" "f32_f32" "f16_f16" "bf16_bf16"),
    dtypes_of!("combine", "_p8", LaunchBounds::COMBINE_OF_EIGHT, COMBINE, "f64_f64" "f32_f32" "f16_f16" "bf16_bf16"),
];
const COMBINE: &[Param] = &[Pointer, Pointer, U64, Pointer, Pointer, Pointer, U64, U64];

/// The suffix of the entry that combines this many vectors: for two, for any number, and with the vectors' own dtype for three or four and
/// for eight. Five to seven use the entry for any number: on 16-bit vectors it is faster for them than the entry for eight.
pub const fn combine_suffix(vectors: usize, is_one_dtype: bool) -> &'static str {
    match vectors {
        2 => "_p2",
        3 | 4 if is_one_dtype => "_p4",
        8 if is_one_dtype => "_p8",
        _ => "",
    }
}

/// The length of a layer's row of its combination tree: the coefficients of each pair, followed by the ranks' scaling norms.
pub const fn tree_row(world_size: usize) -> usize {
    crate::math::precise::NUMBERS * (world_size - 1) + world_size
}

/// Kernels over one dtype.
pub const DTYPE_ENTRIES: [[EntryPoint; 4]; 10] = [
    // (sums, rows, row count): the sum of squares of each chunk, one block a chunk
    dtypes_of!("norms", "", LaunchBounds::REDUCE, STREAM),
    // (flag, source, len): a u32 that is 1 before the launch becomes 0 if any element is NaN or infinite
    dtypes_of!("all_finite", "", LaunchBounds::REDUCE, STREAM),
    // one sum: |a|²
    dtypes_of!("squared_norms", "", LaunchBounds::REDUCE, REDUCE_ONE),
    // three sums: a·b, |a|², |b|²
    dtypes_of!("dots", "", LaunchBounds::REDUCE, REDUCE_TWO),
    // (partials, totals, table of vectors, first vector, count in this tile, world size, spans, …): `products(width)` sums, of which the
    // products of `count` vectors are used
    dtypes_of!("gram", "_p2", LaunchBounds::REDUCE, GRAM),
    dtypes_of!("gram", "_p4", LaunchBounds::GRAM_OF_FOUR, GRAM),
    dtypes_of!("gram", "_p8", LaunchBounds::GRAM_OF_EIGHT, GRAM),
    // (partials, totals, table of vectors, first and count of the left, first and count of the right, world size, spans, …):
    // `GRAM_CROSS_WIDTH` squared sums
    dtypes_of!(
        "gram_cross",
        "",
        LaunchBounds::GRAM_CROSS,
        &[Pointer, Pointer, Pointer, U64, U64, U64, U64, U64, Pointer, U64, U64, U64, U64]
    ),
    // (partials, totals, table of vectors, tree, cancelled, begin, middle, end, world size, spans, …): three sums, for cancelled layers
    dtypes_of!(
        "tree_dots",
        "",
        LaunchBounds::TREE_DOTS,
        &[Pointer, Pointer, Pointer, Pointer, Pointer, U64, U64, U64, U64, Pointer, U64, U64, U64, U64]
    ),
    // (destination, table of vectors, vector count, tree, cancelled, spans, span count, block length), for cancelled layers
    dtypes_of!("tree_combine", "", LaunchBounds::TREE, &[Pointer, Pointer, U64, Pointer, Pointer, Pointer, U64, U64]),
];

/// Updates of optimizers by `(rows, row count, step memory, scalars…)`. Names have the dtype of gradients, and the dtype of the copy of the
/// weights, if there is one. Weights and states are of `f32`, or all operands of `f64`.
pub const UPDATE_ENTRIES: [[EntryPoint; 10]; 2] =
    [updates_of!(weights "sgd", SGD), with_f64_bounds(updates_of!(weights "adamw", ADAMW), LaunchBounds::UPDATE_WIDE)];
/// The same, which write the steps instead of adding them. Names have the dtypes of gradients and steps.
pub const DELTA_ENTRIES: [[EntryPoint; 5]; 2] = [
    updates_of!(deltas "sgd_deltas", SGD),
    with_f64_bounds(updates_of!(deltas "adamw_deltas", ADAMW), LaunchBounds::UPDATE_WIDE),
];
const SGD: &[Param] = &[Pointer, U64, Pointer, F64, F64];
const ADAMW: &[Param] = &[Pointer, U64, Pointer];

/// Kernels over one dtype and the memory of peers.
pub const PEER_ENTRIES: [[EntryPoint; 4]; 15] = [
    // (peers, weights, tree, cancelled, short, totals, partials, chunked spans, span count, block count, chunk count, spans, block count, block
    // length, senders): one job for each sender, block of chunks, PEER_LAYERS layers and block of the result, in this order, on any number of
    // blocks; every rank's shard becomes Adasum of all
    dtypes_of!("peer_adasum", "_p2", LaunchBounds::of_peers(2), PEER_ADASUM),
    dtypes_of!("peer_adasum", "_p4", LaunchBounds::of_peers(4), PEER_ADASUM),
    dtypes_of!("peer_adasum", "_p8", LaunchBounds::of_peers(8), PEER_ADASUM),
    // (peers, factor, senders, reducers): one job for each sender and reducer, on any number of blocks; every rank's shard becomes the sum
    // times the factor
    dtypes_of!("peer_reduce", "_p2", LaunchBounds::of_peers(2), PEER_REDUCE),
    dtypes_of!("peer_reduce", "_p4", LaunchBounds::of_peers(4), PEER_REDUCE),
    dtypes_of!("peer_reduce", "_p8", LaunchBounds::of_peers(8), PEER_REDUCE),
    // (mailboxes, destination, source, len, factor, blocks): the destination, which may be the source, becomes the sum times the factor;
    // every rank sends all others all data
    dtypes_of!("one_shot", "_p2", LaunchBounds::PACKETS, PACKETS),
    dtypes_of!("one_shot", "_p4", LaunchBounds::PACKETS, PACKETS),
    dtypes_of!("one_shot", "_p8", LaunchBounds::PACKETS, PACKETS),
    // the same; every rank sends each other one its shard, adds up its own and sends all others the result
    dtypes_of!("two_shot", "_p2", LaunchBounds::PACKETS, PACKETS),
    dtypes_of!("two_shot", "_p4", LaunchBounds::PACKETS, PACKETS),
    dtypes_of!("two_shot", "_p8", LaunchBounds::PACKETS, PACKETS),
    // (mailboxes, packet arena, elements, weights, cancelled, short, vectors, len, trees, blocks): the elements become their Adasum;
    // weights[layer][rank]; cancelled and short are a u32 per layer; kernels with an exact path need memory for the other ranks' vectors, of
    // `len` elements, and a [`packet_tree`] for each block
    with_f64_bounds(
        dtypes_of!("packet_adasum", "_p2", LaunchBounds::packet_adasum(4), PACKET_ADASUM),
        LaunchBounds::packet_adasum(8),
    ),
    with_f64_bounds(
        dtypes_of!("packet_adasum", "_p4", LaunchBounds::packet_adasum(4), PACKET_ADASUM),
        LaunchBounds::packet_adasum(8),
    ),
    with_f64_bounds(
        dtypes_of!("packet_adasum", "_p8", LaunchBounds::packet_adasum(4), PACKET_ADASUM),
        LaunchBounds::packet_adasum(8),
    ),
];
const PACKET_ADASUM: &[Param] = &[Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, U64, Pointer, U64];
const PACKETS: &[Param] = &[Pointer, Pointer, Pointer, U64, F64, U64];
const PEER_ADASUM: &[Param] =
    &[Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, U64, U64, U64, Pointer, U64, U64, U64];
const PEER_REDUCE: &[Param] = &[Pointer, F64, U64, U64];
const GRAM: &[Param] = &[Pointer, Pointer, Pointer, U64, U64, U64, Pointer, U64, U64, U64, U64];

/// Kernels without a dtype.
pub const PLAIN_ENTRIES: [EntryPoint; 9] = [
    // (step memory, step rules, sums of chunks, chunk count): one block
    plain("advance_step", LaunchBounds::REDUCE, &[Pointer, Pointer, Pointer, U64]),
    plain("empty", LaunchBounds::STREAM, &[]),
    // (sums, source, bytes): the exclusive or of the words that each warp reads, a u32 per warp; bytes are a multiple of 4
    plain("sweep", LaunchBounds::STREAM, STREAM),
    // (peers): waits for all ranks, and counts the run
    plain("peer_barrier", LaunchBounds::of_peers(MOST_PEERS), &[Pointer]),
    // (destination, bytes)
    plain("zero", LaunchBounds::STREAM, &[Pointer, U64]),
    plain("zero_segments", LaunchBounds::STREAM, COPIES),
    // (totals, chunked spans, divided layers, count of products): one block for each divided layer and product adds the rows to its total
    plain("fold_sums", LaunchBounds::REDUCE, &[Pointer, Pointer, Pointer, U64]),
    // (weights, tree, cancelled, short, gram, layers, world size, whether vectors are of f64); cancelled and short are a u32 per layer. The
    // weights of cancelled layers are those after the first level, whose coefficients go to the trees of all layers (see `combine_pair`);
    // for f64 they are all 1, and the ranks' squared norms go there
    plain("coefficients", LaunchBounds::LAYER, &[Pointer, Pointer, Pointer, Pointer, Pointer, U64, U64, U64]),
    // (weights, tree, cancelled, sums, layers, world size, begin, middle, end, whether vectors are of f64): sums[layer] are the sums of
    // `tree_dots`, and the pair's coefficients go to the layer's row of the tree ([`tree_row`])
    plain("combine_pair", LaunchBounds::LAYER, &[Pointer, Pointer, Pointer, Pointer, U64, U64, U64, U64, U64, U64]),
];

const fn plain(name: &'static str, bounds: LaunchBounds, params: &'static [Param]) -> EntryPoint {
    EntryPoint { name, family: name, bounds, params }
}

/// Every entry point of the PTX.
pub fn entries() -> impl Iterator<Item = &'static EntryPoint> {
    let pairs = STREAM_ENTRIES.iter().flatten().chain(COMBINE_ENTRIES.iter().flatten());
    let dtypes = COMBINE_WIDE_ENTRIES.iter().flatten().chain(DTYPE_ENTRIES.iter().flatten());
    let updates = UPDATE_ENTRIES.iter().flatten().chain(DELTA_ENTRIES.iter().flatten());
    pairs.chain(dtypes).chain(PEER_ENTRIES.iter().flatten()).chain(updates).chain(&PLAIN_ENTRIES)
}
