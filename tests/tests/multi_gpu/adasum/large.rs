//! Large buffers: 3000 tensors of 64 MiB together, some of which are compared with the oracle, and a buffer beyond 2 GiB with a result that
//! is known without an oracle.

use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;

use gradsync::ops::{AdasumOptions, Algorithm};
use gradsync::{DType, GradientBuffer, Slice};
use gradsync_tests::array::{dtype, values_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;
use gradsync_tests::tolerance::adasum::{Method, expect};
use gradsync_tests::tolerance::assert_within;

use super::Cases;
use super::device::Runner;
use crate::context::Context;
use crate::report::Report;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    for cases in Cases::new(context, &comm).each_way() {
        for format in [Format::F32, Format::BF16] {
            for &algorithm in cases.algorithms() {
                let name = cases.name(&format!("3000 tensors, {} {algorithm:?}", format.name()));
                report.case(&name, || many_tensors(&cases, format, algorithm));
            }
        }
        for &algorithm in cases.algorithms() {
            report.case(&cases.name(&format!("2 GiB, {algorithm:?}")), || huge_buffer(&cases, algorithm));
        }
    }
}

/// The number of tensors, and the stride of those compared with the oracle. Lengths repeat after 10, so every length is sampled.
const TENSORS: usize = 3000;
const SAMPLED: usize = 97;

/// The lengths of tensors, 67 MB together in f32, and as many bytes in a narrower dtype.
fn lens(format: Format) -> Vec<usize> {
    const LENS: [usize; 10] = [1, 3, 64, 255, 1000, 2048, 4096, 4099, 16_384, 28_000];
    LENS.into_iter().cycle().take(TENSORS).map(|len| len * 4 / format.size_bytes()).collect()
}

fn input(format: Format, layer: usize, len: usize, rank: usize) -> Vec<f64> {
    vector(format, len, (layer * 1009 + rank) as u64)
}

fn many_tensors(cases: &Cases<'_>, format: Format, algorithm: Algorithm) {
    let (Runner { queue, comm, way }, world_size) = (cases.runner, cases.world_size());
    let lens = lens(format);
    let tensors = || lens.iter().enumerate().map(|(layer, &len)| (format!("layer{layer}"), vec![len]));
    let mut host = GradientBuffer::new(dtype(format), world_size, tensors()).unwrap();
    let segments: Vec<Range<usize>> = host.segments().to_vec();
    for (layer, segment) in segments.iter().enumerate() {
        write(host.as_mut_slice(), segment.start, &input(format, layer, segment.len(), comm.rank()));
    }
    let mut buffer = GradientBuffer::on_queue(queue, dtype(format), world_size, tensors()).unwrap();
    buffer.copy_from_host(&host).unwrap();
    let options = AdasumOptions::default().with_algorithm(algorithm);
    let mut adasum = way.prepare(comm, &buffer, options).unwrap();
    adasum.all_reduce(&mut buffer).unwrap();
    comm.synchronize(queue).unwrap();
    buffer.copy_to_host(&mut host).unwrap();
    let report = adasum.report().unwrap();

    let what = format!("{} {algorithm:?} {way:?} over {world_size}", format.name());
    let mut hasher = DefaultHasher::new();
    hasher.write(host.as_slice().as_bytes());
    let hash = hasher.finish();
    let mut checks = Checks::new(comm);
    checks.same_list(format!("{what}: bits"), vec![hash], vec![hash]);
    checks.finish();

    assert_eq!(report.algorithm, algorithm, "{what}: another algorithm is reported");
    let method = if algorithm == Algorithm::Tree { Method::Tree } else { Method::Gram };
    for (layer, segment) in segments.iter().enumerate().step_by(SAMPLED) {
        let inputs: Vec<Vec<f64>> = (0..world_size).map(|rank| input(format, layer, segment.len(), rank)).collect();
        let expected = expect(method, format, &inputs, &[0..segment.len()]);
        let what = format!("{what}: layer {layer}");
        assert!(expected.bounds.iter().all(|bound| bound.is_finite()), "{what}: an infinite bound would check nothing");
        let got = values_of(host.as_slice().range(segment.clone()));
        assert_within(&what, format, &got, &expected.exact, &expected.bounds);
        if let Some(weights) = &report.weights {
            let weights = &weights[layer * world_size..(layer + 1) * world_size];
            let (exact, bounds) = (&expected.weights, &expected.weight_bounds);
            assert_within(&format!("{what}, weights"), Format::F64, weights, exact, bounds);
        }
    }
    let ends = segments.iter().skip(1).map(|next| next.start).chain([host.len()]);
    for (segment, end) in segments.iter().zip(ends) {
        let gap = host.as_slice().range(segment.end..end);
        assert!(
            gap.as_bytes().iter().all(|&byte| byte == 0),
            "{what}: the gap behind {segment:?} is not zero any more"
        );
    }
}

/// Equal vectors are their own Adasum. For integers below 2⁷, every sum of products is exact in f64, every coefficient is 1/2, and the
/// result is exact too.
fn huge_buffer(cases: &Cases<'_>, algorithm: Algorithm) {
    /// The period of the values, and the number of values that are copied at a time, a multiple of the period.
    const PERIOD: usize = 251;
    const PIECE: usize = PERIOD << 16;
    let Runner { queue, comm, way } = cases.runner;
    // The first tensor alone exceeds 2 GiB.
    let lens = [(1usize << 29) + 12_345, 1000, 1];
    let tensors = lens.iter().enumerate().map(|(layer, &len)| (format!("layer{layer}"), vec![len]));
    let mut buffer = GradientBuffer::on_queue(queue, DType::F32, cases.world_size(), tensors).unwrap();
    assert!(buffer.as_slice().len() * DType::F32.size_bytes() > 2 << 30);
    let piece: Vec<f32> = (0..PIECE).map(|place| (place % PERIOD) as f32 - 125.0).collect();
    let pieces = |len: usize| (0..len).step_by(PIECE).map(move |begin| begin..len.min(begin + PIECE));
    for (layer, &len) in lens.iter().enumerate() {
        for range in pieces(len) {
            let data = Slice::from(&piece[..range.len()]);
            buffer.tensor_mut(layer).into_data().range_mut(range).copy_from_host(data).unwrap();
        }
    }
    let options = AdasumOptions::default().with_algorithm(algorithm);
    let mut adasum = way.prepare(comm, &buffer, options).unwrap();
    adasum.all_reduce(&mut buffer).unwrap();
    comm.synchronize(queue).unwrap();

    let mut got = vec![0f32; PIECE];
    for (layer, &len) in lens.iter().enumerate() {
        for range in pieces(len) {
            let (begin, count) = (range.start, range.len());
            buffer.tensor(layer).data().range(range).copy_to_host((&mut got[..count]).into()).unwrap();
            if let Some(place) = (0..count).find(|&place| got[place] != piece[place]) {
                let (found, expected) = (got[place], piece[place]);
                panic!("{algorithm:?} {way:?}: layer {layer}, element {}: {found}, not {expected}", begin + place);
            }
        }
    }
}
