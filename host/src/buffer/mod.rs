//! [`GradientBuffer`]: the gradients of many tensors in one arena, so that a collective runs over all of them at once.
//!
//! It owns memory and knows the names, shapes and offsets of its tensors. It never communicates and does no arithmetic.

#[cfg(feature = "cuda")]
mod device;
mod scratch;
pub(crate) mod table;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use self::scratch::Scratch;
pub(crate) use self::table::TensorTable;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Host, HostBuffer, Memory, TensorView, TensorViewMut, Work};
use crate::plan::segments;
use crate::slice::SliceMut;

/// Owned memory for many tensors of one floating-point dtype, by name and shape: the gradients of a model, which one call reduces.
///
/// Tensors start at multiples of 256 bytes. The arena is padded so that it divides into `world_size` equal shards, which also start at such
/// multiples. The gaps belong to no tensor: collectives run over the whole arena without packing,
/// and values written to the gaps change no result. They are zero in a new buffer, every operation of this crate keeps zeros zero, and
/// Adasum clears them, because zeros change no inner product.
///
/// Reductions on the host that need a workspace keep it in the buffer for the next step, until [`release_scratch`](Self::release_scratch).
///
/// ```
/// use gradsync::{DType, GradientBuffer};
///
/// let mut gradients = GradientBuffer::new(DType::F32, 2, [("weight", vec![3, 5]), ("bias", vec![5])])?;
/// assert_eq!(gradients.segments(), [0..15, 64..69]);
/// gradients.tensor_mut(1).copy_from_slice(&[1.0f32; 5])?;
/// assert_eq!(gradients.tensor(1).shape(), [5]);
/// assert_eq!(gradients.tensor(1).to_vec::<f32>()?, [1.0; 5]);
/// gradients.zero()?;
/// # Ok::<(), gradsync::Error>(())
/// ```
pub struct GradientBuffer<M: Memory = Host> {
    table: Arc<TensorTable>,
    arena: M::Buffer,
    scratch: Scratch,
}

/// A buffer's arena, its tensors and its workspaces.
pub(crate) struct BufferParts<'a> {
    pub(crate) arena: SliceMut<'a>,
    pub(crate) tensors: &'a [Range<usize>],
    pub(crate) scratch: &'a mut Scratch,
}

impl GradientBuffer {
    /// Allocates a buffer of zeros for tensors given by name and shape, to be divided among `world_size` ranks: as many as the communicator
    /// has that reduces it, since each rank reduces a shard. Shapes are arrays of one length, or `Vec`s.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an integer type, a world of 0 ranks, a name that occurs twice,
    /// or sizes beyond the address space; [`Error::OutOfMemory`](crate::Error::OutOfMemory) naming the bytes.
    pub fn new<N: Into<String>, S: Into<Vec<usize>>>(
        dtype: DType,
        world_size: usize,
        tensors: impl IntoIterator<Item = (N, S)>,
    ) -> Result<Self> {
        Self::with(HostBuffer::zeroed, TensorTable::new(dtype, world_size, tensors)?)
    }

    /// Like [`new`](Self::new), in memory that other processes of this machine can map (Linux: an anonymous file), for ranks that are
    /// processes, as over MPI. Adasum and [`ops::all_reduce`](crate::ops::all_reduce()) then reduce the vectors in place in shared memory
    /// instead of exchanging them. Either all ranks create their buffers with this function, or none; the results have the same bits. A
    /// child of `fork` shares this memory with its parent.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::MemoryFile`](crate::Error::MemoryFile) with the system's reason, for example that it
    /// does not support such files or that this process has too many open.
    pub fn new_shared<N: Into<String>, S: Into<Vec<usize>>>(
        dtype: DType,
        world_size: usize,
        tensors: impl IntoIterator<Item = (N, S)>,
    ) -> Result<Self> {
        Self::with(HostBuffer::shared, TensorTable::new(dtype, world_size, tensors)?)
    }

