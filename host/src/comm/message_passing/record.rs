//! [`Record`]: the encoded messages of the handshake and of transfers between two ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Call, CommError, Operation};

/// The longest encoded record: by default, MPI implementations send this much without waiting for the receiver to post its buffer.
pub(in crate::comm) const RECORD_BYTES: usize = 4000;
/// The most eager bytes in a record.
pub(super) const MAX_EAGER_BYTES: usize = 3 << 10;
/// The lists and texts of a failure are truncated to fit into a record.
const LONGEST_REASON: usize = 500;
const MOST_MISSING: usize = 40;

/// The messages of the handshake; a rank's records arrive in the order in which it sent them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) enum Record {
    /// The sender is in this collective; with the eager bytes for the receiver.
    Call { call: Call, eager: EagerBytes },
    /// All ranks are in the same collective, and the sender proceeds.
    Go,
    /// The sender has data for the receiver. `is_alone` is whether, in the same call, it receives nothing from the receiver.
    Offer { call: Call, is_alone: bool },
    /// The receiver of an offer is ready for the data.
    Accept,
    /// The data were sent without an error. It follows data of devices, because their sender can fail half-way.
    Sent,
    /// The sender has done its part of a collective on memory of devices.
    Closed,
    /// The sender has failed, after this many collectives.
    Failed { completed: u64, error: CommError },
}

impl Record {
    /// Encodes the record in at most [`RECORD_BYTES`].
    pub(in crate::comm) fn encode(self) -> Box<[u8]> {
        let bytes = postcard::to_stdvec(&shortened(self)).expect("plain data").into_boxed_slice();
        assert!(bytes.len() <= RECORD_BYTES, "a record of {} bytes", bytes.len());
        bytes
    }

    /// Decodes a record of `rank`; other bytes may follow it.
    pub(in crate::comm) fn decode(bytes: &[u8], rank: usize) -> Self {
        postcard::from_bytes(bytes).unwrap_or_else(|error| Record::unreadable(rank, &error))
    }

    /// A copy; if it is a call, then with these eager bytes.
    pub(super) fn with_eager(&self, bytes: &[u8]) -> Self {
        match self {
            Record::Call { call, .. } => Record::Call { call: *call, eager: EagerBytes(bytes.to_vec()) },
            word => word.clone(),
        }
    }

    /// The failure of `rank`, which has sent this record where no rank of this version does. A record that cannot be decoded is its reason.
    pub(super) fn misplaced(&self, operation: Operation, rank: usize) -> CommError {
        if let Record::Failed { error, .. } = self {
            return error.clone();
        }
        let reason = format!(
            "it sent {self:?}, which no rank of this version sends here: all ranks need one version of gradsync"
        );
        CommError::Transport { operation, rank, reason }
    }

    /// Replaces a record of `rank` that cannot be decoded.
    pub(super) fn unreadable(rank: usize, error: &postcard::Error) -> Self {
        let reason = format!("its message cannot be read, perhaps as it has another version of gradsync: {error}");
        Record::Failed { completed: 0, error: CommError::Transport { operation: Operation::Exchange, rank, reason } }
    }
}

/// The operands of a call. Errors quote records, and show only the number of these bytes.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) struct EagerBytes(#[serde(with = "serde_bytes")] pub(super) Vec<u8>);

impl fmt::Debug for EagerBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// Truncates the lists and texts of a record.
pub(super) fn shortened(mut record: Record) -> Record {
    if let Record::Failed { error, .. } = &mut record {
        match error {
            CommError::InvalidCall { reason, .. } | CommError::Transport { reason, .. } => {
                let end = (0..=LONGEST_REASON.min(reason.len())).rev().find(|&end| reason.is_char_boundary(end));
                reason.truncate(end.unwrap_or(0));
            }
            CommError::Timeout { missing, .. } => missing.truncate(MOST_MISSING),
            _ => {}
        }
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ReduceOp;
    use crate::dtype::DType;
    use crate::error::Operation;

    #[test]
    fn record_is_long_enough_for_an_eager_call() {
        let factor = (-1.5f64).into();
        let operation = Operation::ScaledAllReduce { op: ReduceOp::Min, before: factor, after: factor };
        let call = Call { within: Some(operation), ..Call::new(operation, usize::MAX, DType::BF16) };
        let record = Record::Call { call, eager: EagerBytes(vec![255; MAX_EAGER_BYTES]) };
        let bytes = postcard::to_stdvec(&record).unwrap();
        assert!(bytes.len() + 100 < RECORD_BYTES, "{} bytes", bytes.len());
        assert!(!format!("{record:?}").contains("255"), "{record:?}");
        let mut received = vec![0; RECORD_BYTES];
        received[..bytes.len()].copy_from_slice(&bytes);
        assert_eq!(postcard::from_bytes::<Record>(&received), Ok(record));
    }
}
