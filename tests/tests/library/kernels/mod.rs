//! The CPU kernels against the oracle: every dtype pair, the sizes at which loops go wrong, misaligned slices, edge values, errors, and
//! equal bits for any number of threads.

mod cast_halves;
mod coefficients;
mod combine;
mod elementwise;
mod equal_bits;
mod pack_and_unpack;
mod reductions;
mod refusals;

/// Lengths around vector widths, blocks and pages, and the lengths 0 and 1.
const SIZES: [usize; 14] = [0, 1, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 65535, 65536, 65537];

/// The first integer that f32 cannot represent, and that upstream's launch computation loses.
const PAST_F32: usize = (1 << 24) + 1;

/// Elements before and after a destination, which must stay unchanged.
const GUARD: usize = 3;
