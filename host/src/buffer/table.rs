//! [`TensorTable`]: the tensors of a buffer and their offsets. It does not depend on the kind of memory that the buffer is in.
//!
//! It owns no elements.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Range;

use crate::call::{Digest, LineBytes, Value, Visit};
use crate::dtype::DType;
use crate::error::{Error, Result, check_float, same_len};
use crate::plan::layout::Layout;
use crate::slice::shape_len;

const OPERATION: &str = "gradient buffer";

/// Names, shapes, dtype and offsets of the tensors in one arena.
///
/// Tensors start at multiples of 256 bytes. The arena is padded so that it divides into `world_size` equal shards, which also start at such
/// multiples ([`Layout`]).
#[derive(Debug)]
pub(crate) struct TensorTable {
    dtype: DType,
    world_size: usize,
    layout: Layout,
    names: Vec<String>,
    shapes: Vec<Vec<usize>>,
    index: HashMap<String, usize>,
    digest: Digest,
}

impl TensorTable {
    /// Lays out tensors given by name and shape, to be divided among `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an integer type, a world of 0 ranks, a name that occurs twice, or sizes beyond the address space.
    pub(crate) fn new<N: Into<String>, S: Into<Vec<usize>>>(
        dtype: DType,
        world_size: usize,
        tensors: impl IntoIterator<Item = (N, S)>,
    ) -> Result<Self> {
        check_float(OPERATION, dtype)?;
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
        let mut table = Self { dtype, world_size, layout, names, shapes, index, digest: Digest::default() };
        let mut bytes = LineBytes::default();
        table.visit(&mut |_, value| value.hash(&mut bytes));
        table.digest = bytes.digest();
        Ok(table)
    }

    /// The dtype of every tensor.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of shards.
    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    /// The number of tensors.
    pub(crate) fn tensor_count(&self) -> usize {
        self.names.len()
    }

    /// The number of elements of the arena, gaps included: `world_size × shard_len`.
    pub(crate) fn arena_len(&self) -> usize {
        self.layout.shard_len * self.world_size
    }

    /// The number of elements of one rank's shard.
    pub(crate) fn shard_len(&self) -> usize {
        self.layout.shard_len
    }

    /// The name of tensor `index`. All accessors by index panic beyond the last tensor.
    pub(crate) fn name(&self, index: usize) -> &str {
        &self.names[index]
    }

    /// The shape of tensor `index`.
    pub(crate) fn shape(&self, index: usize) -> &[usize] {
        &self.shapes[index]
    }

