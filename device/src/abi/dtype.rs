//! [`DType`]: all element types, with their properties in one table.

use core::fmt;

/// An element type: the floating-point numbers that kernels compute with, and the integers that transports carry too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[allow(missing_docs)] // the variants are the types
#[non_exhaustive]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16, the upper half of a binary32.
    BF16,
    I64,
    U64,
    I32,
    U32,
    I8,
    U8,
    I16,
    U16,
    /// A byte that is 0 or 1.
    Bool,
}

/// The properties of an element type.
struct Row {
    name: &'static str,
    size_bytes: usize,
    nccl_code: Option<i32>,
}

impl DType {
    /// All element types in the order of their discriminants, those of [`FLOATS`](Self::FLOATS) first.
    pub const ALL: [DType; 13] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::U64,
        DType::I32,
        DType::U32,
        DType::I8,
        DType::U8,
        DType::I16,
        DType::U16,
        DType::Bool,
    ];

    /// The floating-point types, which gradients have and kernels compute with, widest first.
    pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

    #[inline(always)]
    const fn row(self) -> Row {
        let (name, size_bytes, nccl_code) = match self {
            DType::F64 => ("f64", 8, Some(8)),
            DType::F32 => ("f32", 4, Some(7)),
            DType::F16 => ("f16", 2, Some(6)),
            DType::BF16 => ("bf16", 2, Some(9)),
            DType::I64 => ("i64", 8, Some(4)),
            DType::U64 => ("u64", 8, Some(5)),
            DType::I32 => ("i32", 4, Some(2)),
            DType::U32 => ("u32", 4, Some(3)),
            DType::I8 => ("i8", 1, Some(0)),
            DType::U8 => ("u8", 1, Some(1)),
            DType::I16 => ("i16", 2, None),
            DType::U16 => ("u16", 2, None),
            DType::Bool => ("bool", 1, None),
        };
        Row { name, size_bytes, nccl_code }
    }

    /// The name used on command lines, in reports and in the names of kernels' entry points.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// The size of one element in bytes.
    #[inline(always)]
    pub const fn size_bytes(self) -> usize {
        self.row().size_bytes
    }

    /// The `ncclDataType_t`; `None` for a type that NCCL does not reduce, and moves as bytes.
    pub const fn nccl_code(self) -> Option<i32> {
        self.row().nccl_code
    }

    /// Whether this is one of [`FLOATS`](Self::FLOATS).
    #[inline(always)]
    pub const fn is_float(self) -> bool {
        (self as usize) < Self::FLOATS.len()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that is not the name of a [`DType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownDType;

impl fmt::Display for UnknownDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown dtype: expected f64, f32, f16, bf16, or an integer type such as i32")
    }
}

impl core::error::Error for UnknownDType {}

impl core::str::FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or(UnknownDType)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_lists_and_table_agree() {
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, index, "{dtype}");
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(dtype.is_float(), DType::FLOATS.contains(&dtype), "{dtype}");
            let bits: usize = dtype.name().trim_matches(char::is_alphabetic).parse().unwrap_or(8);
            assert_eq!(dtype.size_bytes() * 8, bits, "{dtype}");
        }
    }
}
