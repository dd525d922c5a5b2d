//! Steps by mean and sum, and the first step of any kind: the ranks' weights become equal or are compared, and so are the groups.

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Communicator, Ranks, Split};
use gradsync::ops::Nodes;
use gradsync::train::{AdamWOptions, DeltaOptimizer, Reduction, Start, StepOptions, StepOutcome, Stepper};
use gradsync::{DType, Error, GradientBuffer};
use gradsync_tests::array::{patterns_of, write};
use gradsync_tests::oracle::{Format, elementwise, reduce};
use gradsync_tests::ranks::{agreed, guarded, on_ranks};

use super::optimizers::{adamw, filled, flat, state};
use super::stepper_adasum::{adasum, on_nodes, random, sgd};

fn all() -> [Reduction; 3] {
    [Reduction::Mean, Reduction::Sum, adasum()]
}

/// Plain SGD with the rate 1/2 on the ranks' means and sums, element by element: gradients divided by the accumulation steps, reduced, and
/// added to the weights, each rounded once; the half is exact.
#[test]
fn means_and_sums_against_the_oracle() {
    guarded(60, || {
        let cases = [(Reduction::Mean, reduce::Op::Mean), (Reduction::Sum, reduce::Op::Sum)];
        for ((reduction, op), format) in cases.into_iter().flat_map(|case| Format::ALL.map(|format| (case, format))) {
            for (world_size, accumulation_steps) in [(1, 1), (2, 1), (3, 1), (4, 3)] {
                let what = format!("{op:?} of {format:?} over {world_size}");
                let options = StepOptions::from(reduction).with_accumulation_steps(accumulation_steps);
                let got = agreed(&what, world_size, |comm| {
                    let (gradients, mut weights) = (random(format, comm.rank()), random(Format::F32, 77));
                    let report = Stepper::new(&comm, options).step(&gradients, &mut weights, &mut sgd(0.5)).unwrap();
                    assert_eq!(report.outcome, StepOutcome::Applied, "{what}");
                    assert_eq!(flat(&gradients), flat(&random(format, comm.rank())), "{what}: the caller's gradients");
                    flat(&weights)
                });
                let factor = 1.0 / accumulation_steps as f64;
                let scale = |x: f64| elementwise::scale(format, format, x, factor);
                let of_rank = |rank| flat(&random(format, rank)).into_iter().map(scale).collect();
                let inputs: Vec<Vec<f64>> = (0..world_size).map(of_rank).collect();
                let joined = reduce::all_reduce(op, format, &inputs);
                let delta = |gradient: f64| Format::F32.round(-(0.5 * gradient));
                let sum =
                    |(weight, gradient)| elementwise::accumulate(Format::F32, weight, Format::F32, delta(gradient));
                let expected: Vec<f64> = flat(&random(Format::F32, 77)).into_iter().zip(joined).map(sum).collect();
                assert_eq!(got, expected, "{what}");
            }
        }
    });
}

/// Nodes do not change a mean over all ranks, and many steps with state keep all ranks equal.
#[test]
fn means_on_nodes_over_many_steps() {
    guarded(60, || {
        let train = |mut stepper: Stepper<'_>, rank: usize| {
            let (mut weights, mut adam) = (random(Format::F32, 77), adamw(AdamWOptions::default()));
            for step in 0..5 {
                let gradients = random(Format::BF16, 10 * step + rank);
                let report = stepper.step(&gradients, &mut weights, &mut adam).unwrap();
                assert_eq!((report.outcome, report.adasum), (StepOutcome::Applied, None));
            }
            patterns_of(weights.as_slice())
        };
        let plain = agreed("mean", 4, |comm| train(Stepper::new(&comm, Reduction::Mean), comm.rank()));
        let nodes = on_nodes(2, 2, |nodes| train(Stepper::on_nodes(nodes, Reduction::Mean), nodes.all.rank()));
        assert!(nodes.into_iter().flatten().all(|weights| weights == plain));
    });
}

