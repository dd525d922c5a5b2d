//! [`Collective`]: one call of a collective with its operands, and the checks of a rank's own operands before any other rank is involved.
//!
//! This module neither moves data nor reports to other ranks: the transport tells them of a refused call.

use super::ReduceOp;
#[cfg(feature = "cuda")]
use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::{Call, CommError, Error, Operation, Result, same_len};
use crate::kernels::cpu::Fingerprint;
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::{Host, Memory};

/// Factors of an all-reduce: every rank's input is multiplied by `before`, and the reduction by `after`.
///
/// On host memory both apply in `f64`, and no intermediate value overflows or loses digits where the result does not. NCCL adds in the
/// dtype of the data, so that an input times `before`, and their sum, must be within its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// Applied to each element before it is reduced.
    pub before: f64,
    /// Applied to each element of the reduction.
    pub after: f64,
}

impl Scaling {
    /// No scaling.
    pub const NONE: Self = Self { before: 1.0, after: 1.0 };

    /// The name under which ranks compare an all-reduce with these factors.
    pub(crate) fn operation(self, op: ReduceOp) -> Operation {
        match self {
            Self::NONE => Operation::AllReduce(op),
            Self { before, after } => Operation::ScaledAllReduce { op, before: before.into(), after: after.into() },
        }
    }

    /// Refuses factors that are not finite.
    fn check(self) -> Result<()> {
        let Self { before, after } = self;
        if before.is_finite() && after.is_finite() {
            return Ok(());
        }
        let reason = format!("factors must be finite, and are {before:?} before and {after:?} after");
        Err(Error::InvalidArgument { operation: "all_reduce", reason })
    }
}

impl Default for Scaling {
    fn default() -> Self {
        Self::NONE
    }
}

/// The memory that a collective reads from and writes to.
#[derive(Debug)]
#[non_exhaustive]
pub enum Operands<'a, M: Memory = Host> {
    /// One vector for both. An all-gather reads its shard `rank`; a reduce-scatter writes the result to its shard `rank`; an
    /// all-to-all replaces each shard.
    InPlace(M::SliceMut<'a>),
    /// Separate vectors for input and output.
    Apart {
        /// Read only.
        input: M::Slice<'a>,
        /// Written only.
        output: M::SliceMut<'a>,
    },
}

/// A call of a collective.
#[derive(Debug)]
#[non_exhaustive]
pub enum Collective<'a, M: Memory = Host> {
    /// The reduction of all ranks' inputs, on every rank; operands have the same length.
    AllReduce {
        /// The vectors.
        operands: Operands<'a, M>,
        /// How elements are joined.
        op: ReduceOp,
        /// The factors before and after the reduction.
        scaling: Scaling,
    },
    /// The weighted mean of all ranks' inputs, on every rank; operands have the same length.
    WeightedMean {
        /// The vectors.
        operands: Operands<'a, M>,
        /// The weight of every rank, in rank order.
        weights: &'a [f64],
    },
    /// Shard `rank` of the reduction of all ranks' inputs; the input has `world_size` shards of the output's length.
    ReduceScatter {
        /// The vectors.
        operands: Operands<'a, M>,
        /// How elements are joined.
        op: ReduceOp,
    },
    /// All ranks' inputs in rank order; the output has `world_size` shards of the input's length.
    AllGather {
        /// The vectors.
        operands: Operands<'a, M>,
    },
    /// Shard `rank` of all ranks' inputs in rank order; both operands have `world_size` shards of the same length.
    AllToAll {
        /// A shard for each rank, and a shard from each rank.
        operands: Operands<'a, M>,
    },
    /// The data of rank `root`, on every rank.
    Broadcast {
        /// Read on the root, written on all others.
        data: M::SliceMut<'a>,
        /// The rank that sends its data.
        root: usize,
    },
}

/// The name, the elements and the dtype of an operand.
type Operand<'a> = (&'a str, usize, DType);

fn operand<'a, M: Memory>(name: &'a str, data: M::Slice<'_>) -> Operand<'a> {
    (name, M::len(data), M::dtype(data))
}

