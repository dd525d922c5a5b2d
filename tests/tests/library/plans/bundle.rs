//! Bundles of tensors: their offsets, and headers that are valid, wrong in one place, or arbitrary bytes.

use gradsync::DType;
use gradsync::internal::plan::bundle::{
    BundleLayout, Header, HeaderError, Limits, PREFIX_BYTES, Prefix, TensorSpec, decode, encode,
};
use proptest::prelude::*;

use super::bundle_header;

fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec { dtype, dims: dims.to_vec() }
}

/// The tensors of the example layout in section 5 of the specification.
fn three() -> Vec<TensorSpec> {
    vec![spec(DType::F32, &[1]), spec(DType::F32, &[75]), spec(DType::F32, &[64])]
}

fn prefix_of(header: &[u8]) -> Result<Prefix, HeaderError> {
    Prefix::decode(header.first_chunk().unwrap(), &Limits::default())
}

fn refusal(header: &[u8]) -> HeaderError {
    decode(header, &Limits::default()).unwrap_err()
}

#[test]
fn debug_of_a_header_error_is_its_text() {
    let error = refusal(&[0; 3]);
    assert_eq!(format!("{error:?}"), error.to_string());
}

/// A header with some bytes replaced.
fn with(mut header: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    header[offset..offset + bytes.len()].copy_from_slice(bytes);
    header
}

#[test]
fn layout_has_tensors_where_upstream_has_them() {
    let layout = BundleLayout::new(&[4, 300, 256]).unwrap();
    assert_eq!((layout.ranges, layout.len), (vec![0..4, 256..556, 768..1024], 1024));
    let header = decode(&encode(&three(), 7).unwrap(), &Limits::default()).unwrap();
    assert_eq!(header.layout, BundleLayout::new(&[4, 300, 256]).unwrap());
    assert_eq!(BundleLayout::new(&[]).unwrap(), BundleLayout { ranges: vec![], len: 0 });
    // There is no padding at the end, and an empty tensor has an offset too.
    assert_eq!(BundleLayout::new(&[5, 0]).unwrap(), BundleLayout { ranges: vec![0..5, 256..256], len: 256 });
    assert_eq!(BundleLayout::new(&[0, 0, 1]).unwrap(), BundleLayout { ranges: vec![0..0, 0..0, 0..1], len: 1 });
}

#[test]
fn layout_beyond_the_address_space_is_an_error() {
    for sizes in [vec![3, usize::MAX], vec![1, isize::MAX as usize - 255], vec![isize::MAX as usize - 3, 0]] {
        let message = BundleLayout::new(&sizes).unwrap_err().to_string();
        assert!(message.contains("tensor 1") && message.contains(&sizes[1].to_string()), "{message}");
    }
    assert!(BundleLayout::new(&[1, isize::MAX as usize - 256]).is_ok());
}

