//! [`RunningMean`] and [`mean_over_ranks`]: means of losses and metrics over all ranks.

use super::reducer::ReducerMemory;
use crate::agreement::gather;
use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::comm::Ranks;
use crate::dtype::DType;
use crate::error::{Operation, Result, same_len};
use crate::memory::{Host, Memory};

const OPERATION: &str = "running mean";
/// The factor of sums that may be larger than every `f64`: a sum of as many values as there can be, times this, is in range.
const SHRINK: f64 = 1.0 / (1u128 << 64) as f64;
const TENSORS: [(&str, [usize; 1]); 2] = [("sum", [1]), ("value", [1])];

/// Computes the mean of the values of all ranks. Each rank passes the `sum` of its values and their number, `count`; the sums are added in
/// rank order in `f64` and divided by the total count. `None`, on every rank, if all counts are 0. The host waits for the other ranks.
///
/// ```
/// use gradsync::comm::{Ranks, local};
/// use gradsync::train::mean_over_ranks;
///
/// // Rank 0 has had 3 examples with losses of 2, rank 1 one with a loss of 6.
/// let means = local::run(2, |comm| mean_over_ranks(&comm, 6.0, if comm.rank() == 0 { 3 } else { 1 }))?;
/// assert_eq!(means, [Some(3.0); 2]);
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// # Errors
/// The errors of a collective.
pub fn mean_over_ranks<R: Ranks + ?Sized>(ranks: &R, sum: f64, count: u64) -> Result<Option<f64>> {
    mean_of_sums(ranks, sum, count, 1.0)
}

/// The mean of values whose sums were multiplied by `factor`, a power of two.
fn mean_of_sums<R: Ranks + ?Sized>(ranks: &R, sum: f64, count: u64, factor: f64) -> Result<Option<f64>> {
    let _scope = scope::within(Operation::MeanOverRanks);
    let own = [sum.to_bits(), count];
    let all = if ranks.world_size() == 1 { own.to_vec() } else { gather(ranks, &own)? };
    let count: u128 = all.chunks_exact(2).map(|rank| u128::from(rank[1])).sum();
    // A rank without values adds nothing, for any `sum`.
    let sums = all.chunks_exact(2).filter(|rank| rank[1] > 0).map(|rank| f64::from_bits(rank[0]));
    let mut mean = sums.clone().sum::<f64>() / (count as f64 * factor);
    if !mean.is_finite() {
        // The sum may leave the range of `f64` where the mean does not.
        mean = sums.map(|sum| sum * SHRINK).sum::<f64>() / (count as f64 * factor * SHRINK);
    }
    Ok((count > 0).then_some(mean))
}

/// A mean over many batches and all ranks, weighted by the numbers of examples. Values are added in the memory where they are, in `f64`: on
/// a GPU nothing is copied to the host before the mean is requested. No sum overflows; values below 1e-288 lose digits.
///
/// ```
/// use gradsync::comm::local;
/// use gradsync::train::RunningMean;
///
/// let means = local::run(2, |comm| {
///     let mut loss = RunningMean::new()?;
///     loss.add(&[2.0f32], 3)?;
///     loss.add(&[6.0f32], 1)?;
///     loss.over_ranks(&comm)
/// })?;
/// assert_eq!(means, [Some(3.0); 2]);
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Debug)]
pub struct RunningMean<M: Memory = Host> {
    numbers: GradientBuffer<M>,
    count: u64,
}

impl RunningMean {
    /// Creates a mean of values in host memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new() -> Result<Self> {
        Ok(Self { numbers: GradientBuffer::new(DType::F64, 1, TENSORS)?, count: 0 })
    }
}

#[cfg(feature = "cuda")]
impl RunningMean<crate::memory::Cuda> {
    /// Creates a mean of values in device memory of this queue.
    ///
    /// # Errors
    /// `Error::Cuda`.
    pub fn on_queue(queue: &crate::driver::Queue) -> Result<Self> {
        Ok(Self { numbers: GradientBuffer::on_queue(queue, DType::F64, 1, TENSORS)?, count: 0 })
    }
}

impl<M: ReducerMemory> RunningMean<M> {
    /// Adds the mean of `count` examples, which is one element. On a GPU the call is asynchronous.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for any other number of elements; `Error::Cuda`. Nothing is added then.
    pub fn add<'a>(&mut self, mean: impl Into<M::Slice<'a>>, count: u64) -> Result<()> {
        let mean = mean.into();
        same_len(OPERATION, ("a value", 1), ("the mean of a batch", M::len(mean)))?;
        if count == 0 {
            return Ok(());
        }
        let (sum, mut value) = self.numbers.two_tensors_mut(0, 1);
        M::scale(value.data_mut(), mean, count as f64 * SHRINK)?;
        M::accumulate(sum.into_data(), value.data())?;
        self.count += count;
        Ok(())
    }

    /// The number of examples of this rank so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Computes the mean over all examples of all ranks; `None`, on every rank, if there are none. The host waits for the other ranks, and
    /// for the queue.
    ///
    /// # Errors
    /// `Error::Cuda`; the errors of a collective.
    pub fn over_ranks<R: Ranks + ?Sized>(&self, ranks: &R) -> Result<Option<f64>> {
        let sum = M::read_f64(self.numbers.tensor(0).data());
        let _scope = scope::within(Operation::MeanOverRanks);
        let sum = match ranks.world_size() {
            1 => sum?,
            _ => crate::agreement::all_prepared(Operation::MeanOverRanks, ranks, sum)?,
        };
        mean_of_sums(ranks, sum, self.count, SHRINK)
    }

    /// Resets the mean to no examples.
    ///
    /// # Errors
    /// `Error::Cuda`; never on the host.
    pub fn reset(&mut self) -> Result<()> {
        self.count = 0;
        self.numbers.zero()
    }
}