/// One rank has one NaN: for every kind of reduction, moments and weights of all ranks stay unchanged, bit for bit, and the next step is as
/// if there had been none.
#[test]
fn one_nan_leaves_every_moment_and_weight_alone() {
    guarded(60, || {
        for reduction in all() {
            let train = |bad: Option<f64>| {
                agreed("one NaN", 3, |comm| {
                    let mut stepper = Stepper::new(&comm, reduction);
                    let (mut weights, mut adam) = (random(Format::F32, 77), adamw(AdamWOptions::default()));
                    for step in 0..3 {
                        let gradients = random(Format::F32, 10 * step + comm.rank());
                        if let Some(bad) = bad.filter(|_| step > 0) {
                            let before = (state(&adam), patterns_of(weights.as_slice()));
                            let mut poisoned = random(Format::F32, 10 * step + comm.rank());
                            if comm.rank() == 1 {
                                write(poisoned.as_mut_slice(), 3, &[bad]);
                            }
                            let report = stepper.step(&poisoned, &mut weights, &mut adam).unwrap();
                            assert_eq!(report.outcome, StepOutcome::GradientsNotFinite { ranks: vec![1] });
                            assert_eq!((state(&adam), patterns_of(weights.as_slice())), before, "{reduction:?}");
                        }
                        let report = stepper.step(&gradients, &mut weights, &mut adam).unwrap();
                        assert_eq!(report.outcome, StepOutcome::Applied);
                    }
                    patterns_of(weights.as_slice())
                })
            };
            for bad in [f64::NAN, f64::INFINITY] {
                assert_eq!(train(Some(bad)), train(None), "{reduction:?}");
            }
        }
    });
}

/// Finite gradients have a sum that is not finite: no single rank caused it, and all ranks are named.
#[test]
fn a_sum_that_overflows_skips_the_step() {
    guarded(20, || {
        let half_of_f16 = |_, len| vec![40_000.0; len];
        let outcome = agreed("overflow", 2, |comm| {
            let (gradients, mut weights) =
                (filled(Format::F16, &[4], half_of_f16), filled(Format::F32, &[4], half_of_f16));
            Stepper::new(&comm, Reduction::Sum).step(&gradients, &mut weights, &mut sgd(0.5)).unwrap().outcome
        });
        assert_eq!(outcome, StepOutcome::GradientsNotFinite { ranks: vec![0, 1] });
    });
}

/// Weights, changed by the last bit of one element of tensor `t1` if `is_other`.
fn weights(is_other: bool) -> GradientBuffer {
    let mut weights = random(Format::F32, 77);
    if is_other {
        let place = weights.segments()[1].start + 7;
        let value = weights.tensor(1).data().to_f64_vec()[7] as f32;
        write(weights.as_mut_slice(), place, &[f64::from(f32::from_bits(value.to_bits() ^ 1))]);
    }
    weights
}

#[test]
fn weights_that_differ_are_refused_with_the_ranks_named() {
    guarded(60, || {
        let cases: [(usize, &[usize], &str); 5] = [
            (2, &[1], "the weights of rank 1 differ from those of rank 0"),
            (3, &[0], "the weights of rank 0 differ from those of ranks [1, 2]"),
            (4, &[2], "the weights of rank 2 differ from those of ranks [0, 1, 3]"),
            (4, &[1, 3], "the weights of ranks [1, 3] differ from those of ranks [0, 2]"),
            (5, &[0, 2, 4], "the weights of ranks [1, 3] differ from those of ranks [0, 2, 4]"),
        ];
        for ((world_size, others, words), reduction) in
            cases.into_iter().flat_map(|case| all().map(|reduction| (case, reduction)))
        {
            let text = agreed(words, world_size, |comm| {
                let mut stepper = Stepper::new(&comm, StepOptions::from(reduction).with_start(Start::Compare));
                let (gradients, mut odd) = (random(Format::F32, comm.rank()), weights(others.contains(&comm.rank())));
                let before = patterns_of(odd.as_slice());
                let error = stepper.step(&gradients, &mut odd, &mut sgd(0.1)).expect_err("weights differ");
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
                assert_eq!(patterns_of(odd.as_slice()), before, "weights moved");
                // The group stays usable: with equal weights the same stepper goes on.
                let report = stepper.step(&gradients, &mut weights(false), &mut sgd(0.1)).unwrap();
                assert_eq!(report.outcome, StepOutcome::Applied);
                error.to_string()
            });
            assert!(text.contains(words) && text.contains("\"t1\""), "{text}");
        }
    });
}

