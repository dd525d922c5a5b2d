//! The dialect for rustc's own PTX target.

/// `cuda_std::thread`: the indices of a thread. Launches here are one-dimensional.
pub(crate) mod thread {
    use crate::arch::intrinsics;

    /// Index of this thread in its block.
    #[inline(always)]
    pub(crate) fn thread_idx_x() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_thread_idx_x() as u32 }
    }

    /// Index of this block in the grid.
    #[inline(always)]
    pub(crate) fn block_idx_x() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_block_idx_x() as u32 }
    }

    /// Threads of a block.
    #[inline(always)]
    pub(crate) fn block_dim_x() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_block_dim_x() as u32 }
    }

    /// Waits for every thread of the block, and makes their writes to memory visible. If some threads of a block do not call it, the others
    /// wait for ever, or for another barrier; that alone is no memory unsafety.
    #[inline(always)]
    pub(crate) fn sync_threads() {
        // SAFETY: accesses no memory.
        unsafe { intrinsics::_syncthreads() }
    }
}

/// `cuda_std::warp`, as far as kernels use it: `lane_id`, and `warp_shuffle_xor`, which upstream added after its last release.
pub(crate) mod warp {
    use super::thread;
    use crate::abi::WARP;
    use crate::arch::asm;

    /// Index of this thread in its warp.
    #[inline(always)]
    pub(crate) fn lane_id() -> u32 {
        thread::thread_idx_x() % WARP
    }

    /// A value that lanes exchange.
    pub(crate) trait WarpShuffleValue: Sized {
        /// The value of the lane whose index differs by `lane_mask`.
        ///
        /// # Safety
        /// All lanes of the warp must execute this together.
        unsafe fn of_lane_xor(self, lane_mask: u32) -> Self;
    }

    impl WarpShuffleValue for u32 {
        #[inline(always)]
        unsafe fn of_lane_xor(self, lane_mask: u32) -> Self {
            let other: u32;
            // SAFETY: the caller promises a full warp, which the member mask names; no memory is touched.
            unsafe {
                asm!("shfl.sync.bfly.b32 {0}, {1}, {2}, 31, -1;", out(reg32) other, in(reg32) self, in(reg32) lane_mask,
                    options(nomem, nostack))
            };
            other
        }
    }

    impl WarpShuffleValue for f64 {
        #[inline(always)]
        unsafe fn of_lane_xor(self, lane_mask: u32) -> Self {
            let bits = self.to_bits();
            // SAFETY: the caller's promise.
            let (low, high) =
                unsafe { ((bits as u32).of_lane_xor(lane_mask), ((bits >> 32) as u32).of_lane_xor(lane_mask)) };
            f64::from_bits((high as u64) << 32 | low as u64)
        }
    }

    /// The value of the lane whose index differs by `lane_mask`, and whether that lane exists: always, among all lanes.
    ///
    /// # Panics
    /// Unless `mask` names all 32 lanes and `width` is 32, as in all kernels. Both are compile-time constants, so kernels contain no check.
    ///
    /// # Safety
    /// All lanes that `mask` names must execute this together.
    #[inline(always)]
    pub(crate) unsafe fn warp_shuffle_xor<T: WarpShuffleValue>(
        mask: u32,
        value: T,
        lane_mask: u32,
        width: u32,
    ) -> (T, bool) {
        assert!(mask == u32::MAX && width == WARP);
        // SAFETY: the caller's promise, of all lanes.
        (unsafe { value.of_lane_xor(lane_mask) }, true)
    }
}

/// `cuda_std::atomic::mid`, as far as kernels use it: words that threads of the device, or of the whole system, exchange.
///
/// An ordering, or an addend, that no kernel uses makes a function panic. Both are compile-time constants, so kernels contain no check.
pub(crate) mod atomic {
    use core::sync::atomic::Ordering;

    use crate::arch::asm;

    /// With acquire ordering, all reads and writes before the writer's release, on any device, are visible afterwards.
    ///
    /// # Safety
    /// A readable word of this device, a peer or the host that is mapped on this device.
    #[inline(always)]
    pub(crate) unsafe fn atomic_load_32_system(ptr: *mut u32, ordering: Ordering) -> u32 {
        let value: u32;
        // SAFETY: the caller's promise.
        unsafe {
            match ordering {
                Ordering::Acquire => {
                    asm!("ld.acquire.sys.b32 {0}, [{1}];", out(reg32) value, in(reg64) ptr as u64, options(nostack))
                }
                Ordering::Relaxed => {
                    asm!("ld.relaxed.sys.b32 {0}, [{1}];", out(reg32) value, in(reg64) ptr as u64, options(nostack))
                }
                _ => panic!(),
            }
        }
        value
    }

    /// All earlier reads and writes of this thread are visible, on any device, to a thread that acquires the value.
    ///
    /// # Safety
    /// The conditions of [`atomic_load_32_system`], for a writable word.
    #[inline(always)]
    pub(crate) unsafe fn atomic_store_32_system(ptr: *mut u32, ordering: Ordering, val: u32) {
        assert!(matches!(ordering, Ordering::Release));
        // SAFETY: the caller's promise.
        unsafe {
            asm!("fence.acq_rel.sys; st.relaxed.sys.b32 [{0}], {1};", in(reg64) ptr as u64, in(reg32) val, options(nostack))
        };
    }

    /// # Safety
    /// A readable word in global memory of this device.
    #[inline(always)]
    pub(crate) unsafe fn atomic_load_64_device(ptr: *mut u64, ordering: Ordering) -> u64 {
        assert!(matches!(ordering, Ordering::Relaxed));
        let value: u64;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("ld.relaxed.gpu.global.b64 {0}, [{1}];", out(reg64) value, in(reg64) ptr as u64, options(nostack))
        };
        value
    }

    /// # Safety
    /// The conditions of [`atomic_load_64_device`], for a writable word.
    #[inline(always)]
    pub(crate) unsafe fn atomic_store_64_device(ptr: *mut u64, ordering: Ordering, val: u64) {
        assert!(matches!(ordering, Ordering::Relaxed));
        // SAFETY: the caller's promise.
        unsafe { asm!("st.relaxed.gpu.global.b64 [{0}], {1};", in(reg64) ptr as u64, in(reg64) val, options(nostack)) };
    }

    /// Returns the previous value, so each number is drawn once on this device.
    ///
    /// # Safety
    /// A writable word in global memory of this device.
    #[inline(always)]
    pub(crate) unsafe fn atomic_fetch_add_u32_device(ptr: *mut u32, ordering: Ordering, val: u32) -> u32 {
        assert!(matches!(ordering, Ordering::Relaxed) && val == 1);
        let before: u32;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("atom.relaxed.gpu.global.add.u32 {0}, [{1}], 1;", out(reg32) before, in(reg64) ptr as u64,
                options(nostack))
        };
        before
    }
}

/// Static shared memory. rustc has no attribute for shared variables, as rust-cuda's compiler has in `cuda_std`'s
/// `#[address_space(shared)]`, so inline assembly declares them.
#[cfg(not(feature = "cuda_std"))]
pub(crate) mod shared {
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
}

/// An entry point, after `cuda_std`'s `#[kernel]`: unmangled, with the concatenated name, and with the PTX kernel convention.
#[cfg(not(feature = "cuda_std"))]
macro_rules! entry {
    ([$($name:literal)+] $parameters:tt $body:tt) => {
        #[unsafe(export_name = concat!($($name),+))]
        unsafe extern "ptx-kernel" fn kernel $parameters $body
    };
}
#[cfg(not(feature = "cuda_std"))]
pub(crate) use entry;
