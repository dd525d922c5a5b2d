//! Starting threads as ranks: [`run`] and its forms.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::output::RankOutput;
use super::{LocalCommunicator, group_with_deadline};
use crate::bootstrap::call_deadline;
use crate::error::{Error, Result};

/// Runs `body` once for each of `world_size` ranks, each on its own thread, waits for all of them, and returns their results in rank
/// order.
///
/// The threads are new and belong to no pool, so this function may be called from anywhere, tasks of rayon included; `body` may use
/// rayon.
///
/// `body` returns a [`Result`], whose error is [`Error`], or a plain value: a number, `bool`, `char`, `()`, a string, a
/// [`GradientBuffer`](crate::GradientBuffer), or a vector, an array, a box, an option or a tuple. A value of another type is returned as
/// `Ok(value)`.
///
/// ```
/// use gradsync::prelude::*;
///
/// let sums = local::run(3, |comm| {
///     let mut data = [comm.rank() as f32 + 1.0; 4];
///     comm.all_reduce(&mut data, ReduceOp::Sum)?;
///     Ok(data)
/// })?;
/// assert_eq!(sums, [[6.0; 4]; 3]);
/// assert_eq!(local::run(3, |comm| comm.rank())?, [0, 1, 2]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// The earliest error of a rank; the errors that it causes on other ranks are discarded. [`Error::InvalidArgument`] for 0 ranks, and for
/// more than 65536.
///
/// # Panics
/// With the panic of a rank, once all ranks have ended.
pub fn run<R: RankOutput>(world_size: usize, body: impl Fn(LocalCommunicator) -> R + Sync) -> Result<Vec<R::Value>> {
    try_run(world_size, |comm| body(comm).into_result())
}

/// Like [`run`], for a `body` whose error is another type than [`Error`], which an [`Error`] converts into. The type has to be named, as in
/// `Ok::<_, E>(…)`, where `?` alone produces it.
///
/// # Errors
/// The errors of [`run`].
///
/// # Panics
/// As [`run`].
pub fn try_run<T: Send, E: Send + From<Error>>(
    world_size: usize,
    body: impl Fn(LocalCommunicator) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let first = Mutex::new(None);
    let keep_first = |comm: LocalCommunicator| {
        // The membership keeps this rank in the group until its error is stored: other ranks must not fail earlier because it has left.
        let _membership = Arc::clone(&comm.membership);
        let note = |error: E| {
            first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        };
        body(comm).map_err(note).ok()
    };
    let outcomes = run_each(world_size, keep_first)?;
    let results: Vec<Option<T>> =
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|panic| resume_unwind(panic))).collect();
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// Like [`run`], but returns each rank's result separately: the return value of its thread, or the payload of its panic.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks, and for more than 65536.
pub fn run_each<T: Send>(
    world_size: usize,
    body: impl Fn(LocalCommunicator) -> T + Sync,
) -> Result<Vec<std::thread::Result<T>>> {
    run_each_with_deadline(world_size, call_deadline()?, body)
}

/// Like [`run_each`], but every call of a communicator waits for the other ranks at most `deadline` instead of `GRADSYNC_DEADLINE`
/// or 10 minutes. `body` itself has no time limit.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks, and for more than 65536.
pub fn run_each_with_deadline<T: Send>(
    world_size: usize,
    deadline: Duration,
    body: impl Fn(LocalCommunicator) -> T + Sync,
) -> Result<Vec<std::thread::Result<T>>> {
    let group = group_with_deadline(world_size, deadline)?;
    let body = &body;
    Ok(std::thread::scope(|scope| {
        let ranks: Vec<_> = group.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        ranks.into_iter().map(|rank| rank.join()).collect()
    }))
}
