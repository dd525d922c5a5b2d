//! A rank's communicators of every kind of parallel group: data, horizontal, pipeline, and the two halves of the data
//! group on and across nodes.
//!
//! Which ranks form a group is [`plan::groups`](crate::plan::groups)' to say; here they come together, and stay.
//! Nothing is reduced here.
//!
//! ```
//! use gradsync::groups::Groups;
//! use gradsync::comm::{Collectives, Ranks, ReduceOp, local};
//! use gradsync::plan::groups::{GroupKind, Sizes};
//!
//! // Two stages, each of which sees different data on two ranks: ranks 0 and 1 are the first, ranks 2 and 3 the second.
//! let sizes = Sizes { world: 4, local: 4, data: 2, horizontal: 1, pipeline: 2 };
//! let outcomes = local::run(4, |world| -> gradsync::Result<_> {
//!     let rank = world.rank();
//!     let groups = Groups::new(world, sizes)?;
//!     // The gradients of a stage are added up over the ranks that have it, and over no others.
//!     let mut gradients = [rank as f32];
//!     groups.get(GroupKind::Data)?.all_reduce(&mut gradients, ReduceOp::Sum)?;
//!     // What the first stage has computed goes to the second, on the ranks that see the same data.
//!     let pipeline = groups.get(GroupKind::Pipeline)?;
//!     let mut activation = [if pipeline.rank() == 0 { 10.0 + rank as f32 } else { 0.0 }];
//!     match pipeline.rank() {
//!         0 => pipeline.send(&activation, 1)?,
//!         _ => pipeline.recv(&mut activation, 0)?,
//!     }
//!     Ok((gradients[0], activation[0]))
//! })?;
//! assert_eq!(outcomes, [(1.0, 10.0), (1.0, 11.0), (5.0, 10.0), (5.0, 11.0)]);
//! # Ok::<(), gradsync::Error>(())
//! ```

use std::cell::OnceCell;

use crate::agreement::{Plan, agree};
use crate::call::Value;
use crate::call::scope;
use crate::comm::{Ranks, Split};
use crate::error::{Error, Operation, Result};
use crate::plan::groups::{GroupKind, Sizes, Topology};

const OPERATION: &str = "groups";

/// A rank's communicators of every kind of parallel group, split off at their first use and kept.
///
/// Kinds whose groups are the same sets of ranks share a communicator: without tensor and pipeline parallelism, the
/// data group is the world itself. A rank's number in a group's communicator is its index in the group.
#[derive(Debug)]
pub struct Groups<C> {
    world: C,
    topology: Topology,
    /// By kind; only the first of those that share one has it. The world's stays empty.
    split: [OnceCell<C>; GroupKind::ALL.len()],
}

impl<C: Ranks + Split> Groups<C> {
    /// Divides all ranks, those of `world`. All of them have to call it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on every rank, naming two ranks whose sizes differ; [`Error::InvalidArgument`] as
    /// [`Topology::new`], or for a size of the world that is not the communicator's; and those of a collective.
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
        // Before anything that a rank might refuse alone.
        agree(&world, &Plan { lines: &lines, ..Plan::of(Operation::Groups) }, Ok(()))?;
        let (rank, world_size) = (world.rank(), world.world_size());
        if ranks != world_size {
            let reason = format!("the world size is {ranks}, and the communicator has {world_size} ranks");
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        let topology = Topology::new(rank, sizes)?;
        Ok(Self { world, topology, split: Default::default() })
    }

    /// This rank's place among all others.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// The communicator of this rank's group of a kind.
    ///
    /// The first call for a kind splits the world: all ranks have to make it, at the same place among the world's other
    /// calls. Later ones only look it up.
    ///
    /// # Errors
    /// As [`Topology::group`], on every rank and before any communication; [`Error::Disagreement`] on every rank if two
    /// ranks, which it names, ask for other kinds; and those of [`Split::split`].
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
        agree(&self.world, &Plan::of(operation), Ok(()))?;
        // There are fewer ranks than `plan::groups::MOST_RANKS`: both fit.
        let comm = self.world.split(Some(group.id as u64), group.index as i64)?.ok_or_else(|| {
            let reason = format!("the split of the world gave rank {} no {kind} group", self.topology.rank());
            Error::InvalidArgument { operation: OPERATION, reason }
        })?;
        Ok(slot.get_or_init(|| comm))
    }

    /// The first kind that has the same groups.
    fn first_like(&self, kind: GroupKind) -> GroupKind {
        // Cross-node data groups may be refused; then they are like no others.
        let is_like = |other: &GroupKind| self.topology.same_groups(*other, kind).unwrap_or(false);
        GroupKind::ALL.into_iter().find(is_like).unwrap_or(kind)
    }
}
