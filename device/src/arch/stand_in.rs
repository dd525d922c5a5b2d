//! Replacements of inline PTX and intrinsics for type checks by a CPU's compiler; they cannot run. Operands are checked by rustc's PTX
//! target whenever PTX is generated.

macro_rules! asm {
    ($($operands:tt)*) => {
        panic!("PTX runs on GPUs alone")
    };
}
pub(crate) use asm;

/// The intrinsics of `core::arch::nvptx` that [`crate::dialect`] uses.
pub(crate) mod intrinsics {
    macro_rules! intrinsics {
        ($($name:ident -> $result:ty),*) => {
            $(pub(crate) unsafe fn $name() -> $result {
                panic!("intrinsics run on GPUs alone")
            })*
        };
    }
    intrinsics!(_thread_idx_x -> i32, _block_idx_x -> i32, _block_dim_x -> i32, _syncthreads -> ());
}