#[test]
fn encode_gives_the_known_bytes() {
    let header = encode(&[spec(DType::BF16, &[3, 258]), spec(DType::U8, &[])], 0x0102_0304_0506_0708).unwrap();
    let bytes = [
        &b"GSTB"[..],
        &[1, 0, 0, 0],
        &[8, 7, 6, 5, 4, 3, 2, 1],
        &[2, 0, 0, 0],
        &[64, 0, 0, 0],
        // The payload has 1548 bytes, which are padded to 1792, the next multiple of 256, and one more byte.
        &[0x01, 0x07, 0, 0, 0, 0, 0, 0],
        &[4, 0, 0, 0, 2, 0, 0, 0],
        &[3, 0, 0, 0, 0, 0, 0, 0],
        &[2, 1, 0, 0, 0, 0, 0, 0],
        &[10, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(header, bytes);
    let prefix = prefix_of(&header).unwrap();
    assert_eq!(prefix, Prefix { sequence: 0x0102_0304_0506_0708, tensors: 2, header_bytes: 64, payload_bytes: 1793 });
    let codes = DType::ALL.map(|dtype| encode(&[spec(dtype, &[])], 0).unwrap()[PREFIX_BYTES]);
    assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    let empty = encode(&[], u64::MAX).unwrap();
    assert_eq!(empty.len(), PREFIX_BYTES);
    let nothing = Header { sequence: u64::MAX, tensors: vec![], layout: BundleLayout::new(&[]).unwrap() };
    assert_eq!(decode(&empty, &Limits::default()).unwrap(), nothing);
}

#[test]
fn encode_refuses_what_no_header_can_say() {
    let half = spec(DType::U8, &[1 << 62]);
    for (tensors, name) in [
        (vec![spec(DType::F32, &[]), spec(DType::F64, &[1 << 61])], "tensor 1"),
        (vec![spec(DType::U8, &[0, 1 << 32, 1 << 32])], "tensor 0"),
        (vec![half.clone(), half], "tensor 1"),
    ] {
        let message = encode(&tensors, 0).unwrap_err().to_string();
        assert!(message.starts_with("tensor bundle: ") && message.contains(name), "{message}");
    }
}

#[test]
fn decode_has_an_error_for_each_fault() {
    let good = encode(&three(), 1).unwrap();
    // The tensors are at bytes 32, 48 and 64.
    assert_eq!(good.len(), 80);
    let first = |error: HeaderError, header: Vec<u8>| {
        assert_eq!((refusal(&header), prefix_of(&header)), (error, Err(error)));
    };
    first(HeaderError::Magic { found: *b"GSTA" }, with(good.clone(), 3, b"A"));
    first(HeaderError::Version { found: 2 }, with(good.clone(), 4, &[2]));
    first(HeaderError::TooManyTensors { found: 65537, limit: 65536 }, with(good.clone(), 16, &[1, 0, 1]));
    let limit = 4 << 20;
    first(HeaderError::HeaderTooLong { found: limit + 80, limit }, with(good.clone(), 22, &[64]));
    first(HeaderError::HeaderLength { found: 55, tensors: 3 }, with(good.clone(), 20, &[55]));
    first(HeaderError::HeaderLength { found: 441, tensors: 3 }, with(good.clone(), 20, &[185, 1]));
    first(HeaderError::HeaderLength { found: 80, tensors: 7 }, with(good.clone(), 16, &[7]));
    first(HeaderError::PayloadTooLarge { found: u64::MAX, limit: 64 << 30 }, with(good.clone(), 24, &[255; 8]));

    let rest = |error: HeaderError, header: Vec<u8>| {
        assert_eq!((refusal(&header), prefix_of(&header).is_ok()), (error, true));
    };
    rest(HeaderError::PayloadLength { found: 1025, needed: 1024 }, with(good.clone(), 24, &[1]));
    rest(HeaderError::DType { tensor: 1, offset: 48, found: 14 }, with(good.clone(), 48, &[14]));
    rest(HeaderError::DType { tensor: 1, offset: 48, found: 0 }, with(good.clone(), 48, &[0]));
    rest(HeaderError::TooManyDims { tensor: 1, offset: 52, found: 17, limit: 16 }, with(good.clone(), 52, &[17]));
    rest(HeaderError::EndsEarly { tensor: 2, offset: 64 }, with(good.clone(), 68, &[2]));
    // The second of two scalars is read as the first one's dimension.
    let scalars = encode(&[spec(DType::U8, &[]), spec(DType::U8, &[])], 0).unwrap();
    rest(HeaderError::EndsEarly { tensor: 1, offset: 48 }, with(scalars, 36, &[1]));
    rest(HeaderError::TooLong { found: 80, needed: 72 }, with(good.clone(), 68, &[0]));
    let limit = 1 << 40;
    rest(HeaderError::DimTooLarge { tensor: 2, offset: 72, found: limit + 64, limit }, with(good.clone(), 77, &[1]));
    let limit = 64 << 30;
    rest(
        HeaderError::TensorBeyondLimit { tensor: 2, offset: 64, bytes: 4 * ((1 << 34) + 64), limit },
        with(good.clone(), 76, &[4]),
    );
    let cube = encode(&[spec(DType::F64, &[1, 0, 1])], 0).unwrap();
    let huge = (1u64 << 40).to_le_bytes();
    rest(HeaderError::TensorTooLarge { tensor: 0, offset: 32 }, with(with(cube, 40, &huge), 56, &huge));

    assert_eq!(refusal(&[]), HeaderError::TooShort { found: 0, needed: 32 });
    for len in 0..80 {
        assert_eq!(refusal(&good[..len]), HeaderError::TooShort { found: len, needed: if len < 32 { 32 } else { 80 } });
    }
    assert_eq!(refusal(&[&good[..], &[0]].concat()), HeaderError::TooLong { found: 81, needed: 80 });
}

#[test]
fn limits_are_the_largest_that_pass() {
    let tensors = [spec(DType::F32, &[2, 3]), spec(DType::U8, &[])];
    let header = encode(&tensors, 0).unwrap();
    let exact =
        Limits::default().with_tensors(2).with_dims(2).with_dim(3).with_header_bytes(64).with_payload_bytes(257);
    assert_eq!(decode(&header, &exact).unwrap().tensors, tensors);
    for (limits, word) in [
        (exact.with_tensors(1), "limit is 1"),
        (exact.with_dims(1), "2 dimensions, and the limit is 1"),
        (exact.with_dim(2), "dimension of 3"),
        (exact.with_header_bytes(63), "limit is 63"),
        (exact.with_payload_bytes(256), "limit is 256"),
    ] {
        let message = gradsync::Error::from(decode(&header, &limits).unwrap_err()).to_string();
        assert!(message.starts_with("tensor bundle: ") && message.contains(word), "{message}");
    }
}

/// Dimensions of tensors whose payload has at most some KiB; some dimensions are zero.
fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let dims = prop::collection::vec(prop_oneof![0usize..4, 0usize..20], 0..4);
    let tensor = (prop::sample::select(&DType::ALL[..]), dims);
    prop::collection::vec(tensor.prop_map(|(dtype, dims)| TensorSpec { dtype, dims }), 0..7)
}

proptest! {
    #[test]
    fn decode_gives_back_the_encoded_header(tensors in tensors(), sequence in any::<u64>()) {
        let header = encode(&tensors, sequence).unwrap();
        let decoded = decode(&header, &Limits::default()).unwrap();
        let sizes: Vec<_> = tensors.iter().map(|tensor| {
            tensor.dtype.size_bytes() * tensor.dims.iter().product::<usize>()
        }).collect();
        let layout = BundleLayout::new(&sizes).unwrap();
        prop_assert_eq!(decoded, Header { sequence, tensors, layout });
        bundle_header::check(&header);
    }

    /// Random bytes hardly ever pass the magic number: these headers do, and some pass all but the last check.
    #[test]
    fn decode_refuses_damaged_headers_or_gives_others(
        tensors in tensors(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
        more in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let mut header = encode(&tensors, 0).unwrap();
        for (index, value) in damage {
            let index = index.index(header.len());
            header[index] = value;
        }
        if let Some(cut) = cut {
            header.truncate(cut.index(header.len()));
        }
        header.extend(more);
        bundle_header::check(&header);
    }

    #[test]
    fn decode_refuses_any_bytes_or_gives_a_header(
        prefix in prop::bool::ANY,
        counts in (0u32..7, 0u32..200, 0u64..3000),
        bytes in prop::collection::vec(prop_oneof![0u8..5, any::<u8>()], 0..200),
    ) {
        if prefix {
            let mut header = encode(&[], 0).unwrap();
            header[16..20].copy_from_slice(&counts.0.to_le_bytes());
            header[20..24].copy_from_slice(&counts.1.to_le_bytes());
            header[24..32].copy_from_slice(&counts.2.to_le_bytes());
            header.extend(&bytes);
            bundle_header::check(&header);
        }
        bundle_header::check(&bytes);
    }
}
