//! Invalid transfers, and the errors that both ranks of a transfer receive.

use super::*;
use gradsync::comm::Collectives;

/// Panics unless the outcome is an invalid argument whose message contains all words.
#[track_caller]
fn refused(outcome: Result<impl std::fmt::Debug>, words: &[&str]) {
    match outcome {
        Err(Error::InvalidArgument { operation, reason }) => {
            for word in words {
                assert!(reason.contains(word), "{operation}: {reason:?} does not say {word:?}");
            }
        }
        other => panic!("{words:?}: {other:?} is no refusal"),
    }
}

#[track_caller]
fn mismatch(outcome: Result<impl std::fmt::Debug>) {
    match outcome {
        Err(Error::Comm(CommError::Mismatch { left_rank: 0, right_rank: 1, .. })) => {}
        other => panic!("{other:?} is no mismatch of ranks 0 and 1"),
    }
}

/// Checks that the communicator still works between all ranks.
fn works(comm: &dyn Communicator) {
    over(comm, &bundles(31)[0], "afterwards");
    comm.barrier().unwrap();
}

pub(super) fn foreign_schedule(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let plan = ring(world_size);
    let larger = ring(world_size + 1);
    for foreign in [plan.rank((rank + 1) % world_size), larger.rank(rank)] {
        let mut work = Rounds { rank, given: Vec::new(), taken: Vec::new(), sent: 0 };
        refused(run_schedule(&SendRecv::new(comm), foreign, &mut work), &[&format!("rank {rank} of {world_size}")]);
    }
    works(comm);
}

