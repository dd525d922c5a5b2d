//! Properties of the bundle header's decoder that hold for any input bytes; shared by the fuzz target and the test program `library`.

use gradsync::internal::plan::bundle::{HeaderError, Limits, PREFIX_BYTES, Prefix, decode, encode};

/// Limits small enough that random bytes reach each of them.
const SMALL: Limits =
    Limits::new().with_tensors(5).with_dims(3).with_dim(1000).with_header_bytes(160).with_payload_bytes(1 << 16);

/// Decodes the bytes as a header under several limits. Panics if a property does not hold.
pub(crate) fn check(bytes: &[u8]) {
    let all = Limits::new()
        .with_tensors(u32::MAX)
        .with_dims(u32::MAX)
        .with_dim(u64::MAX)
        .with_header_bytes(u32::MAX)
        .with_payload_bytes(u64::MAX);
    let accepted = [SMALL, Limits::default(), all].map(|limits| within(bytes, &limits));
    // A header that narrow limits accept is also accepted under wide limits.
    assert!(accepted.is_sorted(), "{accepted:?}");
}

fn within(bytes: &[u8], limits: &Limits) -> bool {
    let prefix = bytes.first_chunk::<PREFIX_BYTES>().map(|prefix| Prefix::decode(prefix, limits));
    let header = match (decode(bytes, limits), prefix) {
        (Ok(header), Some(Ok(_))) => header,
        (Err(HeaderError::TooShort { found, needed: PREFIX_BYTES }), None) if found == bytes.len() => return false,
        (Err(error), Some(Err(first))) if error == first => return false,
        (Err(error), Some(Ok(_))) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
        (decoded, prefix) => panic!("{decoded:?} where the prefix is {prefix:?}"),
    };
    let layout = &header.layout;
    assert!(header.tensors.len() <= limits.tensors as usize && bytes.len() <= limits.header_bytes as usize);
    assert!(layout.len as u64 <= limits.payload_bytes);
    let mut end = 0;
    for (tensor, range) in header.tensors.iter().zip(&layout.ranges) {
        assert!(tensor.dims.len() <= limits.dims as usize && tensor.dims.iter().all(|&dim| dim as u64 <= limits.dim));
        assert_eq!(tensor.bytes(), Some(range.len() as u64));
        assert!(range.start % 256 == 0 && range.start >= end && range.start - end < 256, "{range:?} after {end}");
        end = range.end;
    }
    assert_eq!((layout.ranges.len(), layout.len), (header.tensors.len(), end));
    // The memory reserved is bounded by the length of the input.
    let dims: usize = header.tensors.iter().map(|tensor| tensor.dims.capacity()).sum();
    let memory = 32 * header.tensors.capacity() + 16 * layout.ranges.capacity() + 8 * dims;
    assert!(memory <= 6 * (bytes.len() - PREFIX_BYTES), "{memory} bytes for a header of {}", bytes.len());
    // A list of tensors has exactly one encoding.
    assert_eq!(encode(&header.tensors, header.sequence).unwrap(), bytes);
    true
}
