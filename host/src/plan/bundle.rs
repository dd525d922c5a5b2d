//! Several tensors as one transfer: the offset of each tensor in the bundle, and a header that describes all of them.
//!
//! A bundle is sent as a header and a payload. Tensor i starts in the payload at the end of tensor i - 1 rounded up to 256 bytes, and the
//! payload ends with the last tensor. The contents of the gaps are unspecified.
//!
//! # The header
//!
//! All integers are little-endian and unsigned. The first [`PREFIX_BYTES`] bytes contain the length of the rest;
//! [`ops::send_recv`](crate::ops::send_recv) defines how both are sent.
//!
//! | byte | size | field |
//! |---|---|---|
//! | 0 | 4 | the magic, ASCII `GSTB` |
//! | 4 | 4 | the version, 1 |
//! | 8 | 8 | the sequence number, whose meaning sender and receiver define |
//! | 16 | 4 | the number of tensors |
//! | 20 | 4 | the bytes of the whole header, these 32 included |
//! | 24 | 8 | the bytes of the payload |
//! | 32 | | one entry for each tensor, without gaps |
//!
//! | byte of an entry | size | field |
//! |---|---|---|
//! | 0 | 4 | the dtype: 1 f64, 2 f32, 3 f16, 4 bf16, 5 i64, 6 u64, 7 i32, 8 u32, 9 i8, 10 u8, 11 i16, 12 u16, 13 bool |
//! | 4 | 4 | the number of dimensions n; 0 for a scalar |
//! | 8 | 8 n | the dimensions, outermost first |
//!
//! Every list of tensors and sequence number has exactly one encoding; all other byte strings are refused.
//!
//! # Untrusted headers
//!
//! [`decode`] allocates one [`TensorSpec`] and one range for each tensor, and 8 bytes for each dimension: at most 6 times the size of the
//! header, which [`Limits::header_bytes`] limits.

use std::ops::Range;

use super::layout::TENSOR_ALIGNMENT;
use crate::dtype::DType;
use crate::error::{Error, Result};

const OPERATION: &str = "tensor bundle";

/// The size of a header's first part, which contains the length of the header.
pub const PREFIX_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"GSTB";
const VERSION: u32 = 1;

/// The offsets of the tensors of a bundle in its payload, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleLayout {
    /// The byte range of each tensor, in order; each starts at a multiple of [`TENSOR_ALIGNMENT`].
    pub ranges: Vec<Range<usize>>,
    /// The size of the payload in bytes: the end of the last tensor, without padding.
    pub len: usize,
}

impl BundleLayout {
    /// Lays out tensors of the given sizes in bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first tensor that ends beyond the address space.
    pub fn new(byte_sizes: &[usize]) -> Result<Self> {
        let mut ranges = Vec::with_capacity(byte_sizes.len());
        let mut len = 0u64;
        for (index, &bytes) in byte_sizes.iter().enumerate() {
            let range = range_after(len, bytes as u64).filter(|range| range.end <= isize::MAX as u64);
            let range = range.ok_or_else(|| {
                refused(format!(
                    "tensor {index} has {bytes} bytes: with the {len} before it, they exceed the address space"
                ))
            })?;
            len = range.end;
            ranges.push(range.start as usize..range.end as usize);
        }
        Ok(Self { ranges, len: len as usize })
    }

    /// Lays out tensors of these types and shapes.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`] naming the first tensor whose product of dimensions, zeros left
    /// out, exceeds the address space.
    pub fn of(tensors: &[TensorSpec]) -> Result<Self> {
        let size = |(index, tensor): (usize, &TensorSpec)| {
            let bytes = tensor.bytes().and_then(|bytes| usize::try_from(bytes).ok());
            bytes.ok_or_else(|| refused(format!("tensor {index} exceeds the address space: {tensor:?}")))
        };
        Self::new(&tensors.iter().enumerate().map(size).collect::<Result<Vec<usize>>>()?)
    }
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first; none for a scalar, which has one element.
    pub dims: Vec<usize>,
}

impl TensorSpec {
    /// The size in bytes; none if the product of the dimensions, zeros left out, exceeds 64 bits. So no partial product overflows where a
    /// receiver computes strides from dimensions.
    pub fn bytes(&self) -> Option<u64> {
        let size = self.dtype.size_bytes() as u64;
        let bytes = self.dims.iter().try_fold(size, |product, &dim| product.checked_mul(dim.max(1) as u64))?;
        Some(if self.dims.contains(&0) { 0 } else { bytes })
    }
}

