//! The CPU backend's half: rounds of all operations in turn, so that a busy moment of the machine hits all alike.

use std::hint::black_box;
use std::time::Instant;

use gradsync::comm::{Ranks, local};
use gradsync::kernels::cpu;
use gradsync::ops::{AdasumOptions, adasum_all_reduce};
use gradsync::{DType, Element, GradientBuffer, SliceMut};

use crate::{Figure, print_table};

const ROUNDS: usize = 15;

/// Something to time: its name, the bytes that it must move, and the work.
type Case<'a> = (String, usize, Box<dyn FnMut() + 'a>);

pub(crate) fn run(quick: bool) {
    let bytes: usize = if quick { 32 << 20 } else { 256 << 20 };
    let title = |what: &str| format!("CPU, {} threads, {} MiB: {what}", rayon::current_num_threads(), bytes >> 20);
    streaming(bytes, &title);
    reductions(bytes, &title);
    adasum(8, bytes / 4);
}

/// Every pair of dtypes; the wider operand has this size.
fn streaming(bytes: usize, title: &dyn Fn(&str) -> String) {
    for to in DType::ALL {
        for from in DType::ALL {
            let len = bytes / to.size_bytes().max(from.size_bytes());
            let (to_bytes, from_bytes) = (len * to.size_bytes(), len * from.size_bytes());
            let (mut sum, mut cast, value) = (filled(to, len), filled(to, len), filled(from, len));
            let (mut copy, value) = (Copy::new(bytes), value.as_slice());
            let figures = measure(vec![
                ("parallel copy".into(), 2 * bytes, Box::new(|| copy.run())),
                (
                    format!("accumulate {to} += {from}"),
                    2 * to_bytes + from_bytes,
                    Box::new(|| cpu::accumulate(sum.as_mut_slice(), value).expect("equal lengths")),
                ),
                (
                    format!("cast {from} to {to}"),
                    to_bytes + from_bytes,
                    Box::new(|| cpu::cast(cast.as_mut_slice(), value).expect("equal lengths")),
                ),
            ]);
            print_table(&title(&format!("{to} and {from}")), &figures);
        }
    }
}

/// Vectors of a quarter of this size.
fn reductions(bytes: usize, title: &dyn Fn(&str) -> String) {
    for dtype in DType::ALL {
        let (vector_bytes, len) = (bytes / 4, bytes / 4 / dtype.size_bytes());
        let vectors: Vec<_> = (0..8).map(|_| filled(dtype, len)).collect();
        let views: Vec<_> = vectors.iter().map(|vector| vector.as_slice().range(0..len)).collect();
        let (mut copy, mut result, mut cleared) = (Copy::new(bytes), filled(dtype, len), filled(DType::F32, bytes / 4));
        let gram = |count: usize| _ = black_box(cpu::gram(&views[..count], &[0..len]).expect("equal lengths"));
        let mut combine = |count: usize| {
            let (result, weights) = (result.as_mut_slice().range_mut(0..len), [0.125; 8]);
            cpu::combine(result, &views[..count], &weights[..count], &[0..len]).expect("equal lengths");
        };
        let mut cases: Vec<Case<'_>> = vec![
            ("parallel copy".into(), 2 * bytes, Box::new(|| copy.run())),
            ("zero".into(), bytes, Box::new(|| cpu::zero(cleared.as_mut_slice()))),
            (
                format!("squared_norms {dtype}"),
                vector_bytes,
                Box::new(|| _ = black_box(cpu::squared_norms(views[0], &[0..len]).expect("a segment of the vector"))),
            ),
            (
                format!("dots {dtype}"),
                2 * vector_bytes,
                Box::new(|| _ = black_box(cpu::dots(views[0], views[1], &[0..len]).expect("equal lengths"))),
            ),
        ];
        for count in [4, 8] {
            let bytes = count * vector_bytes;
            cases.push((format!("gram {dtype}, {count} vectors"), bytes, Box::new(move || gram(count))));
        }
        cases.push((format!("combine {dtype}, 8 vectors"), 9 * vector_bytes, Box::new(move || combine(8))));
        print_table(&title(&format!("zero and reductions, {dtype}")), &measure(cases));
    }
}

/// Local ranks with vectors of this size. What must move: every vector is read for the products, once more for the sum, whose
/// weights depend on all products, and written once.
fn adasum(ranks: usize, bytes: usize) {
    for dtype in [DType::F32, DType::BF16] {
        let len = bytes / dtype.size_bytes();
        let figures = local::run_each(ranks, |comm| {
            let mut buffer = filled_for(dtype, ranks, len);
            // One rank measures; the others wait for it while it copies.
            let mut copy = (comm.rank() == 0).then(|| Copy::new(ranks * bytes));
            let alone = || comm.barrier().expect("every rank comes");
            measure(vec![
                (
                    "parallel copy".into(),
                    2 * ranks * bytes,
                    Box::new(|| {
                        copy.iter_mut().for_each(Copy::run);
                        alone();
                    }),
                ),
                (
                    format!("adasum_all_reduce {dtype}"),
                    3 * ranks * bytes,
                    Box::new(|| {
                        adasum_all_reduce(&comm, &mut buffer, AdasumOptions::default()).expect("equal calls");
                        alone();
                    }),
                ),
            ])
        });
        let figures = figures.expect("there are ranks").swap_remove(0).expect("no rank panics");
        print_table(&format!("CPU, {ranks} local ranks, {} MiB each", bytes >> 20), &figures);
    }
}

/// Times the cases in turn.
fn measure(cases: Vec<Case<'_>>) -> Vec<Figure> {
    let mut cases = cases;
    let mut figures: Vec<_> = cases
        .iter()
        .map(|(name, bytes, _)| Figure { name: name.clone(), bytes: *bytes, seconds: Vec::new() })
        .collect();
    for round in 0..ROUNDS + 1 {
        for ((.., work), figure) in cases.iter_mut().zip(&mut figures) {
            let start = Instant::now();
            work();
            // The first round touches the memory for the first time.
            if round > 0 {
                figure.seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    figures
}

/// The copy to compare with: every thread of the machine, a contiguous part each.
struct Copy {
    from: GradientBuffer,
    to: GradientBuffer,
}

impl Copy {
    fn new(bytes: usize) -> Self {
        Copy { from: filled(DType::F32, bytes / 4), to: filled(DType::F32, bytes / 4) }
    }

    fn run(&mut self) {
        let (to, from) = (self.to.as_mut_slice().as_bytes_mut(), self.from.as_slice().as_bytes());
        let part = to.len().div_ceil(std::thread::available_parallelism().map_or(1, usize::from));
        std::thread::scope(|scope| {
            for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
                scope.spawn(move || to.copy_from_slice(from));
            }
        });
    }
}

fn filled(dtype: DType, len: usize) -> GradientBuffer {
    filled_for(dtype, 1, len)
}

fn filled_for(dtype: DType, world_size: usize, len: usize) -> GradientBuffer {
    fn fill<T: Element>(data: &mut [T]) {
        data.iter_mut()
            .enumerate()
            .for_each(|(index, value)| *value = T::from_f64((index % 1000) as f64 / 500.0 - 1.0));
    }
    let mut buffer = GradientBuffer::new(dtype, world_size, [("data", [len])]).expect("enough memory");
    match buffer.tensor_mut(0).into_data() {
        SliceMut::F64(data) => fill(data),
        SliceMut::F32(data) => fill(data),
        SliceMut::F16(data) => fill(data),
        SliceMut::BF16(data) => fill(data),
    }
    buffer
}
