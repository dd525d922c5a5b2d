//! Invalid transfers, and the errors that both ranks of a transfer receive.

use std::fmt::Debug;

use gradsync::internal::BundleMemory;
use gradsync::internal::plan::bundle::{TensorSpec, encode};
use gradsync::onnx::{recv, recv_described, send};
use gradsync::ops::send_recv::{Bundle, Completion, Expected, Limits, run_schedule};
use gradsync::{CommError, DType, Error, Result, TensorView};

use super::{Owned, Rank, Rounds, bundles, known, over, ring};

/// Panics unless the outcome is an invalid argument whose message contains all words.
#[track_caller]
pub fn refused(outcome: Result<impl Debug>, words: &[&str]) {
    match outcome {
        Err(Error::InvalidArgument { operation, reason }) => {
            for word in words {
                assert!(reason.contains(word), "{operation}: {reason:?} does not say {word:?}");
            }
        }
        other => panic!("{words:?}: {other:?} is no refusal"),
    }
}

/// Checks that the communicator still works between all ranks.
fn works<R: Rank>(rank: &R) {
    over(rank, &bundles(31)[0], "afterwards");
    rank.comm().barrier().unwrap();
}

pub(super) fn foreign_schedule<R: Rank>(rank: &R) {
    let (own, world_size) = (rank.rank(), rank.world_size());
    let (plan, larger) = (ring(world_size), ring(world_size + 1));
    for foreign in [plan.rank((own + 1) % world_size), larger.rank(own)] {
        let mut work = Rounds::<R> { given: Vec::new(), taken: Vec::new(), sent: 0 };
        let outcome = run_schedule(&rank.transfers(), foreign, &mut work);
        refused(outcome, &[&format!("rank {own} of {world_size}")]);
    }
    works(rank);
}

