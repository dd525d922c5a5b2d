//! Steps that do not move the weights: non-finite values, optimizers that fail, and refused calls.

use gradsync::comm::Ranks;
use gradsync::ops::{AdasumOptions, Algorithm};
use gradsync::train::{DeltaOptimizer, Reduction, StepOptions, StepOutcome, Stepper};
use gradsync::{Error, GradientBuffer, Result};
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{agreed, guarded, on_ranks};

use super::optimizers::{filled, flat};
use super::stepper_adasum::{adasum, on_nodes, random, sgd};

/// An optimizer that counts its calls and returns a prescribed outcome.
struct Probe {
    calls: usize,
    outcome: fn(usize) -> Result<f64>,
    rank: usize,
}

impl Probe {
    fn new(rank: usize, outcome: fn(usize) -> Result<f64>) -> Self {
        Self { calls: 0, outcome, rank }
    }
}

impl DeltaOptimizer for Probe {
    fn deltas(&mut self, _: &GradientBuffer, _: &GradientBuffer, deltas: &mut GradientBuffer) -> Result<()> {
        self.calls += 1;
        let value = (self.outcome)(self.rank)?;
        deltas.tensor_mut(0).into_data().typed::<f32>().unwrap().fill(value as f32);
        Ok(())
    }
}

/// Non-finite values between tensors belong to no tensor, and skip no step.
#[test]
fn gaps_that_are_not_finite_skip_nothing() {
    guarded(60, || {
        for format in Format::ALL {
            let outcome = agreed("gaps", 2, |comm| {
                let mut gradients = random(format, comm.rank());
                gradsync_tests::array::fill_gaps(&mut gradients, f64::NAN);
                let mut weights = random(Format::F32, 77);
                let mut probe = Probe::new(comm.rank(), |_| Ok(1.0));
                Stepper::new(&comm, adasum()).step(&gradients, &mut weights, &mut probe).unwrap().outcome
            });
            assert_eq!(outcome, StepOutcome::Applied, "{format:?}");
        }
    });
}

/// NaN or an infinity on one rank: no rank steps, no optimizer runs, and all ranks learn which rank had it.
#[test]
fn gradients_that_are_not_finite_skip_the_step_everywhere() {
    guarded(60, || {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for format in Format::ALL {
                for world_size in [1, 2, 3, 4] {
                    let culprit = world_size - 1;
                    let outcomes = agreed("skipped", world_size, |comm| {
                        let mut gradients = random(format, comm.rank());
                        if comm.rank() == culprit {
                            let place = gradients.segments()[1].start + 64;
                            gradsync_tests::array::write(gradients.as_mut_slice(), place, &[bad]);
                        }
                        let mut weights = random(Format::F32, 77);
                        let mut probe = Probe::new(comm.rank(), |_| Ok(1.0));
                        let report = Stepper::new(&comm, adasum()).step(&gradients, &mut weights, &mut probe).unwrap();
                        assert_eq!(probe.calls, 0, "the optimizer ran");
                        assert_eq!(flat(&weights), flat(&random(Format::F32, 77)), "weights moved");
                        report
                    });
                    let outcome = StepOutcome::GradientsNotFinite { ranks: vec![culprit] };
                    assert_eq!((outcomes.outcome, outcomes.adasum), (outcome, None));
                }
            }
        }
        // The value is on one node of three.
        for (bad, culprits) in [
            ([1.0, f64::NAN], vec![3]),
            ([f64::INFINITY, 1.0], vec![2]),
            ([f64::INFINITY, f64::NEG_INFINITY], vec![2, 3]),
        ] {
            let reports = on_nodes(3, 2, |nodes| {
                let value = if nodes.across.rank() == 1 { bad[nodes.node.rank()] } else { 1.0 };
                let gradients = filled(Format::F16, &[4], |_, len| vec![value; len]);
                let mut weights = filled(Format::F32, &[4], |_, len| vec![0.0; len]);
                Stepper::on_nodes(nodes, adasum()).step(&gradients, &mut weights, &mut sgd(0.1)).unwrap()
            });
            for report in reports.into_iter().flatten() {
                assert_eq!(report.outcome, StepOutcome::GradientsNotFinite { ranks: culprits.clone() }, "{bad:?}");
            }
        }
    });
}

/// A combined step that is not finite moves no weight, although the optimizers have run by then.
#[test]
fn deltas_that_are_not_finite_move_nothing() {
    guarded(60, || {
        for world_size in [1, 2, 3] {
            let reports = agreed("not finite", world_size, |comm| {
                let mut weights = random(Format::F32, 77);
                let mut probe = Probe::new(comm.rank(), |rank| Ok(if rank == 0 { f64::INFINITY } else { 1.0 }));
                let gradients = random(Format::F32, comm.rank());
                let report = Stepper::new(&comm, adasum()).step(&gradients, &mut weights, &mut probe).unwrap();
                assert_eq!(probe.calls, 1);
                assert_eq!(flat(&weights), flat(&random(Format::F32, 77)), "weights moved");
                report.outcome
            });
            assert_eq!(reports, StepOutcome::DeltasNotFinite, "over {world_size}");
        }
    });
}