impl<M: Memory> Collective<'_, M> {
    /// The operation under which ranks compare the call.
    pub fn operation(&self) -> Operation {
        match self {
            Self::AllReduce { op, scaling, .. } => scaling.operation(*op),
            Self::WeightedMean { weights, .. } => {
                Operation::WeightedAllReduce { weights: Fingerprint::of_finite((*weights).into()).hash() }
            }
            Self::ReduceScatter { op, .. } => Operation::ReduceScatter(*op),
            Self::AllGather { .. } => Operation::AllGather,
            Self::AllToAll { .. } => Operation::AllToAll,
            Self::Broadcast { root, .. } => Operation::Broadcast { root: *root },
        }
    }

    /// The call as ranks compare it, with the number of elements that must be equal on all ranks.
    pub(crate) fn call(&self, world_size: usize) -> Call {
        let (_, len, dtype) = match self {
            Self::AllReduce { operands, .. } | Self::WeightedMean { operands, .. } => operands.output(),
            Self::ReduceScatter { operands, .. } => operands.shard(world_size, |output, _| output),
            Self::AllGather { operands } => operands.shard(world_size, |_, input| input),
            Self::AllToAll { operands } => operands.output(),
            Self::Broadcast { data, .. } => operand::<M>("data", M::as_slice(data)),
        };
        Call::new(self.operation(), len, dtype)
    }

    /// Refuses operands that do not fit each other, reductions of other elements than floating-point numbers, factors and weights that are
    /// not valid, and a root that does not exist.
    pub(crate) fn check(&self, rank: usize, world_size: usize) -> Result<()> {
        let shards = |name, whole, shard| check_shards(name, world_size, whole, shard);
        match self {
            Self::AllReduce { operands, scaling, .. } => {
                scaling.check()?;
                operands.check_same_queue("all_reduce")?;
                operands.check_same_shape("all_reduce")?;
                operands.check_floats("all_reduce")
            }
            Self::WeightedMean { operands, weights } => {
                check_weights(weights, world_size)?;
                operands.check_same_queue("all_reduce")?;
                operands.check_same_shape("all_reduce")?;
                operands.check_floats("all_reduce")
            }
            Self::ReduceScatter { operands, .. } => {
                operands.check_same_queue("reduce_scatter")?;
                let shard = operands.shard(world_size, |output, _| output);
                shards("reduce_scatter", operands.input(), shard)?;
                operands.check_floats("reduce_scatter")
            }
            Self::AllGather { operands } => {
                operands.check_same_queue("all_gather")?;
                let shard = operands.shard(world_size, |_, input| input);
                shards("all_gather", operands.output(), shard)
            }
            Self::AllToAll { operands } => {
                operands.check_same_queue("all_to_all")?;
                let (_, len, dtype) = operands.output();
                let shard = ("shards", len / world_size, dtype);
                shards("all_to_all", operands.output(), shard)?;
                shards("all_to_all", operands.input(), shard)
            }
            Self::Broadcast { root, .. } => check_root(self.operation(), *root, rank, world_size),
        }
    }
}

impl<M: Memory> Operands<'_, M> {
    fn output(&self) -> Operand<'static> {
        match self {
            Self::InPlace(data) => operand::<M>("data", M::as_slice(data)),
            Self::Apart { output, .. } => operand::<M>("output", M::as_slice(output)),
        }
    }

    fn input(&self) -> Operand<'static> {
        match self {
            Self::InPlace(data) => operand::<M>("data", M::as_slice(data)),
            Self::Apart { input, .. } => operand::<M>("input", *input),
        }
    }

    /// One rank's shard. For separate vectors it is the output or the input: `choose` gets them in this order and returns one.
    fn shard(
        &self,
        world_size: usize,
        choose: fn(Operand<'static>, Operand<'static>) -> Operand<'static>,
    ) -> Operand<'static> {
        match self {
            Self::InPlace(data) => ("shards", M::len(M::as_slice(data)) / world_size, M::dtype(M::as_slice(data))),
            Self::Apart { .. } => choose(self.output(), self.input()),
        }
    }

    fn check_same_queue(&self, operation: &'static str) -> Result<()> {
        match self {
            Self::InPlace(_) => Ok(()),
            Self::Apart { input, output } => M::check_same_queue(operation, *input, M::as_slice(output)),
        }
    }

    fn check_floats(&self, operation: &'static str) -> Result<()> {
        match self {
            Self::InPlace(data) => M::check_floats(operation, M::as_slice(data)),
            Self::Apart { input, output } => {
                M::check_floats(operation, *input)?;
                M::check_floats(operation, M::as_slice(output))
            }
        }
    }

    fn check_same_shape(&self, operation: &'static str) -> Result<()> {
        let ((left_name, left, input), (right_name, right, output)) = (self.input(), self.output());
        same_len(operation, (left_name, left), (right_name, right))?;
        if input != output {
            return Err(Error::DTypeMismatch {
                operation,
                what: "input and output".into(),
                left: input,
                right: output,
            });
        }
        Ok(())
    }
}

