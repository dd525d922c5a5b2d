//! Adasum's weights on the device, one thread per layer: `coefficients` from Gram matrices, and the exact path for layers that lost digits
//! to cancellation, which `coefficients` starts: for each pair `tree_dots` and `combine_pair`, then `tree_combine`.
//!
//! The exact path evaluates the combination tree at every element, from the ranks' own values; for `f64`, in twice the precision. Other
//! layers skip it. It is never the bottleneck: layers cancel where gradients are opposite to within a hundredth, and the `f64` layers that
//! always take it are short.

use super::products::add_dots;
use super::{for_each_dtype, kernel};
use crate::abi::{ChunkedSpan, LaunchBounds, Span, tree_row};
use crate::half::*;
use crate::math::Element;
use crate::math::adasum::{
    self, Coefficients, Criterion, LEVELS, Pair, Weights, coefficients, product_index, products, start_tree, tree_node,
    weights,
};
use crate::math::precise::{self, NUMBERS, Product, SLICES, SUMS, Scales};
use crate::math::wide::Wide;
use crate::reduce::{self, Reduction};
use crate::{arch, thread};

/// One layer's weights in device memory.
struct LayerWeights(*mut f64);

impl Weights for LayerWeights {
    #[inline(always)]
    fn get(&self, rank: usize) -> f64 {
        // SAFETY: ranks are below the world size, for which the launch provides memory.
        unsafe { *self.0.add(rank) }
    }

    #[inline(always)]
    fn set(&mut self, rank: usize, weight: f64) {
        // SAFETY: as above.
        unsafe { *self.0.add(rank) = weight }
    }
}

/// The exact path's arithmetic for vectors of a dtype.
pub(super) trait Exact: Element {
    /// Whether it has twice the precision of `f64`, from the first pairs on.
    const IS_DOUBLE: bool;
    /// The number of sums of a pair.
    const COUNT: usize;
    /// Sums without terms.
    const ZEROS: Self::Sums;
    /// The number of parts into which the sums of a pair are divided, to save registers; each part reads all elements again.
    const PARTS: usize;
    /// A part without terms.
    const NO_PART: Self::Part;

    /// An element of a node.
    type Value: Copy + Default;
    /// The coefficients of a pair.
    type Coefficients: Copy;
    /// The sums of a pair.
    type Sums: Copy;
    /// One part of the sums of a pair.
    type Part: Copy;
    /// The scales by which terms of sums are divided into slices.
    type Scales: Copy;

    /// An element of a rank's vector.
    ///
    /// # Safety
    /// `row` is the row of a layer's tree of `world_size` ranks, with their scaling norms; the rank is one of them.
    unsafe fn leaf(self, row: *const f64, rank: usize, world_size: usize) -> Self::Value;
    /// An element of the root, rounded.
    ///
    /// # Safety
    /// `row` is the row of a layer's tree of `world_size` ranks, with their scaling norms.
    unsafe fn root(value: Self::Value, row: *const f64, world_size: usize) -> f64;
    /// An element of a pair's combination.
    fn join(both: Self::Coefficients, left: Self::Value, right: Self::Value) -> Self::Value;
    /// A pair's coefficients from its sums.
    fn coefficients(sum: impl Fn(usize) -> f64, scales: Self::Scales) -> Self::Coefficients;
    /// A pair's coefficients of the vectors themselves, rounded.
    fn rounded_coefficients(both: Self::Coefficients, scales: Self::Scales) -> Coefficients;
    /// Stores a pair's coefficients.
    ///
    /// # Safety
    /// `place` has memory for [`NUMBERS`] numbers.
    unsafe fn keep(place: *mut f64, both: Self::Coefficients);
    /// Loads a pair's coefficients.
    ///
    /// # Safety
    /// [`keep`](Self::keep) has stored them there.
    unsafe fn kept(place: *const f64) -> Self::Coefficients;
    /// The scales of a pair.
    ///
    /// # Safety
    /// `row` is the row of a layer's tree of `world_size` ranks, with their scaling norms.
    unsafe fn scales(row: *const f64, pair: Pair, world_size: usize) -> Self::Scales;
    /// The scales for part `number`.
    fn scales_of_part(scales: Self::Scales, number: usize) -> Self::Scales;
    /// Adds an element's terms.
    fn add(sums: Self::Sums, scales: Self::Scales, left: Self::Value, right: Self::Value) -> Self::Sums;
    /// Adds an element's terms to part `number`.
    fn add_part(
        part: Self::Part,
        number: usize,
        scales: Self::Scales,
        left: Self::Value,
        right: Self::Value,
    ) -> Self::Part;
    /// One of a part's sums; there are [`COUNT`](Self::COUNT) over [`PARTS`](Self::PARTS).
    fn sum(part: &Self::Part, index: usize) -> f64;
}

