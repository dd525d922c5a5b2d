//! Send and Recv between threads: every case of [`transfers`], and what only this transport can be made to do.

use gradsync::comm::Communicator;
use gradsync::ops::send_recv::{TensorBytes, TensorBytesMut, recv_described};
use gradsync::plan::bundle::{Limits, TensorSpec, encode};
use gradsync::{DataType, Error, TensorView, TensorViewMut, bf16};
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
                // All ranks stay until the end: whoever leaves is an error of another kind.
                let done = std::sync::Barrier::new(world_size);
                on_ranks(world_size, |comm| {
                    (case.run)(&comm);
                    done.wait();
                });
            }
        }
    });
}

/// A rank that begins a header and leaves: the other says what was wrong with the header, not that nobody heard it.
#[test]
fn a_liar_that_leaves() {
    guarded(60, || {
        on_ranks(2, |comm| {
            if comm.rank() == 0 {
                let mut header = encode(&[TensorSpec { dtype: DataType::F64, dims: vec![1 << 33, 9] }], 0).unwrap();
                header.resize(1016, 0);
                comm.exchange(&[(1, &header)], &mut []).unwrap();
                return;
            }
            match recv_described(&comm, true, 0, 0, &Limits::default()) {
                Err(Error::InvalidArgument { reason, .. }) => assert!(reason.contains("bytes of payload"), "{reason}"),
                other => panic!("{other:?}"),
            }
        });
    });
}

/// Memory that cannot be had is an error on both ranks, and nothing else is.
#[test]
fn memory_that_there_is_not() {
    guarded(60, || {
        let outcomes = on_ranks(2, |comm| {
            let limits = Limits { dim: u64::MAX, payload_bytes: u64::MAX, ..Limits::default() };
            if comm.rank() == 1 {
                return recv_described(&comm, true, 0, 0, &limits).map(drop).unwrap_err().to_string();
            }
            let mut header = encode(&[TensorSpec { dtype: DataType::U8, dims: vec![1 << 62] }], 0).unwrap();
            header.resize(1016, 0);
            let mut answer = vec![0; 256];
            comm.exchange(&[(1, &header)], &mut []).unwrap();
            comm.exchange(&[], &mut [(1, &mut answer[..])]).unwrap();
            String::from_utf8_lossy(&answer[1..]).into_owned()
        });
        assert!(outcomes.iter().all(|text| text.contains(&format!("no memory for {}", 1u64 << 62))), "{outcomes:?}");
    });
}

#[test]
fn tensors_of_views_and_slices() {
    let values = [bf16::from_f32(1.0), bf16::from_f32(-2.0)];
    let view = TensorBytes::from(TensorView::new(&values[..], &[1, 2]).unwrap());
    assert_eq!((view.dtype(), view.shape(), view.typed()), (DataType::BF16, &[1, 2][..], Some(&values[..])));
    assert_eq!(view.typed::<half::f16>(), None);
    let ids = [7i64, -1];
    let slice = TensorBytes::from(&ids[..]);
    assert_eq!((slice.dtype(), slice.shape(), slice.bytes()), (DataType::I64, &[2][..], bytes(&ids)));
    // Typed elements need their alignment.
    let unaligned = TensorBytes::new(DataType::I64, &[1][..], &bytes(&ids)[1..9]).unwrap();
    assert_eq!(unaligned.typed::<i64>(), None);
    let mut written = [0.0f32; 3];
    TensorBytesMut::from(TensorViewMut::new(&mut written[..], &[3]).unwrap()).bytes_mut().fill(0x40);
    assert_eq!(written, [f32::from_bits(0x4040_4040); 3]);
    TensorBytesMut::from(&mut written[..2]).bytes_mut().fill(0);
    assert_eq!(written, [0.0, 0.0, f32::from_bits(0x4040_4040)]);
}

fn bytes(ids: &[i64; 2]) -> &[u8] {
    TensorBytes::from(&ids[..]).bytes()
}

/// More than 2^32 bytes lie where they should, though nobody has so much: the layout is arithmetic.
#[test]
fn sizes_beyond_32_bits() {
    let expected = gradsync::plan::bundle::BundleLayout::new(&[3 << 30, 3 << 30, 5]).unwrap();
    assert_eq!((expected.places[2].start, expected.len), (6 << 30, (6 << 30) + 5));
}
