//! [`LaunchOrder`]: kernels that wait for kernels of other ranks run in the order of their launches, whatever their queues.
//!
//! Two launches that fill the GPU and wait for peers would deadlock if their order differed between ranks, and kernels that share mailboxes
//! would overwrite each other's messages. Kernels of one recording are ordered in the recording; the launch of its graph is ordered with
//! all others as a whole.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use super::{CudaError, Event, Queue};

thread_local! {
    /// The addresses of the orders in which this thread is launching.
    static LAUNCHING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A launch under way on this thread. A launch inside it, as of a graph, is part of it.
struct Launching(usize);

impl Launching {
    /// `None` if this thread is already launching in this order.
    fn begin(order: &LaunchOrder) -> Option<Self> {
        let address = std::ptr::from_ref(order).addr();
        LAUNCHING.with_borrow_mut(|launching| {
            if launching.contains(&address) {
                return None;
            }
            launching.push(address);
            Some(Self(address))
        })
    }
}

impl Drop for Launching {
    fn drop(&mut self) {
        LAUNCHING.with_borrow_mut(|launching| launching.retain(|address| *address != self.0));
    }
}

/// The launches of one communicator, each of which runs behind the one before.
///
/// An event may be the last handle of its queue. Events are retired when others replace them, because destroying a queue waits for the
/// device, where a kernel of this order may be waiting for a kernel that this thread has not launched yet, and ends recordings under way
/// where tools check the device's memory.
#[derive(Debug, Default)]
pub(crate) struct LaunchOrder {
    /// The end of the last launch.
    last: Mutex<Option<Event>>,
    /// The end of the last recorded launch, with the number of the recording.
    last_recorded: Mutex<Option<(u64, Event)>>,
}

impl LaunchOrder {
    /// Calls `launch`, which launches kernels into a queue, and orders them behind the launches before. `recording` is the number of the
    /// queue's recording, if its work is being recorded.
    ///
    /// # Errors
    /// The errors of `launch`, and [`CudaError`] of the driver.
    pub(crate) fn launch<E: From<CudaError>>(
        self: &Arc<Self>,
        queue: &Queue,
        recording: Option<u64>,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(number) = recording else { return self.run(queue, launch) };
        if let Some(recording) = queue.recording()? {
            recording.order(self);
        }
        let mut last = self.last_recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, event)) = last.iter().find(|(other, event)| *other == number && !event.is_of(queue)) {
            queue.wait_for(event)?;
        }
        launch()?;
        let event = queue.event()?;
        event.record()?;
        if let Some((_, earlier)) = last.replace((number, event)) {
            earlier.retire();
        }
        Ok(())
    }

    fn run<E: From<CudaError>>(&self, queue: &Queue, launch: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let Some(_launching) = Launching::begin(self) else { return launch() };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().filter(|event| !event.is_of(queue)).try_for_each(|event| queue.wait_for(event))?;
        launch()?;
        if let Some(event) = last.iter().find(|event| event.is_of(queue)) {
            return Ok(event.record()?);
        }
        let event = queue.event()?;
        event.record()?;
        if let Some(earlier) = last.replace(event) {
            earlier.retire();
        }
        Ok(())
    }

    /// Calls `launch`, which launches a graph with kernels of all these communicators into its queue, and orders it behind the launches
    /// before. All callers pass communicators in the same order.
    pub(super) fn launch_graph(
        orders: &[Arc<Self>],
        queue: &Queue,
        launch: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        match orders.split_first() {
            Some((first, rest)) => first.run(queue, || Self::launch_graph(rest, queue, launch)),
            None => launch(),
        }
    }

    /// Makes the queue wait for the launches until now.
    pub(super) fn follow(&self, queue: &Queue) -> Result<(), CudaError> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().filter(|event| !event.is_of(queue)).try_for_each(|event| queue.wait_for(event))
    }
}
