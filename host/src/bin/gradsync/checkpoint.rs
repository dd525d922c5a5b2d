//! Safetensors files of gradients: reading one rank's through a memory map, and writing the result as a stream.
//!
//! A file is checked as a whole when it is opened; tensors are then read where they lie, piece by piece. The output is written
//! beside its final place and renamed when complete, so that a failure leaves no half-written file. Only a process that is killed
//! leaves its part, `.gradsync-….part`.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gradsync::{DType, Element, GradientBuffer, Slice};
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};

use crate::unfinished;

/// What is wrong with a file, always by its path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path}: not a complete safetensors file: {reason}", path = path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error("{path}: tensor {tensor:?} has dtype {dtype}; supported are F64, F32, F16 and BF16", path = path.display())]
    UnsupportedDType { path: PathBuf, tensor: String, dtype: Dtype },
    #[error("{path}: tensor {tensor:?} is missing; {first} has it", path = path.display(), first = first.display())]
    MissingTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error("{path}: tensor {tensor:?} is not in {first}", path = path.display(), first = first.display())]
    ExtraTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error(
        "{path}: tensor {tensor:?} is {found}, but in {first} it is {expected}",
        path = path.display(), first = first.display()
    )]
    Different { path: PathBuf, tensor: String, found: String, first: PathBuf, expected: String },
    #[error("{path}: the output is also an input", path = path.display())]
    OutputIsInput { path: PathBuf },
    #[error("{path}: the output is there already and is not a regular file", path = path.display())]
    OutputIsNoFile { path: PathBuf },
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) len: usize,
    /// Its bytes in the file.
    place: Range<usize>,
}

/// One rank's file.
pub(crate) struct Checkpoint {
    path: PathBuf,
    map: Mmap,
    /// In the order of the data.
    pub(crate) tensors: Vec<Tensor>,
    /// The free-form metadata of the header.
    pub(crate) metadata: Option<HashMap<String, String>>,
}

impl Checkpoint {
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let malformed = |reason: String| FileError::Malformed { path: path.to_owned(), reason };
        let io = |source| FileError::Io { path: path.to_owned(), source };
        // Asked before it is opened: opening a pipe waits for somebody to write to it.
        let facts = fs::metadata(path).map_err(io)?;
        if !facts.is_file() {
            return Err(malformed("it is not a regular file".into()));
        }
        if facts.len() == 0 {
            return Err(malformed("it is empty".into()));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the file is only read. If another process shrinks it meanwhile, the system ends this process; every reader of
        // mapped checkpoints lives with that.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let (header_len, header) =
            SafeTensors::read_metadata(&map).map_err(|error| malformed(format!("{error} ({} bytes)", map.len())))?;
        let data = 8 + header_len;
        let mut tensors = Vec::new();
        for name in header.offset_keys() {
            let Some(info) = header.info(&name) else { continue };
            let dtype = match info.dtype {
                Dtype::F64 => DType::F64,
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                dtype => return Err(FileError::UnsupportedDType { path: path.to_owned(), tensor: name, dtype }),
            };
            let (begin, end) = info.data_offsets;
            let len = (end - begin) / dtype.size_bytes();
            tensors.push(Tensor { name, dtype, shape: info.shape.clone(), len, place: data + begin..data + end });
        }
        Ok(Self { path: path.to_owned(), map, tensors, metadata: header.metadata().clone() })
    }

    /// Refuses a checkpoint whose tensors differ from the first rank's, and puts them in its order.
    pub(crate) fn match_to(&mut self, first: &Checkpoint) -> Result<(), FileError> {
        let names = || (self.path.clone(), first.path.clone());
        let mut own: HashMap<String, Tensor> =
            self.tensors.drain(..).map(|tensor| (tensor.name.clone(), tensor)).collect();
        let mut matched = Vec::with_capacity(first.tensors.len());
        for expected in &first.tensors {
            let Some(tensor) = own.remove(&expected.name) else {
                let (path, first) = names();
                return Err(FileError::MissingTensor { path, tensor: expected.name.clone(), first });
            };
            if (tensor.dtype, &tensor.shape) != (expected.dtype, &expected.shape) {
                let (path, first) = names();
                let describe = |tensor: &Tensor| format!("{} {:?}", tensor.dtype, tensor.shape);
                let (found, expected) = (describe(&tensor), describe(expected));
                return Err(FileError::Different { path, tensor: tensor.name, found, first, expected });
            }
            matched.push(tensor);
        }
        if let Some(tensor) = own.into_keys().min() {
            let (path, first) = names();
            return Err(FileError::ExtraTensor { path, tensor, first });
        }
        self.tensors = matched;
        Ok(())
    }

