//! Parts of the program `gradsync` that the other programs of its repository use too: [`output`] files that are complete or absent,
//! [`text`] that is safe for a terminal, and [`messages`].
//!
//! The crate exists for the program. The library follows its needs, and may change in any version.

#![deny(unsafe_code)]

pub mod messages;
pub mod output;
pub mod text;