/// After a mean or a sum, optimizers with different options or states would make the ranks' weights diverge: no weight moves. After Adasum
/// they may differ.
#[test]
fn optimizers_that_would_part_the_weights_are_refused() {
    guarded(20, || {
        for reduction in all() {
            let outcomes = on_ranks(3, |comm| {
                let (gradients, mut weights) = (random(Format::F32, comm.rank()), random(Format::F32, 77));
                let mut sgd = sgd(if comm.rank() == 1 { 0.25 } else { 0.5 });
                let outcome = Stepper::new(&comm, reduction).step(&gradients, &mut weights, &mut sgd);
                let moved = flat(&weights) != flat(&random(Format::F32, 77));
                (moved, outcome.map(|report| report.outcome).map_err(|error| error.to_string()))
            });
            for (moved, outcome) in outcomes {
                if reduction == adasum() {
                    assert_eq!((moved, outcome), (true, Ok(StepOutcome::Applied)));
                } else {
                    let (text, words) =
                        (outcome.expect_err("refused"), "steps of rank 1 differ from those of ranks [0, 2]");
                    assert!(!moved && text.contains(words) && text.contains("equal options"), "{text}");
                }
            }
        }
    });
}

/// Values between tensors are not compared.
#[test]
fn gaps_that_differ_are_no_difference() {
    guarded(20, || {
        let outcomes = on_ranks(2, |comm| {
            let mut gaps = weights(false);
            gradsync_tests::array::fill_gaps(&mut gaps, comm.rank() as f64);
            let options = StepOptions::from(adasum()).with_start(Start::Compare);
            Stepper::new(&comm, options).step(&random(Format::F32, 1), &mut gaps, &mut sgd(0.1)).unwrap().outcome
        });
        assert!(outcomes.iter().all(|outcome| *outcome == StepOutcome::Applied));
    });
}

/// Weights that are NaN on all ranks are equal, and no weights to start from.
#[test]
fn equal_weights_that_are_not_finite_are_refused_by_name() {
    guarded(20, || {
        for world_size in [1, 2, 3] {
            let text = agreed("NaN", world_size, |comm| {
                let mut weights = random(Format::F32, 77);
                let place = weights.segments()[1].start + 5;
                write(weights.as_mut_slice(), place, &[f64::NAN]);
                let options = StepOptions::from(Reduction::Mean).with_start(Start::Compare);
                let gradients = random(Format::F32, comm.rank());
                Stepper::new(&comm, options).step(&gradients, &mut weights, &mut sgd(0.1)).unwrap_err().to_string()
            });
            assert!(
                text.contains(r#"the weights are equal on all ranks but not finite: element 5 of "t1" is NaN"#),
                "{text}"
            );
        }
    });
}

/// An optimizer that fails unless it gets the weights of rank 0: its steps depend on weights, as those with weight decay do.
struct Decay;

impl DeltaOptimizer for Decay {
    fn deltas(
        &mut self,
        _: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> gradsync::Result<()> {
        if patterns_of(weights.as_slice()) != patterns_of(random(Format::F32, 70).as_slice()) {
            return Err(Error::InvalidArgument { operation: "decay", reason: "weights of another rank".into() });
        }
        for index in 0..weights.tensor_count() {
            gradsync::internal::kernels::cpu::scale(
                deltas.tensor_mut(index).into_data(),
                weights.tensor(index).data(),
                -0.5,
            )?;
        }
        Ok(())
    }
}

/// Ranks whose initial weights differ train one model, the one of rank 0, from the first step on, for every kind of reduction, with and
/// without nodes; later steps broadcast nothing.
#[test]
fn ranks_start_from_the_weights_of_rank_0() {
    guarded(120, || {
        let train = |mut stepper: Stepper<'_>, rank: usize, own: usize| {
            let mut weights = random(Format::F32, 70 + own);
            let report = stepper.step(&random(Format::F32, rank), &mut weights, &mut Decay).unwrap();
            assert_eq!(report.outcome, StepOutcome::Applied);
            let first = patterns_of(weights.as_slice());
            let mut other = random(Format::F32, 80 + rank);
            let (options, before) = (stepper.options, flat(&other));
            stepper.options = options.with_compare_deltas(false);
            let report = stepper.step(&random(Format::F32, 90), &mut other, &mut sgd(0.0)).unwrap();
            assert_eq!(
                (report.outcome, flat(&other)),
                (StepOutcome::Applied, before),
                "a broadcast in the second step"
            );
            first
        };
        for reduction in all() {
            for world_size in [1, 2, 3, 4] {
                let of = |is_odd: bool| {
                    agreed("start", world_size, |comm| {
                        train(Stepper::new(&comm, reduction), comm.rank(), if is_odd { comm.rank() } else { 0 })
                    })
                };
                assert_eq!(of(true), of(false), "{reduction:?} on {world_size}");
            }
            let of = |is_odd: bool| {
                on_nodes(2, 2, |nodes| {
                    let rank = nodes.all.rank();
                    train(Stepper::on_nodes(nodes, reduction), rank, if is_odd { rank } else { 0 })
                })
            };
            let [odd, equal] = [true, false].map(of);
            assert!(
                odd.iter().chain(&equal).flatten().all(|weights| *weights == equal[0][0]),
                "{reduction:?} on nodes"
            );
        }
    });
}

/// What is refused leaves every rank its own weights, and the next step without an error is the first one.
#[test]
fn a_refused_first_step_broadcasts_nothing() {
    guarded(60, || {
        for reduction in all() {
            agreed("refused", 3, |comm| {
                let own = random(Format::F32, 70 + comm.rank());
                let mut weights = random(Format::F32, 70 + comm.rank());
                let (gradients, plain) = (random(Format::F32, comm.rank()), StepOptions::from(reduction));
                let mut stepper = Stepper::new(&comm, plain.with_accumulation_steps(usize::from(comm.rank() != 1)));
                let mut refused = |stepper: &mut Stepper<'_>, gradients: &GradientBuffer, words: &str| {
                    let error = stepper.step(gradients, &mut weights, &mut Decay).expect_err(words).to_string();
                    assert!(error.contains(words), "{error}");
                    assert_eq!(patterns_of(weights.as_slice()), patterns_of(own.as_slice()), "weights moved");
                };
                refused(&mut stepper, &gradients, "`accumulation_steps` is 0");
                stepper.options = plain.with_delta_dtype(Some(DType::I32));
                refused(&mut stepper, &gradients, "elements of i32");
                stepper.options = plain;
                let short = filled(Format::F32, &[5], |_, len| vec![1.0; len]);
                refused(&mut stepper, if comm.rank() == 2 { &short } else { &gradients }, "gradients");
                stepper.options = plain.with_start(if comm.rank() == 2 { Start::Compare } else { Start::Broadcast });
                refused(&mut stepper, &gradients, "ranks disagree on start: rank 0 has broadcast, rank 2 has compare");
                stepper.options = plain.with_start(Start::Compare);
                refused(&mut stepper, &gradients, "the weights of ranks [1, 2] differ from those of rank 0");
                stepper.options = plain;
                let report = stepper.step(&gradients, &mut weights, &mut Decay).unwrap();
                assert_eq!(report.outcome, StepOutcome::Applied);
                patterns_of(weights.as_slice())
            });
        }
    });
}

