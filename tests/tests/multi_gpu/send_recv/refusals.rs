//! Bundles that ranks refuse on device memory, with errors that reach the sender.

use gradsync::driver::DeviceBuffer;
use gradsync::memory::{Cuda, DeviceWireSlice, RawSlice};
use gradsync::ops::send_recv::{Bundle, Expected, WireTensor, recv, recv_described, send};
use gradsync::plan::bundle::{Limits, TensorSpec, encode};
use gradsync::{CommError, DType, Error, Result};
use gradsync_tests::transfers::{Owned, bundles, known};

use super::RankContext;
use super::cases::over;
use super::tensors::{Tensor, bundle, place};

/// Asserts a refused argument whose message holds these words.
#[track_caller]
fn refused(outcome: Result<impl Sized>, words: &[&str]) {
    match outcome.map(drop) {
        Err(Error::InvalidArgument { operation, reason }) => {
            for word in words {
                assert!(reason.contains(word), "{operation}: {reason:?} does not say {word:?}");
            }
        }
        other => panic!("{words:?}: {other:?} is no refusal"),
    }
}

fn works(ranks: &RankContext<'_>) {
    over(ranks, &bundles(31)[0], "afterwards");
    ranks.meet();
}

pub(super) fn own_mistakes(ranks: &RankContext<'_>) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    let (rank, size, limits) = (ranks.rank(), ranks.size(), Limits::default());
    let owned = [Owned::new(DType::F32, &[2], 0)];
    let (tensors, mut given) = (place(queue, &owned), place(queue, &owned));
    let peer = (rank + 1) % size;
    refused(send(&transfers, false, peer, &bundle(&tensors)), &["signal"]);
    refused(recv(&transfers, false, peer, &mut [given[0].view_mut()]), &["signal"]);
    refused(recv_described(&transfers, false, peer, 0, &limits), &["signal"]);
    refused(send(&transfers, false, rank, &bundle(&tensors)), &["signal"]);
    for bad in [rank, size, usize::MAX] {
        for outcome in [
            send(&transfers, true, bad, &bundle(&tensors)).map(drop),
            recv(&transfers, true, bad, &mut [given[0].view_mut()]).map(drop),
            recv_described(&transfers, true, bad, 0, &limits).map(drop),
            transfers.exchange(&[(bad, bundle(&tensors))], &[]).map(drop),
            transfers.exchange(&[], &[(bad, known(&owned))]).map(drop),
        ] {
            match outcome {
                Err(Error::Comm(CommError::InvalidPeer { peer, rank: own, .. })) => {
                    assert_eq!((peer, own), (bad, rank))
                }
                other => panic!("{other:?} for peer {bad} of rank {rank}"),
            }
        }
    }
    refused(Bundle::new(Vec::<WireTensor<'_, Cuda>>::new()), &["at least one"]);
    refused(recv(&transfers, true, peer, &mut []), &["at least one"]);
    refused(transfers.exchange(&[], &[(peer, Expected::Known(Vec::new()))]), &["at least one"]);
    let other = gradsync::driver::Queue::new(queue.ordinal()).unwrap();
    let foreign = place(&other, &owned);
    refused(Bundle::new([tensors[0].view(), foreign[0].view()]), &["queues"]);
    refused(transfers.exchange(&[(peer, bundle(&foreign))], &[]), &["queues"]);
    let mut foreign = foreign;
    refused(recv(&transfers, true, peer, &mut [given[0].view_mut(), foreign[0].view_mut()]), &["queues"]);
    let short = RawSlice { len: 1, ..tensors[0].view().data().raw() };
    // SAFETY: a part of a tensor that lives; and nothing uses it.
    let short = unsafe { DeviceWireSlice::from_raw_parts(queue, short) };
    refused(WireTensor::on_device(short, &[2][..]), &["f32 [2]", "8", "4"]);
    works(ranks);
}

/// A refusal of the receiver reaches the sender with the receiver's text.
pub(super) fn limits_and_tags(ranks: &RankContext<'_>) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    let tensors = [Owned::new(DType::F32, &[2, 3], 0), Owned::new(DType::U8, &[], 0)];
    let exact =
        Limits::default().with_tensors(2).with_dims(2).with_dim(3).with_header_bytes(64).with_payload_bytes(257);
    let many: Vec<Owned> = (0..100).map(|seed| Owned::new(DType::U8, &[1, 1, 1 + seed / 99], seed as u64)).collect();
    let cases: [(&[Owned], Limits, u64, &str); 4] = [
        (&tensors, exact.with_dim(2), 4, "dimension of 3"),
        (&tensors, exact.with_payload_bytes(256), 4, "limit is 256"),
        (&tensors, exact, 5, "tag 5 is expected"),
        // The limit is exceeded in the rest of the header.
        (&many, Limits::default().with_dim(1), 4, "dimension of 2"),
    ];
    for (tensors, limits, tag, word) in cases {
        match ranks.rank() {
            0 => {
                let placed = place(queue, tensors);
                refused(send(&transfers, true, 1, &bundle(&placed).described(4)), &["rank 1 refuses", "rank 0", word]);
            }
            1 => refused(recv_described(&transfers, true, 0, tag, &limits), &["rank 0", word]),
            _ => {}
        }
    }
    // One of three bundles is refused, and the other two are transferred.
    let own = &bundles(41)[0];
    match ranks.rank() {
        0 => {
            let placed = place(queue, own);
            let bundles = [bundle(&placed), bundle(&placed).described(1), bundle(&placed).described(2)];
            refused(transfers.exchange(&bundles.map(|bundle| (1, bundle)), &[]), &["rank 1 refuses", "limit is 3"]);
        }
        1 => {
            let tight = Expected::Described { tag: 1, limits: Limits::default().with_payload_bytes(3) };
            let receives = [(0, known(own)), (0, tight), (0, Expected::described(2))];
            refused(transfers.exchange(&[], &receives), &["limit is 3"]);
        }
        _ => {}
    }
    works(ranks);
}

/// Tensors that refer to one memory many times, so that no GPU has room for a copy of them. If the bundle is described, its receiver learns
/// of the failure, and another bundle of the call is transferred; if the shapes are known, nothing is transferred.
pub(super) fn withdrawn(ranks: &RankContext<'_>) {
    const PART: usize = 256 << 20;
    const COUNT: usize = 1 << 13;
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    let small = [Owned::new(DType::I16, &[3], 7)];
    match ranks.rank() {
        0 => {
            let part = DeviceBuffer::zeroed(queue, DType::F64, PART / 8).unwrap();
            let huge = Bundle::new((0..COUNT).map(|_| part.as_slice())).unwrap();
            let failed = |outcome: Result<()>| match outcome {
                Err(Error::Cuda(error)) => assert_eq!(error.code, 2, "{error}"),
                other => panic!("{other:?} for a copy of 2 TiB"),
            };
            failed(send(&transfers, true, 1, &huge.clone().described(1)).map(drop));
            let placed = place(queue, &small);
            let bundles = [huge.clone().described(2), bundle(&placed).described(3)];
            failed(transfers.exchange(&bundles.map(|bundle| (1, bundle)), &[]).map(drop));
            failed(send(&transfers, true, 1, &huge).map(drop));
        }
        1 => {
            refused(recv_described(&transfers, true, 0, 1, &Limits::default()), &["rank 0", "withdraws"]);
            let receives = [(0, Expected::described(2)), (0, Expected::described(3))];
            refused(transfers.exchange(&[], &receives), &["rank 0", "withdraws"]);
        }
        _ => {}
    }
    works(ranks);
}

/// Messages of a header's length that are no header, or a header with a false length. No memory is allocated for the claimed sizes.
pub(super) fn no_header(ranks: &RankContext<'_>) {
    let RankContext { comm, queue } = *ranks;
    let transfers = ranks.transfers();
    let head = |mut bytes: Vec<u8>| {
        bytes.resize(1016, 0);
        Owned { dtype: DType::U8, shape: vec![1016], bytes }
    };
    let header = || encode(&[TensorSpec { dtype: DType::F64, dims: vec![1 << 33, 9] }], 3).unwrap();
    let cases = [(head(vec![0x5a; 9]), "starts with", false), (head(header()), "bytes of payload", true)];
    for (bytes, word, is_answered) in cases {
        match ranks.rank() {
            0 => {
                let tensor = Tensor::new(queue, &bytes, 0);
                let mut answer = Tensor::new(queue, &Owned::new(DType::U8, &[256], 0), 0);
                comm.exchange(&[(1, tensor.view().data())], &mut []).unwrap();
                if is_answered {
                    comm.exchange(&[], &mut [(1, answer.wire_mut())]).unwrap();
                }
                comm.synchronize(queue).unwrap();
                let text = String::from_utf8_lossy(&answer.read().bytes).into_owned();
                assert_eq!(text.contains(word), is_answered, "{text:?}");
            }
            1 => refused(recv_described(&transfers, true, 0, 3, &Limits::default()), &["rank 0", word]),
            _ => {}
        }
    }
    works(ranks);
}
