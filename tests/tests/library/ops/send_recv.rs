//! Send and Recv between threads: cases that only this transport allows.

use gradsync::comm::{Collectives, Ranks};
use gradsync::internal::plan::bundle::{TensorSpec, encode};
use gradsync::ops::send_recv::{Bundle, Limits, SendRecv};
use gradsync::{DType, Error, TensorView, TensorViewMut, bf16};
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::transfers::refused;

/// The first message of a negotiation, with the header of one tensor.
fn head(dtype: DType, dims: &[usize]) -> [u64; 127] {
    let header = encode(&[TensorSpec { dtype, dims: dims.to_vec() }], 0).unwrap();
    let word =
        |index| header.get(8 * index..8 * index + 8).map_or(0, |word| u64::from_ne_bytes(word.try_into().unwrap()));
    std::array::from_fn(word)
}

/// A rank sends an invalid header and leaves: the other rank's error describes the header, not a missing peer.
#[test]
fn an_invalid_header_from_a_rank_that_leaves() {
    guarded(60, || {
        on_ranks(2, |comm| match comm.rank() {
            0 => comm.send(&head(DType::F64, &[1 << 33, 9]), 1).unwrap(),
            _ => refused(SendRecv::new(&comm).recv_described(0, 0, &Limits::default()), &["bytes of payload"]),
        });
    });
}

/// Memory that cannot be allocated is an error on both ranks, and the only error.
#[test]
fn memory_that_there_is_not() {
    guarded(60, || {
        let outcomes = on_ranks(2, |comm| {
            let limits = Limits::default().with_dim(u64::MAX).with_payload_bytes(u64::MAX);
            if comm.rank() == 1 {
                return SendRecv::new(&comm).recv_described(0, 0, &limits).unwrap_err().to_string();
            }
            let mut answer = [0u64; 32];
            comm.send(&head(DType::U8, &[1 << 62]), 1).unwrap();
            comm.recv(&mut answer, 1).unwrap();
            String::from_utf8_lossy(TensorView::from(&answer[..]).data().as_bytes()).into_owned()
        });
        assert!(outcomes.iter().all(|text| text.contains(&format!("no memory for {}", 1u64 << 62))), "{outcomes:?}");
    });
}

/// The memory limit of a process leaves room for the payload once and not twice: one of the two ranks cannot allocate it, and the other
/// learns the reason at once, whichever rank it is.
#[cfg(target_os = "linux")]
#[test]
fn memory_for_one_of_two() {
    const NAME: &str = "ops::send_recv::memory_for_one_of_two";
    const LIMITED: &str = "GRADSYNC_TESTS_MEMORY_IS_LIMITED";
    if std::env::var_os(LIMITED).is_some() {
        guarded(60, one_of_two);
        return;
    }
    let script = format!("ulimit -v {} && exec \"$0\" --exact {NAME} --nocapture --test-threads=1", 7 << 19);
    let program = std::env::current_exe().expect("this program");
    let outcome = std::process::Command::new("/bin/sh").arg("-c").arg(script).arg(program).env(LIMITED, "1").output();
    let outcome = outcome.expect("a shell");
    let text = String::from_utf8_lossy(&outcome.stdout);
    assert!(
        outcome.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&outcome.stderr)
    );
}

