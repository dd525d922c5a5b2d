//! Send and Recv between threads: every case of [`transfers`], and cases that only this transport allows.

use gradsync::comm::{Collectives, Ranks};
use gradsync::ops::send_recv::{SendRecv, WireTensor, WireTensorMut, recv_described};
use gradsync::plan::bundle::{Limits, TensorSpec, encode};
use gradsync::{DType, Error, TensorView, TensorViewMut, bf16};
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::transfers::{FATAL, GOOD};

const WORLD_SIZES: [usize; 3] = [2, 3, 4];

#[test]
fn cases_that_leave_the_communicator_working() {
    guarded(120, || {
        for world_size in WORLD_SIZES {
            on_ranks(world_size, |comm| {
                for case in GOOD.iter().filter(|case| case.ranks <= world_size) {
                    println!("{} on rank {} of {world_size}", case.name, comm.rank());
                    (case.run)(&comm);
                }
            });
        }
    });
}

#[test]
fn cases_that_break_it_on_both_ranks() {
    guarded(120, || {
        for world_size in WORLD_SIZES {
            for case in FATAL {
                println!("{} of {world_size}", case.name);
                // All ranks stay until the end, as a rank that leaves is an error of another kind.
                let done = std::sync::Barrier::new(world_size);
                on_ranks(world_size, |comm| {
                    (case.run)(&comm);
                    done.wait();
                });
            }
        }
    });
}

/// A rank sends an invalid header and leaves: the other rank's error describes the header, not a missing peer.
#[test]
fn a_liar_that_leaves() {
    guarded(60, || {
        on_ranks(2, |comm| {
            if comm.rank() == 0 {
                let mut header = encode(&[TensorSpec { dtype: DType::F64, dims: vec![1 << 33, 9] }], 0).unwrap();
                header.resize(1016, 0);
                comm.send(&header, 1).unwrap();
                return;
            }
            match recv_described(&SendRecv::new(&comm), true, 0, 0, &Limits::default()) {
                Err(Error::InvalidArgument { reason, .. }) => assert!(reason.contains("bytes of payload"), "{reason}"),
                other => panic!("{other:?}"),
            }
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
                return recv_described(&SendRecv::new(&comm), true, 0, 0, &limits).map(drop).unwrap_err().to_string();
            }
            let mut header = encode(&[TensorSpec { dtype: DType::U8, dims: vec![1 << 62] }], 0).unwrap();
            header.resize(1016, 0);
            let mut answer = vec![0u8; 256];
            comm.send(&header, 1).unwrap();
            comm.recv(&mut answer, 1).unwrap();
            String::from_utf8_lossy(&answer[1..]).into_owned()
        });
        assert!(outcomes.iter().all(|text| text.contains(&format!("no memory for {}", 1u64 << 62))), "{outcomes:?}");
    });
}

/// The memory limit of a process leaves room for the payload once and not twice: one of the two ranks cannot allocate it, and the other
/// learns the reason at once, whichever rank it is.
#[cfg(target_os = "linux")]
#[test]
fn memory_for_one_of_two() {
    const NAME: &str = "send_recv::memory_for_one_of_two";
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
    use gradsync::ops::send_recv::{Bundle, send};
    const PART: usize = 512 << 20;
    let outcomes = on_ranks(2, |comm| {
        if comm.rank() == 1 {
            return recv_described(&SendRecv::new(&comm), true, 0, 5, &Limits::default()).map(drop);
        }
        let part = vec![0u8; PART];
        let tensors = (0..4).map(|_| WireTensor::new(DType::U8, vec![PART], &part).expect("as many bytes"));
        send(&SendRecv::new(&comm), true, 1, &Bundle::new(tensors)?.described(5)).map(drop)
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
                let tensors = [WireTensor::from(&short[..]), (&word[..]).into(), (&truth[..]).into()];
                let bundle = gradsync::ops::send_recv::Bundle::new(tensors).unwrap();
                gradsync::ops::send_recv::send(&SendRecv::new(&comm), true, 1, &bundle.described(2)).unwrap();
                return;
            }
            let (_, received) = recv_described(&SendRecv::new(&comm), true, 0, 2, &Limits::default()).unwrap();
            let types: Vec<DType> = received.tensors().map(|tensor| tensor.dtype()).collect();
            assert_eq!(types, [DType::I16, DType::U16, DType::Bool]);
            assert_eq!(received.tensor(0).typed(), Some(&short[..]));
            assert_eq!(received.tensor(1).typed(), Some(&word[..]));
            assert_eq!(received.tensor(2).typed(), Some(&truth[..]));
            assert_eq!(received.tensor(0).typed::<u16>(), None);
        });
    });
    let names = [DType::I16, DType::U16, DType::Bool].map(|dtype| format!("{dtype} of {}", dtype.size_bytes()));
    assert_eq!(names, ["i16 of 2", "u16 of 2", "bool of 1"]);
    // A byte that is no valid boolean never becomes one.
    assert_eq!(WireTensor::new(DType::Bool, &[2][..], &[1, 2]).unwrap().typed::<bool>(), None);
    let refusal = WireTensor::new(DType::U16, &[3][..], &[0; 3]).unwrap_err().to_string();
    assert!(refusal.contains("u16 [3] has 6 bytes"), "{refusal}");
    let mut written = [0i16; 2];
    WireTensorMut::from(&mut written[..]).bytes_mut().fill(0x11);
    assert_eq!(written, [0x1111; 2]);
}

#[test]
fn tensors_of_views_and_slices() {
    let values = [bf16::from_f32(1.0), bf16::from_f32(-2.0)];
    let view = WireTensor::from(TensorView::new(&values[..], &[1, 2]).unwrap());
    assert_eq!((view.dtype(), view.shape(), view.typed()), (DType::BF16, &[1, 2][..], Some(&values[..])));
    assert_eq!(view.typed::<half::f16>(), None);
    let ids = [7i64, -1];
    let slice = WireTensor::from(&ids[..]);
    assert_eq!((slice.dtype(), slice.shape(), slice.bytes()), (DType::I64, &[2][..], bytes(&ids)));
    // Typed elements need their alignment.
    let unaligned = WireTensor::new(DType::I64, &[1][..], &bytes(&ids)[1..9]).unwrap();
    assert_eq!(unaligned.typed::<i64>(), None);
    let mut written = [0.0f32; 3];
    WireTensorMut::from(TensorViewMut::new(&mut written[..], &[3]).unwrap()).bytes_mut().fill(0x40);
    assert_eq!(written, [f32::from_bits(0x4040_4040); 3]);
    WireTensorMut::from(&mut written[..2]).bytes_mut().fill(0);
    assert_eq!(written, [0.0, 0.0, f32::from_bits(0x4040_4040)]);
}

fn bytes(ids: &[i64; 2]) -> &[u8] {
    WireTensor::from(&ids[..]).bytes()
}

/// Offsets beyond 2^32 bytes are right, without so much memory: the layout is arithmetic only.
#[test]
fn sizes_beyond_32_bits() {
    let expected = gradsync::plan::bundle::BundleLayout::new(&[3 << 30, 3 << 30, 5]).unwrap();
    assert_eq!((expected.places[2].start, expected.len), (6 << 30, (6 << 30) + 5));
}
