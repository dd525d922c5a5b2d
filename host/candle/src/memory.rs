//! [`TensorMemory`]: the storages of candle's tensors as memory of gradsync, without a copy.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};
use gradsync::comm::Communicator;
use gradsync::kernels::cpu;
use gradsync::memory::Host;
use gradsync::train::{Parameter, Reducer, ReducerMemory, ReducerOptions};
use gradsync::{Slice, SliceMut};

use crate::clip;
use crate::error::{Error, Result};

/// The number of tensors that are borrowed at once. A launch on a GPU serves all of them; each needs a frame of the stack.
pub(crate) const GROUP: usize = 64;

/// The number of elements that are scaled at a time.
const PIECE_LEN: usize = 1 << 16;

/// A kind of memory for candle's tensors: [`Host`], and with the feature `cuda` gradsync's `Cuda`. Its functions are for this crate alone.
#[allow(missing_docs)]
pub trait TensorMemory: ReducerMemory {
    /// The streams and queues that order work on tensors together with candle's.
    #[doc(hidden)]
    type Context: std::fmt::Debug;

    /// Creates the context of tensors on this device, if it is in this memory. With `is_forked`, work on gradients has a separate queue.
    #[doc(hidden)]
    fn context(device: &Device, is_forked: bool) -> Result<Self::Context>;

    /// The name of the memory in errors.
    #[doc(hidden)]
    fn name(device: &Device) -> String;

    /// Whether tensors of this device are in the memory, and ordered like tensors of `like`.
    #[doc(hidden)]
    fn has(device: &Device, like: &Device) -> bool;

    #[doc(hidden)]
    fn reducer<'c>(
        context: &Self::Context,
        comm: &'c dyn Communicator<Self>,
        parameters: Vec<Parameter>,
        options: ReducerOptions,
    ) -> gradsync::Result<Reducer<'c, Self>>;

    /// Runs `body` with the elements of a storage, whose layout is contiguous, and records its work for later uses of the storage.
    #[doc(hidden)]
    fn borrow(
        context: &Self::Context,
        storage: Borrowed<'_>,
        layout: &Layout,
        body: &mut dyn FnMut(Part) -> candle_core::Result<()>,
    ) -> candle_core::Result<()>;

    /// Computes the norm of gradients, and the clipped gradients, unless they are clipped in place.
    #[doc(hidden)]
    fn clip(context: &Self::Context, tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<(Tensor, Vec<Tensor>)>;

    /// # Safety
    /// The storage of the part is borrowed mutably for as long as the slice is used, and only by that borrow.
    #[doc(hidden)]
    unsafe fn slice_mut(context: &Self::Context, part: Part) -> Self::SliceMut<'_>;
}

/// A storage of candle, borrowed exclusively.
#[doc(hidden)]
#[derive(Debug)]
pub enum Borrowed<'s> {
    /// On the host.
    Cpu(&'s mut CpuStorage),
    /// On a GPU.
    Cuda(&'s mut CudaStorage),
}

/// Contiguous elements.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub(crate) address: *mut u8,
    pub(crate) dtype: gradsync::DType,
    pub(crate) len: usize,
}

/// The dtype in gradsync.
pub(crate) fn dtype(dtype: DType) -> Option<gradsync::DType> {
    match dtype {
        DType::F64 => Some(gradsync::DType::F64),
        DType::F32 => Some(gradsync::DType::F32),
        DType::F16 => Some(gradsync::DType::F16),
        DType::BF16 => Some(gradsync::DType::BF16),
        _ => None,
    }
}

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

/// Passes the elements of all tensors, at most [`GROUP`], to `body` at once. The tensors must be contiguous, and no two may share a
/// storage.
///
/// # Errors
/// [`Error::Storage`] naming a tensor that violates this; errors of `body`.
pub(crate) fn lend<M: TensorMemory, T>(
    context: &M::Context,
    tensors: &[(&str, &Tensor)],
    body: impl FnOnce(Vec<M::SliceMut<'_>>) -> gradsync::Result<T>,
) -> Result<T> {
    assert!(tensors.len() <= GROUP, "{} tensors are lent at once", tensors.len());
    check(tensors)?;
    let body = Cell::new(Some(body));
    let outcome = Cell::new(None);
    let run = |parts: &[Part]| {
        // SAFETY: each part is in a storage that a frame of `Lend` around this call borrows mutably, and the storages differ. The closure
        // is generic over the lifetime of the slices, so it cannot keep them.
        let slices = parts.iter().map(|part| unsafe { M::slice_mut(context, *part) }).collect();
        outcome.set(body.take().map(|body| body(slices)));
    };
    Lend::<M> { context, rest: tensors, parts: &RefCell::new(Vec::with_capacity(tensors.len())), run: &run }.next()?;
    Ok(outcome.into_inner().expect("the body has run")?)
}

/// Borrows the storages of `rest`, one within the other, since candle borrows a storage only for the duration of a call.
struct Lend<'f, M: TensorMemory> {
    context: &'f M::Context,
    rest: &'f [(&'f str, &'f Tensor)],
    parts: &'f RefCell<Vec<Part>>,
    run: &'f dyn Fn(&[Part]),
}

