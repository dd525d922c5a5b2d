//! The step of an optimizer on the CPU: [`square_sums`], [`advance_step`] and [`update`], with the bits of the GPU's kernels.
//!
//! Sums follow the order of `gradsync_device::math::sums`. Updates work on blocks that stay in the first-level cache, where operands of
//! other dtypes are widened and rounded.

use gradsync_device::math::Element as Formula;
use gradsync_device::math::optimizer::{self, AdamW, Real, Rule, Sgd};
use gradsync_device::math::step::{StepMemory, StepRules};
use gradsync_device::math::sums::{self, CHUNK_LEN, SUM_THREADS, TOTAL_LANES};

use super::elementwise::cast_near;
use super::isa::vectorized;
use super::{PIECE_LEN, for_each};
use crate::dtype::{DType, Float, storage, storage_mut};
use crate::kernels::optimizer::{Target, TensorUpdate, UpdateRule};
use crate::memory::Host;
use crate::plan::segments::pieces;
use crate::slice::{Slice, SliceMut, with_typed};

/// The number of elements that are widened at a time.
const BLOCK_LEN: usize = 512;

/// Computes the sum of squares of each chunk of the tensors. A tensor's sums begin at its number of `first_chunks`.
pub(crate) fn square_sums(sums: &mut [f64], first_chunks: &[usize], tensors: &[Slice<'_>]) {
    let elements = tensors.iter().map(Slice::len).sum();
    let (mut rest, mut at, mut work) = (sums, 0, Vec::new());
    let mut ordered: Vec<(usize, Slice<'_>)> = first_chunks.iter().copied().zip(tensors.iter().copied()).collect();
    ordered.sort_by_key(|(first, _)| *first);
    for (first, tensor) in ordered {
        let (_, from) = rest.split_at_mut(first - at);
        let (own, behind) = from.split_at_mut(sums::chunks(tensor.len()));
        (rest, at) = (behind, first + own.len());
        // As many chunks at once as make a piece.
        for (place, sums) in own.chunks_mut(PIECE_LEN / CHUNK_LEN).enumerate() {
            let begin = place * PIECE_LEN;
            work.push((tensor.range(begin..tensor.len().min(begin + PIECE_LEN)), sums));
        }
    }
    for_each(work, elements, |(piece, sums)| {
        with_typed!(piece, data => {
            for (sum, chunk) in sums.iter_mut().zip(storage(data).chunks(CHUNK_LEN)) {
                *sum = square_sum(chunk);
            }
        });
    });
}

/// The sum of squares of one chunk.
fn square_sum<T: Formula>(chunk: &[T]) -> f64 {
    /// The most lanes, of 16-bit elements.
    const MOST: usize = 8 * SUM_THREADS;
    let vector_len = sums::vector_len(T::DTYPE);
    let mut all = [0.0; MOST];
    let lanes = &mut all[..sums::lanes(T::DTYPE)];
    for block in chunk.chunks(lanes.len()) {
        add_squares(lanes, block);
    }
    let mut threads = [0.0; SUM_THREADS];
    for (thread, lanes) in threads.iter_mut().zip(lanes.chunks_exact(vector_len)) {
        *thread = lanes[1..].iter().fold(lanes[0], |total, lane| total + lane);
    }
    sums::tree_sum(threads)
}

vectorized! {
    fn add_squares<T: Formula>(lanes: &mut [f64], block: &[T]) {
        for (lane, &value) in lanes.iter_mut().zip(block) {
            *lane = sums::add_square(*lane, value);
        }
    }
}

/// Computes the memory of the next step from the sums of all chunks.
pub(crate) fn advance_step(step: &StepMemory, rules: &StepRules, chunks: &[f64]) -> StepMemory {
    let mut lanes = [0.0; TOTAL_LANES];
    for row in chunks.chunks(TOTAL_LANES) {
        lanes.iter_mut().zip(row).for_each(|(lane, sum)| *lane += sum);
    }
    let of_thread = |thread: usize| {
        let lane = |index: usize| lanes[index * SUM_THREADS + thread];
        ((lane(0) + lane(1)) + lane(2)) + lane(3)
    };
    step.advanced(rules, sums::tree_sum(std::array::from_fn(of_thread)))
}

/// Updates tensors, unless the step is skipped. Operands have the lengths and dtypes that [`TensorUpdate`] describes.
pub(crate) fn update(rule: UpdateRule, step: &StepMemory, tensors: Vec<TensorUpdate<'_, Host>>) {
    if step.state.refusal != 0.0 {
        return;
    }
    let elements = tensors.iter().map(TensorUpdate::len).sum();
    let work: Vec<_> = tensors.into_iter().flat_map(divided).collect();
    for_each(work, elements, |piece| {
        let TensorUpdate { rate, decay, .. } = piece;
        match (rule, piece.dtype()) {
            (UpdateRule::Sgd(scalars), DType::F64) => run::<_, f64>(Sgd::new(scalars, &step.wide, rate, decay), piece),
            (UpdateRule::Sgd(scalars), _) => run::<_, f32>(Sgd::new(scalars, &step.wide, rate, decay), piece),
            (UpdateRule::AdamW, DType::F64) => run::<_, f64>(AdamW::new(&step.wide, rate, decay), piece),
            (UpdateRule::AdamW, _) => run::<_, f32>(AdamW::new(&step.narrow, rate as f32, decay as f32), piece),
        }
    });
}

/// A tensor in pieces.
fn divided<'a>(tensor: TensorUpdate<'a, Host>) -> Vec<TensorUpdate<'a, Host>> {
    let ranges: Vec<_> = pieces(0..tensor.len(), PIECE_LEN).collect();
    if ranges.len() <= 1 {
        return vec![tensor];
    }
    let TensorUpdate { gradients, states, target, rate, decay } = tensor;
    let split = |data: SliceMut<'a>| data.ranges_mut(ranges.clone()).into_iter();
    let mut states = states.map(|state| state.map(split));
    let mut targets: Box<dyn Iterator<Item = Target<'a, Host>>> = match target {
        Target::Weights { weights, copy } => {
            let mut copies = copy.map(split);
            Box::new(split(weights).map(move |weights| {
                let copy = copies.as_mut().and_then(Iterator::next);
                Target::Weights { weights, copy }
            }))
        }
        Target::Deltas { weights, deltas } => {
            let weights = ranges.clone().into_iter().map(move |range| weights.range(range));
            Box::new(weights.zip(split(deltas)).map(|(weights, deltas)| Target::Deltas { weights, deltas }))
        }
    };
    let next = |range: std::ops::Range<usize>| TensorUpdate {
        gradients: gradients.range(range),
        states: states.each_mut().map(|state| state.as_mut().and_then(Iterator::next)),
        target: targets.next().expect("one target for each range"),
        rate,
        decay,
    };
    ranges.iter().cloned().map(next).collect()
}

