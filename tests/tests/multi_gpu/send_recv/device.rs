//! Cases of Send and Recv that only device memory has: contiguous tensors, memory that is used again at once, and several queues.

use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::internal::kernels::cuda;
use gradsync::memory::Cuda;
use gradsync::ops::send_recv::{Bundle, Expected};
use gradsync::{DType, TensorView};
use gradsync_tests::transfers::{Case, Owned, Rank, over, refused};

use super::DeviceRank;
use crate::ballast::Ballast;

pub(super) fn cases<'c>() -> [Case<DeviceRank<'c>>; 4] {
    [
        ("contiguous tensors", contiguous),
        ("memory that is used again at once", reused),
        ("another queue that waits for the completion", two_queues),
        ("tensors of another queue", other_queue),
    ]
}

/// Tensors of one buffer, each of which starts where the previous one ends: with and without gaps in the payload.
fn contiguous(rank: &DeviceRank<'_>) {
    let DeviceRank { queue, .. } = *rank;
    let transfers = rank.transfers();
    for lens in [[64usize, 128, 3], [64, 100, 3], [63, 64, 64]] {
        let ends = [lens[0], lens[0] + lens[1], lens.iter().sum()];
        let values: Vec<f32> = (0..ends[2]).map(|index| index as f32 + 0.5).collect();
        let zeros = vec![0.0f32; ends[2]];
        match rank.rank() {
            0 => {
                let buffer = DeviceBuffer::from_host(queue, (&values).into()).unwrap();
                let part = |index: usize| buffer.as_slice().range(ends[index] - lens[index]..ends[index]);
                let bundle = Bundle::new((0..3).map(part)).unwrap();
                assert!(transfers.send(1, &bundle).unwrap().wait().unwrap());
            }
            1 => {
                let mut buffer = DeviceBuffer::from_host(queue, (&zeros).into()).unwrap();
                let (first, rest) = buffer.as_mut_slice().split_at_mut(ends[0]);
                let (second, third) = rest.split_at_mut(lens[1]);
                let mut views = [first.into(), second.into(), third.into()];
                assert!(transfers.recv(0, &mut views).unwrap().wait().unwrap());
                let mut got = zeros;
                buffer.as_slice().copy_to_host((&mut got).into()).unwrap();
                assert_eq!(got, values, "{lens:?}");
            }
            _ => {}
        }
    }
}

const LEN: usize = 100_003;

/// Tensors are written late, sent, overwritten and dropped at once; the scratch memory of one bundle is reused by the next.
fn reused(rank: &DeviceRank<'_>) {
    const ROUNDS: usize = 20;
    let DeviceRank { comm, queue } = *rank;
    let transfers = rank.transfers();
    let numbers: Vec<f32> = (0..LEN).map(|index| (index % 97) as f32).collect();
    let base = DeviceBuffer::from_host(queue, (&numbers).into()).unwrap();
    // The ranks connect before, as the host may wait for the connection.
    over(rank, &[Owned::new(DType::U8, &[1], 0)], "before");
    let mut ballast = Ballast::new(queue);
    ballast.put(50);
    let mut results = Vec::new();
    for round in 1..=ROUNDS {
        match rank.rank() {
            0 => {
                let mut pair = [(); 2].map(|()| DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap());
                for (index, tensor) in pair.iter_mut().enumerate() {
                    cuda::scale(tensor.as_mut_slice(), base.as_slice(), (2 * round + index) as f64).unwrap();
                }
                let bundle = Bundle::new(pair.iter().map(DeviceBuffer::as_slice)).unwrap();
                let _completion = transfers.send(1, &bundle).unwrap();
                drop(bundle);
                pair.iter_mut().for_each(|tensor| cuda::zero(tensor.as_mut_slice()).unwrap());
            }
            1 => {
                let mut pair = [(); 2].map(|()| DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap());
                let mut views = pair.each_mut().map(|tensor| tensor.as_mut_slice().into());
                let _completion = transfers.recv(0, &mut views).unwrap();
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
fn two_queues(rank: &DeviceRank<'_>) {
    let DeviceRank { queue, .. } = *rank;
    let transfers = rank.transfers();
    let values: Vec<f32> = (0..LEN).map(|index| index as f32).collect();
    let mut ballast = Ballast::new(queue);
    match rank.rank() {
        0 => {
            let data = DeviceBuffer::from_host(queue, (&values).into()).unwrap();
            ballast.put(50);
            let bundle = Bundle::new([TensorView::on_device(data.as_slice(), vec![LEN, 1]).unwrap()]).unwrap();
            assert!(transfers.send(1, &bundle).unwrap().wait().unwrap());
        }
        1 => {
            let other = Queue::new(queue.ordinal()).unwrap();
            ballast.put(50);
            let (completion, new) =
                transfers.exchange(&[], &[(0, Expected::known([(DType::F32, vec![LEN, 1])]))]).unwrap();
            other.wait_for(completion.event()).unwrap();
            let view = new[0].tensor(0).data();
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
    rank.comm().barrier().unwrap();
}

/// These errors are found before any data move, so that no other rank is affected.
fn other_queue(rank: &DeviceRank<'_>) {
    let (queue, transfers) = (rank.queue, rank.transfers());
    let peer = (rank.rank() + 1) % rank.world_size();
    let data = [Owned::new(DType::F32, &[2], 0)];
    let other = Queue::new(queue.ordinal()).unwrap();
    let (tensors, mut given) = (rank.tensors(&data), rank.tensors(&data));
    let mut foreign = DeviceRank { comm: rank.comm, queue: &other }.tensors(&data);
    refused(Bundle::new([DeviceRank::view(&tensors[0]), DeviceRank::view(&foreign[0])]), &["queues"]);
    refused(transfers.exchange(&[(peer, DeviceRank::bundle(&foreign))], &[]), &["queues"]);
    let mut views = [DeviceRank::view_mut(&mut given[0]), DeviceRank::view_mut(&mut foreign[0])];
    refused(transfers.recv(peer, &mut views), &["queues"]);
    let short = DeviceRank::view(&tensors[0]).data().range(0..1);
    let error = TensorView::<Cuda>::on_device(short, &[2][..]).expect_err("one element").to_string();
    assert!(error.contains("[2]") && error.contains('2') && error.contains('1'), "{error}");
    over(rank, &data, "afterwards");
    rank.comm().barrier().unwrap();
}
