//! [`fingerprint`]: a hash of elements' bits, by which ranks compare their data without sending them.

use rayon::prelude::*;
use twox_hash::XxHash3_64;

use crate::slice::Slice;

/// The number of bytes that are hashed at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// XXH3 (64 bits, seed 0) of the XXH3 hashes of all MiBs.
///
/// XXH3 is specified, so ranks built by different compilers compute the same hash, on machines with the same byte order. The result does
/// not depend on the number of threads.
pub(crate) fn fingerprint(src: Slice<'_>) -> u64 {
    fingerprint_of_words(&fingerprints_of_chunks(src))
}

/// The hashes of all MiBs, from which [`fingerprint`] is computed. The hashes of several slices, concatenated, are the hashes of the whole,
/// if all slices but the last are whole MiBs.
pub(crate) fn fingerprints_of_chunks(src: Slice<'_>) -> Vec<u64> {
    src.as_bytes().par_chunks(CHUNK_BYTES).map(XxHash3_64::oneshot).collect()
}

/// XXH3 (64 bits, seed 0) of the numbers' bytes.
pub(crate) fn fingerprint_of_words(words: &[u64]) -> u64 {
    XxHash3_64::oneshot(bytemuck::cast_slice(words))
}
