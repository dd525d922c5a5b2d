//! Adasum's weights on the device, one thread a layer: `coefficients` from Gram matrices, and the exact path for layers that lost
//! digits to cancellation, which `coefficients` starts: for each pair `tree_dots` and `combine_pair`, then `tree_combine`.
//!
//! The exact path evaluates the combination tree at every element, from the ranks' own values; of `f64`, in twice the precision. Other
//! layers skip it. It is never the bottleneck: layers cancel where gradients are opposite to within a hundredth, and those of `f64` that
//! always take it are short.

use super::products::add_dots;
use super::{for_each_dtype, for_each_pair, kernel};
use crate::abi::{LaunchBounds, Span, THREADS, tree_row};
use crate::half::{BF16, F16};
use crate::math::Element;
use crate::math::adasum::{
    self, Coefficients, Criterion, Pair, Weights, coefficients, combine_pair, product_index, products, start_tree,
    tree_node, weights,
};
use crate::math::precise::{self, NUMBERS, SUMS, Scales};
use crate::math::wide::Wide;
use crate::reduce::{self, Reduction};
use crate::thread;

/// One layer's weights in device memory.
struct LayerWeights(*mut f64);

impl Weights for LayerWeights {
    #[inline(always)]
    fn get(&self, rank: usize) -> f64 {
        // SAFETY: ranks are below the world size, for which the launch provides room.
        unsafe { *self.0.add(rank) }
    }

    #[inline(always)]
    fn set(&mut self, rank: usize, weight: f64) {
        // SAFETY: as above.
        unsafe { *self.0.add(rank) = weight }
    }
}

/// How the exact path computes with vectors of a dtype.
pub(super) trait Exact: Element {
    /// An element of a node.
    type Value: Copy + Default;
    /// The sums of a pair.
    type Sums;
    /// What terms of sums are cut by.
    type Scales: Copy;
    /// No terms.
    const ZEROS: Self::Sums;

    /// An element of a rank's vector.
    fn value(self) -> Self::Value;
    /// An element of the root, rounded.
    fn rounded(value: Self::Value) -> f64;
    /// An element of a node, with coefficients from a row of trees.
    ///
    /// # Safety
    /// The row has those of this pair.
    unsafe fn join(row: *const f64, pair: Pair, left: Self::Value, right: Self::Value) -> Self::Value;
    /// The scales of a pair.
    ///
    /// # Safety
    /// The row is one of so many ranks.
    unsafe fn scales(row: *const f64, pair: Pair, world_size: usize) -> Self::Scales;
    /// Adds an element's terms.
    fn add(sums: Self::Sums, scales: Self::Scales, left: Self::Value, right: Self::Value) -> Self::Sums;
}

macro_rules! plainly_exact {
    ($($T:ident)*) => {
        $(impl Exact for $T {
            type Value = f64;
            type Sums = [f64; 3];
            type Scales = ();
            const ZEROS: [f64; 3] = [0.0; 3];

            #[inline(always)]
            fn value(self) -> f64 {
                self.to_f64()
            }

            #[inline(always)]
            fn rounded(value: f64) -> f64 {
                value
            }

            #[inline(always)]
            unsafe fn join(row: *const f64, pair: Pair, left: f64, right: f64) -> f64 {
                // SAFETY: the caller's promise.
                adasum::join(unsafe { kept(row.add(NUMBERS * pair.index())) }, left, right)
            }

            #[inline(always)]
            unsafe fn scales(_: *const f64, _: Pair, _: usize) {}

            #[inline(always)]
            fn add(sums: [f64; 3], (): (), left: f64, right: f64) -> [f64; 3] {
                add_dots(sums, left, right)
            }
        })*
    };
}
plainly_exact!(f32 F16 BF16);

impl Exact for f64 {
    type Value = Wide;
    type Sums = precise::Sums;
    type Scales = Scales;
    const ZEROS: precise::Sums = [0.0; SUMS];