    /// Gives back the memory that reading a piece took; the pages stay in the system's cache for another pass.
    pub(crate) fn release(&self, tensor: usize, range: Range<usize>) {
        let Tensor { dtype, place, .. } = &self.tensors[tensor];
        let (begin, len) = (place.start + range.start * dtype.size_bytes(), range.len() * dtype.size_bytes());
        // SAFETY: dropping clean pages of a read-only file mapping loses nothing; they are read again when touched.
        let advised = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, len) };
        if let Err(error) = advised {
            tracing::debug!(%error, "a mapped piece stays in memory");
        }
    }

    /// The elements `range` of a tensor: where they lie in the file if that is aligned, otherwise copied to `scratch`.
    pub(crate) fn elements<'a>(
        &'a self,
        tensor: usize,
        range: Range<usize>,
        scratch: &'a mut Option<GradientBuffer>,
    ) -> gradsync::Result<Slice<'a>> {
        let Tensor { dtype, place, .. } = &self.tensors[tensor];
        let size = dtype.size_bytes();
        let bytes = &self.map[place.start + range.start * size..place.start + range.end * size];
        if let Some(slice) = in_place(*dtype, bytes) {
            return Ok(slice);
        }
        let copy = scratch.insert(GradientBuffer::new(*dtype, 1, [("copy", [range.len()])])?);
        copy.tensor_mut(0).into_data().as_bytes_mut().copy_from_slice(bytes);
        Ok(copy.tensor(0).data())
    }
}

/// The bytes as elements, if they lie where elements can.
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

/// Refuses an output that is one of the inputs, by whatever path or link, or something else than a file; returns where to write:
/// the file that a link leads to, never the link's own place.
pub(crate) fn check_output(output: &Path, inputs: &[PathBuf]) -> Result<PathBuf, FileError> {
    let Ok(facts) = fs::metadata(output) else {
        return Ok(output.to_owned());
    };
    if !facts.is_file() {
        return Err(FileError::OutputIsNoFile { path: output.to_owned() });
    }
    let identity = |facts: &fs::Metadata| (facts.dev(), facts.ino());
    let same = |input: &PathBuf| fs::metadata(input).is_ok_and(|input| identity(&input) == identity(&facts));
    if inputs.iter().any(same) {
        return Err(FileError::OutputIsInput { path: output.to_owned() });
    }
    fs::canonicalize(output).map_err(|source| FileError::Io { path: output.to_owned(), source })
}

/// An output file on its way: the header is written at once, then the tensors' bytes in order.
pub(crate) struct Writer {
    path: PathBuf,
    file: BufWriter<tempfile::NamedTempFile>,
}

impl Writer {
    /// Starts a file for tensors of the given names, dtypes and shapes, in this order.
    pub(crate) fn create(
        path: &Path,
        metadata: Option<HashMap<String, String>>,
        tensors: impl Iterator<Item = (String, DType, Vec<usize>)>,
    ) -> Result<Self, FileError> {
        let mut end = 0;
        let infos = tensors.map(|(name, dtype, shape)| {
            let begin = end;
            end += shape.iter().product::<usize>() * dtype.size_bytes();
            let dtype = match dtype {
                DType::F64 => Dtype::F64,
                DType::F32 => Dtype::F32,
                DType::F16 => Dtype::F16,
                DType::BF16 => Dtype::BF16,
            };
            (name, TensorInfo { dtype, shape, data_offsets: (begin, end) })
        });
        let invalid = |reason: String| FileError::Malformed { path: path.to_owned(), reason };
        let header = Metadata::new(None, infos.collect()).map_err(|error| invalid(error.to_string()))?;
        let mut header = serde_json::to_value(&header).map_err(|error| invalid(error.to_string()))?;
        if let Some(metadata) = metadata {
            // Sorted, so that the same inputs give the same file, to the byte.
            let sorted: BTreeMap<_, _> = metadata.into_iter().collect();
            header["__metadata__"] = serde_json::json!(sorted);
        }
        let mut header = header.to_string().into_bytes();
        // The data start at a multiple of 8, as the format asks; spaces may follow the JSON.
        header.resize(header.len().next_multiple_of(8), b' ');

        let io = |source| FileError::Io { path: path.to_owned(), source };
        let file = unfinished::beside(path).map_err(io)?;
        let mut writer = Self { path: path.to_owned(), file: BufWriter::with_capacity(1 << 20, file) };
        writer.write(&(header.len() as u64).to_le_bytes())?;
        writer.write(&header)?;
        Ok(writer)
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.file.write_all(bytes).map_err(|source| FileError::Io { path: self.path.clone(), source })
    }

    /// Gives the complete file its name.
    pub(crate) fn finish(self) -> Result<(), FileError> {
        let Self { path, file } = self;
        let io = |source| FileError::Io { path: path.clone(), source };
        let file = file.into_inner().map_err(|error| io(error.into_error()))?;
        file.as_file().sync_all().map_err(io)?;
        file.persist(&path).map_err(|error| io(error.error))?;
        Ok(())
    }
}
