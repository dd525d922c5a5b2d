//! The messages between members and their coordinator, and the limits of their sizes.
//!
//! Members in the coordinator's process pass the same messages by calls. A member waits in one request at a time and messages keep their
//! order, so no message needs to identify its request. The handshake before these messages is in `noise`.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::BootstrapError;
use crate::error::{Call, CommError, Departure, Operation};

/// The most bytes that a rank may contribute to one exchange.
pub(super) const CONTRIBUTION_LIMIT: usize = 64 << 10;
/// The most calls in one request: with the longest calls, the frame keeps within its limit.
pub(super) const CALLS_LIMIT: usize = 16 << 10;
/// The most unmatched announced calls of a rank: about four times as many as a CUDA stream takes before it blocks the host. This bounds
/// the coordinator's queues.
pub(super) const ANNOUNCED_LIMIT: u64 = 4 << 10;
/// The longest text of an error that is sent.
const REASON_LIMIT: usize = 4 << 10;

/// A message from a member to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// The deadline of the join has passed.
    GiveUp { deadline: Duration },
    /// This rank waits until these calls are matched. Then `contribution` is sent to all ranks.
    Post { calls: Vec<Call>, contribution: Option<Vec<u8>> },
    /// This rank makes these calls and continues without waiting.
    Announce { calls: Vec<Call> },
    /// Requests a report when this many of the rank's announced calls have been matched.
    Confirm { calls: u64 },
    /// The deadline of a `Confirm` has passed.
    Unconfirmed { calls: u64, deadline: Duration },
    /// The deadline of this rank's `Post` has passed.
    Overdue { deadline: Duration },
    /// This rank's collective did not complete in time: requests a query for the ranks that have not reached it.
    Late { sequence: u64, operation: Operation, deadline: Duration },
    /// Ends the query: ranks that have not answered by now are missing.
    Conclude,
    /// An answer to [`Event::Probe`].
    Progress { inquiry: u64, sequence: u64 },
    /// Fails the group.
    Fail(CommError),
    /// This rank leaves in good order; this is its last message.
    Leave { departure: Departure, sequence: u64 },
}

/// A message from the coordinator to a member.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Event {
    /// All ranks have joined.
    Start(Network),
    /// This rank's join has failed.
    Refused(BootstrapError),
    /// The contributions of some ranks, in rank order; those of the next ranks follow in further events, then the release.
    Gathered { contributions: Vec<Vec<u8>> },
    /// The calls of this rank's `Post` are matched.
    Released,
    /// The number of this rank's announced calls, from the first on, that have been matched with calls of other ranks.
    Matched { calls: u64 },
    /// The group has failed.
    Failed(CommError),
    /// A rank has left in good order.
    Departed { rank: usize, departure: Departure, sequence: u64 },
    /// Queries the number of the collective that this rank has reached.
    Probe { inquiry: u64 },
}

/// The addresses of the ranks of a group, by which groups that are split off connect.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Network {
    /// The loopback address that all sockets are bound to, if the group is confined to one machine.
    pub(super) loopback: Option<IpAddr>,
    /// The origin of each rank's connection; `None` for rank 0.
    pub(super) addresses: Vec<Option<IpAddr>>,
}

/// The failure of a rank that has sent bytes which no rank of this version sends, or whose bytes were changed on the way.
pub(super) fn violation(rank: usize, error: &std::io::Error) -> CommError {
    let reason = format!("its messages violate the protocol, so its connection was closed: {error}");
    CommError::Transport { operation: Operation::Exchange, rank, reason }
}

