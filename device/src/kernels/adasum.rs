//! Adasum's weights on the device, one thread a layer: `coefficients` from Gram matrices, and the exact path for layers that lost
//! digits to cancellation, which `coefficients` starts: for each pair `tree_dots` and `combine_pair`, then `tree_combine`.
//!
//! The exact path evaluates the combination tree at every element, from the ranks' own values. Other layers skip it. It is never
//! the bottleneck: layers cancel where gradients are opposite to within a hundredth.

use super::products::add_dots;
use super::{for_each_dtype, for_each_pair, kernel};
use crate::abi::{LaunchBounds, Span, THREADS};
use crate::half::{BF16, F16};
use crate::math::Element;
use crate::math::adasum::{
    Coefficients, Pair, Weights, coefficients, combine_pair, product_index, products, start_tree, tree_value, weights,
};
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

/// One layer's combination tree: the ranks' vectors and the coefficients of its pairs.
#[derive(Clone, Copy)]
struct Tree<S> {
    table: *const *const S,
    coefficients: *const f64,
}

impl<S: Element> Tree<S> {
    /// One element of the node over ranks `begin..end`.
    #[inline(always)]
    unsafe fn value(self, element: u64, begin: usize, end: usize) -> f64 {
        // SAFETY: the launch provides every rank's vector, and the coefficients of every pair below this node.
        let value = |rank: usize| unsafe { (*self.table.add(rank)).add(element as usize).read().to_f64() };
        // SAFETY: as above.
        tree_value(begin, end, value, |pair| unsafe { kept(self.coefficients, pair) })
    }

    /// The tree of layer `layer`, out of those of all layers.
    #[inline(always)]
    fn of_layer(table: *const *const S, tree: *const f64, layer: u64, world_size: u64) -> Self {
        Self { table, coefficients: tree.wrapping_add((layer * 2 * (world_size - 1)) as usize) }
    }
}

/// Keeps a pair's coefficients in a layer's tree.
#[inline(always)]
pub(super) unsafe fn keep(tree: *mut f64, pair: Pair, (left, right): Coefficients) {
    // SAFETY: the launch provides room for two numbers a pair.
    unsafe {
        let place = tree.add(2 * pair.index());
        place.write(left);
        place.add(1).write(right);
    }
}

/// What [`keep`] has put there.
#[inline(always)]
pub(super) unsafe fn kept(tree: *const f64, pair: Pair) -> Coefficients {
    let index = 2 * pair.index();
    // SAFETY: the launch provides two numbers a pair, and this pair's have been written.
    unsafe { (*tree.add(index), *tree.add(index + 1)) }
}

kernel!("coefficients", LaunchBounds::LAYER, fn (
    out: *mut f64, tree: *mut f64, cancelled: *mut u32, gram: *const f64, layers: u64, world_size: u64,
) {
    let layer = thread::index_1d() as usize;
    let ranks = world_size as usize;
    if layer as u64 >= layers {
        return;
    }
    let gram = gram.add(layer * products(ranks));
    let product = |i, j| *gram.add(product_index(i, j, ranks));
    let mut layer_weights = LayerWeights(out.add(layer * ranks));
    let tree = tree.wrapping_add(layer * 2 * (ranks - 1));
    let lost = weights(&mut layer_weights, ranks, product, |pair, both| keep(tree, pair, both));
    if lost {
        start_tree(&mut layer_weights, ranks, |pair| kept(tree, pair));
    }
    cancelled.add(layer).write(lost as u32);
});

kernel!("combine_pair", LaunchBounds::LAYER, fn (
    out: *mut f64, tree: *mut f64, cancelled: *const u32, sums: *const f64, layers: u64, world_size: u64,
    begin: u64, middle: u64, end: u64,
) {
    let layer = thread::index_1d();
    if layer >= layers || *cancelled.add(layer as usize) == 0 {
        return;
    }
    let sums = sums.add(layer as usize * 3);
    let pair = Pair { begin: begin as usize, middle: middle as usize, end: end as usize };
    let both = coefficients(*sums, *sums.add(1), *sums.add(2));
    combine_pair(&mut LayerWeights(out.add((layer * world_size) as usize)), pair, both);
    keep(tree.add((layer * 2 * (world_size - 1)) as usize), pair, both);
});

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        kernel!(concat!("tree_dots_", $name), LaunchBounds::TREE, fn (
            partials: *mut f64, totals: *mut f64, table: *const *const $T, tree: *const f64, cancelled: *const u32,
            begin: u64, middle: u64, end: u64, world_size: u64,
            spans: *const Span, span_count: u64, layers: u64, chunks: u64, chunk_len: u64,
        ) {
            let reduction = Reduction { partials, totals, spans, span_count, layers, chunks, chunk_len };
            reduction.run(3, Some, |layer| *cancelled.add(layer as usize) != 0, |chunk| {
                let tree = Tree::<$T>::of_layer(table, tree, chunk.span, world_size);
                let mut totals = [0.0; 3];
                reduce::walk::<1, THREADS>(chunk, |element, _| {
                    let left = tree.value(element, begin as usize, middle as usize);
                    let right = tree.value(element, middle as usize, end as usize);
                    totals = add_dots(totals, left, right);
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
                destination.add(element as usize).write(<$D>::from_f64(value));
            });
        });
    };
}
for_each_pair!(from_to);
