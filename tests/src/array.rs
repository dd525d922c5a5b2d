//! Owned data of any of the four dtypes, which tests pass to gradsync and read back.
//!
//! Conversions to and from `f64` are done by the oracle, never by gradsync, so that a wrong cast in gradsync cannot cancel out.

use std::fmt;
use std::ops::Range;

use gradsync::{DType, GradientBuffer, Slice, SliceMut, bf16, f16};

use crate::oracle::Format;

/// A vector of one of the four dtypes.
#[derive(Clone)]
pub enum Array {
    /// f64
    F64(Vec<f64>),
    /// f32
    F32(Vec<f32>),
    /// f16
    F16(Vec<f16>),
    /// bf16
    BF16(Vec<bf16>),
}

/// Evaluates one expression on the vector of whichever variant is present.
macro_rules! each {
    ($array:expr, $data:ident => $body:expr) => {
        match $array {
            Array::F64($data) => $body,
            Array::F32($data) => $body,
            Array::F16($data) => $body,
            Array::BF16($data) => $body,
        }
    };
}

impl Array {
    /// The given numbers, each of which must be representable in the format.
    pub fn new(format: Format, values: &[f64]) -> Array {
        Array::from_patterns(format, values.iter().map(|&value| format.encode(value)))
    }

    /// The given bit patterns.
    pub fn from_patterns(format: Format, patterns: impl Iterator<Item = u64>) -> Array {
        match format {
            Format::F64 => Array::F64(patterns.map(f64::from_bits).collect()),
            Format::F32 => Array::F32(patterns.map(|pattern| f32::from_bits(pattern as u32)).collect()),
            Format::F16 => Array::F16(patterns.map(|pattern| f16::from_bits(pattern as u16)).collect()),
            Format::BF16 => Array::BF16(patterns.map(|pattern| bf16::from_bits(pattern as u16)).collect()),
        }
    }

    /// `len` elements of value 7: a destination in which unwritten elements are visible.
    pub fn unwritten(format: Format, len: usize) -> Array {
        Array::new(format, &vec![7.0; len])
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each!(self, data => data.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The format.
    pub fn format(&self) -> Format {
        match self {
            Array::F64(_) => Format::F64,
            Array::F32(_) => Format::F32,
            Array::F16(_) => Format::F16,
            Array::BF16(_) => Format::BF16,
        }
    }

    /// The bit patterns.
    pub fn patterns(&self) -> Vec<u64> {
        patterns_of(self.slice())
    }

    /// The numbers.
    pub fn values(&self) -> Vec<f64> {
        values_of(self.slice())
    }

    /// The whole array, as input for gradsync.
    pub fn slice(&self) -> Slice<'_> {
        self.part(0..self.len())
    }

    /// The whole array, as output for gradsync.
    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        self.part_mut(0..self.len())
    }

    /// A part of the array; with an odd start, the slice is aligned to no more than its element.
    pub fn part(&self, range: Range<usize>) -> Slice<'_> {
        each!(self, data => Slice::from(&data[range]))
    }

    /// A part of the array, as output for gradsync.
    pub fn part_mut(&mut self, range: Range<usize>) -> SliceMut<'_> {
        each!(self, data => SliceMut::from(&mut data[range]))
    }

    /// The elements as little-endian bytes, the layout of a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let size = self.format().size_bytes();
        self.patterns().into_iter().flat_map(|pattern| pattern.to_le_bytes().into_iter().take(size)).collect()
    }

    /// From the bytes of a file.
    pub fn from_bytes(format: Format, bytes: &[u8]) -> Array {
        let patterns = bytes.chunks_exact(format.size_bytes()).map(|chunk| {
            let mut all = [0; 8];
            all[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(all)
        });
        Array::from_patterns(format, patterns)
    }
}

/// Bitwise comparison: NaN payloads and the sign of zero count.
impl PartialEq for Array {
    fn eq(&self, other: &Array) -> bool {
        self.format() == other.format() && self.patterns() == other.patterns()
    }
}

/// Shows the format and the first numbers only, so that a failed comparison of long arrays stays readable.
impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values();
        write!(f, "{:?} × {} {:?}…", self.format(), values.len(), &values[..values.len().min(8)])
    }
}

/// The dtype of a format.
pub fn dtype(format: Format) -> DType {
    match format {
        Format::F64 => DType::F64,
        Format::F32 => DType::F32,
        Format::F16 => DType::F16,
        Format::BF16 => DType::BF16,
    }
}

/// The bit patterns of a gradsync slice.
pub fn patterns_of(slice: Slice<'_>) -> Vec<u64> {
    let pattern = |bytes: &[u8]| bytes.iter().rev().fold(0, |pattern, &byte| pattern << 8 | u64::from(byte));
    slice.as_bytes().chunks_exact(slice.dtype().size_bytes()).map(pattern).collect()
}

/// The format of a dtype.
fn format(of: DType) -> Format {
    let formats = [Format::F64, Format::F32, Format::F16, Format::BF16];
    formats.into_iter().find(|&format| dtype(format) == of).expect("a floating-point dtype")
}

/// The numbers of a gradsync slice, decoded by the oracle.
pub fn values_of(slice: Slice<'_>) -> Vec<f64> {
    let format = format(slice.dtype());
    patterns_of(slice).into_iter().map(|pattern| format.decode(pattern)).collect()
}

/// Writes numbers that are representable in the slice's format, from element `start` on.
pub fn write(destination: SliceMut<'_>, start: usize, values: &[f64]) {
    let (format, size) = (format(destination.dtype()), destination.dtype().size_bytes());
    let places = destination.range_mut(start..start + values.len()).as_bytes_mut().chunks_exact_mut(size);
    places.zip(values).for_each(|(place, &value)| place.copy_from_slice(&format.encode(value).to_le_bytes()[..size]));
}

/// Writes a value to every element of a buffer that belongs to no tensor.
pub fn fill_gaps(buffer: &mut GradientBuffer, value: f64) {
    let segments = buffer.segments().to_vec();
    for place in (0..buffer.len()).filter(|place| !segments.iter().any(|segment| segment.contains(place))) {
        write(buffer.as_mut_slice(), place, &[value]);
    }
}

/// The bits of the tensors of a buffer, in order, without the gaps.
pub fn tensor_patterns(buffer: &GradientBuffer) -> Vec<u64> {
    (0..buffer.tensor_count()).flat_map(|index| patterns_of(buffer.tensor(index).data())).collect()
}
