//! The step of an optimizer over many tensors: `norms`, the sums of squares of their chunks; `advance_step`, one block that adds these and
//! computes the state of the step; and the updates, `sgd` and `adamw`, which read that state. The host waits for none of them.
//!
//! A block of an update handles one tile, and a thread one vector of each operand, which it loads before it computes.

use super::kernel;
use crate::abi::{LaunchBounds, SquareRow, THREADS, UpdateRow, update_tile_len, update_vector_len};
use crate::half::*;
use crate::math::optimizer::{self, AdamW, Real, Rule, Sgd, SgdScalars};
use crate::math::step::{StepMemory, StepRules};
use crate::math::sums::{CHUNK_LEN, add_square, vector_len};
use crate::math::{Element, elementwise};
use crate::{memory, reduce, thread};

/// The sum of squares of one chunk, in the order of [`crate::math::sums`].
#[inline(always)]
unsafe fn square_sum<T: Element, const N: usize, const STEPS: usize>(chunk: *const T, len: usize) -> f64 {
    let (stride, first) = (THREADS as usize * N, thread::thread_idx_x() as usize * N);
    let mut lanes = [0.0; N];
    let mut begin = 0;
    let add = |lanes: &mut [f64; N], values: [T; N]| {
        let mut lane = 0;
        while lane < N {
            lanes[lane] = add_square(lanes[lane], values[lane]);
            lane += 1;
        }
    };
    // SAFETY: the launch provides `len` elements; indices are checked against it.
    unsafe {
        if memory::is_aligned::<T, N>(chunk) {
            while begin + STEPS * stride <= len {
                let loaded: [[T; N]; STEPS] =
                    core::array::from_fn(|step| memory::load(chunk.add(begin + first + step * stride)));
                let mut step = 0;
                while step < STEPS {
                    add(&mut lanes, loaded[step]);
                    step += 1;
                }
                begin += STEPS * stride;
            }
        }
        while begin + first < len {
            let mut lane = 0;
            while lane < N {
                if begin + first + lane < len {
                    lanes[lane] = add_square(lanes[lane], chunk.add(begin + first + lane).read());
                }
                lane += 1;
            }
            begin += stride;
        }
    }
    let (mut total, mut lane) = (lanes[0], 1);
    while lane < N {
        total += lanes[lane];
        lane += 1;
    }
    total
}

macro_rules! norms {
    ($name:literal $T:ident) => {
        kernel!(["norms_" $name], LaunchBounds::REDUCE, fn (sums: *mut f64, rows: *const SquareRow, count: u64) {
            const N: usize = vector_len(<$T>::DTYPE);
            let block = thread::block_idx_x() as u64;
            let row = *rows.add(reduce::row_by_warp(count, block, |row| (*rows.add(row as usize)).first_block) as usize);
            let chunk = block - row.first_block;
            let begin = chunk as usize * CHUNK_LEN;
            let left = row.len as usize - begin;
            let len = if left < CHUNK_LEN { left } else { CHUNK_LEN };
            let sum = square_sum::<$T, N, 4>((row.address as *const $T).add(begin), len);
            reduce::block_sum::<1, 1>(0, [sum], |_, sum| sums.add((row.first_chunk + chunk) as usize).write(sum));
        });
    };
}
super::for_each_dtype!(norms);

kernel!(["advance_step"], LaunchBounds::REDUCE, fn (
    memory: *mut StepMemory, rules: *const StepRules, sums: *const f64, count: u64,
) {
    const LANES: usize = 4;
    /// Rows of all lanes that a thread loads at once.
    const STEPS: usize = 4;
    let (first, stride) = (thread::thread_idx_x() as usize, THREADS as usize);
    let mut lanes = [0.0; LANES];
    let mut begin = first;
    while begin - first < count as usize {
        let loaded: [[f64; LANES]; STEPS] = core::array::from_fn(|step| {
            core::array::from_fn(|lane| {
                let index = begin + (step * LANES + lane) * stride;
                // A sum of squares is never -0, so that adding 0 changes no bit.
                if index < count as usize { sums.add(index).read() } else { 0.0 }
            })
        });
        let mut place = 0;
        while place < STEPS * LANES {
            lanes[place % LANES] += loaded[place / LANES][place % LANES];
            place += 1;
        }
        begin += STEPS * LANES * stride;
    }
    let total = ((lanes[0] + lanes[1]) + lanes[2]) + lanes[3];
    reduce::block_sum::<1, 1>(0, [total], |_, sum| {
        let next = (*memory).advanced(&*rules, sum);
        memory.write(next);
    });
});

/// The operands of one thread of an update.
#[derive(Clone, Copy)]
struct Operands<M, G, C> {
    weights: *mut M,
    gradients: *const G,
    states: [*mut M; 2],
    output: *mut C,
}

