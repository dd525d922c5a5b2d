//! `exchange`: any number of transfers at once, none of which waits for another.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Collectives, CommError, Ranks};
use gradsync::{Error, Result};
use gradsync_tests::ranks::{exchange_bytes, guarded, on_ranks};

use crate::WORLD_SIZES;

/// The payload of the `index`-th transfer from one rank to another; lengths and contents differ.
fn payload(from: usize, to: usize, index: usize) -> Vec<u8> {
    let len = (from * 7 + to * 3 + index * 11) % 40;
    (0..len).map(|place| (from * 31 + to * 17 + index * 5 + place) as u8).collect()
}

fn send(comm: &LocalCommunicator, peer: usize, data: &[u8]) -> Result<()> {
    exchange_bytes(comm, &[(peer, data)], &mut [])
}

fn recv(comm: &LocalCommunicator, peer: usize, data: &mut [u8]) -> Result<()> {
    exchange_bytes(comm, &[], &mut [(peer, data)])
}

fn both(comm: &LocalCommunicator, to: usize, data: &[u8], from: usize, into: &mut [u8]) -> Result<()> {
    exchange_bytes(comm, &[(to, data)], &mut [(from, into)])
}

#[test]
fn everybody_with_everybody_several_times_in_any_order() {
    guarded(60, || {
        for world_size in WORLD_SIZES {
            for rounds in [1, 3] {
                on_ranks(world_size, |comm| {
                    let rank = comm.rank();
                    let mut peers: Vec<usize> = (0..world_size).filter(|&peer| peer != rank).collect();
                    // Each rank has its peers in another order, and its sends in another order than its receives.
                    let count = peers.len();
                    peers.rotate_left((rank * 5).checked_rem(count).unwrap_or(0));
                    let pairs = |peers: &[usize]| -> Vec<(usize, usize)> {
                        (0..rounds).flat_map(|index| peers.iter().map(move |&peer| (peer, index))).collect()
                    };
                    let outgoing: Vec<_> =
                        pairs(&peers).into_iter().map(|(peer, index)| (peer, payload(rank, peer, index))).collect();
                    peers.reverse();
                    let wanted = pairs(&peers);
                    let mut incoming: Vec<_> = wanted
                        .iter()
                        .map(|&(peer, index)| (peer, vec![0xAA; payload(peer, rank, index).len()]))
                        .collect();

                    let sends: Vec<(usize, &[u8])> = outgoing.iter().map(|(peer, data)| (*peer, &data[..])).collect();
                    let mut receives: Vec<(usize, &mut [u8])> =
                        incoming.iter_mut().map(|(peer, data)| (*peer, &mut data[..])).collect();
                    exchange_bytes(&comm, &sends, &mut receives).unwrap();

                    for ((peer, index), (_, got)) in wanted.into_iter().zip(incoming) {
                        assert_eq!(got, payload(peer, rank, index), "{index} from {peer} to {rank} of {world_size}");
                    }
                });
            }
        }
    });
}

/// Rank 0's two transfers complete in the order that ranks 1 and 2 choose.
#[test]
fn a_transfer_does_not_wait_for_another_of_its_call() {
    guarded(20, || {
        for is_third_first in [false, true] {
            let got = on_ranks(3, |comm| {
                let mut data = [comm.rank() as u8; 3];
                let own = data;
                match comm.rank() {
                    0 => both(&comm, 1, &own, 2, &mut data).unwrap(),
                    1 if is_third_first => both(&comm, 2, &own, 0, &mut data).unwrap(),
                    1 => {
                        recv(&comm, 0, &mut data).unwrap();
                        send(&comm, 2, &data).unwrap();
                    }
                    _ => {
                        recv(&comm, 1, &mut data).unwrap();
                        send(&comm, 0, &data).unwrap();
                    }
                }
                data[0]
            });
            assert_eq!(got, if is_third_first { [1, 0, 1] } else { [0, 0, 0] });
        }
    });
}

/// The first transfer in rank 0's list completes last: rank 1 sends only once it has heard from rank 2, which must have completed its own
/// send to rank 0 before.
#[test]
fn whatever_is_ready_is_received_first() {
    guarded(20, || {
        on_ranks(3, |comm| {
            let (mut from_1, mut from_2) = ([0], [0]);
            match comm.rank() {
                0 => exchange_bytes(&comm, &[], &mut [(1, &mut from_1), (2, &mut from_2)]).unwrap(),
                1 => {
                    recv(&comm, 2, &mut from_2).unwrap();
                    send(&comm, 0, &[from_2[0] + 1]).unwrap();
                }
                _ => {
                    send(&comm, 0, &[20]).unwrap();
                    send(&comm, 1, &[30]).unwrap();
                }
            }
            if comm.rank() == 0 {
                assert_eq!((from_1, from_2), ([31], [20]));
            }
        });
    });
}

