//! The raw calls: reductions of integers, exactly, and moves of bytes.

use gradsync::DType;
use gradsync::comm::ReduceOp;
use gradsync::driver::DeviceSlice;
use gradsync_tests::inputs::Random;
use gradsync_tests::suite::checks::Checks;

use super::Cases;
use crate::placed::RawBytes;
use crate::report::Report;

const TYPES: [DType; 6] = [DType::I8, DType::U8, DType::I32, DType::U32, DType::I64, DType::U64];
/// The types that NCCL lacks; they are moved as bytes.
const MOVED: [DType; 3] = [DType::I16, DType::U16, DType::Bool];
const LENS: [usize; 4] = [0, 1, 33, 4097];

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for dtype in TYPES {
        report.case(&format!("all_reduce_raw {dtype}"), || all_reduce(cases, dtype));
        report.case(&format!("reduce_scatter_raw {dtype}"), || reduce_scatter(cases, dtype));
    }
    report.case("all_gather_raw of bytes", || all_gather(cases));
    report.case("all_to_all_raw of bytes", || all_to_all(cases));
    report.case("broadcast_raw of bytes", || broadcast(cases));
    report.case("exchange_raw of bytes", || exchange(cases));
    for dtype in MOVED {
        report.case(&format!("moves of {dtype}"), || moves(cases, dtype));
    }
}

/// Integers for which no sum over ranks overflows, with negative ones where the type is signed.
fn integers(dtype: DType, len: usize, rank: usize, world_size: usize) -> Vec<i128> {
    let bits = 8 * dtype.size_bytes();
    let is_signed = matches!(dtype, DType::I8 | DType::I32 | DType::I64);
    let limit = (1i128 << (bits - usize::from(is_signed))) / world_size as i128;
    let mut random = Random::new((len * 64 + bits) as u64 + rank as u64);
    let mut any = || {
        let value = i128::from(random.bits()) % limit;
        if is_signed && random.sign() < 0.0 { -value } else { value }
    };
    (0..len).map(|_| any()).collect()
}

fn bytes(dtype: DType, values: &[i128]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes().into_iter().take(dtype.size_bytes())).collect()
}

/// The reduction over ranks; `/` rounds towards zero, as documented for means of integers.
fn reduce(op: ReduceOp, inputs: &[Vec<i128>]) -> Vec<i128> {
    let column = |index: usize| inputs.iter().map(move |input| input[index]);
    let value = |index: usize| match op {
        ReduceOp::Sum => column(index).sum(),
        ReduceOp::Mean => column(index).sum::<i128>() / inputs.len() as i128,
        ReduceOp::Max => column(index).max().expect("a rank"),
        ReduceOp::Min => column(index).min().expect("a rank"),
        _ => unreachable!("{op} is not tested here"),
    };
    (0..inputs[0].len()).map(value).collect()
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

fn all_reduce(cases: &Cases<'_>, dtype: DType) {
    let (comm, queue, world_size) = (cases.comm, &cases.context.queue, cases.world_size());
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs: Vec<Vec<i128>> = (0..world_size).map(|rank| integers(dtype, len, rank, world_size)).collect();
        let own = bytes(dtype, &inputs[cases.rank()]);
        for op in OPS {
            let expected = bytes(dtype, &reduce(op, &inputs));
            let begin = dtype.size_bytes() * (len % 2);
            let data = RawBytes::new(queue, &own, begin);
            // SAFETY: the memory lives until it has been read, and nothing else uses it.
            unsafe { comm.all_reduce_raw(data.elements(dtype), data.address(), op) }.unwrap();
            checks.same_list(format!("{op} of {len}, in place"), data.read(comm), expected.clone());

            let input = RawBytes::new(queue, &own, begin);
            let output = RawBytes::unwritten(queue, own.len(), begin);
            // SAFETY: As above; input and output do not overlap.
            unsafe { comm.all_reduce_raw(input.elements(dtype), output.address(), op) }.unwrap();
            checks.same_list(format!("{op} of {len}"), output.read(comm), expected);
        }
    }
    checks.finish();
}

fn reduce_scatter(cases: &Cases<'_>, dtype: DType) {
    let (comm, queue, world_size) = (cases.comm, &cases.context.queue, cases.world_size());
    let mut checks = Checks::new(comm);
    for len in LENS {
        let whole = |rank: usize| integers(dtype, len * world_size, rank, world_size);
        let inputs: Vec<Vec<i128>> = (0..world_size).map(whole).collect();
        let input = RawBytes::new(queue, &bytes(dtype, &inputs[cases.rank()]), 0);
        for op in OPS {
            let shard = &reduce(op, &inputs)[cases.rank() * len..(cases.rank() + 1) * len];
            let output = RawBytes::unwritten(queue, len * dtype.size_bytes(), dtype.size_bytes());
            // SAFETY: the memory lives until it has been read, and nothing else uses it.
            unsafe { comm.reduce_scatter_raw(input.address(), output.elements(dtype), op) }.unwrap();
            checks.own_list(format!("{op} of shards of {len}"), output.read(comm), bytes(dtype, shard));
        }
    }
    checks.finish();
}

/// `count` arbitrary bytes of each rank.
fn messages(cases: &Cases<'_>, count: usize) -> Vec<Vec<u8>> {
    let message = |rank: usize| {
        let mut random = Random::new((count * 16 + rank) as u64);
        (0..count).map(|_| random.bits() as u8).collect()
    };
    (0..cases.world_size()).map(message).collect()
}

