//! Arithmetic on a batch of images at once: the image is the innermost index of every array, so that one instruction processes several
//! images.
//!
//! Convolutions and fully connected layers share one representation: each output row is a weighted sum of input rows. Every sum is computed
//! in one fixed order that depends on neither the processor nor the number of threads. This module knows nothing of networks.

use pulp::Simd;

/// Images per batch: a rank's samples in one step.
pub(crate) const BATCH: usize = 32;
/// One number for each image.
pub(crate) type Row = [f32; BATCH];

/// Output rows that are summed at a time, and registers per output row: with eight lanes in a register, a row has four registers.
const OUTPUTS: usize = 6;
const REGISTERS: usize = 2;
/// The block sizes for the gradient of weights, whose sums are over lanes.
const ROWS: usize = 3;
const TAPS: usize = 4;

/// A layer that is linear in its input and in its weights: output row `o * positions + p` is `bias[o]` plus the sum over taps `t` of
/// `weights[o][t]` times input row `positions[p] + taps[t]`.
pub(crate) struct Affine {
    pub(crate) outputs: usize,
    taps: Vec<usize>,
    positions: Vec<usize>,
}

impl Affine {
    /// A fully connected layer: every output depends on every input.
    pub(crate) fn dense(inputs: usize, outputs: usize) -> Self {
        Self { outputs, taps: (0..inputs).collect(), positions: vec![0] }
    }

    /// A convolution without padding: `channels` inputs of `size` × `size`, with a window of `kernel` × `kernel`.
    pub(crate) fn convolution(channels: usize, size: usize, kernel: usize, outputs: usize) -> Self {
        let grid = |side: usize| (0..side).flat_map(move |y| (0..side).map(move |x| y * size + x));
        let taps = (0..channels).flat_map(|channel| grid(kernel).map(move |place| channel * size * size + place));
        Self { outputs, taps: taps.collect(), positions: grid(size - kernel + 1).collect() }
    }

    pub(crate) fn taps(&self) -> usize {
        self.taps.len()
    }

    /// The number of rows of the output.
    pub(crate) fn output_rows(&self) -> usize {
        self.outputs * self.positions.len()
    }

    #[inline(always)]
    pub(crate) fn forward<S: Simd>(&self, simd: S, output: &mut [Row], input: &[Row], weights: &[f32], bias: &[f32]) {
        let places: Vec<usize> = (0..self.outputs).map(|output| output * self.positions.len()).collect();
        let packed = packed(self.outputs, self.taps.len(), |output, tap| weights[output * self.taps.len() + tap]);
        for (rows, &bias) in output.chunks_exact_mut(self.positions.len()).zip(bias) {
            rows.fill([bias; BATCH]);
        }
        for (index, &position) in self.positions.iter().enumerate() {
            add_weighted_rows(simd, &mut output[index..], &places, &input[position..], &self.taps, &packed);
        }
    }

    /// The gradient of the input, computed from the gradient of the output.
    #[inline(always)]
    pub(crate) fn backward_input<S: Simd>(&self, simd: S, input: &mut [Row], output: &[Row], weights: &[f32]) {
        let places: Vec<usize> = (0..self.outputs).map(|output| output * self.positions.len()).collect();
        let packed = packed(self.taps.len(), self.outputs, |tap, output| weights[output * self.taps.len() + tap]);
        input.fill([0.0; BATCH]);
        for (index, &position) in self.positions.iter().enumerate() {
            add_weighted_rows(simd, &mut input[position..], &self.taps, &output[index..], &places, &packed);
        }
    }