/// Updates a piece of weights and states of type `M`.
fn run<R: Rule, M: Real + Float<Storage = M>>(rule: R, piece: TensorUpdate<'_, Host>) {
    let TensorUpdate { gradients, states, target, .. } = piece;
    let states = states.map(|state| state.map(|state| state.typed::<M>().expect("the dtype of the weights")));
    let [mut first, mut second] = states;
    let (mut wide, mut no_state) = ([M::ZERO; BLOCK_LEN], [[M::ZERO; BLOCK_LEN]; 2]);
    let mut steps = [R::Work::ZERO; BLOCK_LEN];
    let (mut target, ranges) = (target, pieces(0..gradients.len(), BLOCK_LEN));
    for range in ranges {
        let len = range.len();
        let gradient: &[M] = match gradients.range(range.clone()).typed::<M>() {
            Some(gradient) => gradient,
            None => {
                with_typed!(gradients.range(range.clone()), data => cast_near(&mut wide[..len], storage(data)));
                &wide[..len]
            }
        };
        let [no_first, no_second] = &mut no_state;
        let first = first.as_mut().map_or(&mut no_first[..len], |state| &mut state[range.clone()]);
        let second = second.as_mut().map_or(&mut no_second[..len], |state| &mut state[range.clone()]);
        match &mut target {
            Target::Weights { weights, copy } => {
                let weights =
                    weights.reborrow().range_mut(range.clone()).typed::<M>().expect("the dtype of the states");
                apply(rule, weights, gradient, first, second);
                if let Some(copy) = copy {
                    with_typed!(copy.reborrow().range_mut(range), copy => cast_near(storage_mut(copy), weights));
                }
            }
            Target::Deltas { weights, deltas } => {
                let weights = weights.range(range.clone()).typed::<M>().expect("the dtype of the states");
                compute(rule, &mut steps[..len], weights, gradient, [first, second]);
                with_typed!(deltas.reborrow().range_mut(range), deltas => cast_near(storage_mut(deltas), &steps[..len]));
            }
        }
    }
}