/// The payload has 2 GiB, four times the same 512 MiB, and the limit is 3.5 GiB of address space.
#[cfg(target_os = "linux")]
fn one_of_two() {
    const PART: usize = 512 << 20;
    let outcomes = on_ranks(2, |comm| {
        if comm.rank() == 1 {
            return SendRecv::new(&comm).recv_described(0, 5, &Limits::default()).map(drop);
        }
        let part = vec![0u8; PART];
        let tensors = (0..4).map(|_| TensorView::of_bytes(DType::U8, vec![PART], &part).expect("as many bytes"));
        SendRecv::new(&comm).send(1, &Bundle::new(tensors)?.described(5)).map(drop)
    });
    let missing = format!("no memory for {} bytes", 4 * PART);
    let is_own = |outcome: &&gradsync::Result<()>| matches!(outcome, Err(Error::OutOfMemory { .. }));
    assert_eq!(outcomes.iter().filter(is_own).count(), 1, "{outcomes:?}");
    for outcome in &outcomes {
        match outcome {
            Err(Error::InvalidArgument { reason, .. }) => assert!(reason.contains(&missing), "{reason}"),
            Err(error @ Error::OutOfMemory { .. }) => assert!(error.to_string().contains(&missing), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn small_integers_and_truth_values() {
    let (short, word, truth) = ([-3i16, i16::MAX], [7u16, u16::MAX], [true, false, true]);
    guarded(60, move || {
        on_ranks(2, |comm| {
            if comm.rank() == 0 {
                let tensors = [TensorView::from(&short[..]), (&word[..]).into(), (&truth[..]).into()];
                SendRecv::new(&comm).send(1, &Bundle::new(tensors).unwrap().described(2)).unwrap();
                return;
            }
            let (_, received) = SendRecv::new(&comm).recv_described(0, 2, &Limits::default()).unwrap();
            let types: Vec<DType> = received.tensors().map(|tensor| tensor.dtype()).collect();
            assert_eq!(types, [DType::I16, DType::U16, DType::Bool]);
            assert_eq!(received.tensor(0).as_slice::<i16>().unwrap(), short);
            assert_eq!(received.tensor(1).as_slice::<u16>().unwrap(), word);
            assert_eq!(received.tensor(2).as_slice::<bool>().unwrap(), truth);
            assert!(matches!(received.tensor(0).as_slice::<u16>(), Err(Error::DTypeMismatch { .. })));
        });
    });
    let names = [DType::I16, DType::U16, DType::Bool].map(|dtype| format!("{dtype} of {}", dtype.size_bytes()));
    assert_eq!(names, ["i16 of 2", "u16 of 2", "bool of 1"]);
    // A byte that is no valid boolean never becomes one.
    refused(TensorView::of_bytes(DType::Bool, &[2][..], &[1, 2]).unwrap().as_slice::<bool>(), &["no bool"]);
    refused(TensorView::of_bytes(DType::U16, &[3][..], &[0; 3]), &["u16 [3] has 6 bytes", "have 3"]);
    refused(
        TensorView::of_bytes(DType::F32, &[usize::MAX, 9][..], &[0; 11]),
        &["more elements than memory has addresses"],
    );
    let mut written = [0i16; 2];
    TensorViewMut::from(&mut written[..]).into_data().as_bytes_mut().fill(0x11);
    assert_eq!(written, [0x1111; 2]);
}

#[test]
fn tensors_of_views_and_slices() {
    let values = [bf16::from_f32(1.0), bf16::from_f32(-2.0)];
    let view = TensorView::new(&values[..], &[1, 2]).unwrap();
    assert_eq!((view.dtype(), view.shape(), view.as_slice().unwrap()), (DType::BF16, &[1, 2][..], &values[..]));
    assert!(matches!(view.as_slice::<half::f16>(), Err(Error::DTypeMismatch { .. })));
    let ids = [7i64, -1];
    let slice = TensorView::from(&ids[..]);
    assert_eq!((slice.dtype(), slice.shape(), slice.data().as_bytes()), (DType::I64, &[2][..], bytes(&ids)));
    // Typed elements need their alignment.
    let unaligned = TensorView::of_bytes(DType::I64, &[1][..], &bytes(&ids)[1..9]).unwrap();
    refused(unaligned.as_slice::<i64>(), &["not aligned to 8 bytes"]);
    let mut written = [0.0f32; 3];
    TensorViewMut::new(&mut written[..], &[3]).unwrap().into_data().as_bytes_mut().fill(0x40);
    assert_eq!(written, [f32::from_bits(0x4040_4040); 3]);
    TensorViewMut::from(&mut written[..2]).into_data().as_bytes_mut().fill(0);
    assert_eq!(written, [0.0, 0.0, f32::from_bits(0x4040_4040)]);
}

fn bytes(ids: &[i64; 2]) -> &[u8] {
    TensorView::from(&ids[..]).data().as_bytes()
}

/// Offsets beyond 2^32 bytes are right, without so much memory: the layout is arithmetic only.
#[test]
fn sizes_beyond_32_bits() {
    let expected = gradsync::internal::plan::bundle::BundleLayout::new(&[3 << 30, 3 << 30, 5]).unwrap();
    assert_eq!((expected.ranges[2].start, expected.len), (6 << 30, (6 << 30) + 5));
}
