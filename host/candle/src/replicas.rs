//! The same variables on every rank: broadcast at the start, compared later, and buffers averaged.

use candle_core::{DType, Tensor};
use gradsync::comm::{Collectives, Operation, ReduceOp};
use gradsync::internal::all_prepared;
use gradsync::train::{broadcast_parameters, compare_parameters};

use crate::data_parallel::DataParallel;
use crate::error::Result;
use crate::memory::{TensorMemory, lend};
use crate::variables::Variable;

impl<M: TensorMemory> DataParallel<'_, M> {
    /// Replaces all variables on every rank by the variables of rank 0, frozen ones included, in place. [`new`](Self::new) does this; it is
    /// for variables that one rank has changed since, by reading a checkpoint for example. Local variables, and frozen ones that all ranks
    /// share because they are threads, are left unchanged.
    ///
    /// # Errors
    /// The errors of [`broadcast_parameters`].
    pub fn broadcast(&self) -> Result<()> {
        self.in_groups(
            |number| !self.is_shared(number),
            |names, data| {
                let mut tensors: Vec<_> = names.iter().copied().zip(data).collect();
                broadcast_parameters(self.communicator(), &mut tensors, 0)
            },
        )
    }

    /// Refuses trained variables whose bits differ between ranks; for use at checkpoints, for example. Buffers, which may differ, are not
    /// compared: see [`average_buffers`](Self::average_buffers).
    ///
    /// # Errors
    /// The errors of [`compare_parameters`], on every rank, which name the ranks and the variable that differ.
    pub fn compare(&self) -> Result<()> {
        self.compare_those(|number| self.is_trained(number))
    }

    /// Like [`compare`](Self::compare), for frozen variables and buffers too.
    pub(crate) fn compare_all(&self) -> Result<()> {
        self.compare_those(|number| !self.is_shared(number))
    }

    fn compare_those(&self, is_compared: impl Fn(usize) -> bool) -> Result<()> {
        self.in_groups(is_compared, |names, data| {
            let tensors: Vec<_> = names.iter().copied().zip(data.iter().map(M::as_slice)).collect();
            compare_parameters(self.communicator(), &tensors)
        })
    }

    /// Replaces buffers by their means over ranks, on every rank: variables that the program sets and no gradient changes, such as the
    /// running means and variances of a BatchNorm, which each rank computes from its own examples. Call it before an evaluation or a
    /// checkpoint; [`broadcast`](Self::broadcast) takes rank 0's buffers instead. All ranks must call it.
    ///
    /// Buffers are the variables that are [declared as frozen](crate::Variables::with_frozen), and after the first step those without a
    /// gradient on any rank so far. Only variables whose bits differ between ranks are sent and change; ranks exchange 8 bytes for each of
    /// the others. Means of `f16` and `bf16` are computed in `f32` or wider, and rounded once; a NaN on one rank is NaN on all.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{ModuleT, Optimizer, SGD, VarBuilder, VarMap, batch_norm};
    /// use gradsync::comm::{Ranks, local};
    /// use gradsync::train::Reduction;
    /// use gradsync_candle::{DataParallel, Error, Variables};
    ///
    /// let means = local::try_run(2, |comm| {
    ///     let map = VarMap::new();
    ///     let norm = batch_norm(1, 1e-5, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    ///     let variables = Variables::from(&map).with_frozen(|name| name.contains("running_"));
    ///     let mut optimizer = SGD::new(variables.trained().cloned().collect(), 0.1)?;
    ///     let mut parallel = DataParallel::new(variables, &comm, Reduction::Mean)?;
    ///     let first = 10.0 * comm.rank() as f32;
    ///     let examples = Tensor::new(&[[first], [first + 2.0]], &Device::Cpu)?; // their means are 1 and 11
    ///     let loss = norm.forward_t(&examples, true)?.sqr()?.mean_all()?;
    ///     optimizer.step(&parallel.backward(&loss)?)?;
    ///     parallel.compare()?; // the trained variables are equal
    ///     parallel.average_buffers()?;
    ///     Ok::<_, Error>(norm.running_mean().to_vec1::<f32>()?) // with momentum 0.1
    /// })?;
    /// assert!(means.iter().all(|mean| (mean[0] - 0.6).abs() < 1e-6));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank, an error that a rank had before anything was sent. Errors of the communicator, after which the buffers are
    /// unspecified.
    pub fn average_buffers(&self) -> Result<()> {
        let (context, variables) = self.parts();
        let buffers: Vec<&Variable> =
            variables.filter(|(number, _)| !self.is_trained(*number)).map(|(_, variable)| variable).collect();
        let (comm, count) = (self.communicator(), buffers.len());
        if comm.world_size() == 1 || count == 0 {
            return Ok(());
        }
        let mut fingerprints = Vec::with_capacity(count);
        let computed = self.in_groups(
            |number| !self.is_trained(number),
            |_, data| {
                data.iter().try_for_each(|data| {
                    fingerprints.push(M::fingerprint(M::as_slice(data))?.hash());
                    Ok(())
                })
            },
        );
        all_prepared(Operation::CompareParameters, comm, computed)?;
        let all = comm.gather_words(&fingerprints)?;
        let differs = |index: &usize| all.iter().skip(*index).step_by(count).any(|one| *one != all[*index]);
        let differing: Vec<&Variable> = (0..count).filter(differs).map(|index| buffers[index]).collect();
        let widened = differing.iter().map(|Variable { name, var, .. }| match var.dtype() {
            DType::F32 | DType::F64 => Ok((&name[..], var.as_tensor().clone())),
            _ => Ok((&name[..], var.to_dtype(DType::F32)?)),
        });
        let widened: Vec<(&str, Tensor)> =
            all_prepared(Operation::CompareParameters, comm, widened.collect::<Result<_>>())?;
        let tensors: Vec<(&str, &Tensor)> = widened.iter().map(|(name, tensor)| (*name, tensor)).collect();
        lend::<M>(context, &tensors, |_, data| {
            data.into_iter().try_for_each(|data| comm.all_reduce(data, ReduceOp::Mean))
        })?;
        for (Variable { var, .. }, (_, mean)) in differing.iter().zip(&widened) {
            if mean.dtype() != var.dtype() {
                var.set(&mean.to_dtype(var.dtype())?)?;
            }
        }
        Ok(())
    }

    /// Passes the variables with certain numbers, each once, to `body`, a group at a time.
    fn in_groups(
        &self,
        is_wanted: impl Fn(usize) -> bool,
        mut body: impl FnMut(&[&str], Vec<M::SliceMut<'_>>) -> gradsync::Result<()>,
    ) -> Result<()> {
        let (context, variables) = self.parts();
        let wanted = variables.filter(|(number, _)| is_wanted(*number));
        let tensors: Vec<(&str, &Tensor)> =
            wanted.map(|(_, Variable { name, var, .. })| (&name[..], var.as_tensor())).collect();
        let names: Vec<&str> = tensors.iter().map(|(name, _)| *name).collect();
        lend::<M>(context, &tensors, |begin, data| body(&names[begin..begin + data.len()], data))
    }
}
