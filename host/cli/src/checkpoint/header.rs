//! Reads the header of a safetensors file tensor by tensor and never as a whole, so that memory use depends only on the data that the
//! caller keeps.

use std::borrow::Cow;
use std::fmt;

use clap::Args;
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// What the header of a file may hold at most: whoever made the file chose what reading it costs.
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
pub(super) struct Entry<'a> {
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

/// Finds the header in the bytes of a file.
pub(super) fn find<'a>(file: &'a [u8], limits: &HeaderLimits) -> Result<&'a [u8], String> {
    let Some((len, rest)) = file.split_first_chunk() else {
        return Err(format!("it has {} bytes, and the length of a header alone takes 8", file.len()));
    };
    let len = u64::from_le_bytes(*len);
    let header = usize::try_from(len).ok().and_then(|len| rest.get(..len));
    let Some(header) = header else {
        return Err(format!("its header is said to have {len} bytes, and the file has {}", file.len()));
    };
    let limit = limits.max_header_bytes;
    if len > limit {
        return Err(format!("its header has {len} bytes, more than {limit}; --max-header-bytes raises that limit"));
    }
    Ok(header)
}

/// Passes each tensor to `take` in the header's order. Returns the metadata, if there are any: an unparsed JSON object of strings.
pub(super) fn read<'a, E>(
    header: &'a [u8],
    limits: &HeaderLimits,
    take: impl FnMut(Entry<'_>) -> Result<(), E>,
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

impl<'de, F: FnMut(Entry<'_>) -> Result<(), E>, E> Visitor<'de> for Header<'_, F, E> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut metadata, mut tensors, mut shape) = (None, 0, Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                metadata = Some(map.next_value::<&RawValue>()?).filter(|metadata| metadata.get() != "null");
                continue;
            }
            tensors += 1;
            let limit = self.limits.max_tensors;
            if tensors > limit {
                let reason = format!("it has more than {limit} tensors; --max-tensors raises that limit");
                return Err(A::Error::custom(reason));
            }
            let limit = self.limits.max_dimensions;
            let (dtype, (begin, end)) = map.next_value_seed(Info { name: &name, shape: &mut shape, limit })?;
            if let Err(error) = (self.take)(Entry { name: &name, dtype, shape: &shape, begin, end }) {
                *self.refused = Some(error);
                return Err(A::Error::custom("refused"));
            }
        }
        if let Some(metadata) = metadata {
            serde_json::Deserializer::from_str(metadata.get())
                .deserialize_map(Texts)
                .map_err(|error| A::Error::custom(format!("its __metadata__ are no object of strings: {error}")))?;
        }
        Ok(metadata)
    }
}

/// The entry of one tensor, as it is parsed.
struct Info<'a> {
    name: &'a str,
    /// The destination of the shape.
    shape: &'a mut Vec<usize>,
    limit: usize,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

impl<'de> DeserializeSeed<'de> for Info<'_> {
    type Value = (Dtype, (usize, usize));

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Info<'_> {
    type Value = (Dtype, (usize, usize));

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "dtype, shape and data_offsets of tensor {:?}", self.name)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut dtype, mut offsets, mut has_shape) = (None, None, false);
        while let Some(field) = map.next_key()? {
            match field {
                Field::Dtype => dtype = Some(map.next_value()?),
                Field::DataOffsets => offsets = Some(map.next_value()?),
                Field::Shape => {
                    has_shape = true;
                    map.next_value_seed(Shape { name: self.name, shape: &mut *self.shape, limit: self.limit })?;
                }
                Field::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        match (dtype, offsets, has_shape) {
            (Some(dtype), Some(offsets), true) => Ok((dtype, offsets)),
            _ => Err(A::Error::custom(format!("tensor {:?} lacks a dtype, a shape or data_offsets", self.name))),
        }
    }
}

struct Shape<'a> {
    name: &'a str,
    shape: &'a mut Vec<usize>,
    limit: usize,
}

impl<'de> DeserializeSeed<'de> for Shape<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Shape<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the dimensions of tensor {:?}", self.name)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut dimensions: A) -> Result<(), A::Error> {
        let Self { name, shape, limit } = self;
        shape.clear();
        while let Some(dimension) = dimensions.next_element()? {
            if shape.len() == limit {
                let reason =
                    format!("tensor {name:?} has more than {limit} dimensions; --max-dimensions raises that limit");
                return Err(A::Error::custom(reason));
            }
            shape.push(dimension);
        }
        Ok(())
    }
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
