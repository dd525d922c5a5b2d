//! Selection of the instruction set at run time, and functions that are compiled twice from the same Rust: for the baseline of the target,
//! and with AVX2.
//!
//! The formulas are branch-free integer and float arithmetic, which the compiler turns into vector code of either
//! width, conversions of f16 and bf16 included. Enabling an instruction set changes no rounding: nothing is fused.
//! Loops that are written for registers by hand are in `lanes`.

/// Defines functions that are compiled twice on x86-64 and run with AVX2 where the machine has it.
///
/// The body is inlined into both versions, so everything that it calls in a loop must be `#[inline(always)]` or small.
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

/// Returns from a function that a function of the module `lanes` replaces, if the machine has one of the module's instruction sets.
macro_rules! return_on_lanes {
    (unsafe $function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the conditions of the function, which the user of this form keeps.
        return_on_lanes!(@ unsafe { $crate::kernels::cpu::lanes::$function($($argument),*) }, $($argument),*);
    };
    (@ $call:expr, $($argument:expr),*) => {
        #[cfg(target_arch = "x86_64")]
        if $call {
            return;
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = ($(&$argument,)*);
    };
    ($function:ident($($argument:expr),* $(,)?)) => {
        return_on_lanes!(@ $crate::kernels::cpu::lanes::$function($($argument),*), $($argument),*);
    };
}
pub(crate) use return_on_lanes;

/// The supported instruction sets, in ascending order: a machine that has one has all earlier ones.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Isa {
    Baseline,
    Avx2,
    Avx512,
}

/// The widest set that this machine has.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn widest() -> Isa {
    use std::arch::is_x86_feature_detected as has;
    // This is asked for every block, so the eight answers are cached as one.
    static ANSWER: std::sync::LazyLock<Isa> = std::sync::LazyLock::new(|| {
        let avx2 = has!("avx2") && has!("bmi1") && has!("bmi2") && has!("lzcnt") && has!("f16c") && has!("fma");
        match avx2 {
            true if has!("avx512f") && has!("avx512bw") && has!("avx512vl") => Isa::Avx512,
            true => Isa::Avx2,
            false => Isa::Baseline,
        }
    });
    *ANSWER
}

#[cfg(all(target_arch = "x86_64", not(test)))]
pub(super) use widest as allowed;

#[cfg(all(target_arch = "x86_64", test))]
pub(super) use limit::allowed;

/// Whether this machine can run the versions for AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx2() -> bool {
    allowed() >= Isa::Avx2
}

/// Runs `work` once with each instruction set that this machine has; the choice applies to all threads.
#[cfg(test)]
pub(crate) fn on_each(work: impl Fn()) {
    #[cfg(target_arch = "x86_64")]
    limit::on_each(work);
    #[cfg(not(target_arch = "x86_64"))]
    work();
}

/// Tests limit the instruction set; a test that runs concurrently may see any limit.
#[cfg(all(target_arch = "x86_64", test))]
mod limit {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, PoisonError};

    use super::{Isa, widest};

    const SETS: [Isa; 3] = [Isa::Baseline, Isa::Avx2, Isa::Avx512];

    /// The index of the widest set that may run.
    static LIMIT: AtomicUsize = AtomicUsize::new(SETS.len() - 1);

    pub(in super::super) fn allowed() -> Isa {
        widest().min(SETS[LIMIT.load(Ordering::Relaxed)])
    }

    /// Removes the limit when it is dropped, also when a test fails.
    struct Lift;

    impl Drop for Lift {
        fn drop(&mut self) {
            LIMIT.store(SETS.len() - 1, Ordering::Relaxed);
        }
    }

    pub(super) fn on_each(work: impl Fn()) {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let _lift = Lift;
        for (index, isa) in SETS.into_iter().enumerate().filter(|(_, isa)| *isa <= widest()) {
            // The output appears where a test fails.
            println!("with {isa:?}");
            LIMIT.store(index, Ordering::Relaxed);
            work();
        }
    }
}
