//! A case on this rank's GPU, and the reference results.
//!
//! Ranks compare their bits with each other and with a second run, before any comparison with the expected result.

use gradsync::comm::Communicator;
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::{AdasumOptions, Algorithm};
use gradsync::{GradientBuffer, Result};
use gradsync_tests::array::{dtype, patterns_of};
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::adasum::Method;
use gradsync_tests::tolerance::assert_within;

use super::case::Case;
use crate::checks::Checks;

/// The path by which ranks access each other's vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By kernels that access peer memory, where there are several ranks.
    Peers,
    /// By packets, which carry every rank's vector to all others.
    OneShot,
    /// By packets of the shards of vectors, products and results.
    TwoShots,
    /// By the communicator's own collectives.
    Transport,
}

impl Way {
    /// The paths that differ for this world size.
    pub(super) fn all(world_size: usize) -> &'static [Way] {
        if world_size > 1 { &[Way::Peers, Way::OneShot, Way::TwoShots, Way::Transport] } else { &[Way::Peers] }
    }

    pub(super) fn prepare<'c>(
        self,
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
    ) -> Result<Adasum<'c, Cuda>> {
        match self {
            Way::Peers => Adasum::with_low_latency(comm, buffer, options, Some(0), None),
            Way::OneShot => Adasum::with_low_latency(comm, buffer, options, Some(usize::MAX), Some(usize::MAX)),
            Way::TwoShots => Adasum::with_low_latency(comm, buffer, options, Some(usize::MAX), Some(0)),
            Way::Transport => Adasum::over_transport(comm, buffer, options),
        }
    }
}

/// The outcome of one reduction on this rank.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The bits of the whole arena, gaps included.
    pub(super) arena: Vec<u64>,
    is_tree: bool,
    /// The weights as bits, so that NaN equals itself; `None` where the report has none.
    weights: Option<Vec<u64>>,
    pub(super) recomputed: usize,
}

/// The queue, the communicator and the path on which cases run.
#[derive(Clone, Copy)]
pub(super) struct Runner<'c> {
    pub(super) queue: &'c Queue,
    pub(super) comm: &'c dyn Communicator<Cuda>,
    pub(super) way: Way,
}

impl Runner<'_> {
    /// A buffer for a case's tensors, of zeros.
    pub(super) fn zeros(&self, case: &Case) -> GradientBuffer<Cuda> {
        GradientBuffer::on_queue(self.queue, dtype(case.format), case.world_size(), case.tensors()).unwrap()
    }

    /// A buffer for a case's tensors, filled with this rank's values.
    pub(super) fn buffer(&self, case: &Case) -> GradientBuffer<Cuda> {
        let mut buffer = self.zeros(case);
        buffer.copy_from_host(&case.buffer(self.comm.rank())).unwrap();
        buffer
    }

    /// The bits of the whole arena, after the queue's work.
    pub(super) fn bits(&self, case: &Case, buffer: &GradientBuffer<Cuda>) -> Vec<u64> {
        self.comm.synchronize(self.queue).unwrap();
        let mut host = case.zeros();
        buffer.copy_to_host(&mut host).unwrap();
        patterns_of(host.as_slice())
    }

    /// Runs a case twice, with one workspace in one buffer.
    pub(super) fn run(&self, case: &Case, what: &str) -> Outcome {
        let mut buffer = self.buffer(case);
        let mut adasum = self.way.prepare(self.comm, &buffer, case.options()).unwrap();
        let mut once = || {
            buffer.copy_from_host(&case.buffer(self.comm.rank())).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            let arena = self.bits(case, &buffer);
            let report = adasum.report().unwrap();
            Outcome {
                arena,
                is_tree: report.algorithm == Algorithm::Tree,
                weights: report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect()),
                recomputed: report.recomputed,
            }
        };
        let (first, second) = (once(), once());
        let mut checks = Checks::new(self.comm);
        checks.same_list(format!("{what}: the second run's bits"), second.arena.clone(), first.arena.clone());
        let weights = |outcome: &Outcome| outcome.weights.clone().unwrap_or_default();
        checks.same_list(format!("{what}: the second run's weights"), weights(&second), weights(&first));
        let rest = |outcome: &Outcome| vec![outcome.recomputed, usize::from(outcome.is_tree)];
        checks.same_list(format!("{what}: the second run's report"), rest(&second), rest(&first));
        checks.finish();
        first
    }

    /// Runs a case and compares everything with the oracle, and the result with the CPU's result; returns its layers.
    pub(super) fn check(&self, case: &Case, label: &str) -> Vec<Vec<f64>> {
        let what = format!("{label}, {}, {:?}", case.name(), self.way);
        let outcome = self.run(case, &what);
        let layers = layers(case, &outcome.arena, &what);
        // In a world of one, neither algorithm runs.
        if case.world_size() > 1 && case.algorithm != Algorithm::Auto {
            assert_eq!(outcome.is_tree, case.algorithm == Algorithm::Tree, "{what}: another algorithm is reported");
        }

        let expected = case.expectation(if outcome.is_tree { Method::Tree } else { Method::Gram });
        assert!(expected.bounds.iter().all(|bound| bound.is_finite()), "{what}: an infinite bound would check nothing");
        let got = layers.concat();
        assert_within(&what, case.format, &got, &expected.exact, &expected.bounds);
        // Each result is within its bound of the exact one, so they differ by at most the sum of both bounds.
        let cpu = case.layers(&case.run_once(&what)).concat();
        let apart: Vec<f64> = expected.bounds.iter().map(|bound| 2.0 * bound).collect();
        assert_within(&format!("against the CPU, {what}"), case.format, &got, &cpu, &apart);

        if outcome.is_tree {
            assert_eq!((outcome.recomputed, &outcome.weights), (0, &None), "{what}: only Gram has these");
            return layers;
        }
        let weights = outcome.weights.unwrap_or_else(|| panic!("{what}: Gram reports weights"));
        let weights: Vec<f64> = weights.into_iter().map(f64::from_bits).collect();
        assert_within(&format!("weights, {what}"), Format::F64, &weights, &expected.weights, &expected.weight_bounds);
        let range = expected.surely_cancelled()..=expected.possibly_cancelled();
        assert!(range.contains(&outcome.recomputed), "{what}: {} layers recomputed, not {range:?}", outcome.recomputed);
        layers
    }
}

/// The layers of a result, in order, without the gaps; panics if a gap is not zero.
pub(super) fn layers(case: &Case, arena: &[u64], what: &str) -> Vec<Vec<f64>> {
    let segments = case.buffer(0).segments().to_vec();
    let inside = |place: usize| segments.iter().any(|segment| segment.contains(&place));
    for (place, &bits) in arena.iter().enumerate() {
        assert!(bits == 0 || inside(place), "{what}: the gap at element {place} is not zero any more");
    }
    let decode = |bits: &u64| case.format.decode(*bits);
    segments.into_iter().map(|segment| arena[segment].iter().map(decode).collect()).collect()
}