macro_rules! plainly_exact {
    ($($T:ident)*) => {
        $(impl Exact for $T {
            const IS_DOUBLE: bool = false;
            const COUNT: usize = 3;
            const ZEROS: [f64; 3] = [0.0; 3];
            const PARTS: usize = 1;
            const NO_PART: [f64; 3] = [0.0; 3];

            type Value = f64;
            type Coefficients = Coefficients;
            type Sums = [f64; 3];
            type Part = [f64; 3];
            type Scales = ();

            #[inline(always)]
            unsafe fn leaf(self, _: *const f64, _: usize, _: usize) -> f64 {
                self.to_f64()
            }

            #[inline(always)]
            unsafe fn root(value: f64, _: *const f64, _: usize) -> f64 {
                value
            }

            #[inline(always)]
            fn join(both: Coefficients, left: f64, right: f64) -> f64 {
                adasum::join(both, left, right)
            }

            #[inline(always)]
            fn coefficients(sum: impl Fn(usize) -> f64, (): ()) -> Coefficients {
                coefficients(sum(0), sum(1), sum(2))
            }

            #[inline(always)]
            fn rounded_coefficients(both: Coefficients, (): ()) -> Coefficients {
                both
            }

            #[inline(always)]
            unsafe fn keep(place: *mut f64, both: Coefficients) {
                // SAFETY: the caller's promise.
                unsafe { keep(place, both) }
            }

            #[inline(always)]
            unsafe fn kept(place: *const f64) -> Coefficients {
                // SAFETY: the caller's promise.
                unsafe { kept(place) }
            }

            #[inline(always)]
            unsafe fn scales(_: *const f64, _: Pair, _: usize) {}

            #[inline(always)]
            fn scales_of_part(_: (), _: usize) {}

            #[inline(always)]
            fn add(sums: [f64; 3], (): (), left: f64, right: f64) -> [f64; 3] {
                add_dots(sums, left, right)
            }

            #[inline(always)]
            fn add_part(part: [f64; 3], _: usize, (): (), left: f64, right: f64) -> [f64; 3] {
                add_dots(part, left, right)
            }

            #[inline(always)]
            fn sum(part: &[f64; 3], index: usize) -> f64 {
                // The index is a constant in each branch: an address computed at run time would put the sums into memory.
                match index {
                    0 => part[0],
                    1 => part[1],
                    _ => part[2],
                }
            }
        })*
    };
}
plainly_exact!(f32 F16 BF16);

/// The product whose slices are in a part of `f64`'s sums.
#[inline(always)]
fn product_of_part(number: usize) -> Product {
    match number {
        0 => Product::Dot,
        1 => Product::Left,
        _ => Product::Right,
    }
}

impl Exact for f64 {
    const IS_DOUBLE: bool = true;
    const COUNT: usize = SUMS;
    const ZEROS: precise::Sums = [0.0; SUMS];
    const PARTS: usize = SUMS / SLICES;
    const NO_PART: [f64; SLICES] = [0.0; SLICES];

    type Value = Wide;
    type Coefficients = precise::Coefficients;
    type Sums = precise::Sums;
    type Part = [f64; SLICES];
    type Scales = Scales;

    #[inline(always)]
    unsafe fn leaf(self, row: *const f64, rank: usize, world_size: usize) -> Wide {
        // SAFETY: the caller's promise.
        precise::leaf(self, unsafe { *scaling_norm(row.cast_mut(), rank, world_size) })
    }

