//! Safetensors files of gradients: the files of all ranks, read through memory maps, and the result.
//!
//! Files are checked as a whole when they are opened; tensors are then read in place, piece by piece. The tensor list of the first file is
//! kept, packed; of every other file only the offsets of the tensors.

mod header;
mod tensors;
mod writer;

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use gradsync::{DType, Element, GradientBuffer, Slice};
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::Dtype;
use serde_json::value::RawValue;

pub(crate) use self::header::HeaderLimits;
use self::header::{Entry, HeaderError};
pub(crate) use self::tensors::{Tensor, Tensors};
pub(crate) use self::writer::write_header;
use gradsync_cli::text::shown;

/// A fault of a file, with its path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("{}: {source}", shown(path))]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: not a complete safetensors file: {reason}", shown(path))]
    Malformed { path: PathBuf, reason: String },
    #[error("{}: tensor {tensor:?} has dtype {dtype}; supported are F64, F32, F16 and BF16", shown(path))]
    UnsupportedDType { path: PathBuf, tensor: String, dtype: Dtype },
    #[error("{}: tensor {tensor:?} is missing; {} has it", shown(path), shown(first))]
    MissingTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error("{}: tensor {tensor:?} is not in {}", shown(path), shown(first))]
    ExtraTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error("{}: tensor {tensor:?} is {found}, but in {} it is {expected}", shown(path), shown(first))]
    Different { path: PathBuf, tensor: String, found: String, first: PathBuf, expected: String },
}

/// The number of bytes of a file that are read before their memory is released.
const RELEASED_BYTES: usize = 16 << 20;
/// The offset of a tensor that a file has not named yet.
const NOWHERE: usize = usize::MAX;

/// The files of all ranks, which have the same tensors.
pub(crate) struct Checkpoints {
    /// The tensors, in the order of the first file's data.
    pub(crate) tensors: Tensors,
    ranks: Vec<Rank>,
    metadata: Option<Box<RawValue>>,
}

impl Checkpoints {
    /// Opens one file for each rank.
    pub(crate) fn open(paths: &[PathBuf], limits: &HeaderLimits) -> Result<Self, FileError> {
        let (first, others) = paths.split_first().expect("clap requires an input");
        let (first_rank, tensors, metadata) = Rank::first(first, limits)?;
        let mut index = HashMap::with_capacity(tensors.len());
        for tensor in 0..tensors.len() {
            if index.insert(tensors.name(tensor), tensor).is_some() {
                return Err(twice(first, tensors.name(tensor)));
            }
        }
        let mut ranks = vec![first_rank];
        for path in others {
            ranks.push(Rank::other(path, limits, &tensors, &index, first)?);
        }
        drop(index);
        Ok(Self { tensors, ranks, metadata })
    }

    /// The number of ranks.
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// The free-form metadata of the first file.
    pub(crate) fn metadata(&self) -> Option<&RawValue> {
        self.metadata.as_deref()
    }

    /// Every rank's elements `range` of a tensor: in place in the file if they are aligned, otherwise copied to `copies`, one per rank.
    pub(crate) fn elements<'a>(
        &'a self,
        tensor: usize,
        range: Range<usize>,
        copies: &'a mut [Option<GradientBuffer>],
    ) -> gradsync::Result<Vec<Slice<'a>>> {
        let dtype = self.tensors.dtype(tensor);
        let vector = |(rank, copy): (&'a Rank, &'a mut Option<GradientBuffer>)| {
            let bytes = &rank.map[rank.place(tensor, dtype, &range)];
            if let Some(slice) = in_place(dtype, bytes) {
                return Ok(slice);
            }
            let copy = copy.insert(GradientBuffer::new(dtype, 1, [("copy", [range.len()])])?);
            copy.tensor_mut(0).into_data().as_bytes_mut().copy_from_slice(bytes);
            Ok(copy.tensor(0).data())
        };
        self.ranks.iter().zip(copies).map(vector).collect()
    }

    /// Releases the memory of a part that has been read; the pages stay in the system's cache for another pass.
    pub(crate) fn release(&self, tensor: usize, range: Range<usize>) {
        let dtype = self.tensors.dtype(tensor);
        self.ranks.iter().for_each(|rank| rank.release(rank.place(tensor, dtype, &range)));
    }
}

