//! Entry points: one file per operation, each a thin wrapper of a formula of `math` around the threads' share of the data.
//!
//! An entry point takes pointers and scalars only. Its safety contract is the launch: parameters as in [`crate::abi`], memory of the sizes
//! that they imply, the block size of `abi`, and one block for each tile, chunk or row.

mod adasum;
mod combine;
mod optimizer;
mod peer;
mod products;
mod stream;

/// Stamps `$body!(name_a type_a name_b type_b)` for every ordered pair of dtypes.
macro_rules! for_each_pair {
    ($body:ident) => {
        for_each_pair!($body, "f64" f64);
        for_each_pair!($body, "f32" f32);
        for_each_pair!($body, "f16" F16);
        for_each_pair!($body, "bf16" BF16);
    };
    ($body:ident, $name:literal $first:ident) => {
        $body!($name $first "f64" f64);
        $body!($name $first "f32" f32);
        $body!($name $first "f16" F16);
        $body!($name $first "bf16" BF16);
    };
}

/// Stamps `$body!(name type)` for every dtype.
macro_rules! for_each_dtype {
    ($body:ident) => {
        $body!("f64" f64);
        $body!("f32" f32);
        $body!("f16" F16);
        $body!("bf16" BF16);
    };
}

/// Stamps `$body!(name type width suffix)` for every dtype and width.
macro_rules! for_each_dtype_and_width {
    ($body:ident) => {
        for_each_dtype_and_width!($body, "f64" f64);
        for_each_dtype_and_width!($body, "f32" f32);
        for_each_dtype_and_width!($body, "f16" F16);
        for_each_dtype_and_width!($body, "bf16" BF16);
    };
    ($body:ident, $name:literal $T:ident) => {
        $body!($name $T 2 "_p2");
        $body!($name $T 4 "_p4");
        $body!($name $T 8 "_p8");
    };
}

/// An entry point with the concatenated name and launch bounds.
macro_rules! kernel {
    ([$($name:literal)+], $bounds:expr, fn ($($parameter:ident: $type:ty),* $(,)?) $body:block) => {
        const _: () = {
            crate::dialect::entry! {
                [$($name)+] ($($parameter: $type),*) {
                    const BOUNDS: crate::abi::LaunchBounds = $bounds;
                    crate::arch::launch_bounds::<{ BOUNDS.threads }, { BOUNDS.blocks }, { BOUNDS.unroll as u32 }>();
                    #[allow(unused_unsafe)] // a kernel may do nothing
                    // SAFETY: the launch satisfies the contract of this module's header.
                    unsafe {
                        $body
                    }
                }
            }
        };
    };
}

use {for_each_dtype, for_each_dtype_and_width, for_each_pair, kernel};
