//! send, recv and send_recv: order, dtypes, and refusals on both ends.

use gradsync::comm::{Collectives, Ranks};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};

use crate::WORLD_SIZES;

#[test]
fn a_pipeline_passes_data_on_in_order() {
    guarded(60, || {
        for format in Format::ALL {
            let outcome = on_ranks(4, |comm| {
                let rank = comm.rank();
                let mut received = Vec::new();
                for (message, len) in [0, 1, 33, 4097].into_iter().enumerate() {
                    let mut data = Array::new(format, &vector(format, len, message as u64));
                    if rank > 0 {
                        data = Array::unwritten(format, len);
                        comm.recv(data.slice_mut(), rank - 1).unwrap();
                    }
                    if rank < 3 {
                        comm.send(data.slice(), rank + 1).unwrap();
                    }
                    received.push(data);
                }
                received
            });
            for (rank, received) in outcome.into_iter().enumerate() {
                for (message, data) in received.into_iter().enumerate() {
                    let sent = vector(format, data.len(), message as u64);
                    assert_eq!(data.values(), sent, "{format:?}, rank {rank}, message {message}");
                }
            }
        }
    });
}

#[test]
fn a_ring_exchanges_without_deadlock() {
    guarded(60, || {
        for format in Format::ALL {
            for world_size in WORLD_SIZES.into_iter().skip(1) {
                for len in [0, 1, 4097] {
                    let got = on_ranks(world_size, |comm| {
                        let rank = comm.rank();
                        let (to, from) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
                        let data = Array::new(format, &vector(format, len, rank as u64));
                        let mut received = Array::unwritten(format, len);
                        comm.send_recv(data.slice(), to, received.slice_mut(), from).unwrap();
                        received
                    });
                    for (rank, received) in got.into_iter().enumerate() {
                        let from = (rank + world_size - 1) % world_size;
                        let what = format!("{format:?}, {world_size} ranks, rank {rank}, {len} elements");
                        assert_eq!(received.values(), vector(format, len, from as u64), "{what}");
                    }
                }
            }
        }
    });
}

/// Adasum's tree exchanges the two halves of a slice, which differ in length if the slice is odd.
#[test]
fn partners_may_send_different_lengths() {
    guarded(60, || {
        let got = on_ranks(2, |comm| {
            let (mine, theirs) = if comm.rank() == 0 { (3, 4) } else { (4, 3) };
            let data = Array::new(Format::F32, &vec![comm.rank() as f64; mine]);
            let mut received = Array::unwritten(Format::F32, theirs);
            comm.send_recv(data.slice(), 1 - comm.rank(), received.slice_mut(), 1 - comm.rank()).unwrap();
            received.values()
        });
        assert_eq!(got, [vec![1.0; 4], vec![0.0; 3]]);
    });
}

#[test]
fn point_to_point_between_some_does_not_involve_the_others() {
    guarded(60, || {
        on_ranks(4, |comm| {
            let mut data = Array::new(Format::F32, &[comm.rank() as f64]);
            match comm.rank() {
                1 => comm.send(data.slice(), 3).unwrap(),
                3 => comm.recv(data.slice_mut(), 1).unwrap(),
                _ => {}
            }
            if comm.rank() == 3 {
                assert_eq!(data.values(), [1.0]);
            }
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn count_and_dtype_mismatches_are_errors_on_both_ends_naming_both() {
    guarded(60, || {
        for (sent, received, words) in [
            (Array::unwritten(Format::F32, 1010), Array::unwritten(Format::F32, 1011), ["1010", "1011"]),
            (Array::unwritten(Format::F32, 10), Array::unwritten(Format::BF16, 10), ["f32", "bf16"]),
        ] {
            let errors = on_ranks(2, |comm| {
                let mut target = received.clone();
                let outcome = if comm.rank() == 0 {
                    comm.send(sent.slice(), 1).and_then(|()| comm.barrier())
                } else {
                    comm.recv(target.slice_mut(), 0)
                };
                (outcome.expect_err("the two ends differ").to_string(), target == received)
            });
            for (text, _) in &errors {
                for word in words {
                    assert!(text.contains(word), "\"{text}\" does not name {word}");
                }
            }
            assert!(errors[1].1, "the receiver wrote data of a mismatched message");
        }
    });
}

/// A rank is no peer of itself, as in ONNX Runtime's Send.
#[test]
fn a_rank_is_not_its_own_peer() {
    guarded(60, || {
        on_ranks(2, |comm| {
            let (mut data, rank) = (Array::unwritten(Format::F32, 1), comm.rank());
            for outcome in [comm.send(data.slice(), rank), comm.recv(data.slice_mut(), rank)] {
                let text = outcome.expect_err("its own peer").to_string();
                assert!(text.contains(&rank.to_string()), "\"{text}\" does not name {rank}");
            }
        });
    });
}

#[test]
fn peers_that_do_not_exist() {
    guarded(60, || {
        for peer in [2, 3, usize::MAX] {
            on_ranks(2, |comm| {
                let mut data = Array::unwritten(Format::F32, 1);
                let error = comm.send(data.slice(), peer).expect_err("no such peer");
                assert!(error.to_string().contains(&peer.to_string()), "\"{error}\" does not name {peer}");
                assert!(comm.recv(data.slice_mut(), peer).is_err());
            });
        }
    });
}