/// The limits of a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The limit of tensors of a bundle.
    pub tensors: u32,
    /// The limit of dimensions of a tensor.
    pub dims: u32,
    /// The limit of one dimension. The address space is a limit in any case.
    pub dim: u64,
    /// The limit of a header's size in bytes, its prefix included.
    pub header_bytes: u32,
    /// The limit of a payload's size in bytes. The address space is a limit in any case.
    pub payload_bytes: u64,
}

impl Default for Limits {
    /// As [`new`](Self::new).
    fn default() -> Self {
        Self::new()
    }
}

impl Limits {
    /// 65536 tensors of at most 16 dimensions, each at most 2^40; a header of 4 MiB and a payload of 64 GiB.
    pub const fn new() -> Self {
        Self { tensors: 1 << 16, dims: 16, dim: 1 << 40, header_bytes: 4 << 20, payload_bytes: 64 << 30 }
    }

    /// Sets the limit of tensors of a bundle.
    #[must_use]
    pub const fn with_tensors(self, tensors: u32) -> Self {
        Self { tensors, ..self }
    }

    /// Sets the limit of dimensions of a tensor.
    #[must_use]
    pub const fn with_dims(self, dims: u32) -> Self {
        Self { dims, ..self }
    }

    /// Sets the limit of one dimension.
    #[must_use]
    pub const fn with_dim(self, dim: u64) -> Self {
        Self { dim, ..self }
    }

    /// Sets the limit of a header's size in bytes.
    #[must_use]
    pub const fn with_header_bytes(self, header_bytes: u32) -> Self {
        Self { header_bytes, ..self }
    }

    /// Sets the limit of a payload's size in bytes.
    #[must_use]
    pub const fn with_payload_bytes(self, payload_bytes: u64) -> Self {
        Self { payload_bytes, ..self }
    }
}

/// The fixed part that a header starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The sequence number.
    pub sequence: u64,
    /// The number of tensors that follow.
    pub tensors: u32,
    /// The size of the whole header in bytes, the prefix included.
    pub header_bytes: u32,
    /// The size of the payload in bytes, as the sender states it; [`decode`] compares it with the tensors.
    pub payload_bytes: u64,
}

impl Prefix {
    /// Reads the prefix, after which a receiver reads another `header_bytes` - [`PREFIX_BYTES`] bytes.
    ///
    /// # Errors
    /// [`HeaderError`] for another magic or version, or for numbers beyond the limits or that contradict each other.
    pub fn decode(bytes: &[u8; PREFIX_BYTES], limits: &Limits) -> Result<Self, HeaderError> {
        let magic = array(bytes, 0);
        if magic != MAGIC {
            return Err(HeaderError::Magic { found: magic });
        }
        let version = u32::from_le_bytes(array(bytes, 4));
        if version != VERSION {
            return Err(HeaderError::Version { found: version });
        }
        let (sequence, tensors) = (u64::from_le_bytes(array(bytes, 8)), u32::from_le_bytes(array(bytes, 16)));
        let (header_bytes, payload_bytes) =
            (u32::from_le_bytes(array(bytes, 20)), u64::from_le_bytes(array(bytes, 24)));
        if tensors > limits.tensors {
            return Err(HeaderError::TooManyTensors { found: tensors, limit: limits.tensors });
        }
        if header_bytes > limits.header_bytes {
            return Err(HeaderError::HeaderTooLong { found: header_bytes, limit: limits.header_bytes });
        }
        // In 128 bits, which hold products of three such numbers.
        let least = PREFIX_BYTES as u128 + 8 * u128::from(tensors);
        let most = least + 8 * u128::from(limits.dims) * u128::from(tensors);
        if !(least..=most).contains(&header_bytes.into()) {
            return Err(HeaderError::HeaderLength { found: header_bytes, tensors });
        }
        let limit = limits.payload_bytes.min(isize::MAX as u64);
        if payload_bytes > limit {
            return Err(HeaderError::PayloadTooLarge { found: payload_bytes, limit });
        }
        Ok(Self { sequence, tensors, header_bytes, payload_bytes })
    }
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sequence number.
    pub sequence: u64,
    /// The tensors, in order.
    pub tensors: Vec<TensorSpec>,
    /// The offsets of the tensors in the payload.
    pub layout: BundleLayout,
}