    #[inline(always)]
    unsafe fn root(value: Wide, row: *const f64, world_size: usize) -> f64 {
        let (mut sum, mut rank) = (0.0, 0);
        while rank < world_size {
            // SAFETY: the caller's promise.
            sum += unsafe { *scaling_norm(row.cast_mut(), rank, world_size) };
            rank += 1;
        }
        precise::root(value, sum, 1.0)
    }

    #[inline(always)]
    fn join(both: precise::Coefficients, left: Wide, right: Wide) -> Wide {
        precise::join(both, left, right)
    }

    #[inline(always)]
    fn coefficients(sum: impl Fn(usize) -> f64, scales: Scales) -> precise::Coefficients {
        precise::coefficients(sum, scales)
    }

    #[inline(always)]
    fn rounded_coefficients(both: precise::Coefficients, scales: Scales) -> Coefficients {
        precise::rounded(both, scales)
    }

    #[inline(always)]
    unsafe fn keep(place: *mut f64, (left, right): precise::Coefficients) {
        // SAFETY: the caller's promise.
        unsafe {
            keep(place, (left.high, left.low));
            keep(place.add(2), (right.high, right.low));
        }
    }

    #[inline(always)]
    unsafe fn kept(place: *const f64) -> precise::Coefficients {
        // SAFETY: the caller's promise.
        let ((left, left_low), (right, right_low)) = unsafe { (kept(place), kept(place.add(2))) };
        (Wide { high: left, low: left_low }, Wide { high: right, low: right_low })
    }

    #[inline(always)]
    unsafe fn scales(row: *const f64, pair: Pair, world_size: usize) -> Scales {
        // SAFETY: the caller's promise.
        Scales::of(pair, |rank| unsafe { *scaling_norm(row.cast_mut(), rank, world_size) })
    }

    #[inline(always)]
    fn scales_of_part(scales: Scales, number: usize) -> Scales {
        scales.only(product_of_part(number))
    }

    #[inline(always)]
    fn add(sums: precise::Sums, scales: Scales, left: Wide, right: Wide) -> precise::Sums {
        precise::add_terms(sums, scales, left, right)
    }

    #[inline(always)]
    fn add_part(part: [f64; SLICES], number: usize, scales: Scales, left: Wide, right: Wide) -> [f64; SLICES] {
        let product = product_of_part(number);
        // The constants for slicing the terms follow from one number, and should not be kept in registers beside it.
        let scale = f64::from_bits(arch::forget(scales.of_product(product).to_bits()));
        precise::add_term(part, product, scale, left, right)
    }

    #[inline(always)]
    fn sum(part: &[f64; SLICES], index: usize) -> f64 {
        match index {
            0 => part[0],
            1 => part[1],
            2 => part[2],
            _ => part[3],
        }
    }
}

/// The place of a rank's scaling norm in the row of a layer's tree of `world_size` ranks, behind the coefficients of the pairs.
#[inline(always)]
fn scaling_norm(row: *mut f64, rank: usize, world_size: usize) -> *mut f64 {
    row.wrapping_add(NUMBERS * (world_size - 1) + rank)
}

/// Stores the scaling norms in the row of a layer's tree of `world_size` ranks, whose vectors have these squared norms.
///
/// # Safety
/// The row has memory for them.
#[inline(always)]
pub(super) unsafe fn keep_scaling_norms(row: *mut f64, world_size: usize, squared_norm: impl Fn(usize) -> f64) {
    // SAFETY: the caller's promise.
    precise::scaling_norms(world_size, squared_norm, |rank, norm| unsafe {
        scaling_norm(row, rank, world_size).write(norm);
    });
}

/// One layer's combination tree, with nodes of at most `2^MOST` ranks: the ranks' vectors and the row with the coefficients of its pairs.
#[derive(Clone, Copy)]
pub(super) struct Tree<S, const MOST: usize> {
    pub(super) table: *const *const S,
    pub(super) row: *const f64,
    pub(super) world_size: usize,
}

