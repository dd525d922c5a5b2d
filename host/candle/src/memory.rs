//! [`TensorMemory`]: the storages of candle's tensors as memory of gradsync, without a copy.

use std::collections::HashSet;
use std::fmt::Debug;

use candle_core::{CpuStorage, DType, Device, Layout, Storage, StorageMutRef, StorageRef, Tensor};
use gradsync::SliceMut;
use gradsync::comm::Communicator;
use gradsync::internal::ReducerMemory;
use gradsync::memory::Host;
use gradsync::train::{OptimizerMemory, Parameter, Reducer, ReducerOptions};

use crate::clip;
use crate::error::{Error, Result};

/// The number of gradients for which a GPU waits at once, before it works on them by one launch.
const GROUP: usize = 64;

/// A kind of memory for candle's tensors: [`Host`], and with the feature `cuda` gradsync's `Cuda`. Its functions are for this crate alone.
#[allow(missing_docs)]
pub trait TensorMemory: ReducerMemory + OptimizerMemory {
    /// The streams and queues that order work on tensors together with candle's.
    #[doc(hidden)]
    type Context: Clone + Debug;

    /// Records the work on borrowed elements for later uses of their storage, when it is dropped.
    #[doc(hidden)]
    type Guard<'a>;

    /// Creates the context of tensors on this device, if it is in this memory. With `is_forked`, work on gradients has a separate queue.
    #[doc(hidden)]
    fn context(device: &Device, is_forked: bool) -> Result<Self::Context>;

    /// The name of this memory in errors, unless tensors of this device are in it and ordered like tensors of `like`.
    #[doc(hidden)]
    fn refuses(device: &Device, like: &Device) -> Option<String>;

    #[doc(hidden)]
    fn reducer<'c>(
        context: &Self::Context,
        comm: &'c dyn Communicator<Self>,
        parameters: Vec<Parameter>,
        options: ReducerOptions,
    ) -> gradsync::Result<Reducer<'c, Self>>;

    /// Borrows the elements of a storage, whose layout is contiguous; `None` for a storage in other memory or of another type. The elements
    /// are not used after the guard.
    #[doc(hidden)]
    fn borrow<'a>(
        context: &'a Self::Context,
        storage: &'a mut Storage,
        layout: &Layout,
    ) -> Option<(Self::SliceMut<'a>, Self::Guard<'a>)>;

    /// Computes the norm of gradients, and the clipped gradients, unless they are clipped in place.
    #[doc(hidden)]
    fn clip(context: &Self::Context, tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<(Tensor, Vec<Tensor>)>;
}

/// The dtype in gradsync.
pub(crate) fn dtype(dtype: DType) -> Option<gradsync::DType> {
    with_float!(dtype, T => Some(<T as gradsync::Element>::DTYPE), _ => None)
}

/// Runs `$body` with the alias `$type` for the Rust type of a dtype that gradsync reduces, or `$other` for another dtype.
macro_rules! with_float {
    ($dtype:expr, $type:ident => $body:expr, _ => $other:expr) => {
        match $dtype {
            candle_core::DType::F64 => {
                type $type = f64;
                $body
            }
            candle_core::DType::F32 => {
                type $type = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $type = gradsync::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $type = gradsync::bf16;
                $body
            }
            _ => $other,
        }
    };
}
pub(crate) use with_float;

/// A number that is equal for tensors with one storage, as long as one of them exists.
pub(crate) fn storage_key(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

/// Refuses tensors that are not contiguous, or two of which share a storage.
pub(crate) fn check(tensors: &[(&str, &Tensor)]) -> Result<()> {
    let mut keys = HashSet::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let refuse = |reason| Error::Storage { name: (*name).to_owned(), shape: tensor.dims().to_vec(), reason };
        if !tensor.is_contiguous() {
            return Err(refuse("is not contiguous"));
        }
        if !keys.insert(storage_key(tensor)) {
            return Err(refuse("has the storage of another tensor of this call"));
        }
    }
    Ok(())
}

