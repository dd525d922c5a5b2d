//! One loop, two instruction sets: the same Rust, compiled for the baseline of the target and again with AVX2.
//!
//! The formulas are branch-free integer and float arithmetic, which the compiler turns into vector code of either width,
//! conversions of f16 and bf16 included. Enabling an instruction set changes no rounding: nothing is fused. Loops that are
//! written for the wider set by hand are in `avx2`.

/// Defines functions that are compiled twice on x86-64 and run with AVX2 where the machine has it.
///
/// The body is inlined into both, so everything that it calls in a loop must be `#[inline(always)]` or small.
macro_rules! vectorized {
    ($($(#[$doc:meta])* $visibility:vis fn $name:ident<$($generic:ident: $bound:path),*>(
        $($argument:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$doc])*
        $visibility fn $name<$($generic: $bound),*>($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body<$($generic: $bound),*>($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,f16c,fma")]
                unsafe fn avx2<$($generic: $bound),*>($($argument: $type),*) $(-> $result)? {
                    body::<$($generic),*>($($argument),*)
                }
                if $crate::kernels::cpu::isa::has_avx2() {
                    // SAFETY: the features were just found on this machine.
                    return unsafe { avx2::<$($generic),*>($($argument),*) };
                }
            }
            body::<$($generic),*>($($argument),*)
        }
    )*};
}
pub(crate) use vectorized;

/// Returns what a function of the module `avx2` gives, if the machine has what that module needs.
macro_rules! return_on_avx2 {
    ($function:ident($($argument:expr),* $(,)?)) => {
        #[cfg(target_arch = "x86_64")]
        if $crate::kernels::cpu::isa::has_avx2() {
            // SAFETY: the features were just found on this machine.
            return unsafe { $crate::kernels::cpu::avx2::$function($($argument),*) };
        }
    };
}
pub(crate) use return_on_avx2;

/// Whether the wider of the two versions can run here.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx2() -> bool {
    use std::arch::is_x86_feature_detected as has;
    // Asked for every block: one answer to look up, not six.
    static ANSWER: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        has!("avx2") && has!("bmi1") && has!("bmi2") && has!("lzcnt") && has!("f16c") && has!("fma")
    });
    *ANSWER
}
