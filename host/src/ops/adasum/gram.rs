//! The Gram form of Adasum: the vectors are exchanged once, each rank multiplies its part of all of them with each other, one small
//! all-reduce adds the products up, and every rank computes the same weights and its part of the weighted sum.
//!
//! A part is cut into chunks, and while the transport moves one chunk the processor works on another. Where this rank's vector is kept,
//! and how it comes and goes, is a [`Vector`]'s business.

use std::ops::Range;
use std::sync::mpsc::sync_channel;

use gradsync_device::math::adasum::{self, Pair};

use super::{AdasumReport, Algorithm, Granularity, OPERATION, for_tensors};
use crate::buffer::{Arena, Scratch};
use crate::comm::{Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu;
use crate::plan::segments;
use crate::slice::{Slice, SliceMut};

/// Bytes of one rank's share of a chunk: what two ranks send each other at a time.
const PIECE_BYTES: usize = 1 << 20;

/// How vectors are cut: each into as many parts as there are vectors, and those into chunks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    vectors: usize,
    part_len: usize,
    chunk_len: usize,
    dtype: DType,
}

impl Cut {
    /// For `vectors` vectors of as many parts of `part_len` elements.
    pub(crate) fn new(dtype: DType, vectors: usize, part_len: usize) -> Self {
        Cut { vectors, part_len, chunk_len: (PIECE_BYTES / dtype.size_bytes()).min(part_len.max(1)), dtype }
    }

    /// How many chunks a part has.
    pub(crate) fn chunks(self) -> usize {
        self.part_len.div_ceil(self.chunk_len)
    }

    /// A chunk's elements in its part.
    pub(super) fn chunk(self, chunk: usize) -> Range<usize> {
        chunk * self.chunk_len..self.part_len.min((chunk + 1) * self.chunk_len)
    }

    /// Where, in a whole vector, the chunk of every part lies, in order.
    pub(crate) fn pieces(self, chunk: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        let Range { start, end } = self.chunk(chunk);
        (0..self.vectors).map(move |part| part * self.part_len + start..part * self.part_len + end)
    }

    /// The dtype of the vectors.
    #[cfg(feature = "cuda")]
    pub(crate) fn dtype(self) -> DType {
        self.dtype
    }

    /// The elements of the longest piece.
    #[cfg(feature = "cuda")]
    pub(crate) fn longest_piece(self) -> usize {
        self.chunk_len
    }
}

/// This rank's vector. Calls go through the chunks in order, twice: first all are fetched and read, then all are filled and stored.
pub(crate) trait Vector {
    /// Begins to bring a chunk of every part; does not wait.
    fn fetch(&mut self, chunk: usize) -> Result<()>;

    /// A chunk of every part, in order, that [`fetch`](Self::fetch) has begun to bring.
    fn pieces(&mut self, chunk: usize) -> Result<Vec<Slice<'_>>>;

    /// Where a chunk of every part of the result is to be written.
    fn places(&mut self, chunk: usize) -> Result<Vec<SliceMut<'_>>>;

    /// Takes a chunk of the result away from its places; need not wait.
    fn store(&mut self, chunk: usize) -> Result<()>;
}

/// Memory for the exchanged vectors and for this rank's part of the result, by chunk.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    received: Vec<Arena>,
    results: Vec<Arena>,
}

/// One reduction.
pub(crate) struct Gram<'a> {
    /// One rank for every vector.
    pub(crate) across: &'a dyn Communicator,
    /// The ranks whose products belong together: all that hold a part of the vectors.
    pub(crate) all: &'a dyn Communicator,
    pub(crate) cut: Cut,
    /// The layers of this rank's part.
    pub(crate) layers: &'a [Range<usize>],
    /// The tensors of this rank's part: each a layer of its own, or all together one.
    pub(crate) tensors: &'a [Range<usize>],
}

/// What all products together say.
pub(super) struct Solution {
    pub(super) report: AdasumReport,
    /// `tensors × P` weights.
    pub(super) of_tensors: Vec<f64>,
    /// The trees of the tensors, if any is to be computed along one.
    pub(super) trees: Option<cpu::Trees>,
}

/// What the arithmetic needs to know; it runs beside the transport.
#[derive(Clone, Copy)]
struct Part<'a> {
    cut: Cut,
    layers: &'a [Range<usize>],
    tensors: &'a [Range<usize>],
}

