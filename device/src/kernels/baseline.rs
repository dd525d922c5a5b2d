//! Baselines of measurements: `empty`, which does nothing, and `sweep`, which reads memory with as little work as possible. No operation of
//! the library uses them.

use super::kernel;
use crate::abi::{LaunchBounds, SWEEP_TILE_BYTES, SWEEP_UNROLL, THREADS, VECTOR_BYTES, WARP};
use crate::{lanes, memory, thread, warp};

kernel!(["empty"], LaunchBounds::STREAM, fn () {});

// The exclusive or of the 32-bit words that each warp reads goes to `sums[block][warp]`.
kernel!(["sweep"], LaunchBounds::STREAM, fn (sums: *mut u32, source: *const u32, bytes: u64) {
    const WORDS: usize = VECTOR_BYTES / size_of::<u32>();
    let block = thread::block_idx_x() as u64;
    let (begin, thread) = (block * SWEEP_TILE_BYTES as u64, thread::thread_idx_x() as usize);
    let first = source.add(begin as usize / size_of::<u32>() + thread * WORDS);
    let mut sum = 0;
    if begin + SWEEP_TILE_BYTES as u64 <= bytes && memory::is_aligned::<u32, WORDS>(source) {
        let loaded: [[u32; WORDS]; SWEEP_UNROLL] =
            core::array::from_fn(|step| memory::load(first.add(step * THREADS as usize * WORDS)));
        for word in loaded.as_flattened() {
            sum ^= word;
        }
    } else {
        let words = if bytes - begin < SWEEP_TILE_BYTES as u64 { bytes - begin } else { SWEEP_TILE_BYTES as u64 } / 4;
        let mut word = thread as u64;
        while word < words {
            sum ^= source.add((begin / 4 + word) as usize).read();
            word += THREADS as u64;
        }
    }
    let sum = lanes::exclusive_or(sum);
    if warp::lane_id() == 0 {
        sums.add((block * (THREADS / WARP) as u64) as usize + thread / WARP as usize).write(sum);
    }
});
