//! Plans: who holds and sends what, as pure arithmetic on counts and ranks.
//!
//! Nothing here touches memory, a device or a transport, so that every rank of any world can be simulated in a test.

pub mod bundle;
pub mod cost;
pub mod groups;
pub mod layout;
pub mod ownership;
pub mod schedule;
pub mod segments;
pub mod tree;
pub mod zero;
