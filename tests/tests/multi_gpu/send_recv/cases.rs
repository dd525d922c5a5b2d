//! The cases of Send and Recv on device memory over any transport.

use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::kernels::cuda;
use gradsync::memory::Cuda;
use gradsync::ops::send_recv::{Bundle, Expected, WireTensor, WireTensorMut, recv, recv_described, send};
use gradsync::plan::bundle::Limits;
use gradsync::{DType, GradientBuffer};
use gradsync_tests::transfers::{Owned, bundles, known};

use super::tensors::{Tensor, bundle, place, read};
use super::{RankContext, pipeline, refusals};

/// A case, which all ranks run; afterwards the communicator works as before.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&RankContext<'_>),
}

const fn case(name: &'static str, run: fn(&RankContext<'_>)) -> Case {
    Case { name, run }
}

pub(crate) const ALL: &[Case] = &[
    case("every type and shape", every_type),
    case("payloads as long as a head", head_lengths),
    case("long headers", long_headers),
    case("tensors that lie as they travel", in_place),
    case("gradient buffers", gradient_buffers),
    case("passed on from where it lies", passed_on),
    case("everybody with everybody, at once", everybody),
    case("memory that is used again at once", reused),
    case("another queue that waits for the completion", two_queues),
    case("signals, peers and empty lists", refusals::own_mistakes),
    case("limits and tags", refusals::limits_and_tags),
    case("memory that a sender does not get", refusals::withdrawn),
    case("what is no header", refusals::no_header),
    case("one forward, one backward", pipeline::pipeline),
];

/// Rank 0 sends a bundle and rank 1 receives it, in all three ways.
pub(super) fn over(ranks: &RankContext<'_>, tensors: &[Owned], what: &str) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    match ranks.rank() {
        0 => {
            let placed = place(queue, tensors);
            let known = bundle(&placed);
            let described = known.clone().described(9);
            for bundle in [&known, &known, &described] {
                let completion = send(&transfers, true, 1, bundle).unwrap();
                assert!(completion.wait().unwrap() && completion.is_done().unwrap());
            }
            let unchanged: Vec<Owned> = placed.iter().map(Tensor::read).collect();
            assert_eq!(unchanged, tensors, "{what}, at the sender");
        }
        1 => {
            let blank: Vec<Owned> = tensors.iter().map(Owned::blank).collect();
            let mut given = place(queue, &blank);
            let mut views: Vec<WireTensorMut<'_, Cuda>> = given.iter_mut().map(Tensor::view_mut).collect();
            assert!(recv(&transfers, true, 0, &mut views).unwrap().wait().unwrap());
            assert_eq!(given.iter().map(Tensor::read).collect::<Vec<_>>(), tensors, "{what}, into given tensors");
            let (completion, new) = transfers.exchange(&[], &[(0, known(tensors))]).unwrap();
            assert!(completion.wait().unwrap());
            assert_eq!(read(&new[0]), tensors, "{what}, known");
            let (completion, new) = recv_described(&transfers, true, 0, 9, &Limits::default()).unwrap();
            assert!(completion.wait().unwrap());
            assert_eq!(read(&new), tensors, "{what}, described");
        }
        _ => {}
    }
}

fn every_type(ranks: &RankContext<'_>) {
    for (index, tensors) in bundles(11).iter().enumerate() {
        over(ranks, tensors, &format!("bundle {index}"));
    }
}

fn head_lengths(ranks: &RankContext<'_>) {
    for len in [1015, 1016, 1017, 1024] {
        over(ranks, &[Owned::new(DType::U8, &[len], 5)], &format!("{len} bytes"));
        let pair = [Owned::new(DType::U8, &[5], 5), Owned::new(DType::U8, &[len - 256], 6)];
        over(ranks, &pair, &format!("{len} bytes in two"));
    }
}

fn long_headers(ranks: &RankContext<'_>) {
    // The first message describes at most 61 vectors.
    for count in [61, 62, 300] {
        let tensors: Vec<Owned> = (0..count).map(|seed| Owned::new(DType::I32, &[seed % 4], seed as u64)).collect();
        over(ranks, &tensors, &format!("{count} vectors"));
    }
}