/// One forward, one backward: in the steady state a stage sends an activation to a peer and receives a gradient from it in one call. In
/// separate calls, neighbours would both be sending to each other.
#[test]
fn a_pipeline_of_one_forward_one_backward() {
    guarded(60, || {
        for (stages, batches) in [(2, 1), (2, 5), (3, 2), (4, 9), (7, 8)] {
            on_ranks(stages, |comm| {
                let stage = comm.rank();
                let (prev, next) = (stage.checked_sub(1), Some(stage + 1).filter(|&next| next < stages));
                let call = |to: Option<usize>, value: u8, from: Option<usize>, first: u8| {
                    let (sent, mut got) = ([value], [first]);
                    let sends: Vec<(usize, &[u8])> = to.map(|to| (to, &sent[..])).into_iter().collect();
                    let mut receives: Vec<(usize, &mut [u8])> =
                        from.map(|from| (from, &mut got[..])).into_iter().collect();
                    exchange_bytes(&comm, &sends, &mut receives).unwrap();
                    got[0]
                };
                // Stages add 1 to an activation; the last stage returns the activation plus 100 as the gradient; stages add 1 to the
                // gradient too.
                let turn = |activation: u8| activation + 100;
                let mut begun = 0..batches;
                let mut first = || begun.next().unwrap_or(0) as u8 * 10;
                let mut waiting = Vec::new();
                let mut gradients = Vec::new();
                let warm_up = (stages - 1 - stage).min(batches);
                for _ in 0..warm_up {
                    let activation = call(None, 0, prev, first());
                    waiting.push(activation);
                    call(next, activation + 1, None, 0);
                }
                let mut activation = if warm_up < batches { call(None, 0, prev, first()) } else { 0 };
                for batch in warm_up..batches {
                    waiting.push(activation);
                    let gradient = call(next, activation + 1, next, turn(activation + 1)) + 1;
                    gradients.push(gradient);
                    let from = prev.filter(|_| batch + 1 < batches);
                    activation = call(prev, gradient, from, if batch + 1 < batches { first() } else { 0 });
                }
                for _ in 0..warm_up {
                    let gradient = call(None, 0, next, 0) + 1;
                    gradients.push(gradient);
                    call(prev, gradient, None, 0);
                }
                for (batch, (activation, gradient)) in waiting.into_iter().zip(gradients).enumerate() {
                    let what = format!("batch {batch} on stage {stage} of {stages}");
                    assert_eq!(usize::from(activation), batch * 10 + stage, "{what}");
                    assert_eq!(usize::from(gradient), batch * 10 + stages + 100 + stages - stage, "{what}");
                }
            });
        }
    });
}

/// A call with an empty list completes at once; an empty transfer waits for its peer.
#[test]
fn empty_lists_return_and_empty_transfers_meet() {
    guarded(20, || {
        let is_there = AtomicBool::new(false);
        on_ranks(2, |comm| {
            exchange_bytes(&comm, &[], &mut []).unwrap();
            if comm.rank() == 0 {
                send(&comm, 1, &[]).unwrap();
                assert!(is_there.load(Ordering::SeqCst), "the sender went on without the receiver");
            } else {
                exchange_bytes(&comm, &[], &mut []).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                is_there.store(true, Ordering::SeqCst);
                recv(&comm, 0, &mut []).unwrap();
            }
        });
    });
}

