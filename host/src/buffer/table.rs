//! [`TensorTable`]: the tensors of a buffer and their offsets. It does not depend on the kind of memory that the buffer is in.
//!
//! It owns no elements.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use twox_hash::XxHash3_64;

use crate::call::{Value, Visit};
use crate::dtype::DType;
use crate::error::{Error, Result, same_len};
use crate::plan::layout::Layout;
use crate::slice::shape_len;

const OPERATION: &str = "gradient buffer";

/// Names, shapes, dtype and offsets of the tensors in one arena.
///
/// Tensors start at multiples of 256 bytes. The arena is padded so that it divides into `world_size` equal shards, which also start at such
/// multiples ([`Layout`]).
#[derive(Debug)]
pub struct TensorTable {
    dtype: DType,
    world_size: usize,
    layout: Layout,
    names: Vec<String>,
    shapes: Vec<Vec<usize>>,
    index: HashMap<String, usize>,
    fingerprint: u64,
}

impl TensorTable {
    /// Lays out tensors given by name and shape, to be divided among `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a world of 0 ranks, a name that occurs twice, or sizes beyond the address space.
    pub fn new<N: Into<String>, S: Into<Vec<usize>>>(
        dtype: DType,
        world_size: usize,
        tensors: impl IntoIterator<Item = (N, S)>,
    ) -> Result<Self> {
        let (mut names, mut shapes, mut lens) = (Vec::new(), Vec::new(), Vec::new());
        let mut index = HashMap::new();
        for (name, shape) in tensors {
            let (name, shape) = (name.into(), shape.into());
            lens.push(shape_len(OPERATION, &shape)?);
            if let Some(first) = index.insert(name.clone(), names.len()) {
                let reason = format!("tensors {first} and {} are both named {name:?}", names.len());
                return Err(Error::InvalidArgument { operation: OPERATION, reason });
            }
            names.push(name);
            shapes.push(shape);
        }
        let layout = Layout::new(dtype, world_size, &lens)?;
        let mut table = Self { dtype, world_size, layout, names, shapes, index, fingerprint: 0 };
        let mut hasher = XxHash3_64::new();
        table.visit(&mut |_, value| value.hash(&mut hasher));
        table.fingerprint = hasher.finish();
        Ok(table)
    }

    /// The dtype of every tensor.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of shards.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.names.len()
    }

    /// The number of elements of the arena, gaps included: `world_size × shard_len`.
    pub fn arena_len(&self) -> usize {
        self.layout.shard_len * self.world_size
    }

    /// The number of elements of one rank's shard.
    pub fn shard_len(&self) -> usize {
        self.layout.shard_len
    }

    /// The name of tensor `index`. All accessors by index panic beyond the last tensor.
    pub fn name(&self, index: usize) -> &str {
        &self.names[index]
    }

    /// The shape of tensor `index`.
    pub fn shape(&self, index: usize) -> &[usize] {
        &self.shapes[index]
    }

    /// The index of the tensor with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// The element range of each tensor in the arena.
    pub fn segments(&self) -> &[Range<usize>] {
        &self.layout.segments
    }

    /// Refuses a world size other than the number of the arena's shards.
    pub(crate) fn check_world_size(&self, operation: &'static str, world_size: usize) -> Result<()> {
        let planned = self.world_size;
        if planned == world_size {
            return Ok(());
        }
        let reason = format!("the buffer was made for a world size of {planned}, and the world size is {world_size}");
        Err(Error::InvalidArgument { operation, reason })
    }

    /// Refuses a buffer with other tensors than the buffer for which an operation was created.
    pub(crate) fn check_made_for(&self, operation: &'static str, fingerprint: u64) -> Result<()> {
        if self.fingerprint() == fingerprint {
            return Ok(());
        }
        let reason = "the buffer has other tensors than the one for which the operation was made: \
                      make the operation anew for it"
            .into();
        Err(Error::InvalidArgument { operation, reason })
    }

    /// The offset of each tensor in the arena, in elements.
    pub(crate) fn offsets(&self) -> Vec<usize> {
        self.segments().iter().map(|segment| segment.start).collect()
    }

    /// Refuses tensors with other lengths than the buffer's; `kind` is the noun for them in the error.
    pub(crate) fn check_lens(
        &self,
        operation: &'static str,
        kind: &str,
        lens: impl ExactSizeIterator<Item = usize>,
    ) -> Result<()> {
        same_len(operation, ("tensors of the buffer", self.tensor_count()), (&format!("{kind}s"), lens.len()))?;
        for (index, (segment, len)) in self.segments().iter().zip(lens).enumerate() {
            let names = (format!("{:?} of the buffer", self.name(index)), format!("{kind} {index}"));
            same_len(operation, (&names.0, segment.len()), (&names.1, len))?;
        }
        Ok(())
    }

    /// The properties that all ranks must share, line by line.
    pub(crate) fn visit(&self, line: &mut Visit<'_>) {
        line(format_args!("dtype"), Value::DType(self.dtype));
        line(format_args!("number of ranks that the buffer is for"), Value::Number(self.world_size));
        for (index, (name, shape)) in self.names.iter().zip(&self.shapes).enumerate() {
            line(format_args!("tensor {index}"), Value::Name(name));
            line(format_args!("tensor {index} {name:?}"), Value::Shape(shape));
        }
        line(format_args!("tensor {}", self.tensor_count()), Value::Words("none"));
    }

    /// A hash of these lines, that is, of dtype, world size, names and shapes: equal where two ranks' buffers have the same tensors at the
    /// same offsets.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}