    #[inline(always)]
    fn value(self) -> Wide {
        self.into()
    }

    #[inline(always)]
    fn rounded(value: Wide) -> f64 {
        value.high
    }

    #[inline(always)]
    unsafe fn join(row: *const f64, pair: Pair, left: Wide, right: Wide) -> Wide {
        // SAFETY: the caller's promise.
        precise::join(unsafe { precisely_kept(row.add(NUMBERS * pair.index())) }, left, right)
    }

    #[inline(always)]
    unsafe fn scales(row: *const f64, pair: Pair, world_size: usize) -> Scales {
        // SAFETY: the caller's promise; squared norms stand behind the coefficients.
        Scales::of(pair, |rank| unsafe { *row.add(NUMBERS * (world_size - 1) + rank) })
    }

    #[inline(always)]
    fn add(sums: precise::Sums, scales: Scales, left: Wide, right: Wide) -> precise::Sums {
        precise::add_terms(sums, scales, left, right)
    }
}

/// One layer's combination tree: the ranks' vectors and the row that has the coefficients of its pairs.
#[derive(Clone, Copy)]
struct Tree<S> {
    table: *const *const S,
    row: *const f64,
}

impl<S: Exact> Tree<S> {
    /// One element of the node over ranks `begin..end`.
    #[inline(always)]
    unsafe fn value(self, element: u64, begin: usize, end: usize) -> S::Value {
        // SAFETY: the launch provides every rank's vector, and the coefficients of every pair below this node.
        let value = |rank: usize| unsafe { (*self.table.add(rank)).add(element as usize).read().value() };
        // SAFETY: as above.
        tree_node(begin, end, value, |pair, left, right| unsafe { S::join(self.row, pair, left, right) })
    }

    /// The tree of layer `layer`, out of those of all layers.
    #[inline(always)]
    fn of_layer(table: *const *const S, tree: *const f64, layer: u64, world_size: u64) -> Self {
        Self { table, row: tree.wrapping_add(layer as usize * tree_row(world_size as usize)) }
    }
}

/// Keeps a pair's coefficients.
#[inline(always)]
pub(super) unsafe fn keep(place: *mut f64, (left, right): Coefficients) {
    // SAFETY: the launch provides room for two numbers a pair, or more.
    unsafe {
        place.write(left);
        place.add(1).write(right);
    }
}

/// What [`keep`] has put there.
#[inline(always)]
pub(super) unsafe fn kept(place: *const f64) -> Coefficients {
    // SAFETY: the launch provides two numbers a pair, or more, and this pair's have been written.
    unsafe { (*place, *place.add(1)) }
}

/// Keeps a pair's coefficients with all their digits.
#[inline(always)]
unsafe fn keep_precisely(place: *mut f64, (left, right): precise::Coefficients) {
    // SAFETY: the launch provides room for four numbers a pair.
    unsafe {
        keep(place, (left.high, left.low));
        keep(place.add(2), (right.high, right.low));
    }
}

/// What [`keep_precisely`] has put there.
#[inline(always)]
unsafe fn precisely_kept(place: *const f64) -> precise::Coefficients {
    // SAFETY: the launch provides four numbers a pair, and this pair's have been written.
    let ((left, left_low), (right, right_low)) = unsafe { (kept(place), kept(place.add(2))) };
    (Wide { high: left, low: left_low }, Wide { high: right, low: right_low })
}

/// The criterion of a layer, of which a launch knows whether vectors are of `f64`, and the layer's flag whether it is short.
#[inline(always)]
pub(super) fn criterion(is_double: bool, is_short: u32) -> Criterion {
    match (is_double, is_short) {
        (false, _) => Criterion::Narrow,
        (true, 0) => Criterion::Double,
        (true, _) => Criterion::ShortDouble,
    }
}