/// Truncates the text of a failure to the limit of a message.
pub(super) fn bounded(mut failure: CommError) -> CommError {
    if let CommError::InvalidCall { reason, .. } | CommError::Transport { reason, .. } = &mut failure {
        let end = (0..=REASON_LIMIT.min(reason.len())).rev().find(|&end| reason.is_char_boundary(end));
        reason.truncate(end.unwrap_or(0));
    }
    failure
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;
    use crate::bootstrap::frame::{FRAME_LIMIT, encode};
    use crate::bootstrap::noise::VERSION;
    use crate::call::ReduceOp;
    use crate::dtype::DType;

    #[test]
    fn request_and_event_stay_within_the_limits_of_frames() {
        let factor = (-1.5f64).into();
        let operation = Operation::ScaledAllReduce { op: ReduceOp::Min, before: factor, after: factor };
        let longest = Call { within: Some(operation), ..Call::new(operation, usize::MAX, DType::U8) };
        let post = |calls, contribution| Request::Post { calls, contribution };
        encode(&post(vec![longest; CALLS_LIMIT], None), FRAME_LIMIT).unwrap();
        encode(&Request::Announce { calls: vec![longest; CALLS_LIMIT] }, FRAME_LIMIT).unwrap();
        encode(&post(vec![longest], Some(vec![0xff; CONTRIBUTION_LIMIT])), FRAME_LIMIT).unwrap();
        let failure = CommError::InvalidCall { operation, rank: usize::MAX, reason: "×".repeat(FRAME_LIMIT) };
        encode(&Request::Fail(bounded(failure)), FRAME_LIMIT).unwrap();
    }

    /// Ranks with the same version number must encode all messages alike.
    #[test]
    fn request_and_event_have_the_bytes_of_this_version() {
        let (deadline, operation) = (Duration::from_millis(1500), Operation::Member);
        let call = Call { within: Some(Operation::Split), ..Call::new(Operation::AllGather, 300, DType::U8) };
        let failures = [
            CommError::mismatch((0, call), (1, Call::without_data(operation))),
            CommError::PeerGone { operation, rank: 1, departure: Departure::Lost },
            CommError::Timeout { operation, missing: vec![2], deadline },
            CommError::InvalidCall { operation, rank: 1, reason: "why".into() },
            CommError::Transport { operation, rank: 1, reason: "why".into() },
            CommError::InvalidPeer { operation, peer: 4, rank: 1, world_size: 3 },
        ];
        let requests = [
            Request::GiveUp { deadline },
            Request::Post { calls: vec![call], contribution: Some(vec![5]) },
            Request::Announce { calls: vec![call] },
            Request::Confirm { calls: 6 },
            Request::Unconfirmed { calls: 6, deadline },
            Request::Overdue { deadline },
            Request::Late { sequence: 7, operation, deadline },
            Request::Conclude,
            Request::Progress { inquiry: 8, sequence: 7 },
            Request::Leave { departure: Departure::Left, sequence: 7 },
        ];
        let network =
            Network { loopback: Some([127, 0, 0, 1].into()), addresses: vec![None, Some([10, 0, 0, 1].into())] };
        let duplicate = BootstrapError::DuplicateRank { rank: 1 };
        let starved = BootstrapError::out_of_threads(0, &std::io::Error::other("why"));
        let events = [
            Event::Start(network),
            Event::Refused(duplicate),
            Event::Refused(starved),
            Event::Gathered { contributions: vec![vec![5]] },
            Event::Released,
            Event::Matched { calls: 6 },
            Event::Departed { rank: 1, departure: Departure::Panicked, sequence: 7 },
            Event::Probe { inquiry: 8 },
        ];
        let said = requests
            .into_iter()
            .chain(failures.clone().map(Request::Fail))
            .map(|request| encode(&request, FRAME_LIMIT));
        let heard = events.into_iter().chain(failures.map(Event::Failed)).map(|event| encode(&event, FRAME_LIMIT));
        let frames: Vec<u8> = said.chain(heard).flat_map(|frame| frame.unwrap()).collect();
        let hash: String = Sha256::digest(&frames).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let reminder =
            "what ranks say has changed: raise VERSION of the handshake, and put the new hash here beside it";
        assert_eq!((VERSION, hash.as_str()), (6, "d0f49a6790f8034c"), "{reminder}");
    }
}
