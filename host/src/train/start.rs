//! A common start of all ranks: [`broadcast_parameters`], [`broadcast_numbers`], and [`compare_parameters`] to verify later that they are
//! still equal.

use super::same_bits::{check_fingerprints, check_finite};
use crate::call::{Value, scope};
use crate::call_comparison::{ComparedCall, agree, gather};
use crate::comm::{Collective, Communicator, Ranks};
use crate::error::{Error, Operation, Result};
use crate::kernels::KernelMemory;
use crate::kernels::cpu::Fingerprint;
use crate::memory::Memory;

/// The number of collectives per group call; NCCL is slow with large groups.
const GROUP: usize = 128;

/// How the ranks' weights become equal in the first step of a [`Stepper`](super::Stepper), or in gradsync-candle's `DataParallel::new`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Start {
    /// Every rank takes the weights of rank 0, in place: ranks whose random initial weights differ train one model (PyTorch's
    /// DistributedDataParallel does the same).
    #[default]
    Broadcast,
    /// Weights whose bits differ between ranks are an error on every rank, which names the ranks and a tensor: for a program whose ranks
    /// have all read one checkpoint, for example.
    Compare,
}

/// Refuses, on all ranks, tensors that differ in name, elements or dtype, and a root that does not exist.
fn agree_on<M: Memory>(
    comm: &dyn Communicator<M>,
    operation: Operation,
    root: Option<usize>,
    tensors: impl Iterator<Item = (String, usize, crate::DType)>,
) -> Result<()> {
    let tensors: Vec<_> = tensors.collect();
    let mut lines = Vec::new();
    for (index, (name, len, dtype)) in tensors.iter().enumerate() {
        lines.push((format!("tensor {index}"), Value::Name(name)));
        lines.push((format!("the elements of tensor {index} {name:?}"), Value::Number(*len)));
        lines.push((format!("the dtype of tensor {index} {name:?}"), Value::DType(*dtype)));
    }
    lines.push((format!("tensor {}", tensors.len()), Value::Words("none")));
    if let Some(root) = root {
        lines.push(("root".into(), Value::Number(root)));
    }
    let lines: Vec<(&str, Value<'_>)> = lines.iter().map(|(label, value)| (&label[..], *value)).collect();
    let checked = check_root(operation, root.unwrap_or(0), comm.world_size());
    agree(comm, &ComparedCall { lines: &lines, ..ComparedCall::of(operation) }, checked)
}

fn check_root(operation: Operation, root: usize, world_size: usize) -> Result<()> {
    if root < world_size {
        return Ok(());
    }
    let reason = format!("the root is rank {root}, and there are {world_size} ranks");
    Err(Error::InvalidArgument { operation: operation.name(), reason })
}

/// Replaces tensors on every rank by the tensors of rank `root`, bit for bit: parameters, buffers and the state of the optimizer at the
/// start, which differ after random initialization, or if one rank alone has read a checkpoint. Each tensor has a name; `into()` makes
/// elements of a `Vec` or slice. On GPUs the call is asynchronous.
///
/// ```
/// use gradsync::comm::{Ranks, local};
/// use gradsync::train::{broadcast_parameters, compare_parameters};
///
/// let weights = local::run(3, |comm| {
///     let (mut weight, mut bias) = (vec![comm.rank() as f32; 6], vec![comm.rank() as f64; 2]);
///     broadcast_parameters(&comm, &mut [("weight", (&mut weight).into()), ("bias", (&mut bias).into())], 0)?;
///     compare_parameters(&comm, &[("weight", (&weight).into()), ("bias", (&bias).into())])?;
///     Ok(weight)
/// })?;
/// assert_eq!(weights, vec![vec![0.0; 6]; 3]);
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// # Errors
/// Before anything is written: [`Error::Disagreement`] on every rank, naming the tensor and two ranks that differ in its name, elements or
/// dtype; [`Error::InvalidArgument`] for a root that does not exist. Errors of the communicator, after which the tensors are unspecified.
pub fn broadcast_parameters<M: Memory>(
    comm: &dyn Communicator<M>,
    tensors: &mut [(&str, M::SliceMut<'_>)],
    root: usize,
) -> Result<()> {
    let operation = Operation::BroadcastParameters;
    let _scope = scope::within(operation);
    if comm.world_size() == 1 {
        return check_root(operation, root, 1);
    }
    let described = tensors.iter().map(|(name, data)| {
        let data = M::as_slice(data);
        ((*name).to_owned(), M::len(data), M::dtype(data))
    });
    agree_on(comm, operation, Some(root), described)?;
    for group in tensors.chunks_mut(GROUP) {
        let data = group.iter_mut().map(|(_, data)| M::reborrow(data));
        comm.run_all(data.map(|data| Collective::Broadcast { data, root }).collect())?;
    }
    Ok(())
}

/// Replaces numbers on every rank by the numbers of rank `root`: seeds, step counts, positions in the data. All ranks must pass the same
/// number of them. The host waits for the other ranks.
///
/// # Errors
/// The errors of [`broadcast_parameters`].
pub fn broadcast_numbers<R: Ranks + ?Sized>(ranks: &R, numbers: &mut [u64], root: usize) -> Result<()> {
    let operation = Operation::BroadcastParameters;
    let _scope = scope::within(operation);
    let world_size = ranks.world_size();
    if world_size == 1 {
        return check_root(operation, root, 1);
    }
    let lines = [("numbers", Value::Number(numbers.len())), ("root", Value::Number(root))];
    agree(
        ranks,
        &ComparedCall { lines: &lines, ..ComparedCall::of(operation) },
        check_root(operation, root, world_size),
    )?;
    let all = gather(ranks, numbers)?;
    numbers.copy_from_slice(&all[root * numbers.len()..(root + 1) * numbers.len()]);
    Ok(())
}

/// Refuses tensors whose bits differ between ranks, and tensors with NaN or infinities: for use at checkpoints, and whenever ranks may have
/// diverged. Parameters that are NaN on all ranks are equal, and no checkpoint to continue from, so they are an error too; tensors in which
/// infinities belong, such as masks of attention, are no parameters and are left out by the caller.
///
/// Ranks exchange at most 16 bytes per tensor. Tensors are read once; on several GPUs they are copied to the host for that.
///
/// # Errors
/// [`Error::Disagreement`] in the cases of [`broadcast_parameters`]; [`Error::InvalidArgument`] on every rank, naming the ranks that differ
/// from most of the others and the first tensor that differs, or a tensor that is equal on all ranks and its first number that is not
/// finite; `Error::Cuda`; errors of the communicator.
pub fn compare_parameters<M: KernelMemory>(comm: &dyn Communicator<M>, tensors: &[(&str, M::Slice<'_>)]) -> Result<()> {
    const ADVICE: (&str, &str) = (
        "the parameters",
        "Make them equal before the first step, by `Start::Broadcast` or `broadcast_parameters`, and apply the same gradients with the \
         same options on every rank",
    );
    let operation = Operation::CompareParameters;
    let _scope = scope::within(operation);
    let name = |index: usize| tensors[index].0;
    if comm.world_size() == 1 {
        // There is nothing to compare, so that only tensors that are not finite are read on the host.
        let fingerprint = |&(_, data): &(_, M::Slice<'_>)| match M::all_finite(data)? {
            true => Ok(Fingerprint::default()),
            false => M::fingerprint(data),
        };
        let fingerprints = tensors.iter().map(fingerprint).collect::<Result<Vec<_>>>()?;
        return check_finite(operation.name(), ADVICE.0, &fingerprints, &name);
    }
    let described = tensors.iter().map(|&(name, data)| (name.to_owned(), M::len(data), M::dtype(data)));
    agree_on(comm, operation, None, described)?;
    let fingerprints: Result<Vec<Fingerprint>> = tensors.iter().map(|&(_, data)| M::fingerprint(data)).collect();
    let fingerprints = agree(comm, &ComparedCall::of(operation), fingerprints)?;
    check_fingerprints(operation.name(), comm, ADVICE, &fingerprints, &name)
}