impl Gram<'_> {
    pub(crate) fn run(&self, vector: &mut dyn Vector, workspace: &mut Workspace) -> Result<AdasumReport> {
        let Gram { across, cut, layers, tensors, .. } = *self;
        let part = Part { cut, layers, tensors };
        let (rank, vectors) = (across.rank(), cut.vectors);
        workspace.make(cut)?;
        let (mut free, mut received) = (std::mem::take(&mut workspace.received).into_iter(), Vec::new());

        let mut products = vec![0.0; layers.len() * adasum::products(vectors)];
        if cut.chunks() > 0 {
            vector.fetch(0)?;
        }
        let exchange = |chunk: usize| {
            if chunk + 1 < cut.chunks() {
                vector.fetch(chunk + 1)?;
            }
            let mut arena = free.next().expect("one for each chunk");
            exchange_pieces(across, &vector.pieces(chunk)?, arena.as_mut_slice())?;
            Ok(arena)
        };
        receive(cut.chunks(), exchange, |chunk, arena| {
            let sums = cpu::gram(&part.vectors(&arena), &part.layers_of(chunk))?;
            products.iter_mut().zip(sums).for_each(|(product, sum)| *product += sum);
            received.push(arena);
            Ok(())
        })?;
        workspace.received = received;
        let Solution { report, of_tensors, trees } =
            self.solve(products, &|chunk| part.vectors(&workspace.received[chunk]))?;
        let (of_tensors, trees) = (&of_tensors, &trees);
        let mut results = std::mem::take(&mut workspace.results);
        let combine = results.iter_mut().enumerate().map(|(chunk, result)| {
            let vectors = part.vectors(&workspace.received[chunk]);
            let tensors = part.tensors_of(chunk);
            let mut to = result.as_mut_slice();
            // What lies between tensors is what it was in this rank's own vector.
            for gap in segments::gaps(&tensors, to.len()) {
                let own = vectors[rank].range(gap.clone()).as_bytes();
                to.reborrow().range_mut(gap).as_bytes_mut().copy_from_slice(own);
            }
            cpu::combine(to.reborrow(), &vectors, of_tensors, &tensors)?;
            if let Some(trees) = trees {
                cpu::tree_combine(to, &vectors, &tensors, trees, 1.0)?;
            }
            Ok(result.as_slice())
        });
        let outcome = send(cut.chunks(), combine, |chunk, result| {
            gather_pieces(across, result, vector.places(chunk)?)?;
            vector.store(chunk)
        });
        workspace.results = results;
        outcome?;
        Ok(report)
    }

    /// What to make of the vectors, given this rank's products of them. `vectors_of` gives every rank's vector in a chunk.
    pub(super) fn solve<'v>(
        &self,
        mut products: Vec<f64>,
        vectors_of: &dyn Fn(usize) -> Vec<Slice<'v>>,
    ) -> Result<Solution> {
        let (vectors, tensors) = (self.cut.vectors, self.tensors.len());
        self.all.all_reduce((&mut products).into(), ReduceOp::Sum)?;
        let cpu::Coefficients { mut weights, cancelled } = cpu::coefficients(&products, vectors)?;
        let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();
        let trees = if recomputed == 0 {
            None
        } else {
            tracing::debug!(recomputed, "norms cancelled: computing their layers from the vectors");
            Some(self.recompute(vectors_of, &products, cancelled, &mut weights)?)
        };
        // Weights belong to layers, results to tensors: the gaps between tensors stay what they are.
        let of_tensors = for_tensors(&weights, vectors, tensors);
        let trees = trees.map(|trees| if self.layers.len() == tensors { trees } else { trees.repeated(tensors) });
        let report = AdasumReport { algorithm: Algorithm::Gram, weights: Some(weights), recomputed };
        Ok(Solution { report, of_tensors, trees })
    }

    /// Finds the coefficients of cancelled layers along the tree: of pairs of ranks from their products, above from the vectors.
    fn recompute<'v>(
        &self,
        vectors_of: &dyn Fn(usize) -> Vec<Slice<'v>>,
        products: &[f64],
        cancelled: Vec<bool>,
        weights: &mut [f64],
    ) -> Result<cpu::Trees> {
        let part = Part { cut: self.cut, layers: self.layers, tensors: self.tensors };
        let vectors = self.cut.vectors;
        for (weights, _) in weights.chunks_exact_mut(vectors).zip(&cancelled).filter(|(_, cancelled)| **cancelled) {
            weights.fill(1.0);
        }
        let mut trees = cpu::Trees::new(vectors, cancelled)?;
        let (first, pairs): (Vec<Pair>, Vec<Pair>) = adasum::pairs(vectors).partition(|pair| pair.joins_ranks());
        for pair in first {
            let of_layer = |gram: &[f64]| {
                let product = |i, j| gram[adasum::product_index(i, j, vectors)];
                let (left, right) = (pair.begin, pair.middle);
                [product(left, right), product(left, left), product(right, right)]
            };
            let sums: Vec<[f64; 3]> = products.chunks_exact(adasum::products(vectors)).map(of_layer).collect();
            trees.set_pair(pair, &sums, weights)?;
        }
        // The pairs of one level are independent: their sums travel together.
        for level in pairs.chunk_by(|one, other| one.middle - one.begin == other.middle - other.begin) {
            let mut sums = vec![[0.0; 3]; level.len() * self.layers.len()];
            for (&pair, sums) in level.iter().zip(sums.chunks_exact_mut(self.layers.len())) {
                for chunk in 0..self.cut.chunks() {
                    let of_chunk = cpu::tree_dots(&vectors_of(chunk), &part.layers_of(chunk), &trees, pair)?;
                    let pairs = sums.as_flattened_mut().iter_mut().zip(of_chunk.as_flattened());
                    pairs.for_each(|(sum, dot)| *sum += dot);
                }
            }
            self.all.all_reduce(sums.as_flattened_mut().into(), ReduceOp::Sum)?;
            for (&pair, sums) in level.iter().zip(sums.chunks_exact(self.layers.len())) {
                trees.set_pair(pair, sums, weights)?;
            }
        }
        Ok(trees)
    }
}

