//! [`FileError`]: the faults of input files.

use std::path::PathBuf;

use gradsync_cli::text::shown;
use safetensors::Dtype;

/// A fault of a file, with its path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("{}: {source}", shown(path))]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: changed while it was read; reduce again once nothing writes to it", shown(path))]
    Changed { path: PathBuf },
    #[error("{}: not a safetensors file, but {what}", shown(path))]
    OtherFormat { path: PathBuf, what: String },
    #[error("{}: not a complete safetensors file: {reason}", shown(path))]
    Malformed { path: PathBuf, reason: String },
    #[error(
        "{}: tensor {tensor:?} has dtype {dtype}, which cannot be reduced; --other-dtypes copy takes \
         such tensors over where all files have the same, and --other-dtypes skip leaves them out",
        shown(path)
    )]
    OtherDType { path: PathBuf, tensor: String, dtype: Dtype },
    #[error(
        "{}: tensor {tensor:?} is {found}, but in {} that is {expected}: it cannot be copied; \
         --other-dtypes skip leaves it out",
        shown(path),
        shown(first)
    )]
    OtherValue { path: PathBuf, tensor: String, found: String, first: PathBuf, expected: String },
    #[error("{}: tensor {tensor:?} is missing; {} has it", shown(path), shown(first))]
    MissingTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error("{}: tensor {tensor:?} is not in {}", shown(path), shown(first))]
    ExtraTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error("{}: tensor {tensor:?} is {found}, but in {} it is {expected}", shown(path), shown(first))]
    Different { path: PathBuf, tensor: String, found: String, first: PathBuf, expected: String },
}