/// Tensors of one buffer, each of which starts where the previous one ends: with and without gaps in the payload.
fn in_place(ranks: &RankContext<'_>) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    for lens in [[64usize, 128, 3], [64, 100, 3], [63, 64, 64]] {
        let ends: Vec<usize> = lens
            .iter()
            .scan(0, |end, len| {
                Some({
                    *end += len;
                    *end
                })
            })
            .collect();
        let values: Vec<f32> = (0..ends[2]).map(|index| index as f32 + 0.5).collect();
        let zeros = vec![0.0f32; ends[2]];
        match ranks.rank() {
            0 => {
                let buffer = DeviceBuffer::from_host(queue, (&values).into()).unwrap();
                let part = |index: usize| buffer.as_slice().range(ends[index] - lens[index]..ends[index]);
                let bundle = Bundle::new((0..3).map(part)).unwrap();
                assert!(send(&transfers, true, 1, &bundle).unwrap().wait().unwrap());
            }
            1 => {
                let mut buffer = DeviceBuffer::from_host(queue, (&zeros).into()).unwrap();
                let (first, rest) = buffer.as_mut_slice().split_at_mut(ends[0]);
                let (second, third) = rest.split_at_mut(lens[1]);
                let mut views = [first.into(), second.into(), third.into()];
                assert!(recv(&transfers, true, 0, &mut views).unwrap().wait().unwrap());
                let mut got = zeros;
                buffer.as_slice().copy_to_host((&mut got).into()).unwrap();
                assert_eq!(got, values, "{lens:?}");
            }
            _ => {}
        }
    }
}

fn gradient_buffers(ranks: &RankContext<'_>) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    let shapes = [("a", vec![3usize, 5]), ("b", vec![0]), ("c", vec![100]), ("d", vec![])];
    let mut host = GradientBuffer::new(DType::BF16, 3, shapes.clone()).unwrap();
    let tensors: Vec<Owned> = shapes.iter().map(|(_, shape)| Owned::new(DType::BF16, shape, 2)).collect();
    for (index, tensor) in tensors.iter().enumerate() {
        host.tensor_mut(index).into_data().as_bytes_mut().copy_from_slice(&tensor.bytes);
    }
    match ranks.rank() {
        0 => {
            let mut buffer = GradientBuffer::on_queue(queue, DType::BF16, 3, shapes).unwrap();
            buffer.copy_from_host(&host).unwrap();
            let bundle = Bundle::of_buffer(&buffer).unwrap().described(1);
            assert!(send(&transfers, true, 1, &bundle).unwrap().wait().unwrap());
        }
        1 => {
            let (completion, new) = recv_described(&transfers, true, 0, 1, &Limits::default()).unwrap();
            assert!(completion.wait().unwrap());
            assert_eq!(read(&new), tensors);
        }
        _ => {}
    }
}

/// A bundle is passed along all ranks, without a wait on any rank's host.
fn passed_on(ranks: &RankContext<'_>) {
    let RankContext { comm, queue } = *ranks;
    let transfers = ranks.transfers();
    let (rank, last) = (ranks.rank(), ranks.size() - 1);
    for tensors in &bundles(23)[..6] {
        let placed = place(queue, tensors);
        let mut received = None;
        if rank > 0 {
            received = transfers.exchange(&[], &[(rank - 1, known(tensors))]).unwrap().1.pop();
        }
        if rank < last {
            let own = received.as_ref().map_or_else(|| bundle(&placed), Bundle::from);
            let _completion = send(&transfers, true, rank + 1, &own).unwrap();
        }
        if let Some(received) = received {
            comm.synchronize(queue).unwrap();
            assert_eq!(read(&received), *tensors, "rank {rank}");
        }
    }
    comm.synchronize(queue).unwrap();
}

/// A known and two described bundles go to every other rank in one call; one of them has a long header.
fn everybody(ranks: &RankContext<'_>) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    let (rank, size) = (ranks.rank(), ranks.size());
    let peers: Vec<usize> = (0..size).filter(|&peer| peer != rank).collect();
    let tensors = |from: usize, to: usize| -> [Vec<Owned>; 3] {
        let seed = (from * size + to) as u64;
        let many = (0..100).map(|index| Owned::new(DType::I8, &[from + 1, to, index], seed)).collect();
        [vec![Owned::new(DType::F32, &[from, 3], seed)], many, bundles(seed).swap_remove(4)]
    };
    let own: Vec<(usize, [Vec<Tensor>; 3])> =
        peers.iter().map(|&peer| (peer, tensors(rank, peer).map(|tensors| place(queue, &tensors)))).collect();
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for (peer, [first, second, third]) in &own {
        sends.push((*peer, bundle(first).described(1)));
        sends.push((*peer, bundle(second).described(2)));
        sends.push((*peer, bundle(third)));
    }
    // The receives have another order of peers than the sends.
    for &peer in peers.iter().rev() {
        receives.extend([(peer, Expected::described(1)), (peer, Expected::described(2))]);
        receives.push((peer, known(&tensors(peer, rank)[2])));
    }
    let (completion, received) = transfers.exchange(&sends, &receives).unwrap();
    assert!(completion.wait().unwrap());
    for (peer, received) in peers.iter().rev().zip(received.chunks(3)) {
        for (expected, received) in tensors(*peer, rank).iter().zip(received) {
            assert_eq!(read(received), *expected, "from rank {peer}");
        }
    }
}