kernel!("coefficients", LaunchBounds::LAYER, fn (
    out: *mut f64, tree: *mut f64, cancelled: *mut u32, short: *const u32, gram: *const f64, layers: u64, world_size: u64,
    is_double: u64,
) {
    let layer = thread::index_1d() as usize;
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
        // Nothing of the Gram matrix has enough digits, but for the scales.
        start_tree(&mut layer_weights, ranks, |_| (1.0, 1.0));
        let mut rank = 0;
        while rank < ranks {
            row.add(NUMBERS * (ranks - 1) + rank).write(product(rank, rank));
            rank += 1;
        }
    } else if lost {
        start_tree(&mut layer_weights, ranks, |pair| kept(row.add(NUMBERS * pair.index())));
    }
    cancelled.add(layer).write(lost as u32);
});

kernel!("combine_pair", LaunchBounds::LAYER, fn (
    out: *mut f64, tree: *mut f64, cancelled: *const u32, sums: *const f64, layers: u64, world_size: u64,
    begin: u64, middle: u64, end: u64, is_double: u64,
) {
    let layer = thread::index_1d();
    if layer >= layers || *cancelled.add(layer as usize) == 0 {
        return;
    }
    let pair = Pair { begin: begin as usize, middle: middle as usize, end: end as usize };
    let row = tree.add(layer as usize * tree_row(world_size as usize));
    let place = row.add(NUMBERS * pair.index());
    let both = if is_double == 0 {
        let sums = sums.add(layer as usize * 3);
        let both = coefficients(*sums, *sums.add(1), *sums.add(2));
        keep(place, both);
        both
    } else {
        let sums = sums.add(layer as usize * SUMS).cast::<precise::Sums>();
        let both = precise::coefficients(&*sums, f64::scales(row, pair, world_size as usize));
        keep_precisely(place, both);
        precise::rounded(both)
    };
    combine_pair(&mut LayerWeights(out.add((layer * world_size) as usize)), pair, both);
});

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        kernel!(concat!("tree_dots_", $name), LaunchBounds::TREE, fn (
            partials: *mut f64, totals: *mut f64, table: *const *const $T, tree: *const f64, cancelled: *const u32,
            begin: u64, middle: u64, end: u64, world_size: u64,
            spans: *const Span, span_count: u64, layers: u64, chunks: u64, chunk_len: u64,
        ) {
            let reduction = Reduction { partials, totals, spans, span_count, layers, chunks, chunk_len };
            const COUNT: usize = <$T as Exact>::ZEROS.len();
            reduction.run(COUNT, Some, |layer| *cancelled.add(layer as usize) != 0, |chunk| {
                let tree = Tree::<$T>::of_layer(table, tree, chunk.span, world_size);
                let pair = Pair { begin: begin as usize, middle: middle as usize, end: end as usize };
                let scales = <$T>::scales(tree.row, pair, world_size as usize);
                let mut totals = <$T>::ZEROS;
                reduce::walk::<1, THREADS>(chunk, |element, _| {
                    let left = tree.value(element, pair.begin, pair.middle);
                    let right = tree.value(element, pair.middle, pair.end);
                    totals = <$T>::add(totals, scales, left, right);
                });
                totals
            })
        });
    };
}
for_each_dtype!(of_dtype);

macro_rules! from_to {
    ($from:literal $S:ident $to:literal $D:ident) => {
        kernel!(concat!("tree_combine_", $from, "_", $to), LaunchBounds::TREE, fn (
            destination: *mut $D, table: *const *const $S, world_size: u64, tree: *const f64, cancelled: *const u32,
            spans: *const Span, span_count: u64, chunk_len: u64,
        ) {
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            if *cancelled.add(chunk.span as usize) == 0 {
                return;
            }
            let tree = Tree::<$S>::of_layer(table, tree, chunk.span, world_size);
            reduce::walk::<1, THREADS>(chunk, |element, _| {
                let value = tree.value(element, 0, world_size as usize);
                destination.add(element as usize).write(<$D>::from_f64(<$S>::rounded(value)));
            });
        });
    };
}
for_each_pair!(from_to);
