//! One Adasum all-reduce as data: runs it, checks the report, and compares the result with the oracle.

use std::ops::Range;

use crate::array::{dtype, patterns_of, write};
use crate::inputs::{Kind, generate};
use crate::oracle::Format;
use crate::ranks::agreed;
use crate::tolerance::adasum::{Expectation, Method, expect};
use crate::tolerance::assert_within;
use gradsync::GradientBuffer;
use gradsync::comm::Ranks;
use gradsync::ops::{AdasumOptions, AdasumReport, Algorithm, Granularity, adasum_all_reduce};

/// The input: the layers of every rank, as exact numbers of the format.
#[derive(Clone, Debug)]
pub struct Case {
    /// The dtype of all layers.
    pub format: Format,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Whether each layer, or all together, are combined as one.
    pub granularity: Granularity,
    /// The shapes of the layers.
    pub shapes: Vec<Vec<usize>>,
    /// ranks × layers × elements
    pub inputs: Vec<Vec<Vec<f64>>>,
}

/// The output, which is equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The bits of the whole arena, gaps included.
    pub arena: Vec<u64>,
    /// Whether the tree was reported.
    pub tree: bool,
    /// The weights as bits, so that NaN equals itself; `None` where the report has none.
    pub weights: Option<Vec<u64>>,
    /// The number of layers that the exact path computed.
    pub recomputed: usize,
}

impl Outcome {
    /// The outcome of a reduction that has left these bits and this report.
    pub fn new(arena: Vec<u64>, report: AdasumReport) -> Self {
        Outcome {
            arena,
            tree: report.algorithm == Algorithm::Tree,
            weights: report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect()),
            recomputed: report.recomputed,
        }
    }
}

impl Case {
    /// Layers of one kind of input, each with its own seed.
    pub fn of(kind: Kind, format: Format, world_size: usize, shapes: &[&[usize]], seed: u64) -> Case {
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
    pub fn plain(format: Format, inputs: &[&[&[f64]]]) -> Case {
        Case {
            format,
            algorithm: Algorithm::Gram,
            granularity: Granularity::Tensor,
            shapes: inputs[0].iter().map(|layer| vec![layer.len()]).collect(),
            inputs: inputs.iter().map(|rank| rank.iter().map(|layer| layer.to_vec()).collect()).collect(),
        }
    }

    /// By another algorithm, in layers of another granularity.
    pub fn with(mut self, algorithm: Algorithm, granularity: Granularity) -> Case {
        (self.algorithm, self.granularity) = (algorithm, granularity);
        self
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.inputs.len()
    }

    /// The options of the call.
    pub fn options(&self) -> AdasumOptions {
        AdasumOptions::default().with_algorithm(self.algorithm).with_granularity(self.granularity)
    }

    /// The names and shapes of the layers.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.shapes.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.clone()))
    }

    /// A buffer for the layers, of zeros.
    pub fn zeros(&self) -> GradientBuffer {
        GradientBuffer::new(dtype(self.format), self.world_size(), self.tensors()).unwrap()
    }

    /// The buffer of `rank`, filled with its layers.
    pub fn buffer(&self, rank: usize) -> GradientBuffer {
        let mut buffer = self.zeros();
        for (segment, layer) in buffer.segments().to_vec().into_iter().zip(&self.inputs[rank]) {
            write(buffer.as_mut_slice(), segment.start, layer);
        }
        buffer
    }

    /// Runs the case twice; all ranks and both runs have to agree bit for bit.
    pub fn run(&self) -> Outcome {
        let what = self.name();
        let first = self.run_once(&what);
        assert!(self.run_once(&what) == first, "{what}: the second run gives other bits");
        first
    }

    /// Runs the case; all ranks have to agree bit for bit.
    pub fn run_once(&self, what: &str) -> Outcome {
        agreed(what, self.world_size(), |comm| {
            let mut buffer = self.buffer(comm.rank());
            let report = adasum_all_reduce(&comm, &mut buffer, self.options()).unwrap();
            Outcome::new(patterns_of(buffer.as_slice()), report)
        })
    }

    /// The layers of a result, in order, without the gaps.
    ///
    /// # Panics
    /// If a gap is not zero.
    pub fn layers(&self, outcome: &Outcome) -> Vec<Vec<f64>> {
        self.layers_of(&outcome.arena)
    }

    /// The layers in an arena with these bits, in order, without the gaps.
    ///
    /// # Panics
    /// If a gap is not zero.
    pub fn layers_of(&self, arena: &[u64]) -> Vec<Vec<f64>> {
        let segments = self.zeros().segments().to_vec();
        let inside = |place: usize| segments.iter().any(|segment| segment.contains(&place));
        for (place, &bits) in arena.iter().enumerate() {
            assert!(bits == 0 || inside(place), "{}: the gap at element {place} is not zero any more", self.name());
        }
        let decode = |bits: &u64| self.format.decode(*bits);
        segments.into_iter().map(|segment| arena[segment].iter().map(decode).collect()).collect()
    }

    /// The exact result of `method`, over the layers laid end to end.
    pub fn expectation(&self, method: Method) -> Expectation {
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
    ///
    /// # Panics
    /// If the result or the report is wrong.
    pub fn check(&self, label: &str) -> Vec<Vec<f64>> {
        let what = format!("{label}, {}", self.name());
        let outcome = self.run();
        match self.algorithm {
            Algorithm::Gram => assert!(!outcome.tree, "{what}: asked for Gram, reported Tree"),
            Algorithm::Tree => assert!(outcome.tree, "{what}: asked for Tree, reported Gram"),
            _ => {}
        }
        self.compare(&what, &outcome)
    }

    /// Compares an outcome with the oracle, and returns the layers.
    ///
    /// # Panics
    /// If the result or the report is wrong.
    pub fn compare(&self, what: &str, outcome: &Outcome) -> Vec<Vec<f64>> {
        let expected = self.expectation(if outcome.tree { Method::Tree } else { Method::Gram });
        assert!(expected.bounds.iter().all(|bound| bound.is_finite()), "{what}: an infinite bound would check nothing");
        let layers = self.layers(outcome);
        assert_within(what, self.format, &layers.concat(), &expected.exact, &expected.bounds);
        if outcome.tree {
            assert_eq!((outcome.recomputed, &outcome.weights), (0, &None), "{what}: only Gram has these");
            return layers;
        }
        let weights = outcome.weights.as_ref().unwrap_or_else(|| panic!("{what}: Gram reports weights"));
        let weights: Vec<f64> = weights.iter().copied().map(f64::from_bits).collect();
        assert_within(&format!("weights, {what}"), Format::F64, &weights, &expected.weights, &expected.weight_bounds);
        let range = expected.surely_cancelled()..=expected.possibly_cancelled();
        assert!(range.contains(&outcome.recomputed), "{what}: {} layers recomputed, not {range:?}", outcome.recomputed);
        layers
    }

    /// A description for messages.
    pub fn name(&self) -> String {
        format!("{:?} {:?} {:?} over {}", self.format, self.algorithm, self.granularity, self.world_size())
    }
}
