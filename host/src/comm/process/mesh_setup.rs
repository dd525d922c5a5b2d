//! The setup of a [`Mesh`]: first connections, then shared memory if all processes are on one machine. Any rank may lack shared memory;
//! then all ranks do without.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::connection::{Connection, LanePair};
use super::lane::{Lane, bytes_of};
use super::mesh::{Mesh, Peer};
use crate::bootstrap::{Member, Peers};
use crate::comm::message_passing::MemoryUse;
use crate::error::{CommError, Operation};
use crate::memory::file::{FileHandle, MemoryFile};

/// The most ranks with lanes, because each rank has a lane from every other.
const MOST_RANKS: usize = 256;
/// The bytes of all lanes of a rank, and the fewest bytes of one lane.
const ALL_LANES_BYTES: usize = 1 << 20;
const LEAST_LANE_BYTES: usize = 8 << 10;

/// Connects this process to all others. All ranks have to call it.
pub(super) fn connect(member: Member, deadline: Duration, memory: MemoryUse) -> Result<Mesh, CommError> {
    let (rank, world_size) = (member.rank(), member.world_size());
    if world_size == 1 {
        return Ok(Mesh::new(member, vec![None]));
    }
    let Peers { connections, are_on_one_machine } = member.connect_peers(deadline)?;
    let connected = |peer: crate::bootstrap::PeerSocket| Peer::new(Connection::new(peer));
    let mut peers: Vec<Option<Peer>> = connections.into_iter().map(|peer| peer.map(connected)).collect();
    let shares_memory = are_on_one_machine && memory == MemoryUse::Shared && world_size <= MOST_RANKS;
    // Ranks with other settings take part in the exchange, because all ranks have to agree on doing without shared memory.
    let capacity = (ALL_LANES_BYTES / world_size).next_power_of_two().max(LEAST_LANE_BYTES);
    let bytes = world_size * bytes_of(capacity);
    let own = shares_memory.then(|| MemoryFile::zeroed(bytes)).and_then(|made| or_log(rank, made));
    let handle = own.as_ref().and_then(|file| FileHandle::of(file.bytes())).unwrap_or(FileHandle::NONE);
    let handles: Vec<FileHandle> =
        gather(&member, handle.words(), deadline)?.into_iter().map(FileHandle::of_words).collect();
    let lanes = if handles.contains(&FileHandle::NONE) {
        None
    } else {
        or_log(rank, handles.iter().map(|handle| handle.map(bytes).map(Arc::new)).collect::<io::Result<Vec<_>>>())
    };
    let have = gather(&member, [lanes.is_some().into()], deadline)?;
    if let (Some(file), Some(memories), false) = (own, lanes, have.contains(&[0])) {
        // All ranks have mapped the file, so the memory stays until no rank needs it.
        file.leave();
        for (number, (peer, theirs)) in peers.iter_mut().zip(&memories).enumerate() {
            let Some(peer) = peer else { continue };
            // In each rank's memory, lanes are in the order of their senders.
            let outward = Lane::new(theirs.clone(), rank, capacity);
            peer.connection
                .set_lanes(LanePair { outward, inward: Lane::new(memories[rank].clone(), number, capacity) });
        }
    }
    // The other end may not have set its lane yet, but frames are safe: a lane is memory, and keeps them.
    Ok(Mesh::new(member, peers))
}

fn or_log<T>(rank: usize, outcome: io::Result<T>) -> Option<T> {
    if let Err(error) = &outcome {
        tracing::info!(rank, %error, "ranks do not reach each other's memory, and send messages through sockets");
    }
    outcome.ok()
}

/// Gathers every rank's words.
fn gather<const N: usize>(member: &Member, own: [u64; N], deadline: Duration) -> Result<Vec<[u64; N]>, CommError> {
    let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
    let all = member.all_gather(&bytes, deadline)?;
    let words = |(rank, bytes): (usize, &Vec<u8>)| {
        let word = |index: usize| Some(u64::from_le_bytes(bytes.get(8 * index..8 * index + 8)?.try_into().ok()?));
        let words: Option<Vec<u64>> = (0..N).map(word).collect();
        let words = words.and_then(|words| words.try_into().ok());
        words.ok_or_else(|| {
            let reason = format!(
                "its description of its memory has {} bytes, and cannot be read; perhaps it has another version of \
                 gradsync",
                bytes.len()
            );
            CommError::Transport { operation: Operation::SetUp, rank, reason }
        })
    };
    all.iter().enumerate().map(words).collect()
}
