//! The names of element types at run time: [`DType`] for gradients, and [`DataType`] for everything that transports carry.

use std::fmt;

pub use gradsync_device::abi::{DType, UnknownDType};
/// An element type that transports carry: the types of gradients, the integers that NCCL reduces too, and [`I16`](Self::I16),
/// [`U16`](Self::U16) and [`Bool`](Self::Bool), which are moved and never reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs)] // the variants are the types
#[non_exhaustive]
pub enum DataType {
    F64,
    F32,
    F16,
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

impl DataType {
    /// All element types.
    pub const ALL: [DataType; 13] = [
        DataType::F64,
        DataType::F32,
        DataType::F16,
        DataType::BF16,
        DataType::I64,
        DataType::U64,
        DataType::I32,
        DataType::U32,
        DataType::I8,
        DataType::U8,
        DataType::I16,
        DataType::U16,
        DataType::Bool,
    ];

    /// The size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            DataType::F64 | DataType::I64 | DataType::U64 => 8,
            DataType::F32 | DataType::I32 | DataType::U32 => 4,
            DataType::F16 | DataType::BF16 | DataType::I16 | DataType::U16 => 2,
            DataType::I8 | DataType::U8 | DataType::Bool => 1,
        }
    }

    /// The [`DType`] with the same elements, if there is one.
    pub const fn float(self) -> Option<DType> {
        match self {
            DataType::F64 => Some(DType::F64),
            DataType::F32 => Some(DType::F32),
            DataType::F16 => Some(DType::F16),
            DataType::BF16 => Some(DType::BF16),
            _ => None,
        }
    }
}

impl From<DType> for DataType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F64 => DataType::F64,
            DType::F32 => DataType::F32,
            DType::F16 => DataType::F16,
            DType::BF16 => DataType::BF16,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DataType::F64 => "f64",
            DataType::F32 => "f32",
            DataType::F16 => "f16",
            DataType::BF16 => "bf16",
            DataType::I64 => "i64",
            DataType::U64 => "u64",
            DataType::I32 => "i32",
            DataType::U32 => "u32",
            DataType::I8 => "i8",
            DataType::U8 => "u8",
            DataType::I16 => "i16",
            DataType::U16 => "u16",
            DataType::Bool => "bool",
        })
    }
}
