//! Workspace of data movements.

use std::cell::{RefCell, RefMut};

/// Scratch memory, aligned for every dtype.
#[derive(Debug, Default)]
pub(in crate::comm) struct Scratch(Vec<u64>);

impl Scratch {
    pub(in crate::comm) fn new(bytes: usize) -> Self {
        Scratch(vec![0; bytes.div_ceil(size_of::<u64>())])
    }

    /// Borrows memory that is kept from call to call, with at least so many bytes.
    pub(super) fn borrowed(kept: &RefCell<Self>, bytes: usize) -> RefMut<'_, Self> {
        let mut kept = kept.borrow_mut();
        kept.reserve(bytes);
        kept
    }

    /// Makes it longer if it has fewer bytes; its content is lost then.
    fn reserve(&mut self, bytes: usize) {
        if size_of_val(&self.0[..]) < bytes {
            // The old memory goes before the new one is there.
            *self = Scratch::default();
            *self = Scratch::new(bytes);
        }
    }

    pub(in crate::comm) fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// The first `bytes` bytes, at most as many as it was made with.
    pub(super) fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..bytes]
    }
}