/// Updates the vector of `N` elements from `index` on: the output receives the deltas, or a copy of the new weights if there is one.
#[inline(always)]
unsafe fn update<R: Rule, M: Real, G: Element, C: Element, const N: usize, const DELTAS: bool>(
    rule: R,
    operands: Operands<M, G, C>,
    index: usize,
    has_states: bool,
    has_output: bool,
) {
    let Operands { weights, gradients, states, output } = operands;
    // SAFETY: the launch provides these elements.
    unsafe {
        let gradient: [G; N] = memory::load(gradients.add(index));
        let mut weight: [M; N] = memory::load(weights.add(index));
        let mut state = [[M::ZERO; N]; 2];
        let mut place = 0;
        while place < R::STATES && has_states {
            state[place] = memory::load(states[place].add(index));
            place += 1;
        }
        let mut out = [C::from_f32(0.0); N];
        let mut lane = 0;
        while lane < N {
            let old = [state[0][lane], state[1][lane]];
            let new = if DELTAS {
                let (delta, new) = optimizer::delta::<R, M, G, C>(rule, gradient[lane], weight[lane], old);
                out[lane] = delta;
                new
            } else {
                let (sum, new) = optimizer::weight::<R, M, G>(rule, gradient[lane], weight[lane], old);
                (weight[lane], out[lane]) = (sum, elementwise::cast(sum));
                new
            };
            (state[0][lane], state[1][lane]) = (new[0], new[1]);
            lane += 1;
        }
        if !DELTAS {
            memory::store(weights.add(index), weight);
        }
        let mut place = 0;
        while place < R::STATES && has_states {
            memory::store(states[place].add(index), state[place]);
            place += 1;
        }
        if has_output {
            memory::store(output.add(index), out);
        }
    }
}

/// Updates this block's tile, unless the step is skipped. `rule` makes the rule of a tensor.
#[inline(always)]
unsafe fn update_tile<R: Rule, M: Real, G: Element, C: Element, const N: usize, const DELTAS: bool>(
    rows: *const UpdateRow,
    count: u64,
    is_skipped: bool,
    rule: impl Fn(&UpdateRow) -> R,
) {
    let block = thread::block_idx_x() as u64;
    // SAFETY: the launch provides `count` rows, laid out for this grid, and the operands that they name.
    unsafe {
        let row = *rows.add(reduce::row_by_warp(count, block, |row| (*rows.add(row as usize)).first_block) as usize);
        if is_skipped {
            return;
        }
        let rule = rule(&row);
        let operands = Operands::<M, G, C> {
            weights: row.weights as *mut M,
            gradients: row.gradients as *const G,
            states: [row.states[0] as *mut M, row.states[1] as *mut M],
            output: row.output as *mut C,
        };
        // Of the optimizers, those with one vector of state can be without it.
        let has_states = R::STATES > 1 || row.states[0] != 0;
        let has_output = DELTAS || row.output != 0;
        let first =
            (block - row.first_block) as usize * update_tile_len(M::DTYPE) + thread::thread_idx_x() as usize * N;
        // A missing operand is at address 0, which is aligned.
        let is_aligned = memory::is_aligned::<M, N>(operands.weights)
            && memory::is_aligned::<G, N>(operands.gradients)
            && memory::is_aligned::<M, N>(operands.states[0])
            && memory::is_aligned::<M, N>(operands.states[1])
            && memory::is_aligned::<C, N>(operands.output);
        if is_aligned && first + N <= row.len as usize {
            update::<R, M, G, C, N, DELTAS>(rule, operands, first, has_states, has_output);
        } else {
            let end = if first + N < row.len as usize { first + N } else { row.len as usize };
            let mut index = first;
            while index < end {
                update::<R, M, G, C, 1, DELTAS>(rule, operands, index, has_states, has_output);
                index += 1;
            }
        }
    }
}

/// Stamps the updates of one set of dtypes: weights and states, gradients, output; the precision of the weights in rows and
/// constants; and AdamW's launch bounds.
macro_rules! updates {
    ($suffix:literal $M:ident $G:ident $C:ident $deltas:literal $precision:ident $bounds:ident) => {
        kernel!(["sgd" $suffix], LaunchBounds::UPDATE, fn (
            rows: *const UpdateRow, count: u64, step: *const StepMemory, momentum: f64, nesterov: f64,
        ) {
            const N: usize = update_vector_len(<$M>::DTYPE);
            let step = (*step).wide;
            update_tile::<Sgd, $M, $G, $C, N, $deltas>(rows, count, step.refusal != 0.0, |row| {
                let [rate, decay] = row.wide();
                Sgd::new(SgdScalars { momentum, nesterov }, &step, rate, decay)
            })
        });
        kernel!(["adamw" $suffix], LaunchBounds::$bounds, fn (rows: *const UpdateRow, count: u64, step: *const StepMemory) {
            const N: usize = update_vector_len(<$M>::DTYPE);
            let step = (*step).$precision;
            update_tile::<AdamW<$M>, $M, $G, $C, N, $deltas>(rows, count, step.refusal != 0.0, |row| {
                let [rate, decay] = row.$precision();
                AdamW::new(&step, rate, decay)
            })
        });
    };
}
updates!("_f64" f64 f64 f64 false wide UPDATE_WIDE);
updates!("_f32" f32 f32 f32 false narrow UPDATE);
updates!("_f16" f32 F16 f32 false narrow UPDATE);
updates!("_bf16" f32 BF16 f32 false narrow UPDATE);
updates!("_f32_f16" f32 f32 F16 false narrow UPDATE);
updates!("_f16_f16" f32 F16 F16 false narrow UPDATE);
updates!("_bf16_f16" f32 BF16 F16 false narrow UPDATE);
updates!("_f32_bf16" f32 f32 BF16 false narrow UPDATE);
updates!("_f16_bf16" f32 F16 BF16 false narrow UPDATE);
updates!("_bf16_bf16" f32 BF16 BF16 false narrow UPDATE);
updates!("_deltas_f64_f64" f64 f64 f64 true wide UPDATE_WIDE);
updates!("_deltas_f32_f32" f32 f32 f32 true narrow UPDATE);
updates!("_deltas_f32_f16" f32 f32 F16 true narrow UPDATE);
updates!("_deltas_bf16_f32" f32 BF16 f32 true narrow UPDATE);
updates!("_deltas_f16_f16" f32 F16 F16 true narrow UPDATE);