fn all_gather(cases: &Cases<'_>) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs = messages(cases, len);
        let input = RawBytes::new(queue, &inputs[rank], 3);
        let output = RawBytes::unwritten(queue, len * inputs.len(), 1);
        // SAFETY: the memory lives until it has been read, and nothing else uses it.
        unsafe { comm.all_gather_raw(input.elements(DType::U8), output.address()) }.unwrap();
        checks.same_list(format!("{len} bytes each"), output.read(comm), inputs.concat());

        let mut whole = vec![0; len * inputs.len()];
        whole[rank * len..(rank + 1) * len].copy_from_slice(&inputs[rank]);
        let data = RawBytes::new(queue, &whole, 1);
        // SAFETY: as above; the input is this rank's shard of the output.
        unsafe { comm.all_gather_raw(data.range(rank * len..(rank + 1) * len), data.address()) }.unwrap();
        checks.same_list(format!("{len} bytes each, in place"), data.read(comm), inputs.concat());
    }
    checks.finish();
}

fn all_to_all(cases: &Cases<'_>) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs = messages(cases, len * cases.world_size());
        let input = RawBytes::new(queue, &inputs[rank], 1);
        let output = RawBytes::unwritten(queue, inputs[rank].len(), 2);
        // SAFETY: the memory lives until it has been read, nothing else uses it, and the two are apart.
        unsafe { comm.all_to_all_raw(input.elements(DType::U8), output.address()) }.unwrap();
        let expected = inputs.iter().flat_map(|input| input[rank * len..(rank + 1) * len].to_vec()).collect();
        checks.own_list(format!("{len} bytes each"), output.read(comm), expected);
    }
    checks.finish();
}

fn broadcast(cases: &Cases<'_>) {
    let (comm, queue) = (cases.comm, &cases.context.queue);
    let mut checks = Checks::new(comm);
    for root in 0..cases.world_size() {
        for len in LENS {
            let inputs = messages(cases, len);
            let data = RawBytes::new(queue, &inputs[cases.rank()], root);
            // SAFETY: the memory lives until it has been read, and nothing else uses it.
            unsafe { comm.broadcast_raw(data.elements(DType::U8), root) }.unwrap();
            checks.same_list(format!("{len} bytes from rank {root}"), data.read(comm), inputs[root].clone());
        }
    }
    checks.finish();
}

/// A first part of `cut` bytes and the rest of each peer's message.
fn halves<'b>(peers: &[usize], places: &'b [RawBytes], cut: usize) -> Vec<(usize, DeviceSlice<'b>)> {
    let both = |(&peer, place): (&usize, &'b RawBytes)| {
        let whole = place.elements(DType::U8);
        [(peer, whole.range(0..cut)), (peer, whole.range(cut..whole.len()))]
    };
    peers.iter().zip(places).flat_map(both).collect()
}

/// Two payloads to every other rank in one call, which must match their receives in order.
fn exchange(cases: &Cases<'_>) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let peers: Vec<usize> = (0..cases.world_size()).filter(|&peer| peer != rank).collect();
    // Each transfer to a rank is cut into a first part and the rest.
    let (cut, len) = (70, 257);
    let all = messages(cases, len * cases.world_size());
    let message = |from: usize, to: usize| &all[from][to * len..(to + 1) * len];
    let inputs: Vec<RawBytes> = peers.iter().map(|&peer| RawBytes::new(queue, message(rank, peer), peer)).collect();
    let outputs: Vec<RawBytes> = peers.iter().map(|&peer| RawBytes::unwritten(queue, len, peer)).collect();
    // SAFETY: the memory lives until it has been read, nothing else uses it, and no two parts overlap.
    unsafe { crate::transfers::exchange_raw(comm, &halves(&peers, &inputs, cut), &halves(&peers, &outputs, cut)) }
        .unwrap();
    let mut checks = Checks::new(comm);
    for (peer, output) in peers.iter().zip(&outputs) {
        checks.own_list(format!("bytes from rank {peer}"), output.read(comm), message(*peer, rank).to_vec());
    }
    checks.finish();
}

/// Elements of a type that NCCL lacks, between guard bytes that must stay unchanged.
fn moves(cases: &Cases<'_>, dtype: DType) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs = messages(cases, len * dtype.size_bytes());
        let input = RawBytes::new(queue, &inputs[rank], dtype.size_bytes());
        let all = RawBytes::unwritten(queue, inputs.concat().len(), dtype.size_bytes());
        // SAFETY: the memory lives until it has been read, and nothing else uses it.
        unsafe { comm.all_gather_raw(input.elements(dtype), all.address()) }.unwrap();
        checks.same_list(format!("{len} of each rank"), all.read(comm), inputs.concat());

        let data = RawBytes::new(queue, &inputs[rank], 0);
        // SAFETY: as above.
        unsafe { comm.broadcast_raw(data.elements(dtype), 0) }.unwrap();
        checks.same_list(format!("{len} of rank 0"), data.read(comm), inputs[0].clone());

        if world_size > 1 {
            let come = RawBytes::unwritten(queue, inputs[last].len(), dtype.size_bytes());
            let (out, back) = ([(next, input.elements(dtype))], [(last, come.elements(dtype))]);
            // SAFETY: as above; the two are apart.
            unsafe { crate::transfers::exchange_raw(comm, &out, &back) }.unwrap();
            checks.own_list(format!("{len} of rank {last}"), come.read(comm), inputs[last].clone());
        }
    }
    checks.finish();
}