/// Loops over the elements of a block, compiled twice as `vectorized!` describes; that macro does not take rules.
macro_rules! loops {
    ($(fn $name:ident<R: Rule, M: Real>($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        fn $name<R: Rule, M: Real>($($argument: $type),*) {
            #[inline(always)]
            fn body<R: Rule, M: Real>($($argument: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                unsafe fn avx2<R: Rule, M: Real>($($argument: $type),*) {
                    body::<R, M>($($argument),*)
                }
                if super::isa::has_avx2() {
                    // SAFETY: the feature was just found on this machine.
                    return unsafe { avx2::<R, M>($($argument),*) };
                }
            }
            body::<R, M>($($argument),*)
        }
    )*};
}

loops! {
    fn apply<R: Rule, M: Real>(rule: R, weights: &mut [M], gradients: &[M], first: &mut [M], second: &mut [M]) {
        let len = weights.len();
        let (gradients, first, second) = (&gradients[..len], &mut first[..len], &mut second[..len]);
        for index in 0..len {
            let states = [first[index], second[index]];
            let (weight, states) = optimizer::weight::<R, M, M>(rule, gradients[index], weights[index], states);
            (weights[index], first[index], second[index]) = (weight, states[0], states[1]);
        }
    }

    fn compute<R: Rule, M: Real>(
        rule: R, steps: &mut [R::Work], weights: &[M], gradients: &[M], states: [&mut [M]; 2],
    ) {
        let (len, [first, second]) = (steps.len(), states);
        let (weights, gradients, first, second) =
            (&weights[..len], &gradients[..len], &mut first[..len], &mut second[..len]);
        for index in 0..len {
            let states = [first[index], second[index]];
            let (step, states) = optimizer::delta::<R, M, M, R::Work>(rule, gradients[index], weights[index], states);
            (steps[index], first[index], second[index]) = (step, states[0], states[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use gradsync_device::math::step::StepState;

    use super::super::isa;
    use super::*;
    use crate::kernels::optimizer::SgdScalars;

    /// Numbers of many magnitudes and both signs.
    fn numbers<T: Float>(len: usize) -> Vec<T> {
        (0..len).map(|index| T::from_f64((index as f64).sin() * 2.0_f64.powi(index as i32 % 9 - 4))).collect()
    }

    fn bits<T: Float>(data: &[T]) -> Vec<u64> {
        data.iter().map(|value| value.to_f64().to_bits()).collect()
    }

    /// The bits of a step of weights, states, copies and deltas, with the norm of the gradients.
    fn step<M: Float, G: Float, C: Float>(rule: UpdateRule) -> Vec<u64> {
        let gradients = numbers::<G>(3000);
        let mut sums = [0.0];
        square_sums(&mut sums, &[0], &[Slice::from(&gradients)]);
        let rules = StepRules {
            rate: 0.3,
            max_norm: 1.0,
            limit: f64::MAX,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            corrects: 1.0,
            growth: 1.0,
            backoff: 1.0,
            growth_interval: 0.0,
            most_scale: 1.0,
            schedule: 0.0,
            warm_up: 0.0,
            decay_begin: 0.0,
            decay_end: 0.0,
            last: 0.0,
        };
        let memory = advance_step(&StepMemory::new(StepState::new(1.0)), &rules, &sums);
        let mut states =
            [numbers::<M>(3000), numbers::<M>(3000).into_iter().map(|x| M::from_f64(x.to_f64().abs())).collect()];
        let (mut weights, mut copy, mut deltas) = (numbers::<M>(3000), numbers::<C>(3000), numbers::<C>(3000));
        let kept = weights.clone();
        let source = Slice::from(&gradients);
        let target = Target::Weights { weights: (&mut weights).into(), copy: Some((&mut copy).into()) };
        let [first, second] = &mut states;
        let operands = [Some(SliceMut::from(first)), Some(SliceMut::from(second))];
        let tensor = TensorUpdate { gradients: source, states: operands, target, rate: 0.5, decay: 0.01 };
        update(rule, &memory, vec![tensor]);
        let target = Target::Deltas { weights: (&kept).into(), deltas: (&mut deltas).into() };
        let [first, second] = &mut states;
        let operands = [Some(SliceMut::from(first)), Some(SliceMut::from(second))];
        let tensor = TensorUpdate { gradients: source, states: operands, target, rate: 0.5, decay: 0.01 };
        update(rule, &memory, vec![tensor]);
        let [first, second] = states;
        [bits(&sums), bits(&first), bits(&second), bits(&weights), bits(&copy), bits(&deltas)].concat()
    }

    #[test]
    fn steps_have_the_same_bits_with_every_instruction_set() {
        let seen = RefCell::new(None);
        isa::on_each(|| {
            let mut all = Vec::new();
            for rule in [UpdateRule::Sgd(SgdScalars { momentum: 0.9, nesterov: 1.0 }), UpdateRule::AdamW] {
                all.push(step::<f32, f32, half::bf16>(rule));
                all.push(step::<f32, half::bf16, half::f16>(rule));
                all.push(step::<f32, half::f16, f32>(rule));
                all.push(step::<f64, f64, f64>(rule));
                all.push(step::<f64, f32, half::f16>(rule));
            }
            let mut seen = seen.borrow_mut();
            assert!(*seen.get_or_insert_with(|| all.clone()) == all);
        });
    }
}
