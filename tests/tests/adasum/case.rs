//! One Adasum all-reduce as data: runs it, checks the report, and compares the result with the oracle.

use std::ops::Range;

use gradsync::GradientBuffer;
use gradsync::comm::Ranks;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce};
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::agreed;
use gradsync_tests::tolerance::adasum::{Expectation, Method, expect};
use gradsync_tests::tolerance::assert_within;

/// The input: the layers of every rank, as exact numbers of the format.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) format: Format,
    pub(crate) algorithm: Algorithm,
    pub(crate) granularity: Granularity,
    pub(crate) shapes: Vec<Vec<usize>>,
    /// ranks × layers × elements
    pub(crate) inputs: Vec<Vec<Vec<f64>>>,
}

/// The output, which is equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The bits of the whole arena, gaps included.
    arena: Vec<u64>,
    pub(crate) tree: bool,
    weights: Option<Vec<u64>>,
    pub(crate) recomputed: usize,
}

impl Case {
    /// Layers of one kind of input, each with its own seed.
    pub(crate) fn of(kind: Kind, format: Format, world_size: usize, shapes: &[&[usize]], seed: u64) -> Case {
        let layers: Vec<Vec<Vec<f64>>> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| generate(kind, format, world_size, shape.iter().product(), seed + i as u64))
            .collect();
        let inputs = (0..world_size).map(|rank| layers.iter().map(|layer| layer[rank].clone()).collect()).collect();
        Case {
            format,
            algorithm: Algorithm::Gram,
            granularity: Granularity::Tensor,
            shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
            inputs,
        }
    }

    /// One layer per vector, given per rank.
    pub(crate) fn plain(format: Format, inputs: &[&[&[f64]]]) -> Case {
        Case {
            format,
            algorithm: Algorithm::Gram,
            granularity: Granularity::Tensor,
            shapes: inputs[0].iter().map(|layer| vec![layer.len()]).collect(),
            inputs: inputs.iter().map(|rank| rank.iter().map(|layer| layer.to_vec()).collect()).collect(),
        }
    }

    pub(crate) fn with(mut self, algorithm: Algorithm, granularity: Granularity) -> Case {
        (self.algorithm, self.granularity) = (algorithm, granularity);
        self
    }

    pub(crate) fn world_size(&self) -> usize {
        self.inputs.len()
    }

    pub(crate) fn options(&self) -> AdasumOptions {
        AdasumOptions::default().with_algorithm(self.algorithm).with_granularity(self.granularity)
    }

    /// The names and shapes of the layers.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.shapes.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.clone()))
    }

    /// A buffer for the layers, of zeros.
    pub(crate) fn zeros(&self) -> GradientBuffer {
        GradientBuffer::new(dtype(self.format), self.world_size(), self.tensors()).unwrap()
    }

    /// The buffer of `rank`, filled with its layers.
    pub(crate) fn buffer(&self, rank: usize) -> GradientBuffer {
        let mut buffer = self.zeros();
        for (segment, layer) in buffer.segments().to_vec().into_iter().zip(&self.inputs[rank]) {
            write(buffer.as_mut_slice(), segment.start, layer);
        }
        buffer
    }

    /// Runs the case twice; all ranks and both runs have to agree bit for bit.
    pub(crate) fn run(&self) -> Outcome {
        let what = self.name();
        let first = self.run_once(&what);
        assert!(self.run_once(&what) == first, "{what}: the second run gives other bits");
        first
    }

    pub(crate) fn run_once(&self, what: &str) -> Outcome {
        agreed(what, self.world_size(), |comm| {
            let mut buffer = self.buffer(comm.rank());
            let report = adasum_all_reduce(&comm, &mut buffer, self.options()).unwrap();
            Outcome {
                arena: patterns_of(buffer.as_slice()),
                tree: matches!(report.algorithm, Algorithm::Tree),
                weights: report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect()),
                recomputed: report.recomputed,
            }
        })
    }

    /// The layers of a result, in order, without the gaps; fails if a gap is not zero.
    pub(crate) fn layers(&self, outcome: &Outcome) -> Vec<Vec<f64>> {
        let segments = self.buffer(0).segments().to_vec();
        let inside = |place: usize| segments.iter().any(|segment| segment.contains(&place));
        for (place, &bits) in outcome.arena.iter().enumerate() {
            assert!(bits == 0 || inside(place), "{}: the gap at element {place} is not zero any more", self.name());
        }
        let decode = |segment: &Range<usize>| {
            outcome.arena[segment.clone()].iter().map(|&bits| self.format.decode(bits)).collect::<Vec<f64>>()
        };
        segments.iter().map(decode).collect()
    }

    /// The exact result of `method`, over the layers laid end to end.
    pub(crate) fn expectation(&self, method: Method) -> Expectation {
        let inputs: Vec<Vec<f64>> = self.inputs.iter().map(|layers| layers.concat()).collect();
        let mut end = 0;
        let mut segments: Vec<Range<usize>> = Vec::new();
        for shape in &self.shapes {
            segments.push(end..end + shape.iter().product::<usize>());
            end = segments.last().map_or(0, |segment| segment.end);
        }
        if matches!(self.granularity, Granularity::Whole) {
            segments = std::iter::once(0..end).collect();
        }
        expect(method, self.format, &inputs, &segments)
    }

    /// Runs the case and compares the result and the report with the oracle.
    pub(crate) fn check(&self, label: &str) {
        let what = format!("{label}, {}", self.name());
        let outcome = self.run();
        match self.algorithm {
            Algorithm::Gram => assert!(!outcome.tree, "{what}: asked for Gram, reported Tree"),
            Algorithm::Tree => assert!(outcome.tree, "{what}: asked for Tree, reported Gram"),
            _ => {}
        }
        let expected = self.expectation(if outcome.tree { Method::Tree } else { Method::Gram });
        assert!(expected.bounds.iter().all(|bound| bound.is_finite()), "{what}: an infinite bound would check nothing");
        let got = self.layers(&outcome).concat();
        assert_within(&what, self.format, &got, &expected.exact, &expected.bounds);
        if outcome.tree {
            assert_eq!((outcome.recomputed, &outcome.weights), (0, &None), "{what}: only Gram has these");
            return;
        }
        let weights: Vec<f64> =
            outcome.weights.clone().expect("Gram reports weights").into_iter().map(f64::from_bits).collect();
        assert_within(&format!("weights, {what}"), Format::F64, &weights, &expected.weights, &expected.weight_bounds);
        let range = expected.surely_cancelled()..=expected.possibly_cancelled();
        assert!(range.contains(&outcome.recomputed), "{what}: {} layers recomputed, not {range:?}", outcome.recomputed);
    }

    pub(crate) fn name(&self) -> String {
        format!("{:?} {:?} {:?} over {}", self.format, self.algorithm, self.granularity, self.world_size())
    }
}