    /// The gradients of weights and bias, computed from the gradient of the output.
    #[inline(always)]
    pub(crate) fn backward_weights<S: Simd>(
        &self,
        simd: S,
        weights: &mut [f32],
        bias: &mut [f32],
        output: &[Row],
        input: &[Row],
    ) {
        let (taps, positions) = (self.taps.len(), self.positions.len());
        for (bias, rows) in bias.iter_mut().zip(output.chunks_exact(positions)) {
            let mut sums = [0.0; BATCH];
            rows.iter().for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value));
            *bias = sums.iter().sum();
        }
        for first in (0..self.outputs).step_by(ROWS) {
            for tap in (0..taps).step_by(TAPS) {
                // Blocks beyond the end repeat the last row, and their results are dropped.
                let rows: [&[Row]; ROWS] =
                    std::array::from_fn(|row| &output[(first + row).min(self.outputs - 1) * positions..][..positions]);
                let offsets: [usize; TAPS] = std::array::from_fn(|index| self.taps[(tap + index).min(taps - 1)]);
                let sums = products(simd, rows, input, &self.positions, offsets);
                for (row, sums) in sums.iter().enumerate().take(self.outputs - first) {
                    for (index, sum) in sums.iter().enumerate().take(taps - tap) {
                        weights[(first + row) * taps + tap + index] = *sum;
                    }
                }
            }
        }
    }
}

/// Weights in the order in which [`add_weighted_rows`] reads them, padded with zeros to whole blocks of outputs.
#[inline(always)]
fn packed(outputs: usize, taps: usize, weight: impl Fn(usize, usize) -> f32) -> Vec<[f32; OUTPUTS]> {
    let mut packed = vec![[0.0; OUTPUTS]; outputs.div_ceil(OUTPUTS) * taps];
    for output in 0..outputs {
        for tap in 0..taps {
            packed[output / OUTPUTS * taps + tap][output % OUTPUTS] = weight(output, tap);
        }
    }
    packed
}

/// `output[places[o]] += Σ weights[o][t] × input[taps[t]]`.
#[inline(always)]
fn add_weighted_rows<S: Simd>(
    simd: S,
    output: &mut [Row],
    places: &[usize],
    input: &[Row],
    taps: &[usize],
    packed: &[[f32; OUTPUTS]],
) {
    for (places, packed) in places.chunks(OUTPUTS).zip(packed.chunks_exact(taps.len())) {
        for first in (0..BATCH / S::F32_LANES).step_by(REGISTERS) {
            let mut sums = [[simd.splat_f32s(0.0); REGISTERS]; OUTPUTS];
            for (sums, &place) in sums.iter_mut().zip(places) {
                let row = S::as_simd_f32s(&output[place]).0;
                (0..REGISTERS).for_each(|index| sums[index] = row[first + index]);
            }
            for (&tap, weights) in taps.iter().zip(packed) {
                let row = S::as_simd_f32s(&input[tap]).0;
                let row = [row[first], row[first + 1]];
                for (sums, &weight) in sums.iter_mut().zip(weights) {
                    let weight = simd.splat_f32s(weight);
                    for index in 0..REGISTERS {
                        sums[index] = simd.mul_add_e_f32s(weight, row[index], sums[index]);
                    }
                }
            }
            for (sums, &place) in sums.iter().zip(places) {
                let row = S::as_mut_simd_f32s(&mut output[place]).0;
                (0..REGISTERS).for_each(|index| row[first + index] = sums[index]);
            }
        }
    }
}

/// `Σ rows[r][p] · input[positions[p] + offsets[t]]` over positions and images.
#[inline(always)]
fn products<S: Simd>(
    simd: S,
    rows: [&[Row]; ROWS],
    input: &[Row],
    positions: &[usize],
    offsets: [usize; TAPS],
) -> [[f32; TAPS]; ROWS] {
    let mut sums = [[simd.splat_f32s(0.0); TAPS]; ROWS];
    for (index, &position) in positions.iter().enumerate() {
        let left = rows.map(|rows| S::as_simd_f32s(&rows[index]).0);
        let right = offsets.map(|offset| S::as_simd_f32s(&input[position + offset]).0);
        for register in 0..BATCH / S::F32_LANES {
            let right = right.map(|row| row[register]);
            for (sums, left) in sums.iter_mut().zip(left) {
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = simd.mul_add_e_f32s(left[register], right, *sum);
                }
            }
        }
    }
    sums.map(|sums| sums.map(|sum| simd.reduce_sum_f32s(sum)))
}