    /// The index of the tensor with this name.
    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// The element range of each tensor in the arena.
    pub(crate) fn segments(&self) -> &[Range<usize>] {
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
    pub(crate) fn check_made_for(&self, operation: &'static str, made_for: &TensorTable) -> Result<()> {
        if self.is_same(made_for) {
            return Ok(());
        }
        let reason = "the buffer has other tensors, or another dtype or world size, than the one for which the operation was made: make \
                      the operation anew for it"
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

    /// The digest of these lines, that is, of dtype, world size, names and shapes: equal where two ranks' buffers have the same tensors at
    /// the same offsets.
    pub(crate) fn digest(&self) -> &Digest {
        &self.digest
    }

    /// Whether both tables have the same tensors at the same offsets. Offsets follow from dtype, world size and shapes.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let lines = |table: &Self| (table.dtype, table.world_size);
        std::ptr::eq(self, other)
            || (lines(self) == lines(other) && self.names == other.names && self.shapes == other.shapes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::hash::Hasher;

    use twox_hash::XxHash3_64;

    use super::*;

    /// The length of the first tensor of each of the [`colliding`] lists.
    pub(crate) const LENS: [usize; 2] = [128, 1_007_616];

    /// Two lists of tensors whose lines have the same XXH3, although the first tensors have different lengths: the shapes of the second
    /// tensors begin with 0, so that their other dimensions are free.
    ///
    /// XXH3 adds each word `v` of a lane to one sum, and the product of both halves of `v ^ key` to another one, where the key belongs to
    /// the word's place. So two words change the second sum by the required amount, and words whose product is 0 change the first one.
    pub(crate) fn colliding() -> [[(&'static str, Vec<usize>); 2]; 2] {
        // The keys of words 8, 16, 24, 32, 40 and 48 of the stream, which all belong to the first lane.
        const KEYS: [u64; 6] = [
            0x1cad_21f7_2c81_017c,
            0xdb97_9083_e96d_d4de,
            0x1f67_b3b7_a4a4_4072,
            0x78e5_c0cc_4ee6_79cb,
            0x2172_ffcc_7dd0_5a82,
            0x8e24_43f7_7446_08b8,
        ];
        /// Its length puts the length of the tensor at word 8.
        const FIRST: &str = "weights, first";
        const HIGH: u64 = 1 << 26;
        const LOW: u64 = 0xffff_ffff;
        let product = |len: usize| i128::from((len as u64 ^ KEYS[0]) & LOW) * i128::from(KEYS[0] >> 32);
        // The words of both lists at the places of the other keys.
        let lack = product(LENS[1]) - product(LENS[0]);
        let mut halves = [[0; 2]; 2];
        halves[usize::from(lack < 0)] = [lack.unsigned_abs() as u64 / HIGH, lack.unsigned_abs() as u64 % HIGH];
        let mut words =
            halves.map(|[first, second]| vec![(HIGH << 32 | first) ^ KEYS[1], (1 << 32 | second) ^ KEYS[2]]);
        let sum = |index: usize| LENS[index] as i128 + words[index].iter().map(|&word| i128::from(word)).sum::<i128>();
        let mut lack = sum(0) - sum(1);
        for key in &KEYS[3..] {
            let step = lack.clamp(-i128::from(LOW), i128::from(LOW));
            lack -= step;
            let high = key & !LOW;
            words[0].push(high | (-step).max(0) as u64);
            words[1].push(high | step.max(0) as u64);
        }
        assert_eq!(lack, 0, "the first sum");
        [0, 1].map(|index: usize| {
            let mut free = vec![0; 48];
            for (position, &word) in words[index].iter().enumerate() {
                free[3 + 8 * position] = word as usize;
            }
            [(FIRST, vec![LENS[index]]), ("nothing", free)]
        })
    }

    #[test]
    fn digest_tells_tables_that_collide_in_a_fast_hash_apart() {
        let tables = colliding().map(|tensors| TensorTable::new(DType::F32, 2, tensors).unwrap());
        let hashes = tables.each_ref().map(|table| {
            let (mut bytes, mut hasher) = (LineBytes::default(), XxHash3_64::new());
            table.visit(&mut |_, value| value.hash(&mut bytes));
            hasher.write(&bytes.0);
            hasher.finish()
        });
        assert_eq!(hashes[0], hashes[1], "made to collide");
        let [one, other] = &tables;
        assert_ne!(one.digest(), other.digest());
        assert!(one.arena_len() < other.arena_len());
        one.check_made_for("test", one).unwrap();
        one.check_made_for("test", &TensorTable::new(DType::F32, 2, colliding()[0].clone()).unwrap()).unwrap();
        one.check_made_for("test", other).expect_err("other tensors");
    }

    #[test]
    fn new_refuses_dtypes_without_a_floating_point() {
        for dtype in DType::ALL {
            let made = TensorTable::new(dtype, 1, [("first", [4])]).map(|table| table.dtype());
            assert_eq!(made.as_ref().ok(), dtype.is_float().then_some(&dtype));
            let named = made.map_or_else(|error| error.to_string().contains(dtype.name()), |_| true);
            assert!(named, "{dtype}");
        }
    }

    #[test]
    fn is_same_compares_every_line() {
        let table = |dtype, world_size, name: &str, shape: &[usize]| {
            TensorTable::new(dtype, world_size, [("first", vec![4]), (name, shape.to_vec())]).unwrap()
        };
        let one = table(DType::F32, 2, "second", &[2, 3]);
        assert!(one.is_same(&table(DType::F32, 2, "second", &[2, 3])));
        for other in [
            table(DType::F64, 2, "second", &[2, 3]),
            table(DType::F32, 3, "second", &[2, 3]),
            table(DType::F32, 2, "Second", &[2, 3]),
            table(DType::F32, 2, "second", &[3, 2]),
            table(DType::F32, 2, "second", &[2, 3, 1]),
            TensorTable::new(DType::F32, 2, [("first", [4])]).unwrap(),
        ] {
            assert!(!one.is_same(&other) && !other.is_same(&one) && one.digest() != other.digest(), "{other:?}");
        }
    }
}