    fn with(arena: fn(&'static str, DType, usize) -> Result<HostBuffer>, table: TensorTable) -> Result<Self> {
        let arena = arena("gradient buffer", table.dtype(), table.arena_len())?;
        Ok(Self { table: Arc::new(table), arena, scratch: Scratch::default() })
    }

    /// Whether other processes can map the arena, that is, whether [`new_shared`](Self::new_shared) created it.
    pub fn is_shared(&self) -> bool {
        self.arena.is_shared()
    }

    /// Moves the arena to memory of this process alone, if it is shared.
    pub(crate) fn unshare(&mut self) -> Result<()> {
        if self.is_shared() {
            let mut own = HostBuffer::zeroed("gradient buffer", self.dtype(), self.len())?;
            own.as_mut_slice().as_bytes_mut().copy_from_slice(self.as_slice().as_bytes());
            self.arena = own;
        }
        Ok(())
    }

    /// Frees the workspaces of all reductions of this buffer, of every algorithm and group; the next reduction allocates new ones.
    pub fn release_scratch(&mut self) {
        self.scratch = Scratch::default();
    }

    /// The arena, its tensors and its workspaces, borrowed together. Gaps are cleared, so that inner products over whole arenas equal inner
    /// products over tensors.
    pub(crate) fn parts_mut(&mut self) -> BufferParts<'_> {
        let (mut arena, tensors) = (self.arena.as_mut_slice(), self.table.segments());
        for gap in segments::gaps(tensors, arena.len()) {
            arena.reborrow().range_mut(gap).as_bytes_mut().fill(0);
        }
        BufferParts { arena, tensors, scratch: &mut self.scratch }
    }
}

impl<M: Memory> GradientBuffer<M> {
    /// A buffer of these tensors, in an arena of zeros that `allocate` makes.
    pub(crate) fn of_arena(table: TensorTable, allocate: impl FnOnce(usize) -> Result<M::Buffer>) -> Result<Self> {
        let arena = allocate(table.arena_len())?;
        Ok(Self { table: Arc::new(table), arena, scratch: Scratch::default() })
    }

    /// The tensors of the buffer, with their offsets.
    pub(crate) fn table(&self) -> &TensorTable {
        &self.table
    }

    /// The tensors, for an operation that keeps them, to compare the buffers of later calls with this one.
    pub(crate) fn shared_table(&self) -> Arc<TensorTable> {
        self.table.clone()
    }

