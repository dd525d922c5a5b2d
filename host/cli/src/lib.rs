//! Parts of the program `gradsync` that the other programs of its repository use too: [`output`] files that are complete or not there,
//! [`text`] that is fit for a terminal, and [`messages`].
//!
//! The program is what this crate is for. The library follows its needs, and may change in any version.

pub mod messages;
pub mod output;
pub mod text;
