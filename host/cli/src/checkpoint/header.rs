//! Reads the header of a safetensors file tensor by tensor and never as a whole, so that memory use depends only on the data that the
//! caller keeps.

use std::borrow::Cow;
use std::fmt;

use clap::Args;
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::FileError;
use super::input::Input;

/// The number of bytes of a header's length, which precede the header.
pub(super) const LEN_BYTES: u64 = 8;

/// The limits of a file's header. The author of a file may be unknown, and without limits the header would decide how much memory reading it
/// takes.
#[derive(Args, Clone, Debug)]
pub(crate) struct HeaderLimits {
    /// Refuse files whose header has more bytes; the default is what the format's own reader takes
    #[arg(long, value_name = "BYTES", default_value_t = 100_000_000)]
    pub(crate) max_header_bytes: u64,
    /// Refuse files of more tensors
    #[arg(long, value_name = "N", default_value_t = 2_000_000)]
    pub(crate) max_tensors: usize,
    /// Refuse tensors of more dimensions
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_dimensions: usize,
}

/// A tensor of a header.
pub(super) struct TensorEntry<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [usize],
    /// The range of its bytes in the data.
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// The reason why a header was not read to its end.
pub(super) enum HeaderError<E> {
    Malformed(String),
    /// The caller's reason to refuse a tensor.
    Refused(E),
}

/// The header of a file, which follows the eight bytes of its length.
pub(super) fn of(input: &Input, limits: &HeaderLimits) -> Result<Vec<u8>, FileError> {
    let in_file = input.len();
    let Some(rest) = in_file.checked_sub(LEN_BYTES) else {
        return Err(
            input.malformed(format!("it has {in_file} bytes, and the length of a header alone takes {LEN_BYTES}"))
        );
    };
    let mut len = [0; LEN_BYTES as usize];
    input.read(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > rest {
        let reason = format!(
            "its header is said to have {len} bytes, and the file has {in_file}; it was cut short, or is of another format"
        );
        return Err(input.malformed(reason));
    }
    let limit = limits.max_header_bytes;
    if len > limit {
        let reason = format!("its header has {len} bytes, more than {limit}; --max-header-bytes raises that limit");
        return Err(input.malformed(reason));
    }
    let mut header = vec![0; len as usize];
    input.read(&mut header, LEN_BYTES)?;
    Ok(header)
}

/// Passes each tensor to `take` in the header's order. Returns the metadata, if there are any: an unparsed JSON object of strings.
pub(super) fn read<'a, E>(
    header: &'a [u8],
    limits: &HeaderLimits,
    take: impl FnMut(TensorEntry<'_>) -> Result<(), E>,
) -> Result<Option<&'a RawValue>, HeaderError<E>> {
    let mut refused = None;
    let mut reader = serde_json::Deserializer::from_slice(header);
    let read = reader.deserialize_map(Header { limits, take, refused: &mut refused });
    match read.and_then(|metadata| reader.end().map(|()| metadata)) {
        Ok(metadata) => Ok(metadata),
        Err(error) => Err(refused.map_or_else(|| HeaderError::Malformed(error.to_string()), HeaderError::Refused)),
    }
}

struct Header<'a, F, E> {
    limits: &'a HeaderLimits,
    take: F,
    refused: &'a mut Option<E>,
}

impl<'de, F: FnMut(TensorEntry<'_>) -> Result<(), E>, E> Visitor<'de> for Header<'_, F, E> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut metadata, mut tensors) = (None, 0);
        let mut last = String::new();
        while let Some(name) = map.next_key::<String>().map_err(|error| after(&last, error))? {
            if name == "__metadata__" {
                metadata = Some(map.next_value::<&RawValue>()?).filter(|metadata| metadata.get() != "null");
                continue;
            }
            tensors += 1;
            let limit = self.limits.max_tensors;
            if tensors > limit {
                let reason = format!(
                    "it has more than {limit} tensors, {name:?} being the next; --max-tensors raises that limit"
                );
                return Err(A::Error::custom(reason));
            }
            let entry = map.next_value().and_then(|entry| info(entry, self.limits.max_dimensions));
            let (dtype, shape, (begin, end)) =
                entry.map_err(|error| A::Error::custom(format!("tensor {name:?}: {error}")))?;
            if let Err(error) = (self.take)(TensorEntry { name: &name, dtype, shape: &shape, begin, end }) {
                *self.refused = Some(error);
                return Err(A::Error::custom("refused"));
            }
            last = name;
        }
        if let Some(metadata) = metadata {
            serde_json::Deserializer::from_str(metadata.get())
                .deserialize_map(Texts)
                .map_err(|error| A::Error::custom(format!("its __metadata__ are no object of strings: {error}")))?;
        }
        Ok(metadata)
    }
}

/// The error of a header that cannot be read further than a tensor.
fn after<E: Error>(last: &str, error: E) -> E {
    if last.is_empty() { error } else { E::custom(format!("after tensor {last:?}: {error}")) }
}

/// The entry of one tensor.
#[derive(Deserialize)]
struct Info<'a> {
    dtype: Dtype,
    #[serde(borrow)]
    shape: &'a RawValue,
    data_offsets: (usize, usize),
}

/// The dtype, the shape and the offsets of a tensor.
type Parsed = (Dtype, Vec<usize>, (usize, usize));

/// Reads the entry of a tensor of at most so many dimensions.
fn info<E: Error>(entry: &RawValue, limit: usize) -> Result<Parsed, E> {
    if !entry.get().starts_with('{') {
        return Err(E::custom("it is no object of dtype, shape and data_offsets"));
    }
    let Info { dtype, shape, data_offsets } = serde_json::from_str(entry.get()).map_err(E::custom)?;
    let too_many = || E::custom(format!("it has more than {limit} dimensions; --max-dimensions raises that limit"));
    // Memory is allocated only for a list that is not longer than that.
    if shape.get().matches(',').count() > limit {
        return Err(too_many());
    }
    let shape: Vec<usize> = serde_json::from_str(shape.get()).map_err(E::custom)?;
    if shape.len() > limit { Err(too_many()) } else { Ok((dtype, shape, data_offsets)) }
}

/// An object of strings, which are checked and not kept.
struct Texts;

#[derive(Deserialize)]
struct Text<'a>(
    #[serde(borrow)]
    #[allow(dead_code, reason = "that it can be read is all")]
    Cow<'a, str>,
);

impl<'de> Visitor<'de> for Texts {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<Text<'_>, Text<'_>>()?.is_some() {}
        Ok(())
    }
}
