//! Baselines of CPU kernels, and of ranks that share the CPU's memory: pure memory traffic with all threads.
//!
//! The baseline of kernels that write is a copy, and of kernels that only read a sweep; both move as many bytes.

use std::hint::black_box;

use rayon::prelude::*;

use super::vectors::{Copy, filled};
use crate::perf::PerfError;
use crate::perf::operation::{Operation, Row};
use crate::perf::record::BaselineName;

/// The baseline of a row.
pub(crate) enum Baseline {
    Copy(Copy),
    Sweep(Sweep),
}

impl Baseline {
    pub(crate) fn name(operation: Operation) -> BaselineName {
        if operation.only_reads() { Sweep::NAME } else { Copy::NAME }
    }

    /// A baseline with as many sets of buffers as the operation has.
    pub(crate) fn new(row: &Row, slots: usize) -> Result<Self, PerfError> {
        let traffic = row.traffic();
        Ok(if row.operation.only_reads() {
            Baseline::Sweep(Sweep::new(traffic, slots)?)
        } else {
            Baseline::Copy(Copy::new(traffic, slots)?)
        })
    }

    pub(crate) fn call(&mut self, round: usize) {
        match self {
            Baseline::Copy(copy) => copy.call(round),
            Baseline::Sweep(sweep) => sweep.call(round),
        }
    }
}

/// A read by all threads of as many bytes as an operation reads.
pub(crate) struct Sweep {
    words: Vec<u64>,
    /// Words per sweep.
    len: usize,
}

/// Words that are combined in parallel: enough that memory bandwidth determines the time.
const LANES: usize = 32;

impl Sweep {
    pub(crate) const NAME: BaselineName =
        BaselineName { column: "read-only sweep", full: "a parallel read of as many bytes" };

    pub(crate) fn new(traffic: f64, slots: usize) -> Result<Self, PerfError> {
        let len = (traffic as usize).div_ceil(size_of::<u64>()).max(1);
        Ok(Self { words: filled(len * slots, 1)?, len })
    }

    pub(crate) fn call(&mut self, round: usize) {
        let begin = round * self.len % self.words.len();
        black_box(parallel_xor(&self.words[begin..begin + self.len]));
    }
}

/// The exclusive or of all words, a contiguous part for each thread of the pool.
fn parallel_xor(words: &[u64]) -> u64 {
    let part = words.len().div_ceil(rayon::current_num_threads()).next_multiple_of(LANES);
    if words.len() <= part {
        xor(words)
    } else {
        words.par_chunks(part).map(xor).reduce(|| 0, |left, right| left ^ right)
    }
}

fn xor(words: &[u64]) -> u64 {
    let mut lanes = [0; LANES];
    let mut chunks = words.chunks_exact(LANES);
    for chunk in &mut chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, word)| *lane ^= word);
    }
    lanes.iter().chain(chunks.remainder()).fold(0, |all, word| all ^ word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_xor_reads_every_word() {
        for len in [1, LANES, 1000 * LANES + 7] {
            let mut words = vec![0; len];
            for place in [0, len / 2, len - 1] {
                words[place] = 5;
                assert_eq!(parallel_xor(&words), 5, "word {place} of {len}");
                words[place] = 0;
            }
        }
    }
}