/// These errors are found before any data move, so that no other rank is affected.
pub(super) fn own_mistakes(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let tensors = [Owned::new(DType::F32, &[2], 0)];
    let mut given = tensors[0].blank();
    let limits = Limits::default();
    let peer = (rank + 1) % world_size;
    refused(send(&SendRecv::new(comm), false, peer, &bundle(&tensors)), &["signal"]);
    refused(recv(&SendRecv::new(comm), false, peer, &mut [given.tensor_mut()]), &["signal"]);
    refused(recv_described(&SendRecv::new(comm), false, peer, 0, &limits), &["signal"]);
    // The signal is checked first, as upstream does.
    refused(send(&SendRecv::new(comm), false, rank, &bundle(&tensors)), &["signal"]);
    for bad in [rank, world_size, usize::MAX] {
        for outcome in [
            send(&SendRecv::new(comm), true, bad, &bundle(&tensors)).map(drop),
            recv(&SendRecv::new(comm), true, bad, &mut [given.tensor_mut()]).map(drop),
            recv_described(&SendRecv::new(comm), true, bad, 0, &limits).map(drop),
            SendRecv::new(comm).exchange(&[(bad, bundle(&tensors))], &[]).map(drop),
            SendRecv::new(comm).exchange(&[], &[(bad, known(&tensors))]).map(drop),
        ] {
            match outcome {
                Err(Error::Comm(CommError::InvalidPeer { peer, rank: own, .. })) => {
                    assert_eq!((peer, own), (bad, rank))
                }
                other => panic!("{other:?} for peer {bad} of rank {rank}"),
            }
        }
    }
    refused(Bundle::new(Vec::<WireTensor<'_>>::new()), &["at least one"]);
    refused(recv(&SendRecv::new(comm), true, peer, &mut []), &["at least one"]);
    refused(SendRecv::new(comm).exchange(&[], &[(peer, Expected::Known(Vec::new()))]), &["at least one"]);
    refused(WireTensor::new(DType::F32, &[3][..], &[0; 11]), &["f32 [3]", "12", "11"]);
    refused(WireTensor::new(DType::F32, &[usize::MAX, 9][..], &[0; 11]), &["2^64"]);
    works(comm);
}

/// When the receiver refuses a bundle, the sender gets the receiver's message.
pub(super) fn limits_and_tags(comm: &dyn Communicator) {
    let tensors = [Owned::new(DType::F32, &[2, 3], 0), Owned::new(DType::U8, &[], 0)];
    let exact =
        Limits::default().with_tensors(2).with_dims(2).with_dim(3).with_header_bytes(64).with_payload_bytes(257);
    let many: Vec<Owned> = (0..100).map(|seed| Owned::new(DType::U8, &[1, 1, 1 + seed as usize / 99], seed)).collect();
    let cases: [(&[Owned], Limits, u64, &str); 8] = [
        (&tensors, exact.with_tensors(1), 4, "limit is 1"),
        (&tensors, exact.with_dims(1), 4, "2 dimensions, and the limit is 1"),
        (&tensors, exact.with_dim(2), 4, "dimension of 3"),
        (&tensors, exact.with_header_bytes(63), 4, "limit is 63"),
        (&tensors, exact.with_payload_bytes(256), 4, "limit is 256"),
        (&tensors, exact, 5, "tag 5 is expected"),
        // The limit is exceeded in the remainder of the header.
        (&many, Limits::default().with_dim(1), 4, "dimension of 2"),
        // The limit is exceeded in the header's first message.
        (&many, Limits::default().with_payload_bytes(1000), 4, "limit is 1000"),
    ];
    for (tensors, limits, tag, word) in cases {
        match comm.rank() {
            0 => refused(
                send(&SendRecv::new(comm), true, 1, &bundle(tensors).described(4)),
                &["rank 1 refuses", "rank 0", word],
            ),
            1 => refused(recv_described(&SendRecv::new(comm), true, 0, tag, &limits), &["rank 0", word]),
            _ => {}
        }
    }
    match comm.rank() {
        0 => assert!(send(&SendRecv::new(comm), true, 1, &bundle(&tensors).described(4)).unwrap().wait().unwrap()),
        1 => assert_eq!(recv_described(&SendRecv::new(comm), true, 0, 4, &exact).unwrap().1.len(), 2),
        _ => {}
    }
    works(comm);
}

/// The receiver refuses one of three bundles: the two ranks get the error, and the other two bundles are transferred.
pub(super) fn refused_among_others(comm: &dyn Communicator) {
    let tensors = &bundles(41)[0];
    let tight = Limits::default().with_payload_bytes(3);
    match comm.rank() {
        0 => {
            let bundles = [bundle(tensors), bundle(tensors).described(1), bundle(tensors).described(2)];
            refused(
                SendRecv::new(comm).exchange(&bundles.map(|bundle| (1, bundle)), &[]),
                &["rank 1 refuses", "limit is 3"],
            );
        }
        1 => {
            let refusal = Expected::Described { tag: 1, limits: tight };
            let receives = [(0, known(tensors)), (0, refusal), (0, Expected::described(2))];
            refused(SendRecv::new(comm).exchange(&[], &receives), &["limit is 3"]);
        }
        _ => {}
    }
    works(comm);
}

/// The bundle's tensors all refer to one allocation, and a copy of them would exceed any address space. A receiver of a described bundle
/// gets the error, and the call's other bundles are transferred; for a bundle of known shapes, nothing has been sent.
pub(super) fn withdrawn(comm: &dyn Communicator) {
    const PART: usize = 1 << 30;
    const COUNT: usize = 1 << 18;
    let small = [Owned::new(DType::I16, &[3], 7)];
    let missing = format!("no memory for {} bytes", PART * COUNT);
    match comm.rank() {
        0 => {
            let part = vec![0u8; PART];
            let tensors = (0..COUNT).map(|_| WireTensor::new(DType::U8, vec![PART], &part).expect("as many bytes"));
            let huge = Bundle::new(tensors).expect("less than 2^63 bytes");
            let failed = |outcome: Result<()>| match outcome {
                Err(error @ Error::OutOfMemory { .. }) => assert!(error.to_string().contains(&missing), "{error}"),
                other => panic!("{other:?} for a copy of 2^48 bytes"),
            };
            failed(send(&SendRecv::new(comm), true, 1, &huge.clone().described(1)).map(drop));
            let bundles = [bundle(&small), huge.clone().described(2), bundle(&small).described(3)];
            failed(SendRecv::new(comm).exchange(&bundles.map(|bundle| (1, bundle)), &[]).map(drop));
            failed(send(&SendRecv::new(comm), true, 1, &huge).map(drop));
        }
        1 => {
            refused(
                recv_described(&SendRecv::new(comm), true, 0, 1, &Limits::default()),
                &["rank 0", "withdraws", &missing],
            );
            let receives = [(0, known(&small)), (0, Expected::described(2)), (0, Expected::described(3))];
            refused(SendRecv::new(comm).exchange(&[], &receives), &["rank 0", "withdraws", &missing]);
        }
        _ => {}
    }
    works(comm);
}

/// Messages of a header's length that are no header, or a header of another version. The receiver does not answer them.
pub(super) fn no_header(comm: &dyn Communicator) {
    let mut version = encode(&[spec()], 3).unwrap();
    version[4] = 2;
    version.resize(1016, 0);
    for (bytes, word) in [(vec![0x5a; 1016], "starts with"), (vec![0; 1016], "starts with"), (version, "version 2")] {
        match comm.rank() {
            0 => comm.send(&bytes, 1).unwrap(),
            1 => refused(recv_described(&SendRecv::new(comm), true, 0, 3, &Limits::default()), &["rank 0", word]),
            _ => {}
        }
    }
    works(comm);
}

fn spec() -> TensorSpec {
    TensorSpec { dtype: DType::F32, dims: vec![1] }
}

/// Headers with a valid start and false contents, from a rank that follows the protocol: they are refused before any memory is allocated.
pub(super) fn strangers(comm: &dyn Communicator) {
    let good = |tensors: &[TensorSpec]| encode(tensors, 3).unwrap();
    let with = |mut header: Vec<u8>, offset: usize, bytes: &[u8]| {
        header[offset..offset + bytes.len()].copy_from_slice(bytes);
        header
    };
    let cases = [
        (with(good(&[spec()]), 16, &[255; 4]), "4294967295 tensors"),
        (with(good(&[spec()]), 20, &[255; 4]), "4294967295 bytes of header"),
        (with(good(&[spec()]), 24, &[255; 8]), "18446744073709551615 bytes of payload"),
        (with(good(&[spec()]), 24, &[5]), "5 bytes of payload"),
        (with(good(&[spec()]), 32, &[14]), "dtype 14"),
        (with(good(&[spec()]), 40, &[255; 8]), "dimension of 18446744073709551615"),
        (with(good(&[spec()]), 36, &[17]), "17 dimensions"),
        (with(good(&[spec()]), 36, &[2]), "ends inside tensor 0"),
        (good(&[]), "no tensors"),
    ];
    for (mut header, word) in cases {
        header.resize(1016, 0);
        match comm.rank() {
            0 => {
                comm.send(&header, 1).unwrap();
                let mut answer = vec![0u8; 256];
                comm.recv(&mut answer, 1).unwrap();
                let text = String::from_utf8_lossy(&answer[1..]).into_owned();
                assert!(answer[0] == 1 && text.contains(word), "{text:?} does not say {word:?}");
            }
            1 => refused(recv_described(&SendRecv::new(comm), true, 0, 3, &Limits::default()), &["rank 0", word]),
            _ => {}
        }
    }
    // The receiver answers with a value that means neither acceptance nor refusal.
    match comm.rank() {
        0 => refused(
            send(&SendRecv::new(comm), true, 1, &bundle(&[Owned::new(DType::U8, &[1], 0)]).described(3)),
            &["rank 1", "77"],
        ),
        1 => {
            comm.recv(&mut [0u8; 1016], 0).unwrap();
            comm.send(&[77u8; 256], 0).unwrap();
        }
        _ => {}
    }
    works(comm);
}

pub(super) fn other_lengths(comm: &dyn Communicator) {
    match comm.rank() {
        0 => mismatch(send(&SendRecv::new(comm), true, 1, &bundle(&[Owned::new(DType::F32, &[10], 0)]))),
        1 => mismatch(recv(&SendRecv::new(comm), true, 0, &mut [Owned::new(DType::F32, &[11], 0).tensor_mut()])),
        _ => {}
    }
}

/// The payload's length equals the length of the header's first message, which the sender transmits instead.
pub(super) fn described_to_one_who_knows(comm: &dyn Communicator) {
    let tensors = [Owned::new(DType::F32, &[254], 0)];
    assert_eq!(tensors[0].bytes.len(), 1016);
    match comm.rank() {
        0 => mismatch(send(&SendRecv::new(comm), true, 1, &bundle(&tensors).described(3))),
        1 => mismatch(recv(&SendRecv::new(comm), true, 0, &mut [tensors[0].blank().tensor_mut()])),
        _ => {}
    }
}

/// The payload equals the first message of a header, byte for byte.
pub(super) fn known_to_one_who_asks(comm: &dyn Communicator) {
    let mut bytes = encode(&[spec()], 3).unwrap();
    bytes.resize(1016, 0);
    let tensors = [Owned { dtype: DType::U8, shape: vec![1016], bytes }];
    match comm.rank() {
        0 => mismatch(send(&SendRecv::new(comm), true, 1, &bundle(&tensors))),
        1 => mismatch(recv_described(&SendRecv::new(comm), true, 0, 3, &Limits::default())),
        _ => {}
    }
}
