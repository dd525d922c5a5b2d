//! Timing on the device: with an event before and after each call, or each graph of many calls.
//!
//! A side's turn consists of two calls, of which the second is timed: the first leaves the cache in the state that calls of this side
//! produce. Otherwise, if one side wrote more than the other, its dirty cache lines would be written back during the other side's time.

use std::ops::Range;

use gradsync::Error;
use gradsync::driver::{Event, Graph, Queue};

use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::subject::{Seconds, Side, Subject, sides};
use crate::perf::watch;

/// Launches a graph in its queue.
pub(super) type Launch<'a> = &'a mut dyn FnMut(&Graph) -> Result<(), PerfError>;

/// Times a subject whose calls add their work to `queue`. The host waits only at the end, unless a call itself waits.
pub(super) fn time(
    queue: &Queue,
    subject: &mut dyn Subject,
    counts: Counts,
    launch: Launch<'_>,
) -> Result<Seconds, PerfError> {
    let sides = sides(subject, counts);
    // Empty if the calls are timed directly.
    let mut graphs = Vec::new();
    for &side in sides.iter().filter(|_| counts.graph_calls > 0) {
        // There are two graphs, which use different buffers if there are enough.
        let graph = |turn: usize, subject: &mut dyn Subject| {
            record(queue, subject, side, turn * counts.graph_calls..(turn + 1) * counts.graph_calls)
        };
        graphs.push([graph(0, subject)?, graph(1, subject)?]);
    }
    // Events are created beforehand, because creating one takes longer than recording it.
    let mut marks: Vec<(Event, Event)> = Vec::new();
    for _ in 0..sides.len() * counts.iterations {
        marks.push((queue.record()?, queue.record()?));
    }
    queue.synchronize()?;
    let mut place = 0;
    for round in 0..counts.warm_ups + counts.iterations {
        for (index, &side) in sides.iter().enumerate() {
            let mark = (round >= counts.warm_ups).then(|| &marks[place]);
            let mut turn = |round: usize| match graphs.get(index) {
                Some(graphs) => launch(&graphs[round % 2]),
                None => subject.call(side, round),
            };
            turn(2 * round)?;
            if let Some((begin, _)) = mark {
                begin.record()?;
            }
            turn(2 * round + 1)?;
            if let Some((_, end)) = mark {
                end.record()?;
                place += 1;
            }
        }
    }
    let calls = counts.graph_calls.max(1) as f64;
    let mut seconds = Seconds::default();
    for (index, (begin, end)) in marks.iter().enumerate() {
        watch::side(sides[index % sides.len()]);
        seconds[sides[index % sides.len()] as usize].push(end.seconds_since(begin)? / calls);
    }
    Ok(seconds)
}

/// Launches a graph that does not communicate with other ranks.
pub(super) fn alone(graph: &Graph) -> Result<(), PerfError> {
    Ok(graph.launch()?)
}

/// Records the calls of a side for these rounds. Each call runs once before, because a first call may allocate, which cannot be recorded.
fn record(queue: &Queue, subject: &mut dyn Subject, side: Side, rounds: Range<usize>) -> Result<Graph, PerfError> {
    watch::side(side);
    let mut run = || rounds.clone().try_for_each(|round| subject.call(side, round));
    run()?;
    queue.synchronize()?;
    let mut failure = None;
    let graph = queue.capture(|| {
        run().map_err(|error| match error {
            PerfError::Gradsync(error) => error,
            other => {
                let reason = other.to_string();
                failure = Some(other);
                Error::InvalidArgument { operation: "perf --cudagraph", reason }
            }
        })
    });
    match failure {
        Some(failure) => Err(failure),
        None => Ok(graph?),
    }
}
