//! The files of all ranks as the library reads them.

use std::cell::{RefCell, RefMut};
use std::ops::Range;

use gradsync::ops::offline::RankTensors;
use gradsync::{DType, Error, Slice};
use indicatif::ProgressBar;

use super::ReduceError;
use crate::checkpoint::{Checkpoints, FileError, Pieces, reducible};

/// The files of all ranks, with a bar of the bytes read so far. Tensors that are copied are empty here, and so of no effect.
pub(super) struct Source<'a> {
    pub(super) ranks: &'a Checkpoints,
    progress: &'a ProgressBar,
    pieces: RefCell<Pieces>,
    /// The reason why a file could not be read.
    failed: RefCell<Option<FileError>>,
}

impl<'a> Source<'a> {
    pub(super) fn new(ranks: &'a Checkpoints, progress: &'a ProgressBar) -> Self {
        Self { ranks, progress, pieces: RefCell::default(), failed: RefCell::default() }
    }

    /// The memory for pieces of the files, while the library does not read.
    pub(super) fn pieces(&self) -> RefMut<'_, Pieces> {
        self.pieces.borrow_mut()
    }

    /// An error of the library, with the tensor, or the error of the file that it could not read.
    pub(super) fn explained(&self, tensor: usize, error: ReduceError) -> ReduceError {
        match (self.failed.take(), error) {
            (Some(error), _) => error.into(),
            (None, ReduceError::Gradsync(source)) => {
                ReduceError::Tensor { tensor: self.ranks.tensors.name(tensor).to_owned(), source }
            }
            (None, error) => error,
        }
    }
}

impl RankTensors for Source<'_> {
    fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn tensor_count(&self) -> usize {
        self.ranks.tensors.len()
    }

    fn tensor(&self, index: usize) -> (DType, usize) {
        match reducible(self.ranks.tensors.dtype(index)) {
            Some(dtype) => (dtype, self.ranks.tensors.get(index).len),
            // The widest dtype leaves the precision of tensors that share their weights to the others.
            None => (DType::F64, 0),
        }
    }

    fn read(&self, index: usize, elements: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> gradsync::Result<()> {
        let (dtype, len) = (self.tensor(index).0, elements.len());
        let mut pieces = self.pieces();
        let vectors = self.ranks.elements(index, dtype, elements, &mut pieces).map_err(|error| {
            let reason = error.to_string();
            self.failed.replace(Some(error));
            Error::InvalidArgument { operation: "gradsync reduce", reason }
        })?;
        work(&vectors);
        self.progress.inc((len * dtype.size_bytes() * self.ranks.len()) as u64);
        Ok(())
    }
}