impl<S: Exact, const MOST: usize> Tree<S, MOST> {
    /// Computes one element of the node over ranks `begin..end`.
    #[inline(always)]
    pub(super) unsafe fn value(self, element: u64, begin: usize, end: usize) -> S::Value {
        // SAFETY: the launch provides every rank's vector, and the coefficients of every pair below this node.
        let value = |rank: usize| unsafe {
            (*self.table.add(rank)).add(element as usize).read().leaf(self.row, rank, self.world_size)
        };
        tree_node::<_, MOST>(begin, end, value, |pair, left, right| {
            // SAFETY: as above.
            S::join(unsafe { S::kept(self.row.add(NUMBERS * pair.index())) }, left, right)
        })
    }

    /// Computes one element of the root, rounded.
    #[inline(always)]
    pub(super) unsafe fn root(self, element: u64) -> f64 {
        // SAFETY: the launch provides every rank's vector, the coefficients of every pair, and the scaling norms.
        unsafe { S::root(self.value(element, 0, self.world_size), self.row, self.world_size) }
    }

    /// Computes one element of the two nodes that a pair combines.
    #[inline(always)]
    pub(super) unsafe fn sides(self, element: u64, pair: Pair) -> (S::Value, S::Value) {
        // SAFETY: as above.
        unsafe {
            if !S::IS_DOUBLE {
                return (self.value(element, pair.begin, pair.middle), self.value(element, pair.middle, pair.end));
            }
            // In a loop that the compiler cannot unroll: with twice as much code, inner loops would not be unrolled either, and values of
            // nodes would be in memory.
            let (mut left, mut right) = (S::Value::default(), S::Value::default());
            let mut side = 0;
            while side < arch::opaque(2) {
                let (begin, end) = if side == 0 { (pair.begin, pair.middle) } else { (pair.middle, pair.end) };
                (left, right) = (right, self.value(element, begin, end));
                side += 1;
            }
            (left, right)
        }
    }

    /// The tree of layer `layer`, among the trees of all layers.
    #[inline(always)]
    fn of_layer(table: *const *const S, tree: *const f64, layer: u64, world_size: u64) -> Self {
        let world_size = world_size as usize;
        Self { table, row: tree.wrapping_add(layer as usize * tree_row(world_size)), world_size }
    }
}

/// Stores a pair's coefficients.
#[inline(always)]
pub(super) unsafe fn keep(place: *mut f64, (left, right): Coefficients) {
    // SAFETY: the launch provides memory for at least two numbers per pair.
    unsafe {
        place.write(left);
        place.add(1).write(right);
    }
}

/// Loads coefficients that [`keep`] has stored.
#[inline(always)]
pub(super) unsafe fn kept(place: *const f64) -> Coefficients {
    // SAFETY: the launch provides at least two numbers per pair, and this pair's have been written.
    unsafe { (*place, *place.add(1)) }
}

/// The criterion of a layer, from the launch's flag whether vectors are of `f64`, and the layer's flag whether it is short.
#[inline(always)]
pub(super) fn criterion(is_double: bool, is_short: u32) -> Criterion {
    match (is_double, is_short) {
        (false, _) => Criterion::Narrow,
        (true, 0) => Criterion::Double,
        (true, _) => Criterion::ShortDouble,
    }
}

/// The layer of this thread.
#[inline(always)]
fn layer_of_thread() -> u64 {
    // Like `thread::index_1d`, whose 32 bits are too few for all grids.
    thread::block_idx_x() as u64 * thread::block_dim_x() as u64 + thread::thread_idx_x() as u64
}