/// One rank's file.
struct Rank {
    map: Mmap,
    /// The offset of each tensor.
    begins: Vec<usize>,
    /// The range that has been read and not released.
    read: Cell<(usize, usize)>,
}

impl Rank {
    fn first(path: &Path, limits: &HeaderLimits) -> Result<(Self, Tensors, Option<Box<RawValue>>), FileError> {
        let map = map(path)?;
        let (mut tensors, mut begins) = (Tensors::default(), Vec::new());
        let metadata = each_tensor(path, &map, limits, |tensor, begin| {
            tensors.push(&tensor);
            begins.push(begin);
            Ok(())
        })?
        .map(RawValue::to_owned);
        let order = by_place(&begins, &tensors);
        if !order.is_sorted() {
            let mut sorted = Tensors::default();
            order.iter().for_each(|&tensor| sorted.push(&tensors.get(tensor as usize)));
            begins = order.iter().map(|&tensor| begins[tensor as usize]).collect();
            tensors = sorted;
        }
        let rank = Self { map, begins, read: Cell::default() }.checked(path, &tensors)?;
        Ok((rank, tensors, metadata))
    }

    /// Opens a file that must have the tensors of the file `first`, which `index` finds by name.
    fn other(
        path: &Path,
        limits: &HeaderLimits,
        tensors: &Tensors,
        index: &HashMap<&str, usize>,
        first: &Path,
    ) -> Result<Self, FileError> {
        let map = map(path)?;
        let names = || (path.to_owned(), first.to_owned());
        let mut begins = vec![NOWHERE; tensors.len()];
        each_tensor(path, &map, limits, |found, begin| {
            let Some(&place) = index.get(found.name) else {
                let (path, first) = names();
                return Err(FileError::ExtraTensor { path, tensor: found.name.to_owned(), first });
            };
            let expected = tensors.get(place);
            if found != expected {
                let (path, first) = names();
                let describe = |tensor: &Tensor<'_>| format!("{} {:?}", tensor.dtype, tensor.shape);
                let (tensor, found, expected) = (found.name.to_owned(), describe(&found), describe(&expected));
                return Err(FileError::Different { path, tensor, found, first, expected });
            }
            if begins[place] != NOWHERE {
                return Err(twice(path, found.name));
            }
            begins[place] = begin;
            Ok(())
        })?;
        if let Some(missing) = begins.iter().position(|&begin| begin == NOWHERE) {
            let (path, first) = names();
            return Err(FileError::MissingTensor { path, tensor: tensors.name(missing).to_owned(), first });
        }
        Self { map, begins, read: Cell::default() }.checked(path, tensors)
    }

    /// Refuses a file whose tensors leave gaps, overlap, or end elsewhere than the file. Afterwards offsets count from the begin of the
    /// file.
    fn checked(mut self, path: &Path, tensors: &Tensors) -> Result<Self, FileError> {
        let malformed = |reason: String| FileError::Malformed { path: path.to_owned(), reason };
        let data = data_begin(&self.map);
        let mut end = 0;
        for &index in &by_place(&self.begins, tensors) {
            let (tensor, begin) = (tensors.get(index as usize), self.begins[index as usize]);
            if begin != end {
                let name = tensor.name;
                return Err(malformed(format!("tensor {name:?} begins at byte {begin} of the data, and not at {end}")));
            }
            end += tensor.bytes();
        }
        if data + end != self.map.len() {
            let found = self.map.len() - data;
            return Err(malformed(format!("the tensors have {end} bytes, and the file has {found} for them")));
        }
        self.begins.iter_mut().for_each(|begin| *begin += data);
        self.advise(0..data);
        Ok(self)
    }

    /// The byte range of some elements of a tensor.
    fn place(&self, tensor: usize, dtype: DType, range: &Range<usize>) -> Range<usize> {
        let (begin, size) = (self.begins[tensor], dtype.size_bytes());
        begin + range.start * size..begin + range.end * size
    }

    fn release(&self, place: Range<usize>) {
        let (begin, end) = self.read.get();
        let mut read = begin..end;
        if place.start != read.end {
            self.advise(read);
            read = place.start..place.start;
        }
        read.end = place.end;
        if read.len() >= RELEASED_BYTES {
            self.advise(read.clone());
            read.start = read.end;
        }
        self.read.set((read.start, read.end));
    }

