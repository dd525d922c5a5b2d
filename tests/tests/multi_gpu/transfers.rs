//! Exchanges of device memory, with operands in the form that most cases have.

use gradsync::Result;
use gradsync::comm::Communicator;
use gradsync::driver::{DeviceSlice, DeviceSliceMut, Queue};
use gradsync::memory::{Cuda, DeviceWireSlice, DeviceWireSliceMut, RawSlice};

/// Exchanges slices.
pub(crate) fn exchange(
    comm: &dyn Communicator<Cuda>,
    sends: Vec<(usize, DeviceSlice<'_>)>,
    receives: Vec<(usize, DeviceSliceMut<'_>)>,
) -> Result<()> {
    let sends: Vec<_> = sends.into_iter().map(|(peer, data)| (peer, data.into())).collect();
    let mut receives: Vec<_> = receives.into_iter().map(|(peer, data)| (peer, data.into())).collect();
    comm.exchange(&sends, &mut receives)
}

/// Exchanges elements of any type.
///
/// # Safety
/// All elements must be on the queue's device, valid until the queue has completed the operation, and not used meanwhile by work without an
/// order to the queue. No received element may overlap another element.
pub(crate) unsafe fn exchange_raw(
    comm: &dyn Communicator<Cuda>,
    queue: &Queue,
    sends: &[(usize, RawSlice)],
    receives: &[(usize, RawSlice)],
) -> Result<()> {
    // SAFETY: the caller's promise.
    let wire = |&(peer, data): &(usize, RawSlice)| (peer, unsafe { DeviceWireSlice::from_raw_parts(queue, data) });
    let wire_mut = |&(peer, data): &(usize, RawSlice)| {
        // SAFETY: the caller's promise.
        (peer, unsafe { DeviceWireSliceMut::from_raw_parts(queue, data) })
    };
    let sends: Vec<_> = sends.iter().map(wire).collect();
    comm.exchange(&sends, &mut receives.iter().map(wire_mut).collect::<Vec<_>>())
}
