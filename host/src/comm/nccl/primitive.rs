//! [`Primitive`]: the calls of NCCL as data, and their execution.
//!
//! The code that builds a [`Primitive`] has checked its operands; this module checks only NCCL's return codes.

use std::ffi::{c_int, c_void};

use crate::driver::DeviceSlice;
use crate::dtype::{DType, Float, with_float};
use crate::sys::nccl::{Comm, DataTypeCode, Nccl, RedOp, ResultCode, ScalarResidence, Stream};

/// The elements of a [`DeviceSlice`], without its borrow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RawSlice {
    /// The device address of the first element.
    pub(super) address: u64,
    /// The number of elements.
    pub(super) len: usize,
    /// The type of every element.
    pub(super) dtype: DType,
}

impl RawSlice {
    /// The `len` elements from `begin` on.
    pub(super) fn range(self, begin: usize, len: usize) -> Self {
        Self { address: self.address + (begin * self.dtype.size_bytes()) as u64, len, ..self }
    }
}

impl From<DeviceSlice<'_>> for RawSlice {
    fn from(data: DeviceSlice<'_>) -> Self {
        Self { address: data.address(), len: data.len(), dtype: data.dtype() }
    }
}

/// The reduction that NCCL computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Reduction {
    Plain(RedOp),
    /// The sum of the inputs times a factor, which is representable in the elements' type.
    ScaledSum(f64),
}

/// One call of NCCL. Counts are in elements of the first operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Primitive {
    AllReduce {
        input: RawSlice,
        output: u64,
        reduction: Reduction,
    },
    /// A reduce-scatter; `output.len` is the length of a shard.
    ReduceScatter {
        input: u64,
        output: RawSlice,
        reduction: Reduction,
    },
    AllGather {
        input: RawSlice,
        output: u64,
    },
    Broadcast {
        data: RawSlice,
        root: usize,
    },
    Send {
        data: RawSlice,
        peer: usize,
    },
    Recv {
        data: RawSlice,
        peer: usize,
    },
}

/// A call that NCCL refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    pub(super) call: &'static str,
    pub(super) code: ResultCode,
}

/// The count and type by which NCCL moves data: elements of types that NCCL does not have are counted as bytes.
fn moved(data: RawSlice) -> (usize, DataTypeCode) {
    // The product does not overflow, because the data exist in memory.
    let len = if data.dtype.nccl_code().is_some() { data.len } else { data.len * data.dtype.size_bytes() };
    (len, data_type(data.dtype))
}

/// The `ncclDataType_t` of a type; bytes for types that NCCL does not have.
fn data_type(dtype: DType) -> DataTypeCode {
    dtype.nccl_code().map_or(DataTypeCode::BYTES, DataTypeCode)
}

fn pointer(address: u64) -> *mut c_void {
    address as usize as *mut c_void
}

pub(super) fn checked(call: &'static str, code: ResultCode) -> Result<ResultCode, Refused> {
    match code {
        ResultCode::SUCCESS | ResultCode::IN_PROGRESS => Ok(code),
        code => Err(Refused { call, code }),
    }
}

/// Encodes a factor in the type of the elements. Only floating-point numbers are scaled.
fn scalar(factor: f64, dtype: DType) -> [u8; 8] {
    let mut bytes = [0; 8];
    with_float!(dtype, T => bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&<T as Float>::from_f64(factor))));
    bytes
}

