//! The dialect from rust-cuda itself: `cuda_std`'s own `thread`, `warp`, `atomic`, `#[kernel]` and `#[address_space(shared)]`.

use super::rustc;

pub(crate) use cuda_std::{atomic::mid as atomic, thread};

/// `warp_shuffle_xor` of `cuda_std::warp` is on upstream's main branch and in no release yet. Ours has its types.
pub(crate) mod warp {
    pub(crate) use super::rustc::warp::{WarpShuffleValue, warp_shuffle_xor};
    pub(crate) use cuda_std::warp::lane_id;
}

/// Compiles without a warning only if our functions and `cuda_std`'s have the same types, and the stated safety. A function of ours that is
/// not listed here is dead code.
macro_rules! same {
    (fn $arguments:tt: $($module:ident::$name:ident)*) => {
        $(const _: () = {
            let _ = [rustc::$module::$name, $module::$name];
            let _ = |$arguments| (rustc::$module::$name $arguments, $module::$name $arguments);
        };)*
    };
    (unsafe fn $arguments:tt: $($module:ident::$name:ident)*) => {
        $(const _: () = {
            let _ = [rustc::$module::$name, $module::$name];
            // SAFETY: the closure is never called.
            let _ = |$arguments| (unsafe { rustc::$module::$name $arguments }, unsafe { $module::$name $arguments });
        };)*
    };
}
same!(fn (): thread::thread_idx_x thread::block_idx_x thread::block_dim_x thread::sync_threads warp::lane_id);
same!(unsafe fn (ptr, ordering): atomic::atomic_load_32_system atomic::atomic_load_64_device);
same!(unsafe fn (ptr, ordering, val): atomic::atomic_store_32_system atomic::atomic_store_64_device atomic::atomic_fetch_add_u32_device);

/// Static shared memory, as rust-cuda's compiler places it.
pub(crate) mod shared {
    /// An array in the block's shared memory.
    #[derive(Clone, Copy)]
    pub(crate) struct Array<T>(*mut T);

    impl<T: Copy> Array<T> {
        /// # Safety
        /// A static array of `T` in shared memory begins at `first`.
        #[inline(always)]
        pub(crate) unsafe fn at(first: *mut T) -> Self {
            Array(first)
        }

        /// # Safety
        /// `index` is below the array's length, and no other thread may access that element before the next barrier.
        #[inline(always)]
        pub(crate) unsafe fn write(self, index: usize, value: T) {
            // SAFETY: in bounds and unshared by the caller's promise.
            unsafe { self.0.add(index).write(value) }
        }

        /// # Safety
        /// `index` is below the array's length, and some thread wrote that element before the last barrier.
        #[inline(always)]
        pub(crate) unsafe fn read(self, index: usize) -> T {
            // SAFETY: as above.
            unsafe { self.0.add(index).read() }
        }
    }

    /// A function that returns one array in the block's shared memory. The name is for rustc's PTX target.
    macro_rules! array {
        ($(#[$attribute:meta])* $visibility:vis fn $function:ident() -> $name:literal: [$T:ty; $len:expr]) => {
            $(#[$attribute])*
            #[inline(always)]
            $visibility fn $function() -> $crate::dialect::shared::Array<$T> {
                use core::mem::MaybeUninit;
                #[cuda_std::address_space(shared)]
                static mut ARRAY: MaybeUninit<[$T; $len]> = MaybeUninit::uninit();
                // SAFETY: the address is the start of the array above.
                unsafe { $crate::dialect::shared::Array::at((&raw mut ARRAY).cast::<$T>()) }
            }
        };
    }
    pub(crate) use array;
}

/// An entry point: a function with the concatenated name, under `cuda_std`'s `#[kernel]`.
macro_rules! entry {
    ([$($name:literal)+] $parameters:tt $body:tt) => {
        paste::paste! {
            #[cuda_std::kernel]
            unsafe fn [<$($name)+>] $parameters $body
        }
    };
}
pub(crate) use entry;