/// Writes the header of a bundle of these tensors.
///
/// # Errors
/// The errors of [`BundleLayout::of`], and [`Error::InvalidArgument`] for a header beyond 4 GiB.
pub fn encode(tensors: &[TensorSpec], sequence: u64) -> Result<Vec<u8>> {
    let layout = BundleLayout::of(tensors)?;
    // The sum is below the address space, since the dimensions are in memory.
    let header_bytes = PREFIX_BYTES + tensors.iter().map(|tensor| 8 + 8 * tensor.dims.len()).sum::<usize>();
    let stated = u32::try_from(header_bytes)
        .map_err(|_| refused(format!("the header of {} tensors has {header_bytes} bytes", tensors.len())))?;
    let mut header = Vec::with_capacity(header_bytes);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(sequence.to_le_bytes());
    // The number of tensors is below the number of header bytes, and so are the numbers of dimensions below.
    header.extend((tensors.len() as u32).to_le_bytes());
    header.extend(stated.to_le_bytes());
    header.extend((layout.len as u64).to_le_bytes());
    for tensor in tensors {
        header.extend(code(tensor.dtype).to_le_bytes());
        header.extend((tensor.dims.len() as u32).to_le_bytes());
        header.extend(tensor.dims.iter().flat_map(|&dim| (dim as u64).to_le_bytes()));
    }
    Ok(header)
}

/// Reads a whole header, prefix included. `bytes` must have exactly its length.
///
/// # Errors
/// [`HeaderError`] naming the fault and its offset: the errors of [`Prefix::decode`], a length other than in the prefix, an unknown dtype,
/// a tensor or payload beyond the limits, or a payload of another length than in the prefix.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Header, HeaderError> {
    let prefix = bytes.first_chunk::<PREFIX_BYTES>();
    let prefix = prefix.ok_or(HeaderError::TooShort { found: bytes.len(), needed: PREFIX_BYTES })?;
    let prefix = Prefix::decode(prefix, limits)?;
    let needed = prefix.header_bytes as usize;
    match bytes.len() {
        found if found < needed => return Err(HeaderError::TooShort { found, needed }),
        found if found > needed => return Err(HeaderError::TooLong { found, needed }),
        _ => {}
    }
    // The prefix was checked against the length of the header, which therefore bounds the number of tensors.
    let count = prefix.tensors as usize;
    let (mut tensors, mut ranges) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let (mut offset, mut payload_bytes) = (PREFIX_BYTES, 0);
    for tensor in 0..prefix.tensors {
        let spec = entry(bytes, limits, tensor, offset)?;
        let size = spec.bytes().ok_or(HeaderError::TensorTooLarge { tensor, offset })?;
        let limit = limits.payload_bytes.min(isize::MAX as u64);
        let range = range_after(payload_bytes, size).filter(|range| range.end <= limit);
        let range = range.ok_or(HeaderError::TensorBeyondLimit { tensor, offset, bytes: size, limit })?;
        (offset, payload_bytes) = (offset + 8 + 8 * spec.dims.len(), range.end);
        tensors.push(spec);
        // The end is at most the limit on payloads, which is within the address space.
        ranges.push(range.start as usize..range.end as usize);
    }
    if offset < needed {
        return Err(HeaderError::TooLong { found: needed, needed: offset });
    }
    if payload_bytes != prefix.payload_bytes {
        return Err(HeaderError::PayloadLength { found: prefix.payload_bytes, needed: payload_bytes });
    }
    let layout = BundleLayout { ranges, len: prefix.payload_bytes as usize };
    Ok(Header { sequence: prefix.sequence, tensors, layout })
}

/// Reads a tensor at an offset.
fn entry(bytes: &[u8], limits: &Limits, tensor: u32, offset: usize) -> Result<TensorSpec, HeaderError> {
    let ends_early = HeaderError::EndsEarly { tensor, offset };
    let head: [u8; 8] = *bytes[offset..].first_chunk().ok_or(ends_early)?;
    let found = u32::from_le_bytes(array(&head, 0));
    let dtype = DType::ALL.into_iter().find(|&dtype| code(dtype) == found);
    let dtype = dtype.ok_or(HeaderError::DType { tensor, offset, found })?;
    let count = u32::from_le_bytes(array(&head, 4));
    if count > limits.dims {
        return Err(HeaderError::TooManyDims { tensor, offset: offset + 4, found: count, limit: limits.dims });
    }
    let first_dim = offset + 8;
    // In 64 bits, since 8 times the count may exceed a smaller address space; it is compared before it is used.
    if u64::from(count) * 8 > (bytes.len() - first_dim) as u64 {
        return Err(ends_early);
    }
    let dims = || bytes[first_dim..][..8 * count as usize].chunks_exact(8).map(|dim| u64::from_le_bytes(array(dim, 0)));
    let limit = limits.dim.min(usize::MAX as u64);
    if let Some((axis, found)) = dims().enumerate().find(|&(_, dim)| dim > limit) {
        return Err(HeaderError::DimTooLarge { tensor, offset: first_dim + axis * 8, found, limit });
    }
    Ok(TensorSpec { dtype, dims: dims().map(|dim| dim as usize).collect() })
}