    fn advise(&self, read: Range<usize>) {
        // SAFETY: dropping clean pages of a read-only file mapping loses nothing; they are read again when touched.
        let advised = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, read.start, read.len()) };
        if let Err(error) = advised {
            tracing::debug!(%error, "a mapped piece stays in memory");
        }
    }
}

fn map(path: &Path) -> Result<Mmap, FileError> {
    let malformed = |reason: &str| FileError::Malformed { path: path.to_owned(), reason: reason.into() };
    let io = |source| FileError::Io { path: path.to_owned(), source };
    // The type is checked before the file is opened: opening a pipe waits for a writer.
    let facts = fs::metadata(path).map_err(io)?;
    if !facts.is_file() {
        return Err(malformed("it is not a regular file"));
    }
    if facts.len() == 0 {
        return Err(malformed("it is empty"));
    }
    let file = File::open(path).map_err(io)?;
    // SAFETY: the file is only read. If another process shrinks it meanwhile, the system ends this process; every reader of mapped
    // checkpoints has this limitation.
    unsafe { Mmap::map(&file) }.map_err(io)
}

/// The offset of the data in a file whose header has been read.
fn data_begin(map: &Mmap) -> usize {
    8 + map.first_chunk().map_or(0, |len| u64::from_le_bytes(*len) as usize)
}

/// Passes each tensor of a file and its offset in the data to `take`, in the header's order; returns the metadata.
fn each_tensor<'a>(
    path: &Path,
    map: &'a Mmap,
    limits: &HeaderLimits,
    mut take: impl FnMut(Tensor<'_>, usize) -> Result<(), FileError>,
) -> Result<Option<&'a RawValue>, FileError> {
    let malformed = |reason: String| FileError::Malformed { path: path.to_owned(), reason };
    let header = header::find(map, limits).map_err(malformed)?;
    let read = header::read(header, limits, |Entry { name, dtype, shape, begin, end }| {
        let dtype = match dtype {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            dtype => return Err(FileError::UnsupportedDType { path: path.to_owned(), tensor: name.to_owned(), dtype }),
        };
        let len = shape.iter().try_fold(1, |len: usize, &dimension| len.checked_mul(dimension));
        let bytes = len.and_then(|len| len.checked_mul(dtype.size_bytes()));
        let (Some(len), true) = (len, bytes.is_some() && begin.checked_add(bytes.unwrap_or(0)) == Some(end)) else {
            let reason =
                format!("tensor {name:?} is {dtype} {shape:?}, which does not take the bytes {begin} to {end}");
            return Err(malformed(reason));
        };
        take(Tensor { name, dtype, shape: shape.to_owned(), len }, begin)
    });
    read.map_err(|error| match error {
        HeaderError::Malformed(reason) => malformed(reason),
        HeaderError::Refused(error) => error,
    })
}

/// The tensors in the order of their bytes; of tensors with the same offset, empty ones come first.
fn by_place(begins: &[usize], tensors: &Tensors) -> Vec<u32> {
    let mut order: Vec<u32> = (0..begins.len() as u32).collect();
    let key = |index: &u32| (begins[*index as usize], tensors.get(*index as usize).len > 0);
    if !order.is_sorted_by_key(key) {
        order.sort_by_cached_key(key);
    }
    order
}

fn twice(path: &Path, name: &str) -> FileError {
    FileError::Malformed { path: path.to_owned(), reason: format!("tensor {name:?} is there twice") }
}

/// The bytes as elements, if they are aligned.
fn in_place(dtype: DType, bytes: &[u8]) -> Option<Slice<'_>> {
    fn typed<T: Element>(bytes: &[u8]) -> Option<Slice<'_>> {
        bytemuck::try_cast_slice::<u8, T>(bytes).ok().map(T::slice)
    }
    match dtype {
        DType::F64 => typed::<f64>(bytes),
        DType::F32 => typed::<f32>(bytes),
        DType::F16 => typed::<gradsync::f16>(bytes),
        DType::BF16 => typed::<gradsync::bf16>(bytes),
    }
}
