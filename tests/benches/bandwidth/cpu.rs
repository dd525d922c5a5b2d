//! The CPU backend's half: rounds of all operations in turn, so that a busy moment of the machine hits all alike.

use std::hint::black_box;
use std::time::Instant;

use gradsync::kernels::cpu;
use gradsync::{DType, Element, GradientBuffer, SliceMut};

use crate::{Figure, print_table};

const ROUNDS: usize = 15;

fn filled(dtype: DType, len: usize) -> GradientBuffer {
    fn fill<T: Element>(data: &mut [T]) {
        data.iter_mut()
            .enumerate()
            .for_each(|(index, value)| *value = T::from_f64((index % 1000) as f64 / 500.0 - 1.0));
    }
    let mut buffer = GradientBuffer::new(dtype, 1, [("data", [len])]).expect("enough memory");
    match buffer.tensor_mut(0).into_data() {
        SliceMut::F64(data) => fill(data),
        SliceMut::F32(data) => fill(data),
        SliceMut::F16(data) => fill(data),
        SliceMut::BF16(data) => fill(data),
    }
    buffer
}

/// Copies with every thread of the pool, a contiguous part each.
fn parallel_copy(to: &mut [u8], from: &[u8]) {
    let part = to.len().div_ceil(std::thread::available_parallelism().map_or(1, usize::from));
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

pub(crate) fn run(quick: bool) {
    // The wider operand of each operation has this size.
    let bytes: usize = if quick { 32 << 20 } else { 256 << 20 };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pairs = [
        (DType::F32, DType::F32),
        (DType::F32, DType::F16),
        (DType::F32, DType::BF16),
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F64, DType::F64),
        (DType::F64, DType::F32),
    ];
    let title = |what: &str| format!("CPU, {threads} threads, {} MiB: {what}", bytes >> 20);
    for (to, from) in pairs {
        let len = bytes / to.size_bytes().max(from.size_bytes());
        let (mut sum, value) = (filled(to, len), filled(from, len));
        let (to_bytes, from_bytes) = (len * to.size_bytes(), len * from.size_bytes());
        let mut figures = [
            ("parallel copy".to_owned(), 2 * bytes),
            (format!("accumulate {to} += {from}"), 2 * to_bytes + from_bytes),
            (format!("cast {from} to {to}"), to_bytes + from_bytes),
        ]
        .map(|(name, bytes)| Figure { name, bytes, seconds: Vec::new() });
        let (source, mut target) = (filled(DType::F32, bytes / 4), filled(DType::F32, bytes / 4));
        for round in 0..ROUNDS + 1 {
            let times = [
                time(|| parallel_copy(target.as_mut_slice().as_bytes_mut(), source.as_slice().as_bytes())),
                time(|| cpu::accumulate(sum.as_mut_slice(), value.as_slice()).expect("equal lengths")),
                time(|| cpu::cast(sum.as_mut_slice(), value.as_slice()).expect("equal lengths")),
            ];
            // The first round touches the memory for the first time.
            if round > 0 {
                figures.iter_mut().zip(times).for_each(|(figure, time)| figure.seconds.push(time));
            }
        }
        print_table(&title(&format!("{to} and {from}")), &figures);
    }

    let len = bytes / 4 / 4;
    let vectors: Vec<_> = (0..4).map(|_| filled(DType::F32, len)).collect();
    let slices: Vec<_> = vectors.iter().map(GradientBuffer::as_slice).map(|slice| slice.range(0..len)).collect();
    let mut result = filled(DType::F32, len);
    let (source, mut target) = (filled(DType::F32, bytes / 4), filled(DType::F32, bytes / 4));
    let mut figures = [
        ("parallel copy", 2 * bytes),
        ("zero f32", bytes),
        ("dots f32", 2 * len * 4),
        ("gram f32, 4 vectors", 4 * len * 4),
        ("combine f32, 4 vectors", 5 * len * 4),
    ]
    .map(|(name, bytes)| Figure { name: name.into(), bytes, seconds: Vec::new() });
    for round in 0..ROUNDS + 1 {
        let times = [
            time(|| parallel_copy(target.as_mut_slice().as_bytes_mut(), source.as_slice().as_bytes())),
            time(|| cpu::zero(target.as_mut_slice())),
            time(|| _ = black_box(cpu::dots(slices[0], slices[1], &[0..len]).expect("equal lengths"))),
            time(|| _ = black_box(cpu::gram(&slices, &[0..len]).expect("equal lengths"))),
            time(|| {
                let result = result.as_mut_slice().range_mut(0..len);
                cpu::combine(result, &slices, &[0.1, 0.2, 0.3, 0.4], &[0..len]).expect("equal lengths");
            }),
        ];
        if round > 0 {
            figures.iter_mut().zip(times).for_each(|(figure, time)| figure.seconds.push(time));
        }
    }
    print_table(&title("zero and reductions"), &figures);
}

fn time(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}
