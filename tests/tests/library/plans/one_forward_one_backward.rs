//! The schedule of a pipeline, run by the simulator with passes of several lengths.

use gradsync::ops::send_recv::{Payload, PipelineStep, RankSchedule, Schedule, Stage};
use proptest::prelude::*;

use super::schedule::{Action, Event, run};

fn pipeline(stages: usize, micro_batches: usize) -> Vec<Stage> {
    (0..stages).map(|stage| Stage::one_forward_one_backward(stage, stages, micro_batches).unwrap()).collect()
}

/// The passes of one stage, without its transfers.
fn passes(stage: &Stage) -> Vec<PipelineStep> {
    stage.steps.iter().copied().filter(|step| !matches!(step, PipelineStep::Slot(_))).collect()
}

/// Forward pass k has the number 2k, and backward pass k the number 2k + 1.
fn program<'a>(stage: &'a Stage, [forward, backward]: [u64; 2]) -> Vec<Action<'a, Payload>> {
    let action = |step: &PipelineStep| match *step {
        PipelineStep::Forward(k) => Action::Compute { number: 2 * k, ticks: forward },
        PipelineStep::Backward(k) => Action::Compute { number: 2 * k + 1, ticks: backward },
        PipelineStep::Slot(slot) => {
            Action::Group(stage.transfers.slot(slot).expect("a step names a slot that is there"))
        }
    };
    stage.steps.iter().map(action).collect()
}

/// Checks that all inputs of a stage's pass are present before it, and that every event happens once. Returns the largest number of
/// micro-batches for which the stage keeps activations, and the largest number that wait for their forward pass.
fn check_stage(stage: usize, stages: usize, micro_batches: usize, events: &[Event<Payload>]) -> (usize, usize) {
    let at = |wanted: Event<Payload>| events.iter().position(|event| *event == wanted);
    let computed = |number| at(Event::Computed { number }).expect("every pass happens");
    let mut wanted = 2 * micro_batches;
    for k in 0..micro_batches {
        let (forward, backward) = (computed(2 * k), computed(2 * k + 1));
        assert!(forward < backward);
        if stage > 0 {
            let arrived = at(Event::Received { from: stage - 1, what: Payload::Activation(k) });
            assert!(arrived.is_some_and(|arrived| arrived < forward), "activation {k} at stage {stage}");
            wanted += 1;
        }
        if stage + 1 < stages {
            let arrived = at(Event::Received { from: stage + 1, what: Payload::Gradient(k) });
            assert!(arrived.is_some_and(|arrived| arrived < backward), "gradient {k} at stage {stage}");
            wanted += 1;
        }
    }
    assert_eq!(events.len(), wanted);
    let (mut kept, mut most_kept, mut waiting, mut most_waiting) = (0, 0, 0, 0);
    for event in events {
        match event {
            Event::Computed { number } if number % 2 == 0 => {
                kept += 1;
                waiting -= isize::from(stage > 0);
            }
            Event::Computed { .. } => kept -= 1,
            Event::Received { what: Payload::Activation(_), .. } => waiting += 1,
            Event::Received { .. } => {}
        }
        most_kept = most_kept.max(kept);
        most_waiting = most_waiting.max(waiting as usize);
    }
    (most_kept, most_waiting)
}

/// Checks a pipeline, and returns its total duration.
fn check(stages: usize, micro_batches: usize, ticks: [u64; 2]) -> u64 {
    let plan = pipeline(stages, micro_batches);
    let parts: Vec<RankSchedule<Payload>> = plan.iter().map(|stage| stage.transfers.clone()).collect();
    Schedule::from_ranks(parts).unwrap();
    let programs: Vec<_> = plan.iter().map(|stage| program(stage, ticks)).collect();
    let ranks = run(&programs).unwrap_or_else(|stuck| panic!("stages {stuck:?} of {stages} never end"));
    for (stage, ended) in ranks.iter().enumerate() {
        let (kept, waiting) = check_stage(stage, stages, micro_batches, &ended.events);
        assert_eq!(kept, micro_batches.min(stages - stage), "stage {stage} of {stages}, {micro_batches} micro-batches");
        assert!(waiting <= usize::from(stage > 0), "{waiting} activations wait at stage {stage} of {stages}");
        // Each slot of the stage is one of its steps, once, and in order.
        let slots = plan[stage].steps.iter().filter_map(|step| match step {
            PipelineStep::Slot(slot) => Some(*slot),
            _ => None,
        });
        assert!(slots.eq(plan[stage].transfers.slots().map(|(slot, _)| slot)));
    }
    ranks.iter().map(|ended| ended.clock).max().unwrap()
}

#[test]
fn every_small_pipeline() {
    for stages in 1..8 {
        for micro_batches in 1..12 {
            let ticks = check(stages, micro_batches, [1, 1]);
            assert_eq!(
                ticks,
                2 * (micro_batches + stages - 1) as u64,
                "{stages} stages, {micro_batches} micro-batches"
            );
            // Neighbours need not run in lockstep: passes of unequal length take no longer than their sum in sequence.
            let ticks = check(stages, micro_batches, [1, 2]);
            assert_eq!(
                ticks,
                3 * (micro_batches + stages - 1) as u64,
                "{stages} stages, {micro_batches} micro-batches"
            );
        }
    }
}

#[test]
fn passes_in_turn() {
    use PipelineStep::{Backward as B, Forward as F, Slot};
    let plan = pipeline(3, 4);
    assert_eq!(passes(&plan[0]), [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]);
    assert_eq!(passes(&plan[1]), [F(0), F(1), B(0), F(2), B(1), F(3), B(2), B(3)]);
    assert_eq!(passes(&plan[2]), [F(0), B(0), F(1), B(1), F(2), B(2), F(3), B(3)]);
    let alone = pipeline(1, 2).remove(0);
    assert_eq!((alone.steps, alone.transfers.slots().len()), (vec![F(0), B(0), F(1), B(1)], 0));
    assert_eq!(pipeline(2, 1)[0].steps, [F(0), Slot(0), Slot(2), B(0)]);
    // The second activation is sent as early as possible, not together with the first gradient.
    let first = pipeline(2, 2).remove(0);
    assert_eq!(first.steps, [F(0), Slot(0), F(1), Slot(1), Slot(2), B(0), Slot(4), B(1)]);
    assert_eq!(pipeline(2, 1)[1].steps, [Slot(0), F(0), B(0), Slot(2)]);
}

#[test]
fn refusals_name_the_values() {
    let refusal = |stage, stages, micro_batches| {
        Stage::one_forward_one_backward(stage, stages, micro_batches).unwrap_err().to_string()
    };
    assert!(refusal(3, 3, 1).contains("stage 3 is not in a pipeline of 3"));
    assert!(refusal(0, 0, 1).contains("stage 0 is not in a pipeline of 0"));
    assert!(refusal(0, 1, 0).contains("0 micro-batches"));
    let huge = usize::MAX;
    assert!(refusal(0, 1, huge).contains(&huge.to_string()) && refusal(0, huge, 1).contains(&huge.to_string()));
}

proptest! {
    #[test]
    fn any_pipeline_ends(
        stages in 1usize..8,
        micro_batches in 1usize..12,
        forward in 0u64..5,
        backward in 0u64..5,
    ) {
        check(stages, micro_batches, [forward, backward]);
    }
}
