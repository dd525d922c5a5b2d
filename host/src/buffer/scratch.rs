//! [`Scratch`]: the workspaces of the reductions of one buffer, kept between reductions. Reused memory is not cleared.

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::HostBuffer;

/// Unused arenas. Touching new memory for the first time takes longer than most of a reduction's work on it.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    arenas: Vec<HostBuffer>,
}

impl Scratch {
    /// An arena of this dtype and length with unspecified elements: a returned one, or a new one.
    pub(crate) fn take(&mut self, operation: &'static str, dtype: DType, len: usize) -> Result<HostBuffer> {
        let fits = |arena: &HostBuffer| arena.dtype() == dtype && arena.as_slice().len() == len;
        match self.arenas.iter().position(fits) {
            Some(index) => Ok(self.arenas.swap_remove(index)),
            None => HostBuffer::zeroed(operation, dtype, len),
        }
    }

    /// Returns arenas for reuse.
    pub(crate) fn give(&mut self, arenas: impl IntoIterator<Item = HostBuffer>) {
        self.arenas.extend(arenas);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_gives_an_arena_back_for_its_dtype_and_length_alone() {
        let mut scratch = Scratch::default();
        let mut arena = scratch.take("test", DType::F32, 100).unwrap();
        let address = arena.as_slice().as_bytes().as_ptr();
        arena.as_mut_slice().as_bytes_mut().fill(7);
        scratch.give([arena]);
        for (dtype, len) in [(DType::F16, 100), (DType::F32, 99), (DType::F16, 200)] {
            let other = scratch.take("test", dtype, len).unwrap();
            assert_eq!((other.dtype(), other.as_slice().len()), (dtype, len));
            assert!(other.as_slice().as_bytes().iter().all(|&byte| byte == 0), "a new one is zero");
        }
        let again = scratch.take("test", DType::F32, 100).unwrap();
        assert_eq!(again.as_slice().as_bytes().as_ptr(), address);
    }
}