/// Passes the elements of all tensors to `body`, a group at a time, each group with the number of its first tensor. The tensors must be
/// contiguous, and no two may share a storage.
///
/// # Errors
/// [`Error::Storage`] naming a tensor that violates this; errors of `body`.
pub(crate) fn lend<M: TensorMemory>(
    context: &M::Context,
    tensors: &[(&str, &Tensor)],
    mut body: impl FnMut(usize, Vec<M::SliceMut<'_>>) -> gradsync::Result<()>,
) -> Result<()> {
    check(tensors)?;
    let mut groups = tensors.chunks(GROUP).enumerate();
    groups.try_for_each(|(group, tensors)| lend_checked::<M>(context, tensors, |data| body(group * GROUP, data)))
}

/// Like [`lend`], with all tensors at once.
pub(crate) fn lend_all<M: TensorMemory>(
    context: &M::Context,
    tensors: &[(&str, &Tensor)],
    body: impl FnOnce(Vec<M::SliceMut<'_>>) -> gradsync::Result<()>,
) -> Result<()> {
    check(tensors)?;
    lend_checked::<M>(context, tensors, body)
}

fn lend_checked<M: TensorMemory>(
    context: &M::Context,
    tensors: &[(&str, &Tensor)],
    body: impl FnOnce(Vec<M::SliceMut<'_>>) -> gradsync::Result<()>,
) -> Result<()> {
    let mut storages = locked(tensors);
    let (mut slices, mut guards) = (Vec::with_capacity(tensors.len()), Vec::with_capacity(tensors.len()));
    for (storage, (name, tensor)) in storages.iter_mut().zip(tensors) {
        let Some((slice, guard)) = M::borrow(context, storage, tensor.layout()) else {
            let (shape, reason) = (tensor.dims().to_vec(), "is in other memory than the ranks' communicator");
            return Err(Error::Storage { name: (*name).to_owned(), shape, reason });
        };
        slices.push(slice);
        guards.push(guard);
    }
    Ok(body(slices)?)
}

/// Locks the storages of all tensors, no two of which share one.
fn locked<'t>(tensors: &[(&str, &'t Tensor)]) -> Vec<StorageMutRef<'t>> {
    let locks: Vec<_> = tensors.iter().map(|(_, tensor)| StorageRef::rwlock(&tensor.storage_and_layout().0)).collect();
    let mut awaited = 0;
    loop {
        // No lock is held during the wait for one: another thread may hold that one, and wait for the others.
        let mut first = locks.get(awaited).map(|lock| lock.write());
        let mut storages = Vec::with_capacity(locks.len());
        for (number, lock) in locks.iter().enumerate() {
            let storage = if number == awaited { first.take() } else { lock.try_write() };
            storages.extend(storage);
            if storages.len() == number {
                awaited = number;
                break;
            }
        }
        if storages.len() == locks.len() {
            return storages;
        }
    }
}

impl TensorMemory for Host {
    type Context = ();
    type Guard<'a> = ();

    fn context(_: &Device, _: bool) -> Result<()> {
        Ok(())
    }

    fn refuses(device: &Device, _: &Device) -> Option<String> {
        (!device.is_cpu()).then(|| "the memory of the CPU".into())
    }

    fn reducer<'c>(
        (): &(),
        comm: &'c dyn Communicator,
        parameters: Vec<Parameter>,
        options: ReducerOptions,
    ) -> gradsync::Result<Reducer<'c>> {
        Reducer::new(comm, parameters, options)
    }

    fn borrow<'a>((): &'a (), storage: &'a mut Storage, layout: &Layout) -> Option<(SliceMut<'a>, ())> {
        let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
        let Storage::Cpu(storage) = storage else { return None };
        let slice: SliceMut<'_> = match storage {
            CpuStorage::F64(data) => (&mut data[range]).into(),
            CpuStorage::F32(data) => (&mut data[range]).into(),
            CpuStorage::F16(data) => (&mut data[range]).into(),
            CpuStorage::BF16(data) => (&mut data[range]).into(),
            _ => return None,
        };
        Some((slice, ()))
    }

    fn clip((): &(), tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<(Tensor, Vec<Tensor>)> {
        Ok((clip::on_host(tensors, max_norm)?, Vec::new()))
    }
}
