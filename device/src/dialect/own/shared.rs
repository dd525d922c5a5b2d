//! Static shared memory. rustc has no attribute for shared variables, as rust-cuda's compiler has in `cuda_std`'s
//! `#[address_space(shared)]`, so inline assembly declares them.

use core::marker::PhantomData;

use crate::arch::asm;

/// An array in the block's shared memory, by its address there.
#[derive(Clone, Copy)]
pub(crate) struct Array<T>(u32, PhantomData<T>);

impl<T> Array<T> {
    /// # Safety
    /// A static array of `T` begins at `address`.
    #[inline(always)]
    pub(crate) unsafe fn at(address: u32) -> Self {
        Array(address, PhantomData)
    }

    #[inline(always)]
    fn address(self, index: usize) -> u32 {
        self.0 + index as u32 * size_of::<T>() as u32
    }
}

macro_rules! access {
    ($T:ident $class:ident $store:literal $load:literal) => {
        impl Array<$T> {
            /// # Safety
            /// `index` is below the array's length, and no other thread may access that element before the next barrier.
            #[inline(always)]
            pub(crate) unsafe fn write(self, index: usize, value: $T) {
                // SAFETY: in bounds and unshared by the caller's promise.
                unsafe { asm!($store, in(reg32) self.address(index), in($class) value, options(nostack)) };
            }

            /// # Safety
            /// `index` is below the array's length, and some thread wrote that element before the last barrier.
            #[inline(always)]
            pub(crate) unsafe fn read(self, index: usize) -> $T {
                let value: $T;
                // SAFETY: as above.
                unsafe {
                    asm!($load, out($class) value, in(reg32) self.address(index), options(pure, nostack, readonly))
                };
                value
            }
        }
    };
}
access!(f64 reg64 "st.shared.f64 [{0}], {1};" "ld.shared.f64 {0}, [{1}];");
access!(u64 reg64 "st.shared.u64 [{0}], {1};" "ld.shared.u64 {0}, [{1}];");
access!(u32 reg32 "st.shared.u32 [{0}], {1};" "ld.shared.u32 {0}, [{1}];");

/// A function that returns one array in the block's shared memory, which is declared under this name at module scope: every call, inlined or
/// not, returns the same array.
macro_rules! array {
    ($(#[$attribute:meta])* $visibility:vis fn $function:ident() -> $name:literal: [$T:ty; $len:expr]) => {
        #[cfg(target_arch = "nvptx64")]
        core::arch::global_asm!(
            concat!(".shared .align {0} .b8 ", $name, "[{1}];"),
            const align_of::<$T>(),
            const size_of::<[$T; $len]>()
        );

        $(#[$attribute])*
        #[inline(always)]
        $visibility fn $function() -> $crate::dialect::shared::Array<$T> {
            let address: u32;
            // SAFETY: takes the address of the variable above.
            unsafe {
                $crate::arch::asm!(
                    concat!("mov.u32 {0}, ", $name, ";"), out(reg32) address, options(pure, nomem, nostack));
                $crate::dialect::shared::Array::<$T>::at(address)
            }
        }
    };
}
pub(crate) use array;