impl Part<'_> {
    fn layers_of(&self, chunk: usize) -> Vec<Range<usize>> {
        segments::clip(self.layers, self.cut.chunk(chunk))
    }

    fn tensors_of(&self, chunk: usize) -> Vec<Range<usize>> {
        segments::clip(self.tensors, self.cut.chunk(chunk))
    }

    /// Every rank's vector in a chunk.
    fn vectors<'a>(&self, chunk: &'a Arena) -> Vec<Slice<'a>> {
        let len = chunk.as_slice().len() / self.cut.vectors;
        (0..self.cut.vectors).map(|vector| chunk.as_slice().range(vector * len..(vector + 1) * len)).collect()
    }
}

impl Workspace {
    /// Room for the chunks of a cut.
    pub(super) fn take(scratch: &mut Scratch, cut: Cut) -> Result<Self> {
        let mut arenas = |factor: usize| -> Result<Vec<Arena>> {
            (0..cut.chunks()).map(|chunk| scratch.take(OPERATION, cut.dtype, cut.chunk(chunk).len() * factor)).collect()
        };
        Ok(Self { received: arenas(cut.vectors)?, results: arenas(1)? })
    }

    /// Gives it back.
    pub(super) fn give(self, scratch: &mut Scratch) {
        scratch.give(self.received.into_iter().chain(self.results));
    }

    /// Has room for the chunks of this cut.
    fn make(&mut self, cut: Cut) -> Result<()> {
        let lens = || (0..cut.chunks()).map(|chunk| cut.chunk(chunk).len());
        let fits = |arenas: &[Arena], factor: usize| {
            let found = arenas.iter().map(|arena| (arena.as_slice().len(), arena.dtype()));
            found.eq(lens().map(|len| (len * factor, cut.dtype)))
        };
        if !(fits(&self.received, cut.vectors) && fits(&self.results, 1)) {
            *self = Workspace::default();
            *self = Workspace::take(&mut Scratch::default(), cut)?;
        }
        Ok(())
    }
}

