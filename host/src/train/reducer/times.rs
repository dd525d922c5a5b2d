//! [`StepTimes`]: when the gradients of a step were complete, and when its buckets were reduced.

use super::memory::{Lane, ReducerMemory};
use crate::error::Result;

/// The course of a step, in seconds since it began ([`Reducer::record_times`](super::Reducer::record_times)). On GPUs these are times of the
/// queues, not of the host.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StepTimes {
    /// The time at which all gradients were computed.
    pub gradients: f64,
    /// The buckets, in the order of their reductions; none with one rank, which reduces nothing.
    pub buckets: Vec<BucketTimes>,
}

/// The reduction of a bucket in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BucketTimes {
    /// The size of the bucket on this rank, with the gaps between its tensors.
    pub bytes: usize,
    /// The time at which its gradients were in place, and all earlier buckets were reduced.
    pub begin: f64,
    /// The time at which it was reduced.
    pub end: f64,
}

/// The moments of one step.
#[derive(Debug)]
pub(super) struct Moments<M: ReducerMemory> {
    begin: M::Moment,
    gradients: Option<M::Moment>,
    /// The bytes of each bucket, and the moments of its reduction.
    buckets: Vec<(usize, [M::Moment; 2])>,
}

impl<M: ReducerMemory> Moments<M> {
    /// Begins with the present moment.
    pub(super) fn begin(lanes: &M::Lanes) -> Result<Self> {
        Ok(Self { begin: M::moment(lanes, Lane::Gradients)?, gradients: None, buckets: Vec::new() })
    }

    /// Records that all gradients are computed.
    pub(super) fn gradients(&mut self, lanes: &M::Lanes) -> Result<()> {
        self.gradients = Some(M::moment(lanes, Lane::Gradients)?);
        Ok(())
    }

    /// Records a bucket of `bytes` bytes, whose reduction began at the moment `begin` and ends now.
    pub(super) fn bucket(&mut self, lanes: &M::Lanes, bytes: usize, begin: M::Moment) -> Result<()> {
        let end = M::moment(lanes, Lane::Reductions)?;
        self.buckets.push((bytes, [begin, end]));
        Ok(())
    }

    /// The times; `None` before the step has ended. On GPUs it waits for the last moment.
    pub(super) fn times(&self) -> Result<Option<StepTimes>> {
        let Some(gradients) = &self.gradients else { return Ok(None) };
        let since_begin = |moment: &M::Moment| M::seconds(&self.begin, moment);
        let of_bucket = |(bytes, [begin, end]): &(usize, [M::Moment; 2])| {
            Ok(BucketTimes { bytes: *bytes, begin: since_begin(begin)?, end: since_begin(end)? })
        };
        let buckets = self.buckets.iter().map(of_bucket).collect::<Result<_>>()?;
        Ok(Some(StepTimes { gradients: since_begin(gradients)?, buckets }))
    }
}
