//! [`Scratch`]: the memory that reductions of one buffer work in, kept from one to the next. It never zeroes what it hands out again.

use super::Arena;
use crate::dtype::DType;
use crate::error::Result;

/// Arenas that nobody uses at the moment. Touching new memory for the first time takes longer than most of what reductions do with it.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    arenas: Vec<Arena>,
}

impl Scratch {
    /// An arena of this dtype and length, whose elements are anything: one that was given back, or a new one.
    pub(crate) fn take(&mut self, operation: &'static str, dtype: DType, len: usize) -> Result<Arena> {
        let fits = |arena: &Arena| arena.dtype() == dtype && arena.as_slice().len() == len;
        match self.arenas.iter().position(fits) {
            Some(place) => Ok(self.arenas.swap_remove(place)),
            None => Arena::zeroed(operation, dtype, len),
        }
    }

    /// Keeps arenas for the next one who takes some.
    pub(crate) fn give(&mut self, arenas: impl IntoIterator<Item = Arena>) {
        self.arenas.extend(arenas);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_comes_back_for_its_dtype_and_length_alone() {
        let mut scratch = Scratch::default();
        let mut arena = scratch.take("test", DType::F32, 100).unwrap();
        let place = arena.as_slice().as_bytes().as_ptr();
        arena.as_mut_slice().as_bytes_mut().fill(7);
        scratch.give([arena]);
        for (dtype, len) in [(DType::F16, 100), (DType::F32, 99), (DType::F16, 200)] {
            let other = scratch.take("test", dtype, len).unwrap();
            assert_eq!((other.dtype(), other.as_slice().len()), (dtype, len));
            assert!(other.as_slice().as_bytes().iter().all(|&byte| byte == 0), "a new one is zero");
        }
        let again = scratch.take("test", DType::F32, 100).unwrap();
        assert_eq!(again.as_slice().as_bytes().as_ptr(), place);
    }
}