/// These errors are found before any data move, so that no other rank is affected.
pub(super) fn own_mistakes<R: Rank>(rank: &R) {
    let (transfers, own, world_size) = (rank.transfers(), rank.rank(), rank.world_size());
    let data = [Owned::new(DType::F32, &[2], 0)];
    let (tensors, mut given, limits) = (rank.tensors(&data), rank.tensors(&data), Limits::default());
    let bundle = R::bundle(&tensors);
    let peer = (own + 1) % world_size;
    // The signal is checked first, as upstream does.
    for peer in [peer, own] {
        refused(send(&transfers, false, peer, &bundle), &["signal"]);
        refused(recv(&transfers, false, peer, &mut [R::view_mut(&mut given[0])]), &["signal"]);
        refused(recv_described(&transfers, false, peer, 0, &limits), &["signal"]);
    }
    for bad in [own, world_size, usize::MAX] {
        for outcome in [
            send(&transfers, true, bad, &bundle).map(drop),
            recv(&transfers, true, bad, &mut [R::view_mut(&mut given[0])]).map(drop),
            recv_described(&transfers, true, bad, 0, &limits).map(drop),
            transfers.exchange(&[(bad, bundle.clone())], &[]).map(drop),
            transfers.exchange(&[], &[(bad, known(&data))]).map(drop),
        ] {
            match outcome {
                Err(Error::Comm(CommError::InvalidPeer { peer, rank, .. })) => assert_eq!((peer, rank), (bad, own)),
                other => panic!("{other:?} for peer {bad} of rank {own}"),
            }
        }
    }
    refused(Bundle::new(Vec::<TensorView<'_, R::Memory>>::new()), &["at least one"]);
    refused(transfers.recv(peer, &mut []), &["at least one"]);
    refused(transfers.exchange(&[], &[(peer, Expected::Known(Vec::new()))]), &["at least one"]);
    works(rank);
}

/// When the receiver refuses a bundle, the sender gets the receiver's message.
pub(super) fn limits_and_tags<R: Rank>(rank: &R) {
    let transfers = rank.transfers();
    let data = [Owned::new(DType::F32, &[2, 3], 0), Owned::new(DType::U8, &[], 0)];
    let exact =
        Limits::default().with_tensors(2).with_dims(2).with_dim(3).with_header_bytes(64).with_payload_bytes(257);
    let many: Vec<Owned> = (0..100).map(|seed| Owned::new(DType::U8, &[1, 1, 1 + seed as usize / 99], seed)).collect();
    let cases: [(&[Owned], Limits, u64, &str); 8] = [
        (&data, exact.with_tensors(1), 4, "limit is 1"),
        (&data, exact.with_dims(1), 4, "2 dimensions, and the limit is 1"),
        (&data, exact.with_dim(2), 4, "dimension of 3"),
        (&data, exact.with_header_bytes(63), 4, "limit is 63"),
        (&data, exact.with_payload_bytes(256), 4, "limit is 256"),
        (&data, exact, 5, "tag 5 is expected"),
        // The limit is exceeded in the remainder of the header.
        (&many, Limits::default().with_dim(1), 4, "dimension of 2"),
        // The limit is exceeded in the header's first message.
        (&many, Limits::default().with_payload_bytes(1000), 4, "limit is 1000"),
    ];
    for (data, limits, tag, word) in cases {
        match rank.rank() {
            0 => {
                let tensors = rank.tensors(data);
                refused(transfers.send(1, &R::bundle(&tensors).described(4)), &["rank 1 refuses", "rank 0", word]);
            }
            1 => refused(transfers.recv_described(0, tag, &limits), &["rank 0", word]),
            _ => {}
        }
    }
    match rank.rank() {
        0 => {
            let tensors = rank.tensors(&data);
            assert!(transfers.send(1, &R::bundle(&tensors).described(4)).unwrap().wait().unwrap());
        }
        1 => assert_eq!(R::read_all(&transfers.recv_described(0, 4, &exact).unwrap().1), data),
        _ => {}
    }
    works(rank);
}

/// The receiver refuses one of three bundles: the two ranks get the error, and the other two bundles are transferred.
pub(super) fn refused_among_others<R: Rank>(rank: &R) {
    let (transfers, data) = (rank.transfers(), &bundles(41)[0]);
    match rank.rank() {
        0 => {
            let tensors = rank.tensors(data);
            let bundle = R::bundle(&tensors);
            let bundles = [bundle.clone(), bundle.clone().described(1), bundle.described(2)];
            let outcome = transfers.exchange(&bundles.map(|bundle| (1, bundle)), &[]);
            refused(outcome, &["rank 1 refuses", "limit is 3"]);
        }
        1 => {
            let tight = Expected::Described { tag: 1, limits: Limits::default().with_payload_bytes(3) };
            let outcome = transfers.exchange(&[], &[(0, known(data)), (0, tight), (0, Expected::described(2))]);
            refused(outcome, &["limit is 3"]);
        }
        _ => {}
    }
    works(rank);
}

/// The bundle's tensors all refer to one part of memory, and no memory has room for a copy of them. A receiver of a described bundle gets
/// the error, and the call's other bundles are transferred; for a bundle of known shapes, nothing has been sent.
pub(super) fn withdrawn<R: Rank>(rank: &R) {
    let transfers = rank.transfers();
    let small = [Owned::new(DType::I16, &[3], 7)];
    let words = ["rank 0", "withdraws", R::NO_MEMORY];
    match rank.rank() {
        0 => {
            let (bytes, count) = R::HUGE;
            let (part, tensors) = (rank.zeros(bytes / size_of::<f64>()), rank.tensors(&small));
            let huge = Bundle::new((0..count).map(|_| R::view(&part))).expect("less than 2^63 bytes");
            let failed = |outcome: Result<()>| {
                let error = outcome.expect_err("no memory for a copy");
                let is_memory = !matches!(error, Error::InvalidArgument { .. } | Error::Comm(_));
                assert!(is_memory && error.to_string().contains(R::NO_MEMORY), "{error:?}");
            };
            failed(transfers.send(1, &huge.clone().described(1)).map(drop));
            let bundles = [R::bundle(&tensors), huge.clone().described(2), R::bundle(&tensors).described(3)];
            failed(transfers.exchange(&bundles.map(|bundle| (1, bundle)), &[]).map(drop));
            failed(transfers.send(1, &huge).map(drop));
        }
        1 => {
            refused(transfers.recv_described(0, 1, &Limits::default()), &words);
            let receives = [(0, known(&small)), (0, Expected::described(2)), (0, Expected::described(3))];
            refused(transfers.exchange(&[], &receives), &words);
        }
        _ => {}
    }
    works(rank);
}

/// The first message of a negotiation, which has the type `u64`.
fn head(bytes: &[u8]) -> Owned {
    let mut bytes = bytes.to_vec();
    bytes.resize(1016, 0);
    Owned { dtype: DType::U64, shape: vec![127], bytes }
}

/// A header of one tensor, with some bytes replaced.
fn header(offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut header = encode(&[TensorSpec { dtype: DType::F32, dims: vec![1] }], 3).unwrap();
    header[offset..offset + bytes.len()].copy_from_slice(bytes);
    header
}

/// Messages of a header's length that are no header, or a header of another version. The receiver does not answer them.
pub(super) fn no_header<R: Rank>(rank: &R) {
    for (bytes, word) in [(vec![0x5a; 1016], "starts with"), (vec![], "starts with"), (header(4, &[2]), "version 2")] {
        match rank.rank() {
            0 => rank.send_message(&head(&bytes), 1),
            1 => refused(rank.transfers().recv_described(0, 3, &Limits::default()), &["rank 0", word]),
            _ => {}
        }
    }
    works(rank);
}

/// Headers with a valid start and false contents, from a rank that follows the protocol: they are refused before any memory is allocated.
pub(super) fn false_headers<R: Rank>(rank: &R) {
    let transfers = rank.transfers();
    let answer = Owned::new(DType::U64, &[32], 0);
    let cases = [
        (header(16, &[255; 4]), "4294967295 tensors"),
        (header(20, &[255; 4]), "4294967295 bytes of header"),
        (header(24, &[255; 8]), "18446744073709551615 bytes of payload"),
        (header(24, &[5]), "5 bytes of payload"),
        (header(32, &[14]), "dtype 14"),
        (header(40, &[255; 8]), "dimension of 18446744073709551615"),
        (header(36, &[17]), "17 dimensions"),
        (header(36, &[2]), "ends inside tensor 0"),
        (encode(&[], 3).unwrap(), "no tensors"),
    ];
    for (header, word) in cases {
        match rank.rank() {
            0 => {
                rank.send_message(&head(&header), 1);
                let answer = rank.recv_message(&answer, 1);
                let text = String::from_utf8_lossy(&answer[1..]);
                assert!(answer[0] == 1 && text.contains(word), "{text:?} does not say {word:?}");
            }
            1 => refused(transfers.recv_described(0, 3, &Limits::default()), &["rank 0", word]),
            _ => {}
        }
    }
    // The receiver answers with a value that means neither acceptance nor refusal.
    match rank.rank() {
        0 => {
            let tensors = rank.tensors(&[Owned::new(DType::U8, &[1], 0)]);
            refused(transfers.send(1, &R::bundle(&tensors).described(3)), &["rank 1", "77"]);
        }
        1 => {
            rank.recv_message(&head(&[]), 0);
            rank.send_message(&Owned { bytes: vec![77; 256], ..answer }, 0);
        }
        _ => {}
    }
    works(rank);
}

/// Asserts that ranks 0 and 1 disagree. On a GPU, calls are compared before a transfer counts as complete.
#[track_caller]
fn mismatch<M: BundleMemory>(outcome: Result<Completion<'_, M>>) {
    match outcome.and_then(|completion| completion.wait()) {
        Err(Error::Comm(CommError::Mismatch { left_rank: 0, right_rank: 1, .. })) => {}
        other => panic!("{other:?} is no mismatch of ranks 0 and 1"),
    }
}

pub(super) fn other_lengths<R: Rank>(rank: &R) {
    let mut tensors = rank.tensors(&[Owned::new(DType::F32, &[10 + rank.rank()], 0)]);
    match rank.rank() {
        0 => mismatch(rank.transfers().send(1, &R::bundle(&tensors))),
        1 => mismatch(rank.transfers().recv(0, &mut [R::view_mut(&mut tensors[0])])),
        _ => {}
    }
}

/// The payload has as many bytes as the first message of a negotiation, which the sender transmits instead.
pub(super) fn described_to_one_who_knows<R: Rank>(rank: &R) {
    let mut tensors = rank.tensors(&[Owned::new(DType::F32, &[254], 0)]);
    match rank.rank() {
        0 => mismatch(rank.transfers().send(1, &R::bundle(&tensors).described(3))),
        1 => mismatch(rank.transfers().recv(0, &mut [R::view_mut(&mut tensors[0])])),
        _ => {}
    }
}

/// The payload equals the first message of a negotiation, byte for byte.
pub(super) fn known_to_one_who_asks<R: Rank>(rank: &R) {
    let tensors = rank.tensors(&[head(&header(0, &[]))]);
    match rank.rank() {
        0 => mismatch(rank.transfers().send(1, &R::bundle(&tensors))),
        1 => mismatch(rank.transfers().recv_described(0, 3, &Limits::default()).map(|(completion, _)| completion)),
        _ => {}
    }
}
