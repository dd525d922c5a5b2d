//! `gradsync reduce`: results, reports, permitted outputs, and refused inputs.

mod bad_files;
mod bad_tensors;
mod bits_of_the_library;
mod changing_files;
mod escaped_names;
mod foreign_formats;
mod header_limits;
mod json;
mod non_finite;
mod other_dtypes;
mod output_paths;
#[cfg(feature = "prepared")]
mod python;
mod results;
mod signals;
mod special_outputs;
mod unusual_files;