/// `start` makes weights equal before the first gradients are computed, the first step then leaves them alone, and a later call makes them
/// equal again.
#[test]
fn a_start_makes_weights_equal_before_the_first_step_and_again() {
    guarded(60, || {
        let equal = patterns_of(random(Format::F32, 70).as_slice());
        let run = |mut stepper: Stepper<'_>, rank: usize| {
            let mut weights = random(Format::F32, 70 + rank);
            stepper.options.start = Start::Compare;
            let error = stepper.start(&mut weights).map_err(|error| error.to_string());
            stepper.options.start = Start::Broadcast;
            stepper.start(&mut weights).unwrap();
            assert_eq!(patterns_of(weights.as_slice()), equal);
            // The first step does not broadcast again.
            let mut own = random(Format::F32, 80 + rank);
            let outcome = stepper.step(&random(Format::F32, 1), &mut own, &mut sgd(0.0)).unwrap().outcome;
            assert_eq!((outcome, flat(&own)), (StepOutcome::Applied, flat(&random(Format::F32, 80 + rank))));
            stepper.start(&mut own).unwrap();
            assert_eq!(flat(&own), flat(&random(Format::F32, 80)));
            error
        };
        for world_size in [1, 2, 4] {
            let outcome = agreed("start", world_size, |comm| run(Stepper::new(&comm, Reduction::Mean), comm.rank()));
            assert_eq!(outcome.is_err(), world_size > 1, "{outcome:?}");
        }
        for outcome in
            on_nodes(2, 2, |nodes| run(Stepper::on_nodes(nodes, adasum()), nodes.all.rank())).into_iter().flatten()
        {
            assert!(outcome.unwrap_err().contains("the weights of ranks [1, 2, 3] differ from those of rank 0"));
        }
        let texts = on_ranks(2, |comm| {
            let (mut stepper, mut weights) = (Stepper::new(&comm, Reduction::Mean), random(Format::F32, 70));
            let outcome = match comm.rank() {
                0 => stepper.start(&mut weights),
                _ => stepper.step(&random(Format::F32, 1), &mut weights, &mut sgd(0.1)).map(drop),
            };
            outcome.unwrap_err().to_string()
        });
        for text in texts {
            assert_eq!(text, "training step: ranks disagree on call: rank 0 has start, rank 1 has step");
        }
    });
}

