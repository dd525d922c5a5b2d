//! [`TensorMemory`]: the storages of candle's tensors as memory of gradsync, without a copy.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt::Debug;

use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor, bail};
use gradsync::SliceMut;
use gradsync::comm::Communicator;
use gradsync::internal::ReducerMemory;
use gradsync::memory::Host;
use gradsync::train::{Parameter, Reducer, ReducerOptions};

use crate::clip;
use crate::error::{Error, Result};

/// The number of tensors that are borrowed at once. A launch on a GPU serves all of them; each needs a frame of the stack.
const GROUP: usize = 64;

/// A kind of memory for candle's tensors: [`Host`], and with the feature `cuda` gradsync's `Cuda`. Its functions are for this crate alone.
#[allow(missing_docs)]
pub trait TensorMemory: ReducerMemory {
    /// The streams and queues that order work on tensors together with candle's.
    #[doc(hidden)]
    type Context: Debug;

    /// The storage of candle's tensors in this memory.
    #[doc(hidden)]
    type Storage: 'static;

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

    /// Passes the elements of a storage, whose layout is contiguous, to `body`, and records its work for later uses of the storage.
    ///
    /// # Safety
    /// The elements are not used after `body` has returned, whatever the lifetime of the slice says.
    #[doc(hidden)]
    unsafe fn borrow(
        context: &Self::Context,
        storage: &mut Self::Storage,
        layout: &Layout,
        body: &mut dyn FnMut(Self::SliceMut<'static>) -> candle_core::Result<()>,
    ) -> candle_core::Result<()>;

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
    body: impl FnMut(usize, Vec<M::SliceMut<'_>>) -> gradsync::Result<()>,
) -> Result<()> {
    check(tensors)?;
    let body = RefCell::new(body);
    for (group, rest) in tensors.chunks(GROUP).enumerate() {
        let slices = RefCell::new(Vec::with_capacity(rest.len()));
        let outcome = Cell::new(Ok(()));
        // The body is generic over the lifetime of the slices, so it cannot keep them.
        let run = || outcome.set((body.borrow_mut())(group * GROUP, slices.take()));
        Lend::<M> { context, rest, slices: &slices, run: &run }.next()?;
        outcome.into_inner()?;
    }
    Ok(())
}

/// Borrows the storages of `rest`, one within the other, since candle lends a storage exclusively only for the duration of a call.
struct Lend<'f, M: TensorMemory> {
    context: &'f M::Context,
    rest: &'f [(&'f str, &'f Tensor)],
    slices: &'f RefCell<Vec<M::SliceMut<'static>>>,
    run: &'f dyn Fn(),
}

impl<M: TensorMemory> Lend<'_, M> {
    fn next(&self) -> candle_core::Result<()> {
        match self.rest {
            [] => {
                (self.run)();
                Ok(())
            }
            [(_, tensor), ..] => tensor.inplace_op1(self),
        }
    }

    fn within(&self, storage: &mut dyn Any, layout: &Layout) -> candle_core::Result<()> {
        let Some(storage) = storage.downcast_mut::<M::Storage>() else {
            bail!("a tensor is on another device than the ranks' communicator")
        };
        let mut body = |slice| {
            self.slices.borrow_mut().push(slice);
            Lend::<M> { rest: &self.rest[1..], ..*self }.next()
        };
        // SAFETY: the innermost frame takes all slices and drops them before it returns to this one.
        unsafe { M::borrow(self.context, storage, layout, &mut body) }
    }
}

impl<M: TensorMemory> InplaceOp1 for Lend<'_, M> {
    fn name(&self) -> &'static str {
        "lend to gradsync"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        self.within(storage, layout)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.within(storage, layout)
    }
}

impl TensorMemory for Host {
    type Context = ();
    type Storage = CpuStorage;

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

    unsafe fn borrow(
        (): &(),
        storage: &mut CpuStorage,
        layout: &Layout,
        body: &mut dyn FnMut(SliceMut<'static>) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
        let slice: SliceMut<'_> = match storage {
            CpuStorage::F64(data) => (&mut data[range]).into(),
            CpuStorage::F32(data) => (&mut data[range]).into(),
            CpuStorage::F16(data) => (&mut data[range]).into(),
            CpuStorage::BF16(data) => (&mut data[range]).into(),
            _ => bail!("only tensors of f64, f32, f16 and bf16 can be reduced"),
        };
        // SAFETY: the caller's promise: the slice is not used after this borrow of the storage.
        body(unsafe { std::mem::transmute::<SliceMut<'_>, SliceMut<'static>>(slice) })
    }

    fn clip((): &(), tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<(Tensor, Vec<Tensor>)> {
        Ok((clip::on_host(tensors, max_norm)?, Vec::new()))
    }
}
