//! [`Collective`]: a collective as an operation of candle, with its adjoint.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use gradsync::Float;
use gradsync::ops::tensor_parallel::{AllGather, AllReduce, OwnedTensor, ReduceScatter, TensorOp};

use super::{Shared, TensorParallel, locked};
use crate::memory::with_float;

/// A function of the ranks' tensors. Parts are along dimension 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassFunction {
    /// The unchanged tensor.
    Same,
    Sum,
    Concatenate,
    /// This rank's part.
    Part,
    /// This rank's part of the sum.
    SumPart,
}

impl PassFunction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Same => "copy",
            Self::Sum => "all-reduce",
            Self::Concatenate => "all-gather",
            Self::Part => "scatter",
            Self::SumPart => "reduce-scatter",
        }
    }
}

/// A forward step and its backward step, for contiguous tensors.
pub(super) struct Collective {
    pub(super) group: TensorParallel,
    pub(super) forward: PassFunction,
    pub(super) backward: PassFunction,
}

/// The rows of this rank, with the shape of its part.
pub(crate) fn part(
    step: PassFunction,
    dims: &[usize],
    rank: usize,
    world_size: usize,
) -> Result<(Range<usize>, Vec<usize>)> {
    match dims {
        [first, rest @ ..] if first % world_size == 0 => {
            let (rows, row) = (first / world_size, rest.iter().product::<usize>());
            let own = [&[rows], rest].concat();
            Ok((rank * rows * row..(rank + 1) * rows * row, own))
        }
        _ => bail!(
            "{}: a dimension cannot be divided evenly among {world_size} ranks: the shape is {dims:?}, with that dimension first",
            step.name()
        ),
    }
}

impl Collective {
    fn on_host<T: Float>(&self, data: &[T], dims: &[usize]) -> Result<(Vec<T>, Shape)> {
        #[cfg_attr(not(feature = "cuda"), allow(irrefutable_let_patterns))]
        let Shared::Host(comm) = &*self.group.shared else {
            bail!("{}: a tensor on the CPU in a group of ranks on GPUs", self.name())
        };
        if let PassFunction::Same = self.forward {
            return Ok((data.to_vec(), dims.into()));
        }
        if let PassFunction::Part = self.forward {
            let (range, dims) = part(self.forward, dims, self.group.rank, self.group.world_size)?;
            return Ok((data[range].to_vec(), dims.into()));
        }
        let comm = locked(comm);
        let run = || {
            let tensor = OwnedTensor::new(data.to_vec(), dims)?;
            match self.forward {
                PassFunction::Concatenate => AllGather.forward(tensor, &**comm),
                PassFunction::SumPart => ReduceScatter.forward(tensor, &**comm),
                _ => AllReduce.forward(tensor, &**comm),
            }
        };
        let result = run().map_err(candle_core::Error::wrap)?;
        let dims = result.shape().to_vec();
        Ok((result.into_vec().expect("the dtype that was given"), dims.into()))
    }
}

impl CustomOp1 for Collective {
    fn name(&self) -> &'static str {
        self.forward.name()
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("{}: the tensor is not contiguous", self.name())
        };
        with_float!(storage.dtype(), T => {
            let (data, shape) = self.on_host(&storage.as_slice::<T>()?[begin..end], layout.dims())?;
            Ok((T::to_cpu_storage_owned(data), shape))
        }, _ => bail!("{}: a tensor of {:?} cannot be passed", self.name(), storage.dtype()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Shared::Cuda(comm) = &*self.group.shared else {
            bail!("{}: a tensor on a GPU in a group of ranks on CPUs", self.name())
        };
        comm.run(self.forward, storage, layout)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        bail!("{}: built without the feature `cuda`", self.name())
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Self { group, forward, backward } = self;
        if let PassFunction::Same = backward {
            return Ok(Some(gradient.clone()));
        }
        let back = Self { group: group.clone(), forward: *backward, backward: *forward };
        gradient.contiguous()?.apply_op1_no_bwd(&back).map(Some)
    }
}
