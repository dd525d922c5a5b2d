//! [`HostBuffer`]: zeroed memory for elements of one dtype. It has a fixed length and no notion of tensors.

use memmap2::MmapMut;

use super::file::{LARGE_PAGE, MemoryFile};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::layout::TENSOR_ALIGNMENT;
use crate::slice::{Slice, SliceMut};

/// The unit of small allocations, with the alignment of tensors.
#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct AlignedBlock([u8; TENSOR_ALIGNMENT]);

// SAFETY: plain bytes without padding; all zeros is a value.
unsafe impl bytemuck::Zeroable for AlignedBlock {}
// SAFETY: as above, and every byte pattern is a value.
unsafe impl bytemuck::Pod for AlignedBlock {}

enum Allocation {
    Small(Vec<AlignedBlock>),
    /// An anonymous mapping whose bytes begin at `start`, aligned to a large page.
    Large {
        map: MmapMut,
        start: usize,
    },
    /// A file that other processes can map.
    File(MemoryFile),
}

impl Allocation {
    /// Allocates `bytes` zeros; `None` if the system has not enough memory.
    fn zeroed(bytes: usize) -> Option<Self> {
        if bytes < LARGE_PAGE {
            return bytemuck::allocation::try_zeroed_vec(bytes.div_ceil(TENSOR_ALIGNMENT)).map(Allocation::Small).ok();
        }
        let map = MmapMut::map_anon(bytes.checked_add(LARGE_PAGE)?).ok()?;
        // A system without large pages uses small ones.
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no large pages");
        }
        let start = map.as_ptr().align_offset(LARGE_PAGE);
        Some(Allocation::Large { map, start })
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Allocation::Small(blocks) => bytemuck::cast_slice(blocks),
            Allocation::Large { map, start } => &map[*start..],
            Allocation::File(file) => file.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Allocation::Small(blocks) => bytemuck::cast_slice_mut(blocks),
            Allocation::Large { map, start } => &mut map[*start..],
            Allocation::File(file) => file.bytes_mut(),
        }
    }
}

/// Zeroed memory for elements of one dtype, aligned for every use.
pub struct HostBuffer {
    dtype: DType,
    len: usize,
    memory: Allocation,
}

impl HostBuffer {
    pub(crate) fn zeroed(operation: &'static str, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len * dtype.size_bytes();
        let memory = Allocation::zeroed(bytes).ok_or(Error::OutOfMemory { operation, bytes })?;
        Ok(Self { dtype, len, memory })
    }

    /// Like [`zeroed`](Self::zeroed), in memory that other processes of this machine can map.
    pub(crate) fn shared(operation: &'static str, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len * dtype.size_bytes();
        let refused = |source| Error::MemoryFile { operation, bytes, source };
        Ok(Self { dtype, len, memory: Allocation::File(MemoryFile::zeroed(bytes).map_err(refused)?) })
    }

    /// Whether other processes can map the buffer.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.memory, Allocation::File(_))
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements.
    pub fn as_slice(&self) -> Slice<'_> {
        Slice::of_bytes(self.dtype, &self.memory.bytes()[..self.len * self.dtype.size_bytes()])
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> SliceMut<'_> {
        let bytes = self.len * self.dtype.size_bytes();
        SliceMut::of_bytes(self.dtype, &mut self.memory.bytes_mut()[..bytes])
    }
}

/// Shows dtype and length; never the elements.
impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBuffer").field("dtype", &self.dtype).field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_is_zero_and_aligned_at_every_size() {
        for dtype in DType::FLOATS {
            let large = LARGE_PAGE / dtype.size_bytes();
            for len in [0, 1, 127, large - 1, large, large + 1, 3 * large + 5] {
                let mut arenas = vec![HostBuffer::zeroed("test", dtype, len).unwrap()];
                if cfg!(target_os = "linux") {
                    arenas.push(HostBuffer::shared("test", dtype, len).unwrap());
                }
                for mut arena in arenas {
                    assert_eq!((arena.as_slice().len(), arena.as_slice().dtype()), (len, dtype));
                    assert_eq!(arena.as_slice().as_bytes().as_ptr().align_offset(TENSOR_ALIGNMENT), 0);
                    assert!(arena.as_slice().as_bytes().iter().all(|&byte| byte == 0));
                    arena.as_mut_slice().as_bytes_mut().fill(0x3c);
                    assert!(arena.as_slice().as_bytes().iter().all(|&byte| byte == 0x3c));
                }
            }
        }
    }

    #[test]
    fn zeroed_refuses_more_than_any_machine_has() {
        let error = HostBuffer::zeroed("test", DType::F32, 1 << 60).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { operation: "test", bytes } if bytes == 1 << 62), "{error}");
        let error = HostBuffer::shared("test", DType::F32, 1 << 60).unwrap_err();
        assert!(matches!(error, Error::MemoryFile { operation: "test", bytes, .. } if bytes == 1 << 62), "{error}");
    }
}