/// A first step that is skipped has made the weights equal all the same, and the optimizer of the next one gets them.
#[test]
fn a_skipped_first_step_is_a_start() {
    guarded(20, || {
        agreed("skipped", 3, |comm| {
            let mut weights = random(Format::F32, 70 + comm.rank());
            let mut stepper = Stepper::new(&comm, Reduction::Mean);
            let mut gradients = random(Format::F32, comm.rank());
            write(gradients.as_mut_slice(), 0, &[if comm.rank() == 1 { f64::NAN } else { 1.0 }]);
            let report = stepper.step(&gradients, &mut weights, &mut Decay).unwrap();
            assert_eq!(report.outcome, StepOutcome::GradientsNotFinite { ranks: vec![1] });
            let report = stepper.step(&random(Format::F32, comm.rank()), &mut weights, &mut Decay).unwrap();
            assert_eq!(report.outcome, StepOutcome::Applied);
            patterns_of(weights.as_slice())
        });
    });
}

/// The error of every rank in a first step on groups that `groups` splits off its world.
fn refusals(world_size: usize, groups: impl Fn(&LocalCommunicator) -> [LocalCommunicator; 3] + Sync) -> Vec<String> {
    on_ranks(world_size, |comm| {
        let [all, node, across] = groups(&comm);
        let nodes = Nodes { all: &all as &dyn Communicator, node: &node, across: &across };
        let (gradients, mut weights) = (random(Format::F32, comm.rank()), random(Format::F32, 77));
        let outcome = Stepper::on_nodes(nodes, adasum()).step(&gradients, &mut weights, &mut sgd(0.1));
        assert!(flat(&weights) == flat(&random(Format::F32, 77)), "weights moved");
        let error = outcome.expect_err("the groups are no nodes");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        error.to_string()
    })
}

fn split(comm: &LocalCommunicator, color: usize) -> LocalCommunicator {
    comm.split(Some(color as u64), 0).unwrap().expect("every rank has a colour")
}

#[test]
fn groups_that_are_no_nodes_of_all_ranks_are_refused() {
    guarded(60, || {
        // The world is split into two groups of two ranks, and each node has a rank of both groups.
        for text in refusals(4, |comm| [comm.rank() / 2, comm.rank() % 2, comm.rank()].map(|color| split(comm, color)))
        {
            assert!(text.contains("the group \"node\" of rank 0 has ranks that are not among all 2 ranks"), "{text}");
        }
        // One rank of a node is in the group of all ranks, the other is not.
        for text in refusals(4, |comm| [comm.rank() / 2, comm.rank(), comm.rank() % 2].map(|color| split(comm, color)))
        {
            assert!(text.contains("the group \"across\" of rank 0 has ranks that are not among all 2 ranks"), "{text}");
        }
        // Adasum over all ranks would combine steps that nodes have already reduced.
        for text in refusals(4, |comm| [0, comm.rank() / 2, 0].map(|color| split(comm, color))) {
            assert!(text.contains("4 nodes of 2 ranks, and there are 4 ranks in all"), "{text}");
        }
    });
}

/// A rank without nodes does not keep the others waiting.
#[test]
fn ranks_with_and_without_nodes_are_refused() {
    guarded(20, || {
        let texts = on_ranks(2, |comm| {
            let [node, across] = [0, comm.rank()].map(|color| split(&comm, color));
            let mut stepper = match comm.rank() {
                0 => Stepper::on_nodes(Nodes { all: &comm, node: &node, across: &across }, adasum()),
                _ => Stepper::new(&comm, adasum()),
            };
            let (gradients, mut weights) = (random(Format::F32, 1), random(Format::F32, 77));
            stepper.step(&gradients, &mut weights, &mut sgd(0.1)).expect_err("nodes on one rank alone").to_string()
        });
        for text in texts {
            assert_eq!(text, "training step: ranks disagree on ranks per node: rank 0 has 2, rank 1 has no nodes");
        }
    });
}
