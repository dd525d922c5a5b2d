//! The making of a [`Mesh`]: first connections, then shared memory if all processes are on one machine. Any rank may lack shared memory;
//! then all ranks do without.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::connection::{Connection, Lanes};
use super::lane::{Lane, bytes_of};
use super::mesh::{Mesh, Peer};
use crate::bootstrap::{Member, Peers};
use crate::comm::message_passing::MemoryUse;
use crate::comm::message_passing::remote_memory::Probe;
use crate::error::{CommError, Operation};
use crate::memory::file::{FileHandle, MemoryFile};

/// The most ranks with lanes, because each rank has a lane from every other.
const MOST_RANKS: usize = 256;
/// The bytes of all lanes of a rank, and the fewest bytes of one lane.
const ALL_LANES_BYTES: usize = 1 << 20;
const LEAST_LANE_BYTES: usize = 8 << 10;

/// The number of words by which a rank describes its memory.
const WORDS: usize = FileHandle::WORDS + Probe::WORDS;

/// Connects this process to all others. All ranks have to call it.
pub(super) fn connect(member: Member, deadline: Duration, memory: MemoryUse) -> Result<Mesh, CommError> {
    let (rank, world_size) = (member.rank(), member.world_size());
    if world_size == 1 {
        return Ok(Mesh::new(member, vec![None]));
    }
    let Peers { connections, are_on_one_machine } = member.connect_peers(deadline)?;
    let connected = |peer: crate::bootstrap::Peer| Peer::new(Connection::new(peer), None);
    let mut peers: Vec<Option<Peer>> = connections.into_iter().map(|peer| peer.map(connected)).collect();
    let shares_memory = are_on_one_machine && memory == MemoryUse::Shared && world_size <= MOST_RANKS;
    // Ranks with other settings take part in the exchange, because all ranks have to agree on doing without shared memory.
    let capacity = (ALL_LANES_BYTES / world_size).next_power_of_two().max(LEAST_LANE_BYTES);
    let own = shares_memory.then(|| prepare(world_size, capacity)).and_then(|made| or_log(rank, made));
    let words = own.as_ref().map_or([0; WORDS], |(file, probe)| {
        let handle = FileHandle::of(file.bytes()).unwrap_or(FileHandle::NONE).words();
        let mut words = [0; WORDS];
        words[..FileHandle::WORDS].copy_from_slice(&handle);
        words[FileHandle::WORDS..].copy_from_slice(&probe.words());
        words
    });
    let all: Vec<[u64; WORDS]> = gather(&member, words, deadline)?;
    let handles: Vec<FileHandle> = all.iter().map(|words| FileHandle::of_words([words[0], words[1]])).collect();
    let lanes = if handles.contains(&FileHandle::NONE) {
        None
    } else {
        let bytes = world_size * bytes_of(capacity);
        or_log(rank, handles.iter().map(|handle| handle.map(bytes).map(Arc::new)).collect::<io::Result<Vec<_>>>())
    };
    let is_readable = |peer: usize| Probe::is_readable([all[peer][2], all[peer][3], all[peer][4]]);
    let reads = lanes.is_some() && (0..world_size).all(|peer| peer == rank || is_readable(peer));
    let have: Vec<[u64; 2]> = gather(&member, [lanes.is_some().into(), reads.into()], deadline)?;
    let all_have = |index: usize| have.iter().all(|words| words[index] == 1);
    if let (Some((file, _)), Some(memories), true) = (own, lanes, all_have(0)) {
        // All ranks have mapped the file, so the memory stays until no rank needs it.
        file.leave();
        let reads = all_have(1);
        if !reads {
            tracing::info!(rank, "ranks may not read each other's memory: messages are copied twice more");
        }
        for (number, (peer, theirs)) in peers.iter_mut().zip(&memories).enumerate() {
            let Some(peer) = peer else { continue };
            // In each rank's memory, lanes are in the order of their senders.
            let outward = Lane::new(theirs.clone(), rank, capacity);
            peer.connection.set_lanes(Lanes { outward, inward: Lane::new(memories[rank].clone(), number, capacity) });
            peer.process = reads.then_some(all[number][2] as u32);
        }
    }
    // The other end may not have set its lane yet, but frames are safe: a lane is memory, and keeps them.
    Ok(Mesh::new(member, peers))
}

fn prepare(world_size: usize, capacity: usize) -> io::Result<(MemoryFile, Probe)> {
    Ok((MemoryFile::zeroed(world_size * bytes_of(capacity))?, Probe::new()?))
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
