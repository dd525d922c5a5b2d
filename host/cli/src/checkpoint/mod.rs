//! Safetensors files of gradients: the files of all ranks, and the result.
//!
//! The headers of all files are checked before anything else is read; tensors are then read piece by piece. The tensor list of the first file
//! is kept, packed; of every other file only the offsets of the tensors.

mod copied;
mod error;
mod formats;
mod header;
mod input;
mod listing;
mod tensors;
mod writer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use gradsync::{DType, Slice};
use rayon::iter::ParallelIterator as _;
use rayon::iter::{IndexedParallelIterator as _, IntoParallelRefIterator as _, IntoParallelRefMutIterator as _};
use serde_json::value::RawValue;

pub(crate) use self::error::FileError;
pub(crate) use self::header::HeaderLimits;
use self::input::Input;
use self::listing::Listing;
pub(crate) use self::tensors::{Tensor, Tensors, file_dtype, reducible};
pub(crate) use self::writer::write_header;

/// The treatment of tensors whose dtype cannot be reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OtherDTypes {
    /// An error that names the first one.
    Refuse,
    /// Take them over unchanged; an error unless they are equal, bit for bit, in all files.
    Copy,
    /// Leave them out; files may differ in them.
    Skip,
}

/// The number of bytes of a piece from which on the files of several ranks are read at the same time, and checked at once for changes.
const SHORT: usize = 1 << 16;

/// The memory into which pieces of the files are read: one vector for each rank, which is as long as its longest piece so far.
#[derive(Default)]
pub(crate) struct Pieces(Vec<Vec<u64>>);

/// The files of all ranks, which have the same tensors.
pub(crate) struct Checkpoints {
    /// The tensors, in the order of the first file's data, without those that are skipped.
    pub(crate) tensors: Tensors,
    /// The tensors of the first file that are skipped.
    pub(crate) skipped: Tensors,
    ranks: Vec<Rank>,
    metadata: Option<Box<RawValue>>,
}

/// One rank's file.
struct Rank {
    input: Input,
    /// The offset of each tensor in the file.
    begins: Vec<u64>,
}

impl Checkpoints {
    /// Opens one file for each rank.
    pub(crate) fn open(paths: &[PathBuf], limits: &HeaderLimits, other: OtherDTypes) -> Result<Self, FileError> {
        let (first, others) = paths.split_first().expect("clap requires an input");
        input::allow_open(paths.len());
        let input = Input::open(first)?;
        let listing = Listing::read(&input, limits, other)?;
        listing.check_places(&input)?;
        let (mut tensors, mut skipped, mut begins) = (Tensors::default(), Tensors::default(), Vec::new());
        for index in listing.by_place() {
            let tensor = listing.tensors.get(index as usize);
            if is_skipped(&tensor, other) {
                skipped.push(&tensor);
            } else {
                tensors.push(&tensor);
                begins.push(listing.data + listing.begins[index as usize] as u64);
            }
        }
        let Listing { metadata, .. } = listing;
        let mut ranks = vec![Rank { input, begins }];
        let index: HashMap<&str, usize> = (0..tensors.len()).map(|tensor| (tensors.name(tensor), tensor)).collect();
        for path in others {
            let input = Input::open(path)?;
            let listing = Listing::read(&input, limits, other)?;
            let begins =
                matched(&listing, &tensors, &index, other).map_err(|unlike| unlike.of(path, first, &skipped))?;
            listing.check_places(&input)?;
            ranks.push(Rank { input, begins });
        }
        drop(index);
        Ok(Self { tensors, skipped, ranks, metadata })
    }

    /// The number of ranks.
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// The file of a rank.
    pub(crate) fn path(&self, rank: usize) -> &Path {
        self.ranks[rank].input.path()
    }

    /// The free-form metadata of the first file.
    pub(crate) fn metadata(&self) -> Option<&RawValue> {
        self.metadata.as_deref()
    }

    /// Refuses files that have been changed since they were opened.
    pub(crate) fn check(&self) -> Result<(), FileError> {
        self.ranks.iter().try_for_each(|rank| rank.input.check())
    }

