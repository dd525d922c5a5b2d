//! `--op adasum` gives the bits of the library's Adasum on gradient buffers with the same tensors, by both algorithms.

use gradsync::GradientBuffer;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce};
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::agreed;

use crate::files::{Ranks, Tensor, load, tensor};

/// The bits of every tensor after the library's reduction of the ranks' tensors, which all have this format.
fn library(format: Format, inputs: &[Vec<Tensor>], options: AdasumOptions) -> Vec<Vec<u64>> {
    let world_size = inputs.len();
    agreed("the library", world_size, |comm| {
        let own = &inputs[gradsync::comm::Ranks::rank(&comm)];
        let tensors = own.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone()));
        let mut buffer = GradientBuffer::new(dtype(format), world_size, tensors).unwrap();
        for (segment, tensor) in buffer.segments().to_vec().into_iter().zip(own) {
            write(buffer.as_mut_slice(), segment.start, &tensor.data.values());
        }
        adasum_all_reduce(&comm, &mut buffer, options).unwrap();
        let tensors = 0..buffer.tensor_count();
        tensors.map(|index| patterns_of(buffer.tensor(index).data())).collect::<Vec<_>>()
    })
}

#[track_caller]
fn check(format: Format, inputs: &[Vec<Tensor>]) {
    let ranks = Ranks::new(inputs);
    let granularities = [("tensor", Granularity::Tensor), ("whole", Granularity::Whole)];
    let options = [("tree", Algorithm::Tree), ("gram", Algorithm::Gram)]
        .into_iter()
        .flat_map(|of| granularities.map(|by| (of, by)));
    for ((algorithm_name, algorithm), (name, granularity)) in options {
        if algorithm == Algorithm::Tree && !inputs.len().is_power_of_two() {
            continue;
        }
        let what = format!("{format:?}, {} ranks, {algorithm_name}, {name}", inputs.len());
        ranks.reduce(&["--op", "adasum", "--algorithm", algorithm_name, "--granularity", name]).succeeded(&what);
        let got = load(&ranks.output());
        for (tensor, expected) in inputs[0].iter().zip(library(
            format,
            inputs,
            AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity),
        )) {
            let found = got[&tensor.name].data.patterns();
            let differ = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
            assert_eq!((found.len(), differ), (expected.len(), 0), "{what}: {} has other bits", tensor.name);
        }
    }
}

/// The ranks' tensors, named in the order of the data in the files.
fn inputs(kind: Kind, format: Format, world_size: usize, lens: &[usize]) -> Vec<Vec<Tensor>> {
    let layers: Vec<Vec<Vec<f64>>> =
        lens.iter().enumerate().map(|(i, &len)| generate(kind, format, world_size, len, 70 + i as u64)).collect();
    let of_rank = |rank: usize| {
        let layers = layers.iter().zip(lens).enumerate();
        layers.map(|(i, (layer, &len))| tensor(&format!("layer{i}"), format, &[len], &layer[rank])).collect()
    };
    (0..world_size).map(of_rank).collect()
}

#[test]
fn every_dtype_has_the_bits_of_the_library() {
    for format in Format::ALL {
        for world_size in [1, 2, 3, 4, 8] {
            check(format, &inputs(Kind::Random, format, world_size, &[16]));
            check(format, &inputs(Kind::Random, format, world_size, &[300, 1, 0, 37, 1000]));
        }
    }
}

#[test]
fn every_kind_of_input_has_the_bits_of_the_library() {
    for kind in Kind::ADASUM {
        for format in [Format::BF16, Format::F64] {
            check(format, &inputs(kind, format, 4, &[65, 130]));
        }
    }
}

/// Tensors of many chunks, which are divided over several ranks.
#[test]
fn long_tensors_have_the_bits_of_the_library() {
    for format in [Format::F16, Format::F64] {
        check(format, &inputs(Kind::Random, format, 4, &[150_001, 7, 290_003]));
    }
}
