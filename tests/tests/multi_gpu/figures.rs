//! Times of our collectives beside those of plain NCCL, in one process and one run.
//!
//! Calls are put into the queue back to back and timed on the device; rounds of ours and of the baseline take turns, and the medians
//! count. Nothing is compared with a number from another run.

use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Call, Collectives, Communicator, Operation, Ranks, ReduceOp};
use gradsync::driver::{DeviceBuffer, DeviceSlice, Queue};
use gradsync::memory::PeerMemory;
use gradsync::ops::cuda::{Adasum, OrderedAllReduce, PeerAllReduce};
use gradsync::ops::{AdasumOptions, Algorithm};
use gradsync::sys::nccl::{Comm, Config, DataTypeCode, Nccl, RedOp, ResultCode, UniqueId};
use gradsync::{DType, GradientBuffer};

use crate::context::{Context, DEADLINE};
use crate::report::Report;

const MIB: usize = 1 << 20;
const SIZES: [usize; 4] = [MIB, 64 * MIB, 256 * MIB, 1024 * MIB];
const ROUNDS: usize = 7;

/// A communicator of NCCL alone.
struct Plain {
    nccl: &'static Nccl,
    comm: Comm,
}

impl Plain {
    /// Of the ranks of `ours`, over whose control channel the identifier travels.
    fn new(ours: &NcclCommunicator) -> Self {
        let nccl = Nccl::get().unwrap();
        let mut id = UniqueId([0; 128]);
        if ours.rank() == 0 {
            // SAFETY: writes one identifier.
            assert_eq!(unsafe { (nccl.functions.ncclGetUniqueId)(&mut id) }, ResultCode::SUCCESS);
        }
        let bytes: Vec<u8> = id.0.iter().map(|&byte| byte as u8).collect();
        let all = ours.member().all_gather(&bytes, DEADLINE).unwrap();
        id.0.iter_mut().zip(&all[0]).for_each(|(to, &from)| *to = from as _);
        let mut comm = std::ptr::null_mut();
        let mut config = Config { blocking: 1, ..Config::default() };
        // SAFETY: every rank calls it with the same identifier; this rank's device is current.
        let code = unsafe {
            let (ranks, rank) = (ours.world_size() as i32, ours.rank() as i32);
            (nccl.functions.ncclCommInitRankConfig)(&mut comm, ranks, id, rank, &mut config)
        };
        assert_eq!(code, ResultCode::SUCCESS);
        Plain { nccl, comm }
    }