/// The two sides of a transfer may group their transfers into calls differently.
#[test]
fn one_call_meets_several() {
    guarded(20, || {
        on_ranks(3, |comm| {
            let (one, two) = ([1; 5], [2; 6]);
            match comm.rank() {
                0 => exchange_bytes(&comm, &[(1, &one), (2, &one), (1, &two), (2, &two)], &mut []).unwrap(),
                1 => {
                    let (mut first, mut second) = ([0; 5], [0; 6]);
                    recv(&comm, 0, &mut first).unwrap();
                    recv(&comm, 0, &mut second).unwrap();
                    assert_eq!((first, second), (one, two));
                }
                _ => {
                    let (mut first, mut second) = ([0; 5], [0; 6]);
                    exchange_bytes(&comm, &[], &mut [(0, &mut first), (0, &mut second)]).unwrap();
                    assert_eq!((first, second), (one, two));
                }
            }
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn typed_transfers_meet_bytes_only_as_bytes() {
    guarded(20, || {
        let errors = on_ranks(2, |comm| {
            let outcome = match comm.rank() {
                0 => comm.send(&[1.0f32, 2.0][..], 1),
                _ => recv(&comm, 0, &mut [0; 8]),
            };
            outcome.expect_err("f32 is not u8").to_string()
        });
        assert!(errors.iter().all(|text| text.contains("2 × f32") && text.contains("8 × u8")), "{errors:?}");
    });
}

/// The mismatch is detected also in the middle of a list, after a transfer that matches.
#[test]
fn lengths_that_differ_are_an_error_on_all_that_names_both() {
    guarded(20, || {
        let outcomes = on_ranks(3, |comm| {
            let (mut first, mut second) = ([0; 4], [7; 1011]);
            let outcome = match comm.rank() {
                0 => exchange_bytes(&comm, &[(1, &[1; 4]), (1, &[1; 1010])], &mut []),
                1 => exchange_bytes(&comm, &[], &mut [(0, &mut first), (0, &mut second)]),
                _ => comm.barrier(),
            };
            assert_eq!(second, [7; 1011], "a message of another length was written");
            outcome.expect_err("the lengths differ").to_string()
        });
        for text in outcomes {
            assert!(["1010", "1011"].iter().all(|len| text.contains(len)), "\"{text}\"");
        }
    });
}

type Call = fn(&LocalCommunicator) -> Result<()>;

/// Every rank's call fails with the mismatch of a pair, long before the deadline.
#[track_caller]
fn assert_clash(what: &str, calls: &[Call], pair: [usize; 2], words: [&str; 2]) {
    let errors = on_ranks(calls.len(), |comm| calls[comm.rank()](&comm).expect_err(what));
    for (rank, error) in errors.into_iter().enumerate() {
        let text = error.to_string();
        let Error::Comm(CommError::Mismatch { left_rank, right_rank, .. }) = error else {
            panic!("{what}, rank {rank}: {error:?}");
        };
        assert_eq!([left_rank, right_rank], pair, "{what}, rank {rank}: {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{what}, rank {rank}: \"{text}\" lacks {words:?}");
    }
}

#[test]
fn transfers_left_over_on_both_sides_are_a_mismatch() {
    guarded(20, || {
        assert_clash(
            "two sends for one receive, and nobody is done",
            &[
                |comm| exchange_bytes(comm, &[(1, &[1]), (1, &[2])], &mut []),
                |comm| {
                    recv(comm, 0, &mut [0])?;
                    comm.barrier()
                },
            ],
            [0, 1],
            ["send(to rank 1)", "barrier"],
        );
        assert_clash(
            "each has a send left, although both receive",
            &[
                |comm| exchange_bytes(comm, &[(1, &[1]), (1, &[2])], &mut [(1, &mut [0])]),
                |comm| exchange_bytes(comm, &[(0, &[1]), (0, &[2])], &mut [(0, &mut [0])]),
            ],
            [0, 1],
            ["send(to rank 1)", "send(to rank 0)"],
        );
        assert_clash(
            "both receive",
            &[|comm| recv(comm, 1, &mut [0]), |comm| comm.recv(&mut [0.0f32][..], 0)],
            [0, 1],
            ["recv(from rank 1)", "recv(from rank 0)"],
        );
    });
}

#[test]
fn ranks_that_wait_in_a_circle_are_a_mismatch() {
    guarded(20, || {
        // The order in which the ranks call decides which two of them are named.
        for world_size in [3, 5] {
            let errors = on_ranks(world_size, |comm| {
                let error = send(&comm, (comm.rank() + 1) % world_size, &[1]).expect_err("nobody receives");
                assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
                error.to_string()
            });
            assert!(errors.iter().all(|text| *text == errors[0] && text.contains("send(to rank")), "{errors:?}");
        }
        // Rank 2 waits for rank 1, which waits for rank 0; rank 0 is in a collective, and waits for both.
        let errors = on_ranks(3, |comm| {
            let outcome = match comm.rank() {
                0 => comm.barrier(),
                1 => recv(&comm, 0, &mut [0]),
                _ => send(&comm, 1, &[1]),
            };
            outcome.expect_err("rank 0 does not send").to_string()
        });
        assert!(errors.iter().all(|text| text.contains("rank 0 called barrier")), "{errors:?}");
    });
}

#[test]
fn an_invalid_peer_is_refused_and_breaks_nothing() {
    guarded(20, || {
        on_ranks(3, |comm| {
            let rank = comm.rank();
            let other = (rank + 1) % 3;
            for bad in [rank, 3, usize::MAX] {
                let outcomes = [
                    exchange_bytes(&comm, &[(other, &[1]), (bad, &[1])], &mut []),
                    exchange_bytes(&comm, &[(other, &[1])], &mut [(other, &mut [0]), (bad, &mut [0])]),
                ];
                for outcome in outcomes {
                    let error = outcome.expect_err("not a peer");
                    assert!(
                        matches!(&error, Error::Comm(CommError::InvalidPeer { peer, .. }) if *peer == bad),
                        "{error:?}"
                    );
                }
            }
            // The refused lists left no trace of their first transfers.
            comm.barrier().unwrap();
            let mut got = [0];
            both(&comm, other, &[rank as u8], (rank + 2) % 3, &mut got).unwrap();
            assert_eq!(usize::from(got[0]), (rank + 2) % 3);
        });
    });
}
