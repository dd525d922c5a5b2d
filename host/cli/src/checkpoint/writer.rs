//! The result as a safetensors file, written as a stream.

use std::io::{self, Write};

use safetensors::Dtype;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::value::RawValue;

use super::tensors::Tensor;
use gradsync_cli::output::{OutputError, OutputFile};

/// Writes the header of a file of these tensors; their bytes have to follow in the same order.
pub(crate) fn write_header<'a, T: Iterator<Item = Tensor<'a>>>(
    file: &mut OutputFile,
    metadata: Option<&RawValue>,
    tensors: impl Fn() -> T,
) -> Result<(), OutputError> {
    let header = Header { metadata, tensors };
    file.write_by(|file| {
        // The length precedes the header, and bytes written to a pipe cannot be changed.
        let mut count = Count(0);
        serde_json::to_writer(&mut count, &header)?;
        // The data start at a multiple of 8, as the format requires; spaces may follow the JSON.
        let len = count.0.next_multiple_of(8);
        file.write_all(&(len as u64).to_le_bytes())?;
        serde_json::to_writer(&mut *file, &header)?;
        file.write_all(&b"       "[..len - count.0])
    })
}

/// Counts the bytes written.
struct Count(usize);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Header<'a, F> {
    metadata: Option<&'a RawValue>,
    tensors: F,
}

impl<'a, T: Iterator<Item = Tensor<'a>>, F: Fn() -> T> Serialize for Header<'_, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(metadata) = self.metadata {
            map.serialize_entry("__metadata__", metadata)?;
        }
        let mut end = 0;
        for tensor in (self.tensors)() {
            let begin = end;
            end += tensor.bytes();
            let info = Info { dtype: tensor.dtype, shape: tensor.shape, data_offsets: (begin, end) };
            map.serialize_entry(tensor.name, &info)?;
        }
        map.end()
    }
}

#[derive(serde::Serialize)]
struct Info {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}