    /// Every rank's bytes `range` of a tensor.
    pub(crate) fn bytes<'a>(
        &self,
        tensor: usize,
        range: Range<usize>,
        pieces: &'a mut Pieces,
    ) -> Result<Vec<&'a [u8]>, FileError> {
        pieces.0.resize(self.ranks.len(), Vec::new());
        let len = range.len();
        let read = |(rank, piece): (&Rank, &mut Vec<u64>)| {
            if piece.len() < len.div_ceil(8) {
                piece.resize(len.div_ceil(8), 0);
            }
            let bytes = &mut bytemuck::cast_slice_mut(piece)[..len];
            rank.input.read(bytes, rank.begins[tensor] + range.start as u64)
        };
        if len < SHORT {
            self.ranks.iter().zip(&mut pieces.0).try_for_each(read)?;
        } else {
            let ranks = self.ranks.par_iter().zip(pieces.0.par_iter_mut());
            ranks.try_for_each(|(rank, piece)| read((rank, piece)).and_then(|()| rank.input.check()))?;
        }
        Ok(pieces.0.iter().map(|piece| &bytemuck::cast_slice(piece)[..len]).collect())
    }

    /// Every rank's elements `range` of a tensor of this dtype.
    pub(crate) fn elements<'a>(
        &self,
        tensor: usize,
        dtype: DType,
        range: Range<usize>,
        pieces: &'a mut Pieces,
    ) -> Result<Vec<Slice<'a>>, FileError> {
        let size = dtype.size_bytes();
        let bytes = self.bytes(tensor, range.start * size..range.end * size, pieces)?;
        Ok(bytes.into_iter().map(|bytes| Slice::of_bytes(dtype, bytes)).collect())
    }
}

fn is_skipped(tensor: &Tensor<'_>, other: OtherDTypes) -> bool {
    other == OtherDTypes::Skip && reducible(tensor.dtype).is_none()
}

/// The offsets of `tensors`, which `index` finds by name, in another file, which must have the same ones.
fn matched(
    listing: &Listing,
    tensors: &Tensors,
    index: &HashMap<&str, usize>,
    other: OtherDTypes,
) -> Result<Vec<u64>, Unlike> {
    let mut begins = vec![None; tensors.len()];
    for (found, &begin) in listing.tensors.iter().zip(&listing.begins) {
        let Some(&number) = index.get(found.name) else {
            if is_skipped(&found, other) {
                continue;
            }
            return Err(Unlike::Extra { tensor: found.name.to_owned(), found: described(&found) });
        };
        let expected = tensors.get(number);
        if (found.dtype, &found.shape) != (expected.dtype, &expected.shape) {
            let tensor = found.name.to_owned();
            return Err(Unlike::Different { tensor, found: described(&found), expected: described(&expected) });
        }
        begins[number] = Some(listing.data.saturating_add(begin as u64));
    }
    let missing = |tensor: usize| Unlike::Missing { tensor: tensors.name(tensor).to_owned() };
    begins.into_iter().enumerate().map(|(tensor, begin)| begin.ok_or_else(|| missing(tensor))).collect()
}

/// A difference between the tensors of a file and of the first file.
enum Unlike {
    Extra { tensor: String, found: String },
    Missing { tensor: String },
    Different { tensor: String, found: String, expected: String },
}

impl Unlike {
    /// The error of these files, of which the first has further tensors that are `skipped`.
    fn of(self, path: &Path, first: &Path, skipped: &Tensors) -> FileError {
        let (path, first) = (path.to_owned(), first.to_owned());
        match self {
            Unlike::Missing { tensor } => FileError::MissingTensor { path, tensor, first },
            Unlike::Different { tensor, found, expected } => {
                FileError::Different { path, tensor, found, first, expected }
            }
            Unlike::Extra { tensor, found } => match skipped.iter().find(|skipped| skipped.name == tensor) {
                Some(skipped) => FileError::Different { path, found, first, expected: described(&skipped), tensor },
                None => FileError::ExtraTensor { path, tensor, first },
            },
        }
    }
}

fn described(tensor: &Tensor<'_>) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}
