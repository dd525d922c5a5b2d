//! [`Fingerprint`]: a hash of elements' bits, by which ranks compare their data without sending them, and the first element that is not
//! finite.

use rayon::prelude::*;
use twox_hash::XxHash3_64;

use super::all_finite;
use crate::slice::Slice;

/// The number of bytes that are hashed at a time.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;

/// The hashes of all MiBs of elements.
///
/// XXH3 is specified, so ranks built by different compilers compute the same hash, on machines with the same byte order. The result does
/// not depend on the number of threads.
#[derive(Debug, Default)]
pub struct Fingerprint {
    hashes: Vec<u64>,
    len: usize,
    not_finite: Option<(usize, f64)>,
}

impl Fingerprint {
    /// Hashes elements, and searches each MiB for NaN and infinities while it is in the cache.
    pub(crate) fn of(src: Slice<'_>) -> Self {
        let mut fingerprint = Self::default();
        fingerprint.add(src);
        fingerprint
    }

    /// Hashes elements that are known to be finite.
    pub(crate) fn of_finite(src: Slice<'_>) -> Self {
        let hashes = src.as_bytes().par_chunks(BLOCK_BYTES).map(XxHash3_64::oneshot).collect();
        Self { hashes, len: src.len(), not_finite: None }
    }

    /// Adds the elements that follow. The elements so far must be whole MiBs.
    pub(crate) fn add(&mut self, src: Slice<'_>) {
        let block_len = BLOCK_BYTES / src.dtype().size_bytes();
        let blocks = (0..src.len().div_ceil(block_len)).into_par_iter().map(|block| {
            let block = src.range(block * block_len..src.len().min((block + 1) * block_len));
            (XxHash3_64::oneshot(block.as_bytes()), all_finite(block))
        });
        let (hashes, are_finite): (Vec<u64>, Vec<bool>) = blocks.unzip();
        self.hashes.extend(hashes);
        if let (None, Some(block)) = (self.not_finite, are_finite.iter().position(|is_finite| !is_finite)) {
            let begin = block * block_len;
            let values = src.range(begin..src.len().min(begin + block_len)).to_f64_vec();
            let found = values.iter().position(|value| !value.is_finite());
            self.not_finite = found.map(|index| (self.len + begin + index, values[index]));
        }
        self.len += src.len();
    }

    /// XXH3 (64 bits, seed 0) of the hashes of all MiBs.
    pub fn hash(&self) -> u64 {
        fingerprint_of_words(&self.hashes)
    }

    /// The first element that is NaN or infinite: its index and its value.
    pub(crate) fn not_finite(&self) -> Option<(usize, f64)> {
        self.not_finite
    }
}

/// XXH3 (64 bits, seed 0) of the numbers' bytes.
pub(crate) fn fingerprint_of_words(words: &[u64]) -> u64 {
    XxHash3_64::oneshot(bytemuck::cast_slice(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements in pieces, as a GPU's memory is read, give the hash and the first NaN of the whole.
    #[test]
    fn fingerprint_of_pieces_is_of_the_whole() {
        let block_len = BLOCK_BYTES / size_of::<f32>();
        let mut values = vec![1.0f32; 3 * block_len + 5];
        for position in [None, Some(3 * block_len + 4), Some(2 * block_len), Some(17)] {
            if let Some(position) = position {
                values[position] = f32::NEG_INFINITY;
            }
            let whole = Fingerprint::of(Slice::from(&values[..]));
            let mut pieces = Fingerprint::default();
            values.chunks(2 * block_len).for_each(|piece| pieces.add(Slice::from(piece)));
            assert_eq!((whole.hash(), whole.not_finite()), (pieces.hash(), pieces.not_finite()));
            assert_eq!(whole.hash(), Fingerprint::of_finite(Slice::from(&values[..])).hash());
            assert_eq!(whole.not_finite(), position.map(|position| (position, f64::NEG_INFINITY)));
        }
        assert_eq!(Fingerprint::of(Slice::from(&values[..0])).not_finite(), None);
    }
}
