//! Test cases for sends, receives and pipelines, shared by every transport and both memories.
//!
//! All ranks of a communicator run a case. The cases of [`good`] leave the communicator usable, even after errors. Each case of [`fatal`]
//! makes its communicator unusable, and so needs a separate one. Cases never start ranks.

use gradsync::memory::Memory;
use gradsync::ops::send_recv::{Bundle, Expected, Limits, Received, Schedule, TransferHandler, run_schedule};
use gradsync::{DType, Result, TensorViewMut};

mod pipeline;
mod rank;
mod refusals;

pub use pipeline::pipeline;
pub use rank::{HostRank, Owned, Rank, known};
pub use refusals::refused;

/// A test case that all ranks run, two or more; with a name for messages.
pub type Case<R> = (&'static str, fn(&R));

/// Cases that leave the communicator usable.
pub fn good<R: Rank>() -> Vec<Case<R>> {
    vec![
        ("the layout of upstream", upstream_layout),
        ("every type and shape", every_type),
        ("payloads as long as a head", head_lengths),
        ("long headers", long_headers),
        ("received tensors passed on", passed_on),
        ("gradient buffers", gradient_buffers),
        ("everybody with everybody, at once", everybody),
        ("a schedule", schedule),
        ("a schedule of another rank", refusals::foreign_schedule),
        ("signals, peers and empty lists", refusals::own_mistakes),
        ("limits and tags", refusals::limits_and_tags),
        ("refused among others", refusals::refused_among_others),
        ("memory that a sender does not get", refusals::withdrawn),
        ("messages that are no header", refusals::no_header),
        ("headers with false contents", refusals::false_headers),
        ("one forward, one backward", pipeline),
    ]
}

/// Cases after which the communicator has failed on ranks 0 and 1, if it compares calls.
pub fn fatal<R: Rank>() -> Vec<Case<R>> {
    vec![
        ("known shapes of other lengths", refusals::other_lengths),
        ("described, and known to the receiver", refusals::described_to_one_who_knows),
        ("known, and described to the receiver", refusals::known_to_one_who_asks),
    ]
}

/// Bundles of every type, with empty tensors and scalars, alone and together; equal seeds give equal bundles.
pub fn bundles(seed: u64) -> Vec<Vec<Owned>> {
    let shapes: [&[usize]; 7] = [&[], &[1], &[0], &[75], &[3, 5], &[2, 0, 9], &[4, 1, 33]];
    let mut all: Vec<Vec<Owned>> = Vec::new();
    for (index, dtype) in DType::ALL.into_iter().enumerate() {
        all.push(shapes.iter().map(|shape| Owned::new(dtype, shape, seed + index as u64)).collect());
        all.push(vec![Owned::new(dtype, shapes[index % shapes.len()], seed)]);
    }
    all.push(DType::ALL.into_iter().map(|dtype| Owned::new(dtype, &[7, 3], seed)).collect());
    all.push(vec![Owned::new(DType::F32, &[0], seed), Owned::new(DType::I8, &[0, 4], seed)]);
    // The empty tensor at the end begins at the next multiple of 256.
    all.push(vec![Owned::new(DType::U8, &[5], seed), Owned::new(DType::U8, &[0], seed)]);
    all.push(vec![Owned::new(DType::F64, &[1 << 15, 3], seed), Owned::new(DType::BF16, &[1], seed)]);
    all
}

/// Rank 0 sends a bundle three times, and rank 1 receives it in each of the three ways.
pub fn over<R: Rank>(rank: &R, data: &[Owned], label: &str) {
    let transfers = rank.transfers();
    match rank.rank() {
        0 => {
            let tensors = rank.tensors(data);
            let known = R::bundle(&tensors);
            for bundle in [&known, &known, &known.clone().described(9)] {
                let completion = transfers.send(1, bundle).unwrap();
                assert!(completion.wait().unwrap() && completion.is_done().unwrap());
            }
            assert_eq!(tensors.iter().map(R::read).collect::<Vec<_>>(), data, "{label}, at the sender");
        }
        1 => {
            let mut given = rank.tensors(&data.iter().map(Owned::blank).collect::<Vec<_>>());
            {
                let mut views: Vec<TensorViewMut<'_, R::Memory>> = given.iter_mut().map(R::view_mut).collect();
                assert!(transfers.recv(0, &mut views).unwrap().wait().unwrap());
            }
            assert_eq!(given.iter().map(R::read).collect::<Vec<_>>(), data, "{label}, into given tensors");
            let (completion, new) = transfers.exchange(&[], &[(0, known(data))]).unwrap();
            assert!(completion.wait().unwrap());
            assert_eq!(R::read_all(&new[0]), data, "{label}, known");
            let (completion, new) = transfers.recv_described(0, 9, &Limits::default()).unwrap();
            assert!(completion.wait().unwrap());
            assert_eq!(R::read_all(&new), data, "{label}, described");
        }
        _ => {}
    }
}

/// Section 5 of the specification: the offsets are 0, 256 and 768, and there is no padding at the end.
fn upstream_layout<R: Rank>(rank: &R) {
    let data: Vec<Owned> = [1, 75, 64].map(|len| Owned::new(DType::F32, &[len], 3)).to_vec();
    match rank.rank() {
        0 => {
            let tensors = rank.tensors(&data);
            let bundle = R::bundle(&tensors);
            assert_eq!(bundle.len_bytes(), 1024);
            assert!(rank.transfers().send(1, &bundle).unwrap().wait().unwrap());
        }
        1 => {
            let payload = rank.recv_message(&Owned::new(DType::U8, &[1024], 0), 0);
            for (data, begin) in data.iter().zip([0, 256, 768]) {
                assert_eq!(payload[begin..begin + data.bytes.len()], data.bytes);
            }
        }
        _ => {}
    }
}

fn every_type<R: Rank>(rank: &R) {
    for (index, data) in bundles(11).iter().enumerate() {
        over(rank, data, &format!("bundle {index}"));
    }
}

fn head_lengths<R: Rank>(rank: &R) {
    for len in [1015, 1016, 1017, 1024] {
        over(rank, &[Owned::new(DType::U8, &[len], 5)], &format!("{len} bytes"));
        let pair = [Owned::new(DType::U8, &[5], 5), Owned::new(DType::U8, &[len - 256], 6)];
        over(rank, &pair, &format!("{len} bytes in two"));
    }
}

fn long_headers<R: Rank>(rank: &R) {
    // The first message describes at most 61 vectors.
    for count in [30, 61, 62, 300] {
        let data: Vec<Owned> = (0..count).map(|seed| Owned::new(DType::I32, &[seed % 4], seed as u64)).collect();
        over(rank, &data, &format!("{count} vectors"));
    }
    let deep: Vec<Owned> = (0..40).map(|seed| Owned::new(DType::F16, &[1, 2, 1, 1, 1], seed)).collect();
    over(rank, &deep, "40 tensors of 5 dimensions");
}

/// A bundle is passed along all ranks, without a wait on any rank's host.
fn passed_on<R: Rank>(rank: &R) {
    let (transfers, own, last) = (rank.transfers(), rank.rank(), rank.world_size() - 1);
    for data in &bundles(23)[..6] {
        let tensors = rank.tensors(data);
        let mut received = None;
        if own > 0 {
            received = transfers.exchange(&[], &[(own - 1, known(data))]).unwrap().1.pop();
        }
        if own < last {
            let bundle = received.as_ref().map_or_else(|| R::bundle(&tensors), Bundle::from);
            let _completion = transfers.send(own + 1, &bundle).unwrap();
        }
        if let Some(received) = received {
            rank.synchronize();
            assert_eq!(R::read_all(&received), *data, "rank {own}");
        }
    }
    rank.synchronize();
}

/// Gradient buffers whose tensors have the offsets of the payload, or other ones because a tensor would cross a shard's edge.
fn gradient_buffers<R: Rank>(rank: &R) {
    let number = |index: usize| index as f32 - 50.5;
    let values = |shape: &Vec<usize>| -> Vec<f32> { (0..shape.iter().product()).map(number).collect() };
    for len in [40, 100] {
        let shapes = [("a", vec![3usize, 5]), ("b", vec![0]), ("c", vec![len]), ("d", vec![])];
        match rank.rank() {
            0 => {
                let mut buffer = rank.gradients(DType::F32, 3, &shapes);
                for (index, (_, shape)) in shapes.iter().enumerate() {
                    let tensor = buffer.tensor_mut(index).into_data();
                    R::Memory::copy_from_slice(tensor, (&values(shape)).into()).unwrap();
                }
                let bundle = Bundle::of_buffer(&buffer).unwrap().described(1);
                assert_eq!(buffer.segments()[2].start * 4 == 256, len == 40, "the offset of a long tensor");
                assert!(rank.transfers().send(1, &bundle).unwrap().wait().unwrap());
            }
            1 => {
                let (completion, received) = rank.transfers().recv_described(0, 1, &Limits::default()).unwrap();
                assert!(completion.wait().unwrap());
                for (received, (_, shape)) in R::read_all(&received).into_iter().zip(&shapes) {
                    let bytes: Vec<u8> = values(shape).into_iter().flat_map(f32::to_ne_bytes).collect();
                    assert_eq!(received, Owned { dtype: DType::F32, shape: shape.clone(), bytes });
                }
            }
            _ => {}
        }
    }
}

/// One known and two described bundles to every other rank in one call; one of the described bundles has a long header.
fn everybody<R: Rank>(rank: &R) {
    let (own, world_size) = (rank.rank(), rank.world_size());
    let peers: Vec<usize> = (0..world_size).filter(|&peer| peer != own).collect();
    let data = |from: usize, to: usize| -> [Vec<Owned>; 3] {
        let seed = (from * world_size + to) as u64;
        let many = (0..100).map(|index| Owned::new(DType::I8, &[from + 1, to, index], seed)).collect();
        [vec![Owned::new(DType::F32, &[from, 3], seed)], many, bundles(seed).swap_remove(4)]
    };
    let sent: Vec<(usize, [Vec<R::Tensor>; 3])> =
        peers.iter().map(|&peer| (peer, data(own, peer).map(|data| rank.tensors(&data)))).collect();
    let mut sends = Vec::new();
    for (peer, [first, second, third]) in &sent {
        sends.push((*peer, R::bundle(first).described(1)));
        sends.push((*peer, R::bundle(second).described(2)));
        sends.push((*peer, R::bundle(third)));
    }
    let mut receives = Vec::new();
    // Receives are in another order of peers than the sends.
    for &peer in peers.iter().rev() {
        receives.extend([(peer, Expected::described(1)), (peer, Expected::described(2))]);
        receives.push((peer, known(&data(peer, own)[2])));
    }
    let (completion, received) = rank.transfers().exchange(&sends, &receives).unwrap();
    assert!(completion.wait().unwrap());
    for (peer, received) in peers.iter().rev().zip(received.chunks(3)) {
        for (expected, received) in data(*peer, own).iter().zip(received) {
            assert_eq!(R::read_all(received), *expected, "from rank {peer}");
        }
    }
}

/// A schedule of transfers around the ring, two per slot, whose number of bytes grows with the slot.
fn ring(world_size: usize) -> Schedule<usize> {
    let mut schedule = Schedule::new(world_size).unwrap();
    for slot in 0..6 {
        for from in 0..world_size {
            let to = (from + 1) % world_size;
            schedule.transfer(3 * slot, from, to, 100 * slot).unwrap();
            schedule.transfer(3 * slot, from, to, 100 * slot + from).unwrap();
        }
    }
    schedule
}

/// The transfer handler for [`ring`].
struct Rounds<R: Rank> {
    given: Vec<R::Tensor>,
    taken: Vec<(usize, Owned)>,
    sent: usize,
}

impl<R: Rank> TransferHandler<usize, R::Memory> for Rounds<R> {
    fn send(&self, _: usize, payload: &usize) -> Result<Bundle<'_, R::Memory>> {
        Bundle::new(self.given.iter().map(R::view).find(|tensor| tensor.shape() == [*payload]))
    }

    fn expect(&self, _: usize, payload: &usize) -> Result<Expected> {
        Ok(Expected::known([(DType::U8, vec![*payload])]))
    }

    fn received(&mut self, from: usize, payload: &usize, tensors: Received<R::Memory>) -> Result<()> {
        assert_eq!(tensors.tensor(0).shape(), [*payload]);
        self.taken.push((from, R::read_all(&tensors).remove(0)));
        Ok(())
    }

    fn sent(&mut self, _: usize, _: &usize) -> Result<()> {
        self.sent += 1;
        Ok(())
    }
}

fn schedule<R: Rank>(rank: &R) {
    let (own, world_size) = (rank.rank(), rank.world_size());
    let from = (own + world_size - 1) % world_size;
    let data = |rank: usize| -> Vec<Owned> {
        let lens = |slot: usize| [100 * slot, 100 * slot + rank];
        (0..6).flat_map(lens).map(|len| Owned::new(DType::U8, &[len], (rank + 70) as u64)).collect()
    };
    let mut work = Rounds::<R> { given: rank.tensors(&data(own)), taken: Vec::new(), sent: 0 };
    run_schedule(&rank.transfers(), ring(world_size).rank(own), &mut work).unwrap();
    assert_eq!(work.sent, 12);
    assert_eq!(work.taken, data(from).into_iter().map(|tensor| (from, tensor)).collect::<Vec<_>>());
}