impl<M: TensorMemory> Lend<'_, M> {
    fn next(&self) -> candle_core::Result<()> {
        match self.rest {
            [] => {
                (self.run)(&self.parts.borrow());
                Ok(())
            }
            [(_, tensor), ..] => tensor.inplace_op1(self),
        }
    }

    fn within(&self, storage: Borrowed<'_>, layout: &Layout) -> candle_core::Result<()> {
        M::borrow(self.context, storage, layout, &mut |part| {
            self.parts.borrow_mut().push(part);
            Lend::<M> { rest: &self.rest[1..], ..*self }.next()
        })
    }
}

impl<M: TensorMemory> InplaceOp1 for Lend<'_, M> {
    fn name(&self) -> &'static str {
        "lend to gradsync"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        self.within(Borrowed::Cpu(storage), layout)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.within(Borrowed::Cuda(storage), layout)
    }
}

impl TensorMemory for Host {
    type Context = ();

    fn context(_: &Device, _: bool) -> Result<()> {
        Ok(())
    }

    fn name(_: &Device) -> String {
        "the memory of the CPU".into()
    }

    fn has(device: &Device, _: &Device) -> bool {
        device.is_cpu()
    }

    fn reducer<'c>(
        (): &(),
        comm: &'c dyn Communicator,
        parameters: Vec<Parameter>,
        options: ReducerOptions,
    ) -> gradsync::Result<Reducer<'c>> {
        Reducer::new(comm, parameters, options)
    }

    fn borrow(
        (): &(),
        storage: Borrowed<'_>,
        layout: &Layout,
        body: &mut dyn FnMut(Part) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let len = layout.shape().elem_count();
        let range = layout.start_offset()..layout.start_offset() + len;
        let Borrowed::Cpu(storage) = storage else { candle_core::bail!("a tensor on a GPU in a call on the CPU") };
        let (address, dtype): (*mut u8, _) = match storage {
            CpuStorage::F64(data) => (data[range].as_mut_ptr().cast(), gradsync::DType::F64),
            CpuStorage::F32(data) => (data[range].as_mut_ptr().cast(), gradsync::DType::F32),
            CpuStorage::F16(data) => (data[range].as_mut_ptr().cast(), gradsync::DType::F16),
            CpuStorage::BF16(data) => (data[range].as_mut_ptr().cast(), gradsync::DType::BF16),
            _ => candle_core::bail!("only tensors of f64, f32, f16 and bf16 can be reduced"),
        };
        body(Part { address, dtype, len })
    }

    fn clip((): &(), tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<(Tensor, Vec<Tensor>)> {
        let squares = |data: Slice<'_>, power: f64| {
            if power == 1.0 {
                return Ok(cpu::squared_norms(data, &[0..data.len()])?.iter().sum());
            }
            let mut piece = vec![0.0f64; data.len().min(PIECE_LEN)];
            let mut sum = 0.0;
            for begin in (0..data.len()).step_by(PIECE_LEN) {
                let len = PIECE_LEN.min(data.len() - begin);
                cpu::scale((&mut piece[..len]).into(), data.range(begin..begin + len), power)?;
                sum += cpu::squared_norms((&piece[..len]).into(), &[0..len])?.iter().sum::<f64>();
            }
            Ok(sum)
        };
        Ok((clip::by_kernels::<Self>(&(), tensors, max_norm, squares)?, Vec::new()))
    }

    unsafe fn slice_mut((): &(), part: Part) -> SliceMut<'_> {
        let Part { address, dtype, len } = part;
        // SAFETY: that many elements of that type, borrowed mutably by the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, len * dtype.size_bytes()) };
        SliceMut::of_bytes(dtype, bytes)
    }
}
