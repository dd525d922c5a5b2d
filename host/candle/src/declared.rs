//! The variables that the [`DataParallel`](crate::DataParallel)s of this process have, and the refusal of others in a graph.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::{Tensor, TensorId};
use gradsync::comm::Ranks;

use crate::error::Result;
use crate::variables::Variables;

/// The number of variables that an error describes.
const DESCRIBED: usize = 4;

/// How many `DataParallel`s have each variable.
static COUNTS: LazyLock<Mutex<HashMap<TensorId, usize>>> = LazyLock::new(Mutex::default);

fn counts() -> MutexGuard<'static, HashMap<TensorId, usize>> {
    // No code that can panic runs while the map is changed.
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All variables of one `DataParallel`: trained, frozen and local ones. Other `DataParallel`s know them until this is dropped.
#[derive(Debug)]
pub(crate) struct Declared(HashSet<TensorId>);

impl Declared {
    pub(crate) fn new(variables: &Variables) -> Self {
        let own: HashSet<TensorId> = variables.iter().map(|(_, var)| var.id()).collect();
        let mut counts = counts();
        own.iter().for_each(|id| *counts.entry(*id).or_insert(0) += 1);
        Self(own)
    }

    /// The variables among the nodes of a graph that only other `DataParallel`s have.
    ///
    /// # Errors
    /// An error that describes the variables that no `DataParallel` has, with the names that they have in the variables' `VarMap`.
    pub(crate) fn others<'g>(
        &self,
        operation: &'static str,
        variables: &Variables,
        nodes: &[&'g Tensor],
    ) -> Result<Vec<&'g Tensor>> {
        let foreign: Vec<&Tensor> =
            nodes.iter().copied().filter(|node| node.is_variable() && !self.0.contains(&node.id())).collect();
        if foreign.is_empty() {
            return Ok(foreign);
        }
        let (others, unknown): (Vec<_>, Vec<&Tensor>) = {
            let counts = counts();
            foreign.into_iter().partition(|node| counts.contains_key(&node.id()))
        };
        if unknown.is_empty() {
            return Ok(others);
        }
        let describe = |node: &&Tensor| {
            let name = match variables.later_name(node.id()) {
                Some(name) => format!("{name:?}, added to its VarMap later"),
                None => "without a known name".into(),
            };
            format!("a variable of shape {:?} and dtype {:?}, {name}", node.dims(), node.dtype())
        };
        let mut described: Vec<String> = unknown.iter().take(DESCRIBED).map(describe).collect();
        if unknown.len() > DESCRIBED {
            described.push(format!("{} more", unknown.len() - DESCRIBED));
        }
        let reason = format!(
            "the loss depends on variables that were not declared, so that their gradients would not be reduced and the ranks' weights \
             would differ: {}. Create the DataParallel after all layers, with all of their variables; declare variables that are not \
             trained by Variables::with_frozen, and variables that each rank keeps to itself by Variables::with_local",
            described.join("; "),
        );
        Err(gradsync::Error::InvalidArgument { operation, reason }.into())
    }
}

impl Drop for Declared {
    fn drop(&mut self) {
        let mut counts = counts();
        for id in &self.0 {
            if let Some(count) = counts.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(id);
                }
            }
        }
    }
}

/// Whether each of the reduced variables is one variable of all ranks, which are threads of one process: a frozen one, which they only
/// read. All ranks must call it, with the same variables.
///
/// # Errors
/// On every rank, an error that names two ranks and the variable that they share: a trained one, or one that other ranks do not share.
pub(crate) fn shared_by_threads<R: Ranks + ?Sized>(
    operation: &'static str,
    ranks: &R,
    variables: &Variables,
) -> Result<Vec<bool>> {
    /// With the keys of this process, so that equal numbers are one variable.
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let reduced = variables.reduced();
    if ranks.world_size() == 1 || reduced.is_empty() {
        return Ok(vec![false; reduced.len()]);
    }
    let own: Vec<u64> = reduced.iter().map(|variable| HASHER.hash_one(variable.var.id())).collect();
    let all = ranks.gather_words(&own)?;
    let of_ranks: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
    let mut is_shared = Vec::with_capacity(reduced.len());
    for (number, variable) in reduced.iter().enumerate() {
        let words: Vec<u64> = of_ranks.iter().map(|words| words[number]).collect();
        let has_all = words.iter().all(|word| *word == words[0]);
        let first_of = |word: &u64| words.iter().position(|other| other == word).expect("among them");
        let pair =
            words.iter().enumerate().map(|(rank, word)| (first_of(word), rank)).find(|(first, rank)| first < rank);
        if let Some((first, rank)) = pair.filter(|_| variable.is_trained() || !has_all) {
            let reason = format!(
                "ranks {first} and {rank} are threads that share the variable {:?}; only a frozen variable can be shared, by all ranks",
                variable.name
            );
            return Err(gradsync::Error::InvalidArgument { operation, reason }.into());
        }
        is_shared.push(has_all);
    }
    Ok(is_shared)
}
