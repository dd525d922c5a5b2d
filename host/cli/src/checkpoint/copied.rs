//! Tensors that are copied instead of reduced, which all files must have bit for bit.

use std::ops::Range;

use safetensors::Dtype;

use super::{Checkpoints, FileError, Pieces, reducible};

/// The number of bytes of each file that are read at a time.
const PIECE_BYTES: usize = 16 << 20;

impl Checkpoints {
    /// Passes the bytes of a tensor that is copied to `work`, piece by piece in order; refuses values that differ between ranks.
    pub(crate) fn copied<E: From<FileError>>(
        &self,
        tensor: usize,
        pieces: &mut Pieces,
        mut work: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let bytes = self.tensors.get(tensor).bytes();
        for begin in (0..bytes).step_by(PIECE_BYTES) {
            let range = begin..bytes.min(begin + PIECE_BYTES);
            let of_ranks = self.bytes(tensor, range.clone(), pieces)?;
            let first = of_ranks[0];
            for (rank, own) in of_ranks.iter().enumerate() {
                if let Some(offset) =
                    (first != *own).then(|| first.iter().zip(*own).position(|(a, b)| a != b)).flatten()
                {
                    return Err(self.differs(tensor, rank, range, offset, (first, own)).into());
                }
            }
            work(first)?;
        }
        Ok(())
    }

    /// Refuses tensors that are to be copied and differ between ranks.
    pub(crate) fn check_copied(&self, pieces: &mut Pieces) -> Result<(), FileError> {
        let mut others = (0..self.tensors.len()).filter(|&tensor| reducible(self.tensors.dtype(tensor)).is_none());
        others.try_for_each(|tensor| self.copied(tensor, pieces, |_| Ok(())))
    }

    /// The error of a tensor whose bytes `offset` of a piece differ; elements lie whole in a piece.
    fn differs(
        &self,
        tensor: usize,
        rank: usize,
        piece: Range<usize>,
        offset: usize,
        (expected, found): (&[u8], &[u8]),
    ) -> FileError {
        let tensor = self.tensors.get(tensor);
        let size = (tensor.dtype.bitsize() / 8).max(1);
        let offset = offset / size * size;
        let value = |bytes: &[u8]| value(tensor.dtype, &bytes[offset..bytes.len().min(offset + size)]);
        let element = (piece.start + offset) * 8 / tensor.dtype.bitsize();
        FileError::OtherValue {
            path: self.path(rank).to_owned(),
            tensor: tensor.name.to_owned(),
            found: format!("{} {} at element {element}", tensor.dtype, value(found)),
            first: self.path(0).to_owned(),
            expected: value(expected),
        }
    }
}

/// An element as text: a number where the dtype is an integer's, otherwise its bytes.
fn value(dtype: Dtype, bytes: &[u8]) -> String {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    let unused = 64 - 8 * bytes.len() as u32;
    match dtype {
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => ((unsigned << unused) as i64 >> unused).to_string(),
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => unsigned.to_string(),
        Dtype::BOOL if unsigned <= 1 => (unsigned == 1).to_string(),
        _ => format!("{unsigned:#0width$x}", width = 2 + 2 * bytes.len()),
    }
}