    fn all_reduce(&self, data: DeviceSlice<'_>) {
        let dtype = match data.dtype() {
            DType::F32 => DataTypeCode::F32,
            DType::BF16 => DataTypeCode::BF16,
            other => panic!("no figures of {other}"),
        };
        let place = data.address() as usize as *mut std::ffi::c_void;
        // SAFETY: the data outlive the queue's work; every rank makes the same calls.
        let code = unsafe {
            let stream = data.queue().stream();
            (self.nccl.functions.ncclAllReduce)(place, place, data.len(), dtype, RedOp::SUM, self.comm, stream)
        };
        assert_eq!(code, ResultCode::SUCCESS);
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and idle.
        unsafe { (self.nccl.functions.ncclCommDestroy)(self.comm) };
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of one call of each, as medians over rounds in which they take turns.
pub(crate) fn race<const N: usize>(queue: &Queue, calls: usize, mut runners: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for round in 0..=ROUNDS {
        for (runner, times) in runners.iter_mut().zip(&mut times) {
            let begin = queue.record().unwrap();
            (0..calls).for_each(|_| runner());
            let seconds = queue.record().unwrap().seconds_since(&begin).unwrap();
            // The first round warms up.
            if round > 0 {
                times.push(seconds / calls as f64);
            }
        }
    }
    times.map(median)
}

fn calls_of(bytes: usize) -> usize {
    (256 * MIB / bytes).clamp(5, 200)
}

/// Lengths of BERT-large's 398 tensors (embeddings, 24 encoder layers of width 1024, heads), in proportion, `total` elements together.
pub(crate) fn bert_lens(total: usize) -> Vec<usize> {
    let layer: [usize; 16] = [
        1 << 20,
        1024,
        1 << 20,
        1024,
        1 << 20,
        1024,
        1 << 20,
        1024,
        1024,
        1024,
        4 << 20,
        4096,
        4 << 20,
        1024,
        1024,
        1024,
    ];
    let embeddings = [30522 * 1024, 512 * 1024, 2048, 1024, 1024];
    let heads = [1 << 20, 1024, 1 << 20, 1024, 1024, 1024, 30522, 2048, 2];
    let layers = std::iter::repeat_n(layer, 24).flatten();
    let full: Vec<usize> = embeddings.into_iter().chain(layers).chain(heads).collect();
    assert_eq!(full.len(), 398);
    let sum: usize = full.iter().sum();
    full.into_iter().map(|len| (len as f64 * total as f64 / sum as f64).round().max(1.0) as usize).collect()
}

pub(crate) fn run(context: &Context, report: &mut Report) {
    let options = NcclOptions { deadline: DEADLINE, checks: false, ..NcclOptions::default() };
    let comm = context.communicator(0, &options);
    let queue = &context.queue;
    let plain = Plain::new(&comm);
    let is_first = context.rank == 0;
    let say = |report: &Report, name: String, seconds: f64, baseline: f64| {
        if is_first {
            report.figure(&name, seconds * 1e6, "µs", Some(baseline * 1e6));
        }
    };
    let ranks = context.world_size;
    report.case("figures", || {});

    for dtype in [DType::F32, DType::BF16] {
        for bytes in SIZES {
            let mut data = DeviceBuffer::zeroed(queue, dtype, bytes / dtype.size_bytes()).unwrap();
            let mut other = DeviceBuffer::zeroed(queue, dtype, bytes / dtype.size_bytes()).unwrap();
            let mut ours = || comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
            let mut theirs = || plain.all_reduce(other.as_mut_slice().as_slice());
            let [ours, theirs] = race(queue, calls_of(bytes), [&mut ours, &mut theirs]);
            say(report, format!("all_reduce {dtype} {} MiB, {ranks} ranks", bytes / MIB), ours, theirs);
        }
    }
    let ways = [
        (DType::F32, Algorithm::Gram, true),
        (DType::BF16, Algorithm::Gram, true),
        (DType::F32, Algorithm::Tree, true),
        (DType::F32, Algorithm::Gram, false),
        (DType::F32, Algorithm::Tree, false),
    ];
    for (dtype, algorithm, with_peers) in ways {
        for bytes in [MIB / 16].into_iter().chain(SIZES) {
            let lens = bert_lens(bytes / dtype.size_bytes());
            let tensors = lens.iter().enumerate().map(|(index, &len)| (format!("tensor {index}"), vec![len]));
            let mut buffer = GradientBuffer::on_queue(queue, dtype, ranks, tensors).unwrap();
            let mut other = DeviceBuffer::zeroed(queue, dtype, bytes / dtype.size_bytes()).unwrap();
            let options = AdasumOptions { algorithm, ..AdasumOptions::default() };
            let make = if with_peers { Adasum::new } else { Adasum::over_transport };
            let mut adasum = make(&comm, &buffer, options).unwrap();
            assert_eq!(adasum.uses_peers(), with_peers, "GPUs of one machine reach each other");
            let mut ours = || adasum.all_reduce(&mut buffer).unwrap();
            let mut theirs = || plain.all_reduce(other.as_mut_slice().as_slice());
            let [ours, theirs] = race(queue, calls_of(bytes), [&mut ours, &mut theirs]);
            let by = if with_peers { "peers" } else { "NCCL" };
            let size = bytes as f64 / MIB as f64;
            let name = format!("adasum {algorithm:?} by {by} {dtype} {size} MiB, {ranks} ranks, against sum");
            say(report, name, ours, theirs);
        }
    }
    for bytes in [MIB / 16, MIB] {
        let lens = bert_lens(bytes / 4);
        let tensors = lens.iter().enumerate().map(|(index, &len)| (format!("tensor {index}"), vec![len]));
        let mut buffer = GradientBuffer::on_queue(queue, DType::F32, ranks, tensors).unwrap();
        let mut other = DeviceBuffer::zeroed(queue, DType::F32, bytes / 4).unwrap();
        let mut adasum = Adasum::new(&comm, &buffer, AdasumOptions::default()).unwrap();
        adasum.all_reduce(&mut buffer).unwrap();
        let graph = queue.capture(|| adasum.all_reduce(&mut buffer)).unwrap();
        let call = Call::without_data(Operation::Graph);
        let mut ours = || comm.run_kernels(call, queue, &mut || Ok(graph.launch()?)).unwrap();
        let mut theirs = || plain.all_reduce(other.as_mut_slice().as_slice());
        let [ours, theirs] = race(queue, calls_of(bytes), [&mut ours, &mut theirs]);
        let size = bytes as f64 / MIB as f64;
        say(report, format!("adasum as a graph f32 {size} MiB, {ranks} ranks, against sum"), ours, theirs);
    }
    for bytes in SIZES {
        let len = bytes / 2;
        let mut data = DeviceBuffer::zeroed(queue, DType::BF16, len).unwrap();
        let mut other = DeviceBuffer::zeroed(queue, DType::BF16, len).unwrap();
        let mut ordered = OrderedAllReduce::new(&comm, queue, (DType::BF16, DType::BF16), len, ReduceOp::Sum).unwrap();
        let mut ours = || ordered.run(data.as_mut_slice()).unwrap();
        let mut theirs = || plain.all_reduce(other.as_mut_slice().as_slice());
        let [ours, theirs] = race(queue, calls_of(bytes), [&mut ours, &mut theirs]);
        say(report, format!("ordered all_reduce bf16 {} MiB, {ranks} ranks", bytes / MIB), ours, theirs);
    }
    for bytes in SIZES {
        let len = bytes / 2;
        let mut data = GradientBuffer::on_queue(queue, DType::BF16, ranks, [("all", [len])]).unwrap();
        let mut other = DeviceBuffer::zeroed(queue, DType::BF16, len).unwrap();
        let mut peers = PeerAllReduce::new(&comm, &data, ReduceOp::Sum).unwrap().expect("GPUs of one machine");
        let mut ours = || peers.run(&mut data).unwrap();
        let mut theirs = || plain.all_reduce(other.as_mut_slice().as_slice());
        let [ours, theirs] = race(queue, calls_of(bytes), [&mut ours, &mut theirs]);
        say(report, format!("ordered all_reduce by peers bf16 {} MiB, {ranks} ranks", bytes / MIB), ours, theirs);
    }
    comm.synchronize(queue).unwrap();
}