impl Operands<'_> {
    /// The dtype of both vectors.
    pub(super) fn dtype(&self) -> DType {
        self.output().2
    }

    /// The bytes of the input, for reading, and of the output, for writing; they are the same or disjoint, and borrowed as the operands
    /// are.
    pub(super) fn raw_bytes(&mut self) -> (*const [u8], *mut [u8]) {
        match self {
            Self::InPlace(data) => {
                let bytes: *mut [u8] = data.reborrow().as_bytes_mut();
                (bytes.cast_const(), bytes)
            }
            Self::Apart { input, output } => (input.as_bytes(), output.reborrow().as_bytes_mut()),
        }
    }
}

#[cfg(feature = "cuda")]
impl Operands<'_, Cuda> {
    /// The input and the output, which are the same memory or disjoint.
    pub(super) fn views(&self) -> (DeviceSlice<'_>, DeviceSlice<'_>) {
        match self {
            Self::InPlace(data) => (data.as_slice(), data.as_slice()),
            Self::Apart { input, output } => (*input, output.as_slice()),
        }
    }
}

/// The queue of all operands of an exchange; `None` if there are no operands.
#[cfg(feature = "cuda")]
pub(super) fn one_queue<'q>(
    sends: &[(usize, DeviceSlice<'q>)],
    receives: &[(usize, DeviceSliceMut<'q>)],
) -> Result<Option<&'q Queue>> {
    let mut queues = sends.iter().map(|(_, data)| data.queue()).chain(receives.iter().map(|(_, data)| data.queue()));
    let Some(queue) = queues.next() else { return Ok(None) };
    queues.try_for_each(|other| queue.check_same("exchange", other))?;
    Ok(Some(queue))
}

/// Checks that `whole` holds one shard of `shard` elements, of the same dtype, for every rank.
pub(super) fn check_shards(
    operation: &'static str,
    world_size: usize,
    (whole_name, whole, whole_dtype): Operand<'_>,
    (shard_name, shard, shard_dtype): Operand<'_>,
) -> Result<()> {
    if whole_dtype != shard_dtype {
        let what = format!("{whole_name} and {shard_name}");
        return Err(Error::DTypeMismatch { operation, what, left: whole_dtype, right: shard_dtype });
    }
    let expected = shard.saturating_mul(world_size);
    same_len(operation, (whole_name, whole), (&format!("{world_size} ranks' {shard_name}"), expected))
}

/// Refuses anything but a weight for every rank, and weights of which no mean can be computed.
fn check_weights(weights: &[f64], world_size: usize) -> Result<()> {
    same_len("all_reduce", ("weights", weights.len()), ("ranks", world_size))?;
    let sum: f64 = weights.iter().sum();
    if weights.iter().all(|weight| *weight >= 0.0) && sum > 0.0 && sum.is_finite() {
        return Ok(());
    }
    let reason = format!("weights must be finite and not negative, with a positive, finite sum, and are {weights:?}");
    Err(Error::InvalidArgument { operation: "all_reduce", reason })
}

/// Checks that `root` is a rank.
pub(super) fn check_root(operation: Operation, root: usize, rank: usize, world_size: usize) -> Result<()> {
    if root < world_size {
        return Ok(());
    }
    Err(CommError::InvalidPeer { operation, peer: root, rank, world_size }.into())
}

/// Checks that `peer` is another rank.
pub(super) fn check_peer(operation: Operation, peer: usize, rank: usize, world_size: usize) -> Result<()> {
    if peer < world_size && peer != rank {
        return Ok(());
    }
    Err(CommError::InvalidPeer { operation, peer, rank, world_size }.into())
}
