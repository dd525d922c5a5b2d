//! Foreign libraries that are loaded when they are first needed, never linked: declarations, and finding the library.
//!
//! Nothing here decides anything about communication; `comm` does, on top.

mod loader;
pub mod nccl;