/// One rank's optimizer fails: its own error gives the reason, the others' errors name the rank, and no weights move.
#[test]
fn an_optimizer_that_fails_alone_keeps_nobody_waiting() {
    guarded(20, || {
        let failing = |rank: usize| match rank {
            1 => Err(Error::InvalidArgument { operation: "probe", reason: "no step today".into() }),
            _ => Ok(1.0),
        };
        let texts = on_ranks(3, |comm| {
            let mut weights = random(Format::F32, 77);
            let mut probe = Probe::new(comm.rank(), failing);
            let gradients = random(Format::F32, comm.rank());
            let outcome = Stepper::new(&comm, adasum()).step(&gradients, &mut weights, &mut probe);
            assert_eq!(flat(&weights), flat(&random(Format::F32, 77)), "weights moved");
            comm.barrier().unwrap();
            outcome.expect_err("rank 1 failed").to_string()
        });
        assert!(texts[1].contains("no step today"), "{}", texts[1]);
        assert!(
            [0, 2].iter().all(|&rank| texts[rank].contains("rank 1 refuses") && texts[rank].contains("no step today")),
            "{texts:?}"
        );
    });
}

/// A rank's arguments: the lengths of its gradients, the lengths of its weights, and its options.
type Arguments = (Vec<usize>, Vec<usize>, StepOptions);

fn refused(words: &[&str], arguments: impl Fn(usize) -> Arguments + Sync) {
    let texts = on_ranks(3, |comm| {
        let (gradients, weights, options) = arguments(comm.rank());
        let gradients = filled(Format::F32, &gradients, |_, len| vec![1.0; len]);
        let mut weights = filled(Format::F32, &weights, |_, len| vec![1.0; len]);
        let mut probe = Probe::new(comm.rank(), |_| Ok(1.0));
        let outcome = Stepper::new(&comm, options).step(&gradients, &mut weights, &mut probe);
        assert_eq!(probe.calls, 0, "the optimizer ran");
        assert!(flat(&weights).iter().all(|&x| x == 1.0), "weights moved");
        comm.barrier().unwrap();
        outcome.expect_err("a bad call").to_string()
    });
    for text in texts {
        for word in words {
            assert!(text.contains(word), "\"{text}\" does not say \"{word}\"");
        }
    }
}

#[test]
fn refusals_are_everywhere_and_change_nothing() {
    guarded(60, || {
        let plain = StepOptions::from(adasum());
        let tree = AdasumOptions::default().with_algorithm(Algorithm::Tree);
        refused(&["`accumulation_steps` is 0"], |_| (vec![3], vec![3], plain.with_accumulation_steps(0)));
        refused(&["power of two", "3"], |_| (vec![3], vec![3], plain.with_reduction(Reduction::Adasum(tree))));
        refused(&["[3]", "[4]"], |_| (vec![3], vec![4], plain));
        refused(&["gradients has 1", "weights has 2"], |_| (vec![3], vec![3, 3], plain));
        refused(&["rank 0", "rank 1"], |rank| (vec![3 + rank % 2], vec![3 + rank % 2], plain));
        refused(&["[3]", "[4]"], |rank| (vec![3], vec![3 + rank % 2], plain));
        refused(&["rank 0", "rank 1"], |rank| (vec![3], vec![3], plain.with_accumulation_steps(1 + rank % 2)));
        refused(&["`accumulation_steps` is 0"], |rank| (vec![3], vec![3], plain.with_accumulation_steps(1 - rank % 2)));
        refused(&["rank 0 has adasum_all_reduce(Auto, per tensor), rank 1 has all_reduce(mean)"], |rank| {
            let reduction = if rank == 1 { Reduction::Mean } else { adasum() };
            (vec![3], vec![3], plain.with_reduction(reduction))
        });
    });
}

/// One rank of one node makes an invalid call: every rank of every node learns it.
#[test]
fn a_rank_that_is_wrong_alone_stops_every_node() {
    guarded(20, || {
        let texts = on_nodes(3, 2, |nodes| {
            let len = if nodes.all.rank() == 5 { 5 } else { 4 };
            let gradients = filled(Format::F32, &[len], |_, len| vec![1.0; len]);
            let mut weights = filled(Format::F32, &[len], |_, len| vec![1.0; len]);
            let outcome = Stepper::on_nodes(nodes, adasum()).step(&gradients, &mut weights, &mut sgd(0.1));
            nodes.node.barrier().unwrap();
            nodes.across.barrier().unwrap();
            outcome.expect_err("one rank has another tensor").to_string()
        });
        let expected = "training step: ranks disagree on tensor 0 \"t0\" of the gradients: rank 0 has shape [4], rank 5 has shape [5]";
        assert!(texts.iter().flatten().all(|text| text == expected), "{texts:?}");
    });
}