impl Primitive {
    /// The addresses of its operands.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        let (one, other) = match *self {
            Primitive::AllReduce { input, output, .. } | Primitive::AllGather { input, output } => {
                (input.address, Some(output))
            }
            Primitive::ReduceScatter { input, output, .. } => (input, Some(output.address)),
            Primitive::Broadcast { data, .. } | Primitive::Send { data, .. } | Primitive::Recv { data, .. } => {
                (data.address, None)
            }
        };
        std::iter::once(one).chain(other)
    }

    /// Whether NCCL gets these calls as a group. A single transfer is a group too: only then is it in the stream when the call returns, on
    /// non-blocking communicators.
    pub(super) fn are_group(calls: &[Self]) -> bool {
        calls.len() > 1 || matches!(calls.first(), Some(Primitive::Send { .. } | Primitive::Recv { .. }))
    }

    /// Whether there are no data to move; equal on all ranks, because counts agree.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Primitive::AllReduce { input: data, .. }
            | Primitive::ReduceScatter { output: data, .. }
            | Primitive::AllGather { input: data, .. }
            | Primitive::Broadcast { data, .. }
            | Primitive::Send { data, .. }
            | Primitive::Recv { data, .. } => data.len == 0,
        }
    }

    /// Enqueues the call on the stream. Returns [`ResultCode::IN_PROGRESS`] if a non-blocking communicator is still busy with it.
    ///
    /// # Safety
    /// `comm` is a live communicator of the stream's device, which is current; the operands are valid until the stream has passed.
    pub(super) unsafe fn issue(self, nccl: &Nccl, comm: Comm, stream: Stream) -> Result<ResultCode, Refused> {
        let api = &nccl.functions;
        // SAFETY: the caller's promise, for every call below.
        unsafe {
            match self {
                Primitive::AllReduce { input, output, reduction } => {
                    with_reduction(nccl, comm, reduction, input.dtype, |op| {
                        let (from, to) = (pointer(input.address).cast_const(), pointer(output));
                        let code = (api.ncclAllReduce)(from, to, input.len, data_type(input.dtype), op, comm, stream);
                        checked("ncclAllReduce", code)
                    })
                }
                Primitive::ReduceScatter { input, output, reduction } => {
                    with_reduction(nccl, comm, reduction, output.dtype, |op| {
                        let (from, to) = (pointer(input).cast_const(), pointer(output.address));
                        let dtype = data_type(output.dtype);
                        let code = (api.ncclReduceScatter)(from, to, output.len, dtype, op, comm, stream);
                        checked("ncclReduceScatter", code)
                    })
                }
                Primitive::AllGather { input, output } => {
                    let (from, to) = (pointer(input.address).cast_const(), pointer(output));
                    let (len, dtype) = moved(input);
                    let code = (api.ncclAllGather)(from, to, len, dtype, comm, stream);
                    checked("ncclAllGather", code)
                }
                Primitive::Broadcast { data, root } => {
                    let (data_address, (len, dtype)) = (pointer(data.address), moved(data));
                    let code = (api.ncclBroadcast)(
                        data_address.cast_const(),
                        data_address,
                        len,
                        dtype,
                        root as c_int,
                        comm,
                        stream,
                    );
                    checked("ncclBroadcast", code)
                }
                Primitive::Send { data, peer } => {
                    let (from, (len, dtype)) = (pointer(data.address).cast_const(), moved(data));
                    let code = (api.ncclSend)(from, len, dtype, peer as c_int, comm, stream);
                    checked("ncclSend", code)
                }
                Primitive::Recv { data, peer } => {
                    let (to, (len, dtype)) = (pointer(data.address), moved(data));
                    let code = (api.ncclRecv)(to, len, dtype, peer as c_int, comm, stream);
                    checked("ncclRecv", code)
                }
            }
        }
    }
}

/// Runs `call` with the operator of a reduction, which is created if NCCL has none.
///
/// # Safety
/// `comm` is a live communicator.
unsafe fn with_reduction(
    nccl: &Nccl,
    comm: Comm,
    reduction: Reduction,
    dtype: DType,
    call: impl FnOnce(RedOp) -> Result<ResultCode, Refused>,
) -> Result<ResultCode, Refused> {
    let factor = match reduction {
        Reduction::Plain(op) => return call(op),
        Reduction::ScaledSum(factor) => factor,
    };
    let mut scalar = scalar(factor, dtype);
    let mut op = RedOp::SUM;
    // SAFETY: the scalar is read before the call returns; the operator may be destroyed once the call that uses it has returned.
    unsafe {
        let data_address = scalar.as_mut_ptr().cast();
        let create = nccl.functions.ncclRedOpCreatePreMulSum;
        checked(
            "ncclRedOpCreatePreMulSum",
            create(&mut op, data_address, data_type(dtype), ScalarResidence::HOST_IMMEDIATE, comm),
        )?;
        // If the call failed, it may have been ended by an abort, which has freed the communicator and the operator.
        let code = call(op)?;
        checked("ncclRedOpDestroy", (nccl.functions.ncclRedOpDestroy)(op, comm))?;
        Ok(code)
    }
}