/// The range of a tensor of `bytes` bytes after one that ends at `end`.
fn range_after(end: u64, bytes: u64) -> Option<Range<u64>> {
    let start = end.checked_next_multiple_of(TENSOR_ALIGNMENT as u64)?;
    Some(start..start.checked_add(bytes)?)
}

/// The code of a dtype in a header. Codes begin at 1, so that zeros are no dtype.
fn code(dtype: DType) -> u32 {
    dtype as u32 + 1
}

fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    *bytes[offset..].first_chunk().expect("the caller has checked the length")
}

fn refused(reason: String) -> Error {
    Error::InvalidArgument { operation: OPERATION, reason }
}

/// The fault of bytes that are no header of a bundle. Offsets are in bytes from the start of the header.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages describe the fields
pub enum HeaderError {
    /// There are fewer bytes than the header's length.
    #[error("the header has {found} bytes, and needs {needed}")]
    TooShort { found: usize, needed: usize },
    /// There are bytes after the header, or after its last tensor.
    #[error("the header has {found} bytes, and its tensors end at byte {needed}")]
    TooLong { found: usize, needed: usize },
    /// The magic is missing: this is no header.
    #[error("the header starts with {found:?} instead of {MAGIC:?}")]
    Magic { found: [u8; 4] },
    /// A header of another version.
    #[error("the header at byte 4 has version {found}, and this is version {VERSION}")]
    Version { found: u32 },
    /// More tensors than the receiver accepts.
    #[error("the header at byte 16 states {found} tensors, and the limit is {limit}")]
    TooManyTensors { found: u32, limit: u32 },
    /// A longer header than the receiver accepts.
    #[error("the header at byte 20 states {found} bytes of header, and the limit is {limit}")]
    HeaderTooLong { found: u32, limit: u32 },
    /// A length that is impossible for this number of tensors, given the limit on dimensions.
    #[error("the header at byte 20 states {found} bytes of header, which {tensors} tensors cannot have")]
    HeaderLength { found: u32, tensors: u32 },
    /// A larger payload than the receiver accepts.
    #[error("the header at byte 24 states {found} bytes of payload, and the limit is {limit}")]
    PayloadTooLarge { found: u64, limit: u64 },
    /// The header ends inside a tensor.
    #[error("the header ends inside tensor {tensor} at byte {offset}")]
    EndsEarly { tensor: u32, offset: usize },
    /// A dtype that this version does not know.
    #[error("tensor {tensor} at byte {offset} has the unknown dtype {found}")]
    DType { tensor: u32, offset: usize, found: u32 },
    /// More dimensions than the receiver accepts.
    #[error("tensor {tensor} at byte {offset} has {found} dimensions, and the limit is {limit}")]
    TooManyDims { tensor: u32, offset: usize, found: u32, limit: u32 },
    /// A larger dimension than the receiver accepts.
    #[error("tensor {tensor} at byte {offset} has a dimension of {found}, and the limit is {limit}")]
    DimTooLarge { tensor: u32, offset: usize, found: u64, limit: u64 },
    /// A tensor whose size, with zeros among the dimensions left out, exceeds 64 bits.
    #[error("tensor {tensor} at byte {offset} has dimensions whose product exceeds 64 bits")]
    TensorTooLarge { tensor: u32, offset: usize },
    /// A tensor that exceeds the payload that the receiver accepts.
    #[error("tensor {tensor} at byte {offset} has {bytes} bytes and ends beyond the limit of {limit}")]
    TensorBeyondLimit { tensor: u32, offset: usize, bytes: u64, limit: u64 },
    /// The tensors need another payload length than the header states.
    #[error("the header at byte 24 states {found} bytes of payload, and its tensors have {needed}")]
    PayloadLength { found: u64, needed: u64 },
}

debug_as_text!(HeaderError);

impl From<HeaderError> for Error {
    fn from(error: HeaderError) -> Self {
        refused(error.to_string())
    }
}