    /// The kind of the arena's memory, which ranks compare.
    pub(crate) fn memory_kind(&self) -> &'static str {
        M::kind(&self.arena)
    }

    /// [`SharedWindows::with_windows`](crate::memory::SharedWindows::with_windows) of the arena, if all ranks can map it.
    pub(crate) fn with_windows(&mut self, sharing: &M::Sharing, work: &mut Work<'_>) -> Result<bool> {
        M::with_windows(sharing, &mut self.arena, work)
    }

    /// The dtype of every tensor.
    pub fn dtype(&self) -> DType {
        self.table.dtype()
    }

    /// The number of shards.
    pub fn world_size(&self) -> usize {
        self.table.world_size()
    }

    /// The number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.table.tensor_count()
    }

    /// The number of elements of the arena, gaps included: `world_size × shard_len`.
    pub fn len(&self) -> usize {
        self.table.arena_len()
    }

    /// Whether the arena has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of elements of one rank's shard.
    pub fn shard_len(&self) -> usize {
        self.table.shard_len()
    }

    /// The name of tensor `index`. All accessors by index panic beyond the last tensor.
    pub fn name(&self, index: usize) -> &str {
        self.table.name(index)
    }

    /// The shape of tensor `index`.
    pub fn shape(&self, index: usize) -> &[usize] {
        self.table.shape(index)
    }

    /// The index of the tensor with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.table.index_of(name)
    }

    /// The element range of each tensor in the arena.
    pub fn segments(&self) -> &[Range<usize>] {
        self.table.segments()
    }

    /// Tensor `index`.
    pub fn tensor(&self, index: usize) -> TensorView<'_, M> {
        let data = M::range(self.as_slice(), self.segments()[index].clone());
        TensorView::of(data, Cow::Borrowed(self.shape(index))).expect("the layout gave the tensor its shape's length")
    }

    /// Tensor `index`, to write.
    pub fn tensor_mut(&mut self, index: usize) -> TensorViewMut<'_, M> {
        let data = M::range_mut(M::buffer_mut(&mut self.arena), self.table.segments()[index].clone());
        let shape = Cow::Borrowed(self.table.shape(index));
        TensorViewMut::of(data, shape).expect("the layout gave the tensor its shape's length")
    }

    /// All tensors with their names, in order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, TensorView<'_, M>)> {
        (0..self.tensor_count()).map(|index| (self.name(index), self.tensor(index)))
    }

    /// All tensors with their names, in order, writable together.
    pub fn tensors_mut(&mut self) -> impl ExactSizeIterator<Item = (&str, TensorViewMut<'_, M>)> {
        let Self { table, arena, .. } = self;
        let pieces = M::ranges_mut(M::buffer_mut(arena), table.segments());
        pieces.into_iter().enumerate().map(|(index, data)| {
            let tensor = TensorViewMut::of(data, Cow::Borrowed(table.shape(index)));
            (table.name(index), tensor.expect("the layout gave the tensor its shape's length"))
        })
    }

    /// [`tensors`](Self::tensors), as `for (name, tensor) in &gradients` visits them.
    pub fn iter(&self) -> std::vec::IntoIter<(&str, TensorView<'_, M>)> {
        self.into_iter()
    }

    /// [`tensors_mut`](Self::tensors_mut), as `for (name, tensor) in &mut gradients` visits them.
    pub fn iter_mut(&mut self) -> std::vec::IntoIter<(&str, TensorViewMut<'_, M>)> {
        self.into_iter()
    }

    /// Two tensors, writable together; panics if both are the same tensor.
    pub fn two_tensors_mut(&mut self, one: usize, other: usize) -> (TensorViewMut<'_, M>, TensorViewMut<'_, M>) {
        assert_ne!(one, other, "two tensors, not one twice");
        let mut found = self.tensors_mut().enumerate().filter(|(index, _)| [one, other].contains(index));
        let mut next = || found.next().expect("a tensor of that index").1.1;
        let (lower, higher) = (next(), next());
        if one < other { (lower, higher) } else { (higher, lower) }
    }

    /// The whole arena.
    pub fn as_slice(&self) -> M::Slice<'_> {
        M::buffer(&self.arena)
    }

    /// The whole arena, to write. Values in the gaps between [`segments`](Self::segments) may be lost, and change no result.
    pub fn as_mut_slice(&mut self) -> M::SliceMut<'_> {
        M::buffer_mut(&mut self.arena)
    }

    /// Sets all gradients to zero (ONNX Runtime's ZeroGradient of every tensor); on a GPU in the queue's order.
    ///
    /// # Errors
    /// `Error::Cuda`; never on the host.
    pub fn zero(&mut self) -> Result<()> {
        M::clear(self.as_mut_slice())
    }
}

impl<'a, M: Memory> IntoIterator for &'a GradientBuffer<M> {
    type Item = (&'a str, TensorView<'a, M>);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.tensors().collect::<Vec<_>>().into_iter()
    }
}

impl<'a, M: Memory> IntoIterator for &'a mut GradientBuffer<M> {
    type Item = (&'a str, TensorViewMut<'a, M>);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.tensors_mut().collect::<Vec<_>>().into_iter()
    }
}

impl<M: Memory> std::fmt::Debug for GradientBuffer<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradientBuffer").field("table", &self.table).finish_non_exhaustive()
    }
}
