//! Adasum's weights on the device, one thread a layer: `coefficients` from Gram matrices, and the two steps of the exact
//! path, `reset_weights` and `combine_pair`, which touch only layers that lost digits to cancellation.

use super::kernel;
use crate::math::adasum::{Pair, Weights, combine_pair, product_index, products, weights};
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

kernel!("coefficients", fn (
    out: *mut f64, cancelled: *mut u32, gram: *const f64, layers: u64, world_size: u64,
) {
    let layer = thread::index_1d() as usize;
    let ranks = world_size as usize;
    if layer as u64 >= layers {
        return;
    }
    let gram = gram.add(layer * products(ranks));
    let mut layer_weights = LayerWeights(out.add(layer * ranks));
    let lost = weights(&mut layer_weights, ranks, |i, j| *gram.add(product_index(i, j, ranks)));
    cancelled.add(layer).write(lost as u32);
});

kernel!("reset_weights", fn (out: *mut f64, cancelled: *const u32, layers: u64, world_size: u64) {
    let layer = thread::index_1d();
    if layer >= layers || *cancelled.add(layer as usize) == 0 {
        return;
    }
    for rank in 0..world_size {
        out.add((layer * world_size + rank) as usize).write(1.0);
    }
});

kernel!("combine_pair", fn (
    out: *mut f64, cancelled: *const u32, sums: *const f64, layers: u64, world_size: u64,
    begin: u64, middle: u64, end: u64,
) {
    let layer = thread::index_1d();
    if layer >= layers || *cancelled.add(layer as usize) == 0 {
        return;
    }
    let sums = sums.add(layer as usize * 3);
    let pair = Pair { begin: begin as usize, middle: middle as usize, end: end as usize };
    let mut layer_weights = LayerWeights(out.add((layer * world_size) as usize));
    combine_pair(&mut layer_weights, pair, *sums, *sums.add(1), *sums.add(2));
});
