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
use gradsync_tests::tolerance::adasum::Method;
use gradsync_tests::tolerance::assert_within;

use gradsync_tests::suite::adasum::case::{Case, Outcome};
use gradsync_tests::suite::adasum::known;
use gradsync_tests::suite::checks::Checks;

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
            Outcome::new(arena, adasum.report().unwrap())
        };
        let (first, second) = (once(), once());
        let mut checks = Checks::new(self.comm);
        checks.same_list(format!("{what}: the second run's bits"), second.arena.clone(), first.arena.clone());
        let weights = |outcome: &Outcome| outcome.weights.clone().unwrap_or_default();
        checks.same_list(format!("{what}: the second run's weights"), weights(&second), weights(&first));
        let rest = |outcome: &Outcome| vec![outcome.recomputed, usize::from(outcome.tree)];
        checks.same_list(format!("{what}: the second run's report"), rest(&second), rest(&first));
        checks.finish();
        first
    }

    /// Runs a case and compares everything with the oracle, and the result with the CPU's result; returns its layers.
    pub(super) fn check(&self, case: &Case, label: &str) -> Vec<Vec<f64>> {
        let what = format!("{label}, {}, {:?}", case.name(), self.way);
        let outcome = self.run(case, &what);
        // In a world of one, neither algorithm runs.
        if case.world_size() > 1 && case.algorithm != Algorithm::Auto {
            assert_eq!(outcome.tree, case.algorithm == Algorithm::Tree, "{what}: another algorithm is reported");
        }
        let layers = case.compare(&what, &outcome);
        // Each result is within its bound of the exact one, so they differ by at most the sum of both bounds.
        let expected = case.expectation(if outcome.tree { Method::Tree } else { Method::Gram });
        let cpu = case.layers(&case.run_once(&what)).concat();
        let apart: Vec<f64> = expected.bounds.iter().map(|bound| 2.0 * bound).collect();
        assert_within(&format!("against the CPU, {what}"), case.format, &layers.concat(), &cpu, &apart);
        layers
    }
}

impl known::Runner for Runner<'_> {
    /// Those that depend on the path.
    fn algorithms(&self, world_size: usize) -> &'static [Algorithm] {
        // The tree is computed over the transport alone; in a world of one, there is one path.
        let has_tree = self.way == Way::Transport || world_size == 1;
        if has_tree && world_size.is_power_of_two() { &[Algorithm::Gram, Algorithm::Tree] } else { &[Algorithm::Gram] }
    }

    fn run(&self, case: &Case, what: &str) -> Outcome {
        self.run(case, what)
    }

    fn check(&self, case: &Case, label: &str) -> Vec<Vec<f64>> {
        self.check(case, label)
    }
}