/// Gives every rank its piece, and puts everybody's piece for this rank into `room`, in rank order.
fn exchange_pieces(across: &dyn Communicator, pieces: &[Slice<'_>], room: SliceMut<'_>) -> Result<()> {
    let rank = across.rank();
    let bytes = pieces[rank].as_bytes().len();
    let sends: Vec<(usize, &[u8])> = others(rank, pieces.iter().map(|piece| piece.as_bytes())).collect();
    let mut receives = Vec::with_capacity(sends.len());
    for (peer, place) in room.as_bytes_mut().chunks_exact_mut(bytes.max(1)).enumerate() {
        if peer == rank {
            place.copy_from_slice(pieces[rank].as_bytes());
        } else {
            receives.push((peer, place));
        }
    }
    across.exchange(&sends, &mut receives)
}

/// Gives every rank this one's piece of the result, and puts everybody's into their places.
fn gather_pieces(across: &dyn Communicator, result: Slice<'_>, mut places: Vec<SliceMut<'_>>) -> Result<()> {
    let rank = across.rank();
    places[rank].reborrow().as_bytes_mut().copy_from_slice(result.as_bytes());
    let sends: Vec<(usize, &[u8])> =
        (0..places.len()).filter(|&peer| peer != rank).map(|peer| (peer, result.as_bytes())).collect();
    let mut receives: Vec<(usize, &mut [u8])> =
        others(rank, places.into_iter().map(|place| place.as_bytes_mut())).collect();
    across.exchange(&sends, &mut receives)
}

fn others<T>(rank: usize, of_ranks: impl Iterator<Item = T>) -> impl Iterator<Item = (usize, T)> {
    of_ranks.enumerate().filter(move |(peer, _)| *peer != rank)
}

/// Runs `transport` for each chunk on this thread, and `arithmetic` on what it gives on another.
fn receive<T: Send>(
    chunks: usize,
    mut transport: impl FnMut(usize) -> Result<T>,
    mut arithmetic: impl FnMut(usize, T) -> Result<()> + Send,
) -> Result<()> {
    if chunks <= 1 {
        return (0..chunks).try_for_each(|chunk| arithmetic(chunk, transport(chunk)?));
    }
    let (sender, receiver) = sync_channel(chunks);
    std::thread::scope(|scope| {
        let worker =
            scope.spawn(move || receiver.iter().enumerate().try_for_each(|(chunk, data)| arithmetic(chunk, data)));
        // A worker that is gone says why when it is joined.
        let moved = (0..chunks).try_for_each(|chunk| transport(chunk).map(|data| drop(sender.send(data))));
        drop(sender);
        let worked = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moved.and(worked)
    })
}

/// Runs `arithmetic` for each chunk on another thread, and `transport` on what it gives on this one.
fn send<T: Send>(
    chunks: usize,
    mut arithmetic: impl Iterator<Item = Result<T>> + Send,
    mut transport: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    if chunks <= 1 {
        return arithmetic.enumerate().try_for_each(|(chunk, data)| transport(chunk, data?));
    }
    let (sender, receiver) = sync_channel(chunks);
    std::thread::scope(|scope| {
        // Nobody listens any more once the transport has failed.
        let worker = scope.spawn(move || _ = arithmetic.try_for_each(|data| sender.send(data)));
        let moved = receiver.iter().enumerate().try_for_each(|(chunk, data)| transport(chunk, data?));
        drop(receiver);
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moved
    })
}

/// A vector in the host's memory, replaced where it lies.
pub(super) struct InPlace<'a> {
    pub(super) arena: SliceMut<'a>,
    pub(super) cut: Cut,
}

impl Vector for InPlace<'_> {
    fn fetch(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn pieces(&mut self, chunk: usize) -> Result<Vec<Slice<'_>>> {
        Ok(self.cut.pieces(chunk).map(|range| self.arena.as_slice().range(range)).collect())
    }

    fn places(&mut self, chunk: usize) -> Result<Vec<SliceMut<'_>>> {
        let (mut rest, mut at, mut places) = (self.arena.reborrow(), 0, Vec::with_capacity(self.cut.vectors));
        for range in self.cut.pieces(chunk) {
            let (place, others) = rest.split_at_mut(range.end - at);
            places.push(place.range_mut(range.start - at..range.end - at));
            (rest, at) = (others, range.end);
        }
        Ok(places)
    }

    fn store(&mut self, _: usize) -> Result<()> {
        Ok(())
    }
}

/// Replaces the arena, which holds `tensors`, by the Adasum of all ranks'.
pub(super) fn in_place(
    comm: &dyn Communicator,
    arena: SliceMut<'_>,
    tensors: &[Range<usize>],
    granularity: Granularity,
    scratch: &mut Scratch,
) -> Result<AdasumReport> {
    let (rank, len) = (comm.rank(), arena.len());
    let part_len = len / comm.world_size();
    let window = rank * part_len..(rank + 1) * part_len;
    let layers = segments::clip(&granularity.layers(len, tensors), window.clone());
    let tensors = segments::clip(tensors, window);
    let cut = Cut::new(arena.dtype(), comm.world_size(), part_len);
    let gram = Gram { across: comm, all: comm, cut, layers: &layers, tensors: &tensors };
    if let Some(ranks) = comm.address_space() {
        return gram.run_in(ranks, arena);
    }
    let mut workspace = Workspace::take(scratch, cut)?;
    let report = gram.run(&mut InPlace { arena, cut }, &mut workspace);
    workspace.give(scratch);
    report
}
