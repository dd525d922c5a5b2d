//! Time on the device: an event before and after each call.

use gradsync::driver::{Event, Queue};

use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::subject::{Seconds, Subject, sides};

/// Times a subject whose calls put their work into `queue`. The host waits for nothing before the end, unless a call does.
pub(super) fn time(queue: &Queue, subject: &mut dyn Subject, counts: Counts) -> Result<Seconds, PerfError> {
    let sides = sides(subject, counts);
    // Made before they are needed: making one takes longer than recording it.
    let mut marks: Vec<(Event, Event)> = Vec::new();
    for _ in 0..sides.len() * counts.iterations {
        marks.push((queue.record()?, queue.record()?));
    }
    queue.synchronize()?;
    let mut place = 0;
    for round in 0..counts.warm_ups + counts.iterations {
        for &side in &sides {
            let mark = (round >= counts.warm_ups).then(|| &marks[place]);
            if let Some((begin, _)) = mark {
                begin.record()?;
            }
            subject.call(side, round)?;
            if let Some((_, end)) = mark {
                end.record()?;
                place += 1;
            }
        }
    }
    let mut seconds = Seconds::default();
    for (index, (begin, end)) in marks.iter().enumerate() {
        seconds[sides[index % sides.len()] as usize].push(end.seconds_since(begin)?);
    }
    Ok(seconds)
}