/// Work that keeps a queue busy for some milliseconds, so that later work in the queue starts only after the host has gone on.
struct Ballast {
    from: DeviceBuffer,
    to: DeviceBuffer,
}

impl Ballast {
    fn new(queue: &Queue) -> Self {
        let zeros = || DeviceBuffer::zeroed(queue, DType::F32, 64 << 20).unwrap();
        Ballast { from: zeros(), to: zeros() }
    }

    fn put(&mut self) {
        for _ in 0..50 {
            self.to.as_mut_slice().copy_from_device(self.from.as_slice()).unwrap();
        }
    }
}

const LEN: usize = 100_003;

/// Tensors are written late, sent, overwritten and dropped at once; the scratch memory of one bundle is reused by the next.
fn reused(ranks: &RankContext<'_>) {
    const ROUNDS: usize = 20;
    let RankContext { comm, queue } = *ranks;
    let transfers = ranks.transfers();
    let numbers: Vec<f32> = (0..LEN).map(|index| (index % 97) as f32).collect();
    let base = DeviceBuffer::from_host(queue, (&numbers).into()).unwrap();
    // The ranks connect before, as the host may wait for the connection.
    over(ranks, &[Owned::new(DType::U8, &[1], 0)], "before");
    let mut ballast = Ballast::new(queue);
    ballast.put();
    let mut results = Vec::new();
    for round in 1..=ROUNDS {
        match ranks.rank() {
            0 => {
                let mut pair = [(); 2].map(|()| DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap());
                for (index, tensor) in pair.iter_mut().enumerate() {
                    cuda::scale(tensor.as_mut_slice(), base.as_slice(), (2 * round + index) as f64).unwrap();
                }
                let bundle = Bundle::new(pair.iter().map(DeviceBuffer::as_slice)).unwrap();
                let _completion = send(&transfers, true, 1, &bundle).unwrap();
                drop(bundle);
                pair.iter_mut().for_each(|tensor| cuda::zero(tensor.as_mut_slice()).unwrap());
            }
            1 => {
                let mut pair = [(); 2].map(|()| DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap());
                let mut views = pair.each_mut().map(|tensor| tensor.as_mut_slice().into());
                let _completion = recv(&transfers, true, 0, &mut views).unwrap();
                let mut sum = DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap();
                for tensor in &pair {
                    cuda::accumulate(sum.as_mut_slice(), tensor.as_slice()).unwrap();
                }
                results.push(sum);
            }
            _ => {}
        }
    }
    comm.synchronize(queue).unwrap();
    for (index, sum) in results.iter().enumerate() {
        let mut got = vec![0.0f32; LEN];
        sum.as_slice().copy_to_host((&mut got).into()).unwrap();
        let factor = (4 * (index + 1) + 1) as f32;
        let wrong = got.iter().zip(&numbers).position(|(got, number)| *got != number * factor);
        assert_eq!(wrong, None, "round {index}");
    }
}

/// The received data are read on another queue, ordered only by the completion's event.
fn two_queues(ranks: &RankContext<'_>) {
    let RankContext { queue, .. } = *ranks;
    let transfers = ranks.transfers();
    let values: Vec<f32> = (0..LEN).map(|index| index as f32).collect();
    let mut ballast = Ballast::new(queue);
    match ranks.rank() {
        0 => {
            let data = DeviceBuffer::from_host(queue, (&values).into()).unwrap();
            ballast.put();
            let bundle = Bundle::new([WireTensor::on_device(data.as_slice(), vec![LEN, 1]).unwrap()]).unwrap();
            assert!(send(&transfers, true, 1, &bundle).unwrap().wait().unwrap());
        }
        1 => {
            let other = Queue::new(queue.ordinal()).unwrap();
            ballast.put();
            let (completion, new) =
                transfers.exchange(&[], &[(0, Expected::known([(DType::F32, vec![LEN, 1])]))]).unwrap();
            other.wait_for(completion.event()).unwrap();
            let view = new[0].tensor(0).slice().expect("f32");
            // SAFETY: the memory outlives the wait below; the queue that it belongs to has nothing more to do with it.
            let on_other =
                unsafe { gradsync::driver::DeviceSlice::from_raw_parts(&other, view.address(), DType::F32, LEN) };
            let mut copy = DeviceBuffer::zeroed(&other, DType::F32, LEN).unwrap();
            copy.as_mut_slice().copy_from_device(on_other).unwrap();
            let mut got = vec![0.0f32; LEN];
            copy.as_slice().copy_to_host((&mut got).into()).unwrap();
            // The data have arrived; the comparison of the ranks' calls ends a little later.
            assert!(completion.wait().unwrap() && completion.is_done().unwrap());
            assert_eq!(got, values);
        }
        _ => {}
    }
    ranks.meet();
}
