//! Exchanges of device memory, with operands in the form that most cases have.

use gradsync::Result;
use gradsync::comm::Communicator;
use gradsync::driver::{DeviceSlice, DeviceSliceMut};
use gradsync::memory::Cuda;

/// Exchanges slices.
pub(crate) fn exchange(
    comm: &dyn Communicator<Cuda>,
    sends: Vec<(usize, DeviceSlice<'_>)>,
    mut receives: Vec<(usize, DeviceSliceMut<'_>)>,
) -> Result<()> {
    comm.exchange(&sends, &mut receives)
}

/// Exchanges elements of any type.
///
/// # Safety
/// The memory of all elements is valid until their queue has completed the operation, and not used meanwhile by work without an order to
/// the queue. No received element overlaps another element, and the memory of received ones is writable.
pub(crate) unsafe fn exchange_raw(
    comm: &dyn Communicator<Cuda>,
    sends: &[(usize, DeviceSlice<'_>)],
    receives: &[(usize, DeviceSlice<'_>)],
) -> Result<()> {
    let mut writable = Vec::new();
    for (peer, data) in receives {
        let (queue, address, dtype, len) = (data.queue(), data.address(), data.dtype(), data.len());
        // SAFETY: the caller's promise.
        writable.push((*peer, unsafe { DeviceSliceMut::from_raw_parts(queue, address, dtype, len) }));
    }
    comm.exchange(sends, &mut writable)
}
