//! Tensor parallelism: one layer divided among ranks, by collectives with gradients.
//!
//! | call | forward | backward | Megatron-LM |
//! |---|---|---|---|
//! | [`all_reduce`](TensorParallel::all_reduce) | sum over ranks | identity | *g*, reduce from the region |
//! | [`all_reduce_gradient`](TensorParallel::all_reduce_gradient) | identity | sum over ranks | *f*, copy to the region |
//! | [`gather`](TensorParallel::gather) | concatenates the ranks' parts | this rank's part | gather from the region |
//! | [`scatter`](TensorParallel::scatter) | this rank's part | concatenates the ranks' parts | scatter to the region |
//! | [`all_gather`](TensorParallel::all_gather) | concatenates the ranks' parts | sums, and keeps this rank's part | gather of sequence parallelism |
//! | [`reduce_scatter`](TensorParallel::reduce_scatter) | sums, and keeps this rank's part | concatenates the ranks' parts | reduce-scatter of sequence parallelism |
//!
//! `gather` and `scatter` are for ranks that continue with the same numbers, each computing the same loss, whose gradients are the same on
//! all ranks. `all_gather` and `reduce_scatter` are for ranks that continue with different numbers.
//!
//! [`ColumnParallelLinear`] and [`RowParallelLinear`] are layers built from them.
//!
//! # Ownership
//!
//! candle keeps an operation in the graph as long as a tensor derived from it lives, and requires it to be `'static`, [`Send`] and
//! [`Sync`]. A communicator is used by one thread at a time. So a [`TensorParallel`] owns its communicator behind a mutex, and is shared:
//! clones and operations in graphs are the same group. The lock is held while a collective runs. It cannot deadlock with another use of the
//! same group on this rank as long as one thread computes, which is also the only way to make the ranks' calls in the same order.

pub(crate) mod collective;
mod linear;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor};
use gradsync::comm::Communicator;
use gradsync::memory::Host;

use self::collective::{Collective, PassFunction};
pub use self::linear::{ColumnParallelLinear, RowParallelLinear};

/// A group of ranks that divide layers among them; see the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use gradsync::comm::{Ranks, local};
/// use gradsync_candle::{Error, tensor_parallel::TensorParallel};
///
/// let sums = local::try_run(2, |comm| {
///     let rank = comm.rank() as f32;
///     let group = TensorParallel::new(comm);
///     let partial = Var::new(&[rank, 10.0], &Device::Cpu)?;
///     let sum = group.all_reduce(&partial)?;
///     let gradients = sum.sqr()?.sum_all()?.backward()?;
///     // The loss is the same on both ranks, and each has the gradient of its own part.
///     Ok::<_, Error>((sum.to_vec1::<f32>()?, gradients.get(&partial).expect("used").to_vec1::<f32>()?))
/// })?;
/// assert_eq!(sums, vec![(vec![1.0, 20.0], vec![2.0, 40.0]); 2]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct TensorParallel {
    shared: Arc<Shared>,
    rank: usize,
    world_size: usize,
}

/// The communicator of a group.
enum Shared {
    Host(Mutex<Box<dyn Communicator<Host> + Send>>),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::SharedCommunicator),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The communicator itself records whether it has failed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorParallel(rank {} of {})", self.rank, self.world_size)
    }
}

impl TensorParallel {
    /// Creates a group of ranks whose tensors are on the CPU.
    pub fn new(comm: impl Communicator<Host> + Send + 'static) -> Self {
        Self::from_boxed(Box::new(comm))
    }

    /// Like [`new`](Self::new), for a communicator whose type is unknown.
    pub fn from_boxed(comm: Box<dyn Communicator<Host> + Send>) -> Self {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        Self { shared: Arc::new(Shared::Host(Mutex::new(comm))), rank, world_size }
    }

    /// Creates a group of ranks whose tensors are on a GPU.
    ///
    /// # Errors
    /// [`Error::PerThreadStream`](crate::Error::PerThreadStream); [`Error::Device`](crate::Error::Device) for a device that is no GPU;
    /// CUDA's errors.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(
        comm: impl Communicator<gradsync::memory::Cuda> + Send + 'static,
        device: &candle_core::Device,
    ) -> crate::Result<Self> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let shared = crate::cuda::SharedCommunicator::new(comm, device)?;
        Ok(Self { shared: Arc::new(Shared::Cuda(shared)), rank, world_size })
    }

    /// The number of this rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks of the group.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Sums the ranks' tensors, which have one shape; the gradient is unchanged.
    ///
    /// # Errors
    /// On every rank: an error that names two ranks whose shapes, dtypes or calls differ; errors of the communicator. These are the errors
    /// of all operations here. On GPUs a call returns before it is compared with the other ranks' calls: a difference of dtypes or of the
    /// numbers of elements is an error of a later call, and ends the group; shapes with equal numbers of elements are not told apart.
    pub fn all_reduce(&self, tensor: &Tensor) -> Result<Tensor> {
        self.apply(tensor, PassFunction::Sum, PassFunction::Same)
    }

    /// Returns the tensor, which is the same on all ranks, unchanged, and sums the ranks' gradients. The forward pass copies, since
    /// candle's operations must have new results.
    ///
    /// # Errors
    /// None of its own forward; backward the errors of [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_gradient(&self, tensor: &Tensor) -> Result<Tensor> {
        self.apply(tensor, PassFunction::Same, PassFunction::Sum)
    }

    /// Concatenates the ranks' tensors, which have one shape, along a dimension, in rank order. The gradient is this rank's part, for ranks
    /// that continue with the same numbers.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce), and an error for a dimension that the tensor does not have.
    pub fn gather(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        self.along(tensor, dim, PassFunction::Concatenate, PassFunction::Part)
    }

    /// This rank's part, along a dimension, of a tensor that is the same on all ranks. The gradient is concatenated.
    ///
    /// # Errors
    /// The errors of [`gather`](Self::gather), and an error for a dimension that is not divisible by the number of ranks.
    pub fn scatter(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        self.along(tensor, dim, PassFunction::Part, PassFunction::Concatenate)
    }

    /// Concatenates the ranks' tensors along a dimension. The gradient is this rank's part of the sum, for ranks that continue with
    /// different numbers.
    ///
    /// # Errors
    /// The errors of [`gather`](Self::gather).
    pub fn all_gather(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        self.along(tensor, dim, PassFunction::Concatenate, PassFunction::SumPart)
    }

    /// Sums the ranks' tensors and keeps this rank's part along a dimension. The gradient is concatenated.
    ///
    /// # Errors
    /// The errors of [`scatter`](Self::scatter).
    pub fn reduce_scatter(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        self.along(tensor, dim, PassFunction::SumPart, PassFunction::Concatenate)
    }

    /// Swaps `dim` with dimension 0 and back, since parts along another dimension are not contiguous. The result is contiguous: candle's
    /// products of matrices on GPUs refuse most other layouts.
    fn along(&self, tensor: &Tensor, dim: usize, forward: PassFunction, backward: PassFunction) -> Result<Tensor> {
        match dim {
            0 => self.apply(tensor, forward, backward),
            dim => self.apply(&tensor.transpose(0, dim)?, forward, backward)?.transpose(0, dim)?.contiguous(),
        }
    }

    fn apply(&self, tensor: &Tensor, forward: PassFunction, backward: PassFunction) -> Result<Tensor> {
        if self.world_size == 1 {
            return Ok(tensor.clone());
        }
        tensor.contiguous()?.apply_op1(Collective { group: self.clone(), forward, backward })
    }
}