kernel!(["coefficients"], LaunchBounds::LAYER, fn (
    out: *mut f64, tree: *mut f64, cancelled: *mut u32, short: *const u32, gram: *const f64, layers: u64, world_size: u64,
    is_double: u64,
) {
    let layer = layer_of_thread() as usize;
    let ranks = world_size as usize;
    if layer as u64 >= layers {
        return;
    }
    let gram = gram.add(layer * products(ranks));
    let product = |i, j| *gram.add(product_index(i, j, ranks));
    let mut layer_weights = LayerWeights(out.add(layer * ranks));
    let row = tree.wrapping_add(layer * tree_row(ranks));
    let criterion = criterion(is_double != 0, *short.add(layer));
    let keep = |pair: Pair, both| keep(row.add(NUMBERS * pair.index()), both);
    let lost = weights(&mut layer_weights, ranks, criterion, product, keep);
    if lost && is_double != 0 {
        // Only the scales need no more digits than the Gram matrix has.
        start_tree(&mut layer_weights, ranks, |_| (1.0, 1.0));
        keep_scaling_norms(row, ranks, |rank| product(rank, rank));
    } else if lost {
        start_tree(&mut layer_weights, ranks, |pair| kept(row.add(NUMBERS * pair.index())));
    }
    cancelled.add(layer).write(lost as u32);
});

/// Stores a pair's coefficients in a layer's row of its tree, and returns them rounded.
#[inline(always)]
unsafe fn set_pair<T: Exact>(
    sums: *const f64,
    row: *mut f64,
    layer: usize,
    pair: Pair,
    world_size: usize,
) -> Coefficients {
    // SAFETY: the launch provides the sums of every layer, and a row for it.
    unsafe {
        let sum = |index: usize| *sums.add(layer * T::COUNT + index);
        let scales = T::scales(row, pair, world_size);
        let both = T::coefficients(sum, scales);
        T::keep(row.add(NUMBERS * pair.index()), both);
        T::rounded_coefficients(both, scales)
    }
}

kernel!(["combine_pair"], LaunchBounds::LAYER, fn (
    out: *mut f64, tree: *mut f64, cancelled: *const u32, sums: *const f64, layers: u64, world_size: u64,
    begin: u64, middle: u64, end: u64, is_double: u64,
) {
    let layer = layer_of_thread();
    if layer >= layers || *cancelled.add(layer as usize) == 0 {
        return;
    }
    let pair = Pair { begin: begin as usize, middle: middle as usize, end: end as usize };
    let row = tree.add(layer as usize * tree_row(world_size as usize));
    let both = if is_double == 0 {
        set_pair::<f32>(sums, row, layer as usize, pair, world_size as usize)
    } else {
        set_pair::<f64>(sums, row, layer as usize, pair, world_size as usize)
    };
    adasum::combine_pair(&mut LayerWeights(out.add((layer * world_size) as usize)), pair, both);
});

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        kernel!(["tree_dots_" $name], LaunchBounds::TREE_DOTS, fn (
            partials: *mut f64, totals: *mut f64, table: *const *const $T, tree: *const f64, cancelled: *const u32,
            begin: u64, middle: u64, end: u64, world_size: u64,
            spans: *const ChunkedSpan, span_count: u64, layers: u64, blocks: u64, chunks: u64,
        ) {
            let reduction = Reduction { partials, totals, spans, span_count, layers, blocks, chunks };
            reduction.run(<$T>::COUNT, Some, |layer| *cancelled.add(layer as usize) != 0, |range| {
                let tree = Tree::<$T, LEVELS>::of_layer(table, tree, range.span, world_size);
                let pair = Pair { begin: begin as usize, middle: middle as usize, end: end as usize };
                let scales = <$T>::scales(tree.row, pair, world_size as usize);
                let mut totals = <$T>::ZEROS;
                reduce::walk::<1, 1>(range, |element, _| {
                    let (left, right) = tree.sides(element, pair);
                    totals = <$T>::add(totals, scales, left, right);
                });
                totals
            })
        });
        kernel!(["tree_combine_" $name], LaunchBounds::TREE, fn (
            destination: *mut $T, table: *const *const $T, world_size: u64, tree: *const f64, cancelled: *const u32,
            spans: *const Span, span_count: u64, block_len: u64,
        ) {
            let range = reduce::range_of_this_block(spans, span_count, block_len);
            if *cancelled.add(range.span as usize) == 0 {
                return;
            }
            let tree = Tree::<$T, LEVELS>::of_layer(table, tree, range.span, world_size);
            reduce::walk::<1, 1>(range, |element, _| {
                destination.add(element as usize).write(<$T>::from_f64(tree.root(element)));
            });
        });
    };
}
for_each_dtype!(of_dtype);
