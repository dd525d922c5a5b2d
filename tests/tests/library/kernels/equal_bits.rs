//! Equal bits in every run, for any number of threads.

use gradsync::Slice;
use gradsync::internal::kernels::cpu;
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;

/// The results of every kernel that could depend on the order of additions or on the division of work.
fn everything(format: Format) -> Vec<u64> {
    let len = 400_003;
    let arrays: Vec<Array> =
        generate(Kind::Random, format, 3, len, 16).iter().map(|input| Array::new(format, input)).collect();
    let slices: Vec<Slice<'_>> = arrays.iter().map(Array::slice).collect();
    let segments = [0..1, 1..100_000, 100_000..100_000, 100_007..len];
    let mut bits: Vec<f64> = cpu::squared_norms(slices[0], &segments).unwrap();
    bits.extend(cpu::dots(slices[0], slices[1], &segments).unwrap().concat());
    let gram = cpu::gram(&slices, &segments).unwrap();
    let weights = cpu::coefficients(&gram, 3).unwrap().weights;
    bits.extend(gram);
    bits.extend(&weights);
    let mut dst = Array::unwritten(format, len);
    cpu::combine(dst.slice_mut(), &slices, &weights, &segments).unwrap();
    cpu::accumulate(dst.slice_mut(), slices[2]).unwrap();
    bits.into_iter().map(f64::to_bits).chain(dst.patterns()).collect()
}

#[test]
fn all_kernels_give_equal_bits_for_any_number_of_threads() {
    for format in Format::ALL {
        let first = everything(format);
        assert!(everything(format) == first, "{format:?}: the second run differs");
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert!(pool.install(|| everything(format)) == first, "{format:?}: {threads} threads differ");
        }
    }
}

/// Work that runs at the same time does not change a sum.
#[test]
fn all_kernels_give_equal_bits_to_concurrent_callers() {
    let first = everything(Format::F32);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4).map(|_| scope.spawn(|| everything(Format::F32))).collect();
        for caller in callers {
            assert!(caller.join().unwrap() == first);
        }
    });
}
