//! Adasum and ordered sums by kernels that reach into the peers' memory ([`PeerGroup`]): no transport moves a byte.
//!
//! It launches; who the peers are, and whether they still live, is the transport's business.

use std::ops::Range;

use gradsync_device::abi::{GRAM_WIDTHS, MOST_PEERS, Mailbox, PEER_LAYERS, PEER_THREADS, Peers, vector_len};

use super::Layers;
use super::grid::Grids;
use crate::driver::{Argument, DeviceBuffer, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cuda::{pointer, pointer_mut, upload_words};

/// One rank's view of a group whose kernels reach each other's memory, on the device.
#[derive(Debug)]
pub(crate) struct PeerGroup {
    queue: Queue,
    world_size: usize,
    table: DeviceBuffer,
    /// The count of runs.
    _runs: DeviceBuffer,
}

/// What a rank must know of its peers to form a [`PeerGroup`]. One address a rank each, in rank order.
#[derive(Debug)]
pub(crate) struct PeerAddresses {
    pub(crate) rank: usize,
    /// See `gradsync_device::abi::Peers`.
    pub(crate) abort: u64,
    pub(crate) mailboxes: Vec<u64>,
    pub(crate) windows: Vec<u64>,
    pub(crate) copies: Vec<u64>,
}

/// Most ranks of such a group.
pub(crate) const MOST_RANKS: usize = MOST_PEERS;

impl PeerGroup {
    /// Elements of `f64` in the mailbox of a rank of a group with that many layers.
    pub(crate) fn mailbox_len(layers: usize, world_size: usize) -> usize {
        Mailbox { layers, world_size }.bytes() / DType::F64.size_bytes()
    }

    /// Puts what the kernels need to know on the device.
    ///
    /// # Safety
    /// Every address is mapped on `queue`'s device for as long as this lives and work of it is in the queue: mailboxes, cleared
    /// before any rank's first run, of [`mailbox_len`](Self::mailbox_len); windows and copies of what the launches' lengths say,
    /// at multiples of 16 bytes.
    pub(crate) unsafe fn new(queue: &Queue, addresses: &PeerAddresses) -> Result<Self> {
        let world_size = addresses.mailboxes.len();
        if !(1..=MOST_RANKS).contains(&world_size) {
            let reason = format!("{world_size} ranks, and their kernels meet in groups of 1 to {MOST_RANKS}");
            return Err(Error::InvalidArgument { operation: "peer group", reason });
        }
        let runs = DeviceBuffer::zeroed(queue, DType::F64, 1)?;
        let eight =
            |of: &[u64]| -> [u64; MOST_PEERS] { std::array::from_fn(|rank| of.get(rank).copied().unwrap_or(0)) };
        let peers = Peers {
            rank: addresses.rank as u64,
            world_size: world_size as u64,
            runs: runs.as_slice().address(),
            abort: addresses.abort,
            mailboxes: eight(&addresses.mailboxes),
            windows: eight(&addresses.windows),
            copies: eight(&addresses.copies),
        };
        let head = [peers.rank, peers.world_size, peers.runs, peers.abort];
        let words = [&head[..], &peers.mailboxes, &peers.windows, &peers.copies].concat();
        Ok(Self { queue: queue.clone(), world_size, table: upload_words(queue, &words)?, _runs: runs })
    }

    fn table(&self) -> Argument {
        pointer(self.table.as_slice())
    }

    /// The narrowest kernel that takes all ranks.
    fn width(&self) -> usize {
        GRAM_WIDTHS.into_iter().find(|&width| width >= self.world_size).expect("at most eight ranks")
    }

    /// Replaces every rank's window by their sum times a factor, in rank order, in `f64`, rounded once; the windows have `len`
    /// elements of `dtype`.
    pub(crate) fn reduce(&self, dtype: DType, len: usize, factor: f64) -> Result<()> {
        let name = format!("peer_reduce_{dtype}_p{}", self.width());
        let tile = PEER_THREADS as usize * vector_len(dtype, DType::F16);
        // One block at least: the ranks meet in it.
        let blocks = len.div_ceil(tile).max(1) as u64;
        // SAFETY: the promise made to `new`.
        unsafe { self.queue.launch(&name, blocks, &[self.table(), len.into(), factor.into()]) }?;
        self.barrier()
    }

    /// Waits, in the queue, until all ranks have written their results.
    fn barrier(&self) -> Result<()> {
        // SAFETY: the promise made to `new`.
        Ok(unsafe { self.queue.launch("peer_barrier", 1, &[self.table()]) }?)
    }
}

impl Layers {
    /// As [`new`](Self::new), for [`adasum_of_peers`](Self::adasum_of_peers).
    pub(crate) fn for_peers(queue: &Queue, len: usize, segments: &[Range<usize>], world_size: usize) -> Result<Self> {
        Self::on(Grids::for_peers, queue, len, segments, world_size)
    }

    /// Adasum of the ranks' windows in each layer, in place in every rank's arena; the windows have the length and the segments of
    /// these layers, whose group this is.
    pub(crate) fn adasum_of_peers(&mut self, group: &PeerGroup, dtype: DType) -> Result<()> {
        let width = group.width();
        let (partials, grid) = (pointer_mut(&self.partials.as_mut_slice()), self.grids.of_reductions(dtype));
        let gram =
            [group.table(), partials, grid.spans(), self.count.into(), grid.chunks.into(), grid.chunk_len.into()];
        let coefficients = [
            group.table(),
            pointer_mut(&self.weights.as_mut_slice()),
            pointer_mut(&self.tree.as_mut_slice()),
            pointer_mut(&self.cancelled.as_mut_slice()),
            pointer_mut(&self.totals.as_mut_slice()),
            partials,
            grid.spans(),
            self.count.into(),
            grid.chunks.into(),
        ];
        let combine = [
            group.table(),
            pointer(self.weights.as_slice()),
            pointer(self.tree.as_slice()),
            pointer(self.cancelled.as_slice()),
            grid.spans(),
            self.count.into(),
            grid.chunk_len.into(),
        ];
        let blocks = self.count.div_ceil(PEER_LAYERS) as u64;
        let name = |kernel: &str| format!("{kernel}_{dtype}_p{width}");
        // SAFETY: the promise made to `PeerGroup::new`; workspace of these layers.
        unsafe {
            self.queue.launch(&name("peer_gram"), grid.chunks.max(1), &gram)?;
            self.queue.launch(&format!("peer_coefficients_{dtype}"), blocks, &coefficients)?;
            self.queue.launch(&name("peer_combine"), grid.chunks, &combine)?;
        }
        group.barrier()
    }
}
