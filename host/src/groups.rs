//! A rank's communicators of every kind of parallel group: data, horizontal and pipeline, and the two parts of the data group within and
//! across nodes.
//!
//! [`Topology`] determines which ranks form a group, and [`Groups`] makes and keeps the communicators. Nothing here reduces data.
//!
//! ```
//! use gradsync::groups::{GroupKind, Groups, Sizes};
//! use gradsync::prelude::*;
//!
//! // Two stages, each of which sees different data on two ranks: ranks 0 and 1 are the first, ranks 2 and 3 the second.
//! let sizes = Sizes { world: 4, local: 4, data: 2, horizontal: 1, pipeline: 2 };
//! let outcomes = local::run(4, |world| {
//!     let rank = world.rank();
//!     let groups = Groups::new(world, sizes)?;
//!     // The gradients of a stage are summed over the ranks that have this stage.
//!     let mut gradients = [rank as f32];
//!     groups.get(GroupKind::Data)?.all_reduce(&mut gradients, ReduceOp::Sum)?;
//!     // The first stage sends its activation to the second, on the rank that sees the same data.
//!     let pipeline = groups.get(GroupKind::Pipeline)?;
//!     let mut activation = [if pipeline.rank() == 0 { 10.0 + rank as f32 } else { 0.0 }];
//!     match pipeline.rank() {
//!         0 => pipeline.send(&activation, 1)?,
//!         _ => pipeline.recv(&mut activation, 0)?,
//!     }
//!     Ok((gradients[0], activation[0]))
//! })?;
//! assert_eq!(outcomes, [(1.0, 10.0), (1.0, 11.0), (5.0, 10.0), (5.0, 11.0)]);
//! # Ok::<(), Error>(())
//! ```

use std::cell::OnceCell;

use crate::call::Value;
use crate::call::scope;
use crate::call_comparison::{ComparedCall, agree};
use crate::comm::{Ranks, Split};
use crate::error::{Error, Operation, Result};

pub use crate::plan::groups::{Group, GroupKind, Sizes, Topology};

const OPERATION: &str = "groups";

/// A rank's communicators of every kind of parallel group, split off at their first use and kept.
///
/// Kinds with the same groups share a communicator: without tensor and pipeline parallelism, the data group is the world itself. A rank's
/// number in a group's communicator is its index in the group.
#[derive(Debug)]
pub struct Groups<C> {
    world: C,
    topology: Topology,
    /// The communicators by kind. If several kinds share a communicator, the entry of the first kind has it, and the entries of the others
    /// stay empty, as the world's does.
    split: [OnceCell<C>; GroupKind::ALL.len()],
}

impl<C: Ranks + Split> Groups<C> {
    /// Divides the ranks of `world` into groups. All ranks have to call it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on every rank, naming two ranks with different sizes; [`Error::InvalidArgument`] as [`Topology::new`], or
    /// for a world size that is not the communicator's; and the errors of a collective.
    pub fn new(world: C, sizes: Sizes) -> Result<Self> {
        let Sizes { world: ranks, local, data, horizontal, pipeline } = sizes;
        let _scope = scope::within(Operation::Groups);
        let lines = [
            ("world size", Value::Number(ranks)),
            ("local size", Value::Number(local)),
            ("data size", Value::Number(data)),
            ("horizontal size", Value::Number(horizontal)),
            ("pipeline size", Value::Number(pipeline)),
        ];
        // The comparison precedes all checks that may fail on one rank alone.
        agree(&world, &ComparedCall { lines: &lines, ..ComparedCall::of(Operation::Groups) }, Result::<()>::Ok(()))?;
        let (rank, world_size) = (world.rank(), world.world_size());
        if ranks != world_size {
            let reason =
                format!("the groups are for a world of {ranks} ranks, and the communicator has {world_size} ranks");
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        let topology = Topology::new(rank, sizes)?;
        Ok(Self { world, topology, split: Default::default() })
    }

    /// The position of this rank in all groups.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// The communicator of this rank's group of a kind.
    ///
    /// The first call for a kind splits the world: all ranks have to make it, at the same place among the world's other calls. Later
    /// calls only look the communicator up.
    ///
    /// # Errors
    /// As [`Topology::group`], on every rank and before any communication; [`Error::Disagreement`] on every rank, naming two ranks, if
    /// they ask for different kinds; and the errors of [`Split::split`].
    pub fn get(&self, kind: GroupKind) -> Result<&C> {
        let group = self.topology.group(kind)?;
        let kind = self.first_like(kind);
        if kind == GroupKind::World {
            return Ok(&self.world);
        }
        let slot = &self.split[kind as usize];
        if let Some(comm) = slot.get() {
            return Ok(comm);
        }
        let operation = Operation::Group(kind);
        let _scope = scope::within(operation);
        agree(&self.world, &ComparedCall::of(operation), Result::<()>::Ok(()))?;
        // There are at most `MOST_RANKS` ranks (`plan::groups`), so both numbers fit.
        let comm = self.world.split(Some(group.id as u64), group.index as i64)?.ok_or_else(|| {
            let reason = format!("the split of the world gave rank {} no {kind} group", self.topology.rank());
            Error::InvalidArgument { operation: OPERATION, reason }
        })?;
        Ok(slot.get_or_init(|| comm))
    }

    /// The first kind with the same groups as `kind`.
    fn first_like(&self, kind: GroupKind) -> GroupKind {
        // If cross-node data groups are refused, they equal no other groups.
        let is_like = |other: &GroupKind| self.topology.same_groups(*other, kind).unwrap_or(false);
        GroupKind::ALL.into_iter().find(is_like).unwrap_or(kind)
    }
}
