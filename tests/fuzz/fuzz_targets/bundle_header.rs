//! Fuzz target: decodes arbitrary bytes as the header of a bundle.

#![no_main]

#[path = "../bundle_header.rs"]
mod bundle_header;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bundle_header::check(bytes);
});
