//! [`fingerprint`]: a hash of elements' bits, for ranks that compare what they hold without sending it.

use rayon::prelude::*;
use twox_hash::XxHash3_64;

use crate::slice::Slice;

/// Bytes that are hashed at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// XXH3 (64 bits, seed 0) of each MiB, and of those hashes.
///
/// XXH3 is specified, so that ranks built by different compilers compute the same hash, on machines of one byte
/// order; and the number of threads does not matter.
pub(crate) fn fingerprint(src: Slice<'_>) -> u64 {
    fingerprint_of_words(&fingerprints_of_chunks(src))
}

/// The hashes of each MiB, of which [`fingerprint`] is the hash. Those of several slices are those of the whole, if all but the last are whole MiBs.
pub(crate) fn fingerprints_of_chunks(src: Slice<'_>) -> Vec<u64> {
    src.as_bytes().par_chunks(CHUNK_BYTES).map(XxHash3_64::oneshot).collect()
}

/// The same hash of numbers.
pub(crate) fn fingerprint_of_words(words: &[u64]) -> u64 {
    XxHash3_64::oneshot(bytemuck::cast_slice(words))
}
