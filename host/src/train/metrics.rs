//! [`RunningMean`] and [`mean_over_ranks`]: means of losses and metrics over all ranks.

use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::call_comparison::{all_prepared, gather};
use crate::comm::Ranks;
use crate::dtype::DType;
use crate::error::{Error, Operation, Result, same_len};
use crate::kernels::KernelMemory;
use crate::memory::{Host, Memory};
use crate::slice::Floats;

const OPERATION: &str = "running mean";
/// The sum of all values, the value that is added, and the sum of the `f64` values times [`SMALL`].
const TENSORS: [(&str, [usize; 1]); 3] = [("sum", [1]), ("value", [1]), ("small sum", [1])];
/// 2⁻¹²⁸: sums of numbers times this factor stay finite, and the product is exact for every number that matters beside such a sum.
const SMALL: f64 = 0.5 / (1_u128 << 127) as f64;

/// Computes the mean of the values of all ranks. Each rank passes the `sum` of its values and their number, `count`; the sums are added in
/// rank order in `f64` and divided by the total count; a mean inside the range of `f64` is right although that sum is outside. `None`, on
/// every rank, if all counts are 0. The host waits for the other ranks.
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
    mean(ranks, [sum, sum * SMALL], count)
}

/// The mean over all ranks, given this rank's sum, and the sum times [`SMALL`], which is used only where a sum is not finite.
fn mean<R: Ranks + ?Sized>(ranks: &R, [sum, small]: [f64; 2], count: u64) -> Result<Option<f64>> {
    let _scope = scope::within(Operation::MeanOverRanks);
    let own = [sum.to_bits(), small.to_bits(), count];
    let all = if ranks.world_size() == 1 { own.to_vec() } else { gather(ranks, &own)? };
    let count: u128 = all.chunks_exact(3).map(|rank| u128::from(rank[2])).sum();
    if count == 0 {
        return Ok(None);
    }
    // A rank without values adds nothing, for any `sum`.
    let total = |place: usize| -> f64 {
        all.chunks_exact(3).filter(|rank| rank[2] > 0).map(|rank| f64::from_bits(rank[place])).sum()
    };
    let sum = total(0);
    let mean = if sum.is_finite() { sum / count as f64 } else { total(1) / count as f64 / SMALL };
    Ok(Some(mean))
}

/// A mean over many batches and all ranks, weighted by the numbers of examples. Values are added in the memory where they are, in `f64`: on
/// a GPU nothing is copied to the host before the mean is requested.
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
    /// [`Error::OutOfMemory`].
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

impl<M: KernelMemory> RunningMean<M> {
    /// Adds the mean of `count` examples, which is one element. On a GPU the call is asynchronous.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] for any other number of elements; [`Error::InvalidArgument`] if the examples are more than a `u64` counts;
    /// nothing is added then. `Error::Cuda`.
    pub fn add<'a>(&mut self, mean: impl Into<M::Slice<'a>> + Floats, count: u64) -> Result<()> {
        let mean = mean.into();
        same_len(OPERATION, ("a value", 1), ("the mean of a batch", M::len(mean)))?;
        if count == 0 {
            return Ok(());
        }
        let Some(total) = self.count.checked_add(count) else {
            let reason = format!("{count} examples after {} are more than can be counted; call `reset`", self.count);
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        };
        let mut add = |place: usize, factor: f64| {
            let (sum, mut value) = self.numbers.two_tensors_mut(place, 1);
            M::scale(value.elements_mut(), mean, factor)?;
            M::accumulate(sum.into_data(), value.data())
        };
        if M::dtype(mean) == DType::F64 {
            // Values of other dtypes are so small that no sum of them leaves the range of `f64`.
            add(2, count as f64 * SMALL)?;
        }
        add(0, count as f64)?;
        self.count = total;
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
        let sums = self.sums();
        let _scope = scope::within(Operation::MeanOverRanks);
        mean(ranks, all_prepared(Operation::MeanOverRanks, ranks, sums)?, self.count)
    }

    /// The sum of all values, and the same times [`SMALL`].
    fn sums(&self) -> Result<[f64; 2]> {
        let read = |place: usize| Ok::<_, Error>(self.numbers.tensor(place).to_vec::<f64>()?[0]);
        let sum = read(0)?;
        let small = if sum.is_finite() { sum * SMALL } else { read(2)? };
        Ok([sum, small])
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
