//! Send and Recv with input signals.

use crate::error::{Error, Result};
use crate::memory::TensorViewMut;
use crate::ops::send_recv::{Bundle, BundleMemory, Completion, Limits, Received, SendRecv};

/// Send: [`SendRecv::send`] with an input signal, which must be true. The output signal is the completion's.
///
/// # Errors
/// [`Error::InvalidArgument`] if the input signal is false; the errors of that method.
pub fn send<'c, M: BundleMemory>(
    transfers: &SendRecv<'c, M>,
    signal: bool,
    peer: usize,
    bundle: &Bundle<'_, M>,
) -> Result<Completion<'c, M>> {
    check_signal("send", signal)?;
    transfers.send(peer, bundle)
}

/// Recv: [`SendRecv::recv`] with an input signal, which must be true. The output signal is the completion's.
///
/// # Errors
/// [`Error::InvalidArgument`] if the input signal is false; the errors of that method.
pub fn recv<'c, M: BundleMemory>(
    transfers: &SendRecv<'c, M>,
    signal: bool,
    peer: usize,
    tensors: &mut [TensorViewMut<'_, M>],
) -> Result<Completion<'c, M>> {
    check_signal("recv", signal)?;
    transfers.recv(peer, tensors)
}

/// Recv of tensors of unknown shapes: [`SendRecv::recv_described`] with an input signal, which must be true.
///
/// # Errors
/// [`Error::InvalidArgument`] if the input signal is false; the errors of that method.
pub fn recv_described<'c, M: BundleMemory>(
    transfers: &SendRecv<'c, M>,
    signal: bool,
    peer: usize,
    tag: u64,
    limits: &Limits,
) -> Result<(Completion<'c, M>, Received<M>)> {
    check_signal("recv", signal)?;
    transfers.recv_described(peer, tag, limits)
}

/// Refuses a false signal, before any other check, as ONNX Runtime does.
fn check_signal(operation: &'static str, signal: bool) -> Result<()> {
    if signal {
        return Ok(());
    }
    let reason = "the input signal is false, and nothing is transferred unless it is true".into();
    Err(Error::InvalidArgument { operation, reason })
}
