//! The Gram form of Adasum: the vectors are exchanged once, each rank multiplies its shard of all vectors with each other, one small
//! all-reduce adds the products, and every rank computes the same weights and its shard of the weighted sum.
//!
//! A shard is processed in steps; while the transport moves the data of one step, the CPU works on another. Where collectives are faster, two
//! of them move all shards instead ([`Gram::run_on_host`]). A [`Vector`] is the storage of this rank's vector, with its transfers to and from
//! the host.

use std::ops::Range;
use std::sync::mpsc::sync_channel;

use gradsync_device::math::adasum::{self, Criterion, Pair};

use super::{AdasumReport, Granularity, OPERATION};
use crate::buffer::{BufferParts, Scratch};
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu;
use crate::plan::chunks::{Chunk, LONGEST_CHUNK, SumTable};
use crate::plan::segments;
use crate::slice::{Slice, SliceMut};

/// The size in bytes of one rank's piece of a step, which is one message between two ranks. Pieces begin at boundaries of tensors' chunks.
const PIECE_BYTES: usize = 1 << 20;
const _: () = assert!(PIECE_BYTES / DType::F64.size_bytes() % LONGEST_CHUNK == 0);

/// The division of vectors: each into as many shards as there are vectors, and the work on a shard into steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct VectorDivision {
    vectors: usize,
    shard_len: usize,
    step_len: usize,
    dtype: DType,
}

impl VectorDivision {
    /// Divides `vectors` vectors, each into as many shards of `shard_len` elements.
    pub(super) fn new(dtype: DType, vectors: usize, shard_len: usize) -> Self {
        VectorDivision { vectors, shard_len, step_len: (PIECE_BYTES / dtype.size_bytes()).min(shard_len.max(1)), dtype }
    }

    /// The number of steps.
    pub(super) fn steps(self) -> usize {
        self.shard_len.div_ceil(self.step_len)
    }

    /// The elements of a shard that a step processes.
    pub(super) fn of_shard(self, step: usize) -> Range<usize> {
        step * self.step_len..self.shard_len.min((step + 1) * self.step_len)
    }

    /// The number of elements of this rank's shard in all other ranks' vectors.
    pub(super) fn received_len(self) -> usize {
        (self.vectors - 1) * self.shard_len
    }

    /// The pieces of a step in a whole vector: its elements of every shard, in order.
    #[cfg(feature = "cuda")]
    pub(super) fn pieces(self, step: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        self.pieces_of(self.vectors * self.shard_len, step)
    }

    /// The pieces of a step in `len` elements of whole shards.
    fn pieces_of(self, len: usize, step: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        let Range { start, end } = self.of_shard(step);
        (0..len / self.shard_len).map(move |shard| shard * self.shard_len + start..shard * self.shard_len + end)
    }

    /// The dtype of the vectors.
    #[cfg(feature = "cuda")]
    pub(super) fn dtype(self) -> DType {
        self.dtype
    }

    /// The length of the longest piece in elements.
    #[cfg(feature = "cuda")]
    pub(super) fn longest_piece(self) -> usize {
        self.step_len
    }
}

/// The shard of all vectors that a rank reduces.
pub(super) struct Shard {
    pub(super) division: VectorDivision,
    /// The table of products of all layers in the shards of all ranks.
    pub(super) table: SumTable,
    /// The begin of the shard in the arena of the table.
    pub(super) begin: usize,
    /// The criterion of the exact path for each layer.
    pub(super) criteria: Vec<Criterion>,
    /// The tensors of the shard: each is a layer, or all together are one.
    pub(super) tensors: Vec<Range<usize>>,
}

impl Shard {
    /// A shard of `vectors` vectors: the elements in `range` of an arena with these tensors. All ranks' shards have the same length.
    pub(super) fn new(
        dtype: DType,
        vectors: usize,
        tensors: &[Range<usize>],
        granularity: Granularity,
        range: Range<usize>,
    ) -> Self {
        let criterion = |len| Criterion::of(dtype == DType::F64, len);
        Self {
            division: VectorDivision::new(dtype, vectors, range.len()),
            table: granularity.table(tensors, range.len()),
            begin: range.start,
            // Gaps between tensors do not count.
            criteria: match granularity {
                Granularity::Tensor => tensors.iter().map(|tensor| criterion(tensor.len())).collect(),
                Granularity::Whole => vec![criterion(tensors.iter().map(Range::len).sum())],
            },
            tensors: segments::clip(tensors, range),
        }
    }

    /// The shard of this rank, where each rank has a vector.
    fn of_rank(comm: &dyn Communicator, parts: &BufferParts<'_>, granularity: Granularity) -> Self {
        let len = parts.arena.len() / comm.world_size();
        let range = comm.rank() * len..(comm.rank() + 1) * len;
        Self::new(parts.arena.dtype(), comm.world_size(), parts.tensors, granularity, range)
    }

    /// The chunks of tensors, by which products are summed, in some elements of the shard.
    pub(super) fn chunks_in(&self, elements: Range<usize>) -> Vec<Chunk> {
        self.table.within(self.begin + elements.start..self.begin + elements.end)
    }

    /// A table of products of all layers, filled with zeros.
    pub(super) fn no_products(&self) -> Vec<f64> {
        vec![0.0; self.table.row_count() * adasum::products(self.division.vectors)]
    }
}

/// The storage of this rank's vector: source of the shards that other ranks reduce, and destination of their results. Callers go through
/// the steps in order, twice: first they fetch and read all pieces, then they fill and store all. The caller reduces this rank's own shard in
/// place.
pub(super) trait Vector {
    /// Starts to fetch the pieces of a step; does not wait.
    fn fetch(&mut self, step: usize) -> Result<()>;

    /// The fetched pieces of the other ranks' shards, in order; waits for [`fetch`](Self::fetch), and writes the own shard's piece to `own`.
    fn pieces(&mut self, step: usize, own: SliceMut<'_>) -> Result<Vec<Slice<'_>>>;

    /// The destinations of the result's pieces of the other ranks' shards; `own` is its piece of the own shard.
    fn destinations(&mut self, step: usize, own: Slice<'_>) -> Result<Vec<SliceMut<'_>>>;

    /// Stores the pieces of the result from their destinations into the vector; need not wait.
    fn store(&mut self, step: usize) -> Result<()>;
}

/// The elements of a step in this rank's shard of all vectors.
struct Gathered<'a> {
    own: SliceMut<'a>,
    /// The other ranks' vectors, in order.
    others: SliceMut<'a>,
}

impl Gathered<'_> {
    /// The vectors of all ranks, including this one, in order.
    fn vectors(&self, rank: usize) -> Vec<Slice<'_>> {
        let mut vectors = pieces_of(self.others.as_slice(), self.own.len());
        vectors.insert(rank, self.own.as_slice());
        vectors
    }

    /// The vectors of all ranks; the result replaces this rank's vector.
    fn operands(&mut self, rank: usize) -> Vec<cpu::Operand<'_>> {
        let mut operands: Vec<_> =
            pieces_of(self.others.as_slice(), self.own.len()).into_iter().map(cpu::Operand::Read).collect();
        operands.insert(rank, cpu::Operand::Replaced(self.own.reborrow()));
        operands
    }
}

/// An arena divided into pieces of `len` elements.
fn pieces_of(arena: Slice<'_>, len: usize) -> Vec<Slice<'_>> {
    (0..arena.len() / len).map(|piece| arena.range(piece * len..(piece + 1) * len)).collect()
}

/// The extent of the result on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// The rank's own shard; the other shards are unspecified.
    Own,
    /// All shards.
    All,
}

/// One reduction.
pub(super) struct Gram<'a> {
    /// The ranks with the vectors, one rank per vector.
    pub(super) across: &'a dyn Communicator,
    /// The ranks over which products are added: all ranks that have a shard of the vectors.
    pub(super) all: &'a dyn Communicator,
    pub(super) shard: &'a Shard,
    /// The extent of the result on this rank.
    pub(super) extent: Extent,
}

/// The solution from the products of all ranks.
pub(super) struct Solution {
    pub(super) report: AdasumReport,
    /// `tensors × P` weights.
    pub(super) of_tensors: Vec<f64>,
    /// The trees of the tensors, if any tensor takes the exact path.
    pub(super) trees: Option<cpu::Trees>,
}

impl Gram<'_> {
    /// Replaces this rank's vector: its own shard `own`, and the other shards in `vector`. `received` is workspace of
    /// [`received_len`](VectorDivision::received_len) elements: one allocation for all steps, so that the memory can lie in large pages.
    pub(super) fn run(
        &self,
        own: SliceMut<'_>,
        vector: &mut dyn Vector,
        received: SliceMut<'_>,
    ) -> Result<AdasumReport> {
        let Gram { across, shard, extent, .. } = *self;
        let (rank, division) = (across.rank(), shard.division);
        let ranges = || (0..division.steps()).map(|step| division.of_shard(step));
        let others = division.vectors - 1;
        let received = received.ranges_mut(ranges().map(|range| range.start * others..range.end * others));
        let mut memory = own.ranges_mut(ranges()).into_iter().zip(received);

        let mut products = shard.no_products();
        if division.steps() > 0 {
            vector.fetch(0)?;
        }
        let exchange = |step: usize| {
            if step + 1 < division.steps() {
                vector.fetch(step + 1)?;
            }
            let (mut own, mut others) = memory.next().expect("one for each step");
            let pieces = vector.pieces(step, own.reborrow())?;
            exchange_pieces(across, &pieces, others.reborrow())?;
            Ok(Gathered { own, others })
        };
        let mut all_gathered = Vec::new();
        receive(division.steps(), exchange, |step, gathered| {
            cpu::add_gram(&mut products, &gathered.vectors(rank), &shard.chunks_in(division.of_shard(step)));
            all_gathered.push(gathered);
            Ok(())
        })?;
        let Solution { report, of_tensors, trees } = self.solve(products, &|step| all_gathered[step].vectors(rank))?;
        let combine = all_gathered.iter_mut().enumerate().map(|(step, gathered)| {
            let tensors = segments::clip(&shard.tensors, division.of_shard(step));
            cpu::combine_in_place(&mut gathered.operands(rank), &of_tensors, trees.as_ref(), &tensors)?;
            Ok(gathered.own.as_slice())
        });
        send(division.steps(), combine, |step, own| match extent {
            Extent::Own => Ok(()),
            Extent::All => {
                gather_pieces(across, own, vector.destinations(step, own)?)?;
                vector.store(step)
            }
        })?;
        Ok(report)
    }

    /// Replaces this rank's vector, which lies in host memory: by two collectives where these take fewer messages (shards of one step) or
    /// none (ranks that share memory), and otherwise step by step.
    pub(super) fn run_on_host(&self, vector: SliceMut<'_>, scratch: &mut Scratch) -> Result<AdasumReport> {
        let (across, division) = (self.across, self.shard.division);
        if division.steps() > 0 && (division.steps() == 1 || across.sharing().is_some()) {
            return self.run_by_collectives(vector);
        }
        let mut received = scratch.take(OPERATION, division.dtype, division.received_len())?;
        let (own, mut others) = InPlace::new(vector, division, across.rank());
        let report = self.run(own, &mut others, received.as_mut_slice());
        scratch.give([received]);
        report
    }

    /// Like [`run`](Self::run), by an all-to-all in place, which leaves this rank's shard of all vectors in the arena, and an all-gather of
    /// the results.
    fn run_by_collectives(&self, mut arena: SliceMut<'_>) -> Result<AdasumReport> {
        let Gram { across, shard, extent, .. } = *self;
        let (division, mut products) = (shard.division, shard.no_products());
        across.all_to_all_in_place(arena.reborrow())?;
        let vectors = || pieces_of(arena.as_slice(), division.shard_len);
        cpu::add_gram(&mut products, &vectors(), &shard.chunks_in(0..division.shard_len));
        let vectors_of =
            |step: usize| vectors().into_iter().map(|vector| vector.range(division.of_shard(step))).collect();
        let Solution { report, of_tensors, trees } = self.solve(products, &vectors_of)?;
        let (own, InPlace { before, after, .. }) = InPlace::new(arena.reborrow(), division, across.rank());
        let [before, after] = [&before, &after].map(|side| pieces_of(side.as_slice(), division.shard_len));
        let [before, after] = [before, after].map(|side| side.into_iter().map(cpu::Operand::Read));
        let mut operands: Vec<_> = before.chain([cpu::Operand::Replaced(own)]).chain(after).collect();
        cpu::combine_in_place(&mut operands, &of_tensors, trees.as_ref(), &shard.tensors)?;
        if extent == Extent::All {
            across.all_gather_in_place(arena)?;
        }
        Ok(report)
    }

    /// Computes the weights from this rank's products. `vectors_of` returns the elements of a step in every rank's shard.
    pub(super) fn solve<'v>(
        &self,
        mut products: Vec<f64>,
        vectors_of: &dyn Fn(usize) -> Vec<Slice<'v>>,
    ) -> Result<Solution> {
        let Shard { division: VectorDivision { vectors, .. }, table, criteria, tensors, .. } = self.shard;
        let (vectors, tensors) = (*vectors, tensors.len());
        self.all.all_reduce(&mut products, ReduceOp::Sum)?;
        let products = table.fold(&products, adasum::products(vectors));
        let criterion = |layer: usize| criteria[layer];
        let cpu::Coefficients { mut weights, cancelled } = cpu::coefficients_by(&products, vectors, criterion)?;
        let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();
        let trees = if recomputed == 0 {
            None
        } else {
            tracing::debug!(recomputed, "computing these layers from the vectors");
            Some(self.recompute(vectors_of, &products, cancelled, &mut weights)?)
        };
        // Weights belong to layers, results to tensors: the gaps between tensors stay unchanged.
        let of_tensors = for_tensors(&weights, vectors, tensors);
        let trees = trees.map(|trees| if table.layers() == tensors { trees } else { trees.repeated(tensors) });
        let report = AdasumReport::of_gram(weights, table.layers(), recomputed);
        Ok(Solution { report, of_tensors, trees })
    }

    /// Computes the coefficients of cancelled layers along the tree: from the vectors, except for pairs of ranks, whose products suffice
    /// unless they have too few digits.
    fn recompute<'v>(
        &self,
        vectors_of: &dyn Fn(usize) -> Vec<Slice<'v>>,
        products: &[f64],
        cancelled: Vec<bool>,
        weights: &mut [f64],
    ) -> Result<cpu::Trees> {
        let shard = self.shard;
        let Shard { division, table, .. } = shard;
        let vectors = division.vectors;
        for (weights, _) in weights.chunks_exact_mut(vectors).zip(&cancelled).filter(|(_, cancelled)| **cancelled) {
            weights.fill(1.0);
        }
        let is_precise = division.dtype == DType::F64;
        let mut trees = match is_precise {
            true => cpu::Trees::precise(vectors, cancelled, products)?,
            false => cpu::Trees::new(vectors, cancelled)?,
        };
        let of_products = |pair: &Pair| pair.joins_ranks() && !is_precise;
        let (first, pairs): (Vec<Pair>, Vec<Pair>) = adasum::pairs(vectors).partition(of_products);
        for pair in first {
            let of_layer = |gram: &[f64]| {
                let product = |i, j| gram[adasum::product_index(i, j, vectors)];
                let (left, right) = (pair.begin, pair.middle);
                [product(left, right), product(left, left), product(right, right)]
            };
            let sums: Vec<f64> = products.chunks_exact(adasum::products(vectors)).flat_map(of_layer).collect();
            trees.set_pair(pair, &sums, weights)?;
        }
        // The pairs of one level are independent: their sums are exchanged together.
        let width = table.row_count() * trees.sums();
        for level in pairs.chunk_by(|one, other| one.middle - one.begin == other.middle - other.begin) {
            let mut sums = vec![0.0; level.len() * width];
            for (&pair, sums) in level.iter().zip(sums.chunks_exact_mut(width)) {
                for step in 0..division.steps() {
                    let chunks = shard.chunks_in(division.of_shard(step));
                    cpu::add_tree_dots(sums, &vectors_of(step), &chunks, &trees, pair);
                }
            }
            self.all.all_reduce(&mut sums, ReduceOp::Sum)?;
            for (&pair, sums) in level.iter().zip(sums.chunks_exact(width)) {
                trees.set_pair(pair, &table.fold(sums, trees.sums()), weights)?;
            }
        }
        Ok(trees)
    }
}

/// Expands the weights of layers, `width` numbers each, to weights of tensors: a layer is one tensor, or all of them.
pub(super) fn for_tensors(of_layers: &[f64], width: usize, tensors: usize) -> Vec<f64> {
    if of_layers.len() == width * tensors { of_layers.to_vec() } else { of_layers.repeat(tensors) }
}

/// Sends every other rank its piece, and receives their pieces for this rank into `received`; both in rank order.
fn exchange_pieces(across: &dyn Communicator, pieces: &[Slice<'_>], received: SliceMut<'_>) -> Result<()> {
    let len = pieces.first().map_or(0, Slice::len);
    let destinations = received.ranges_mut((0..pieces.len()).map(|index| index * len..(index + 1) * len));
    let sends: Vec<_> = others(across).zip(pieces.iter().copied()).collect();
    let mut receives: Vec<_> = others(across).zip(destinations).collect();
    across.exchange(&sends, &mut receives)
}

/// Sends this rank's piece of the result to every other rank, and receives the other pieces into `destinations`, in rank order.
fn gather_pieces(across: &dyn Communicator, own: Slice<'_>, destinations: Vec<SliceMut<'_>>) -> Result<()> {
    let sends: Vec<_> = others(across).map(|peer| (peer, own)).collect();
    let mut receives: Vec<_> = others(across).zip(destinations).collect();
    across.exchange(&sends, &mut receives)
}

fn others(across: &dyn Communicator) -> impl Iterator<Item = usize> + use<> {
    let rank = across.rank();
    (0..across.world_size()).filter(move |&peer| peer != rank)
}

/// Runs `transport` for each step on this thread, and concurrently `arithmetic` on its results on another.
fn receive<T: Send>(
    steps: usize,
    mut transport: impl FnMut(usize) -> Result<T>,
    mut arithmetic: impl FnMut(usize, T) -> Result<()> + Send,
) -> Result<()> {
    if steps <= 1 {
        return (0..steps).try_for_each(|step| arithmetic(step, transport(step)?));
    }
    let (sender, receiver) = sync_channel(steps);
    std::thread::scope(|scope| {
        let worker =
            scope.spawn(move || receiver.iter().enumerate().try_for_each(|(step, data)| arithmetic(step, data)));
        // A worker that has ended reports its error when it is joined.
        let moved = (0..steps).try_for_each(|step| transport(step).map(|data| drop(sender.send(data))));
        drop(sender);
        let worked = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moved.and(worked)
    })
}

/// Runs `arithmetic` for each step on another thread, and concurrently `transport` on its results on this one.
fn send<T: Send>(
    steps: usize,
    mut arithmetic: impl Iterator<Item = Result<T>> + Send,
    mut transport: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    if steps <= 1 {
        return arithmetic.enumerate().try_for_each(|(step, data)| transport(step, data?));
    }
    let (sender, receiver) = sync_channel(steps);
    std::thread::scope(|scope| {
        // Sending fails once the transport has failed.
        let worker = scope.spawn(move || _ = arithmetic.try_for_each(|data| sender.send(data)));
        let moved = receiver.iter().enumerate().try_for_each(|(step, data)| transport(step, data?));
        drop(receiver);
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moved
    })
}

/// A vector in host memory that is replaced in place: the shards of the ranks before this one, and of the ranks after it.
struct InPlace<'a> {
    before: SliceMut<'a>,
    after: SliceMut<'a>,
    division: VectorDivision,
}

impl<'a> InPlace<'a> {
    /// Splits an arena into this rank's own shard and the other shards.
    fn new(arena: SliceMut<'a>, division: VectorDivision, rank: usize) -> (SliceMut<'a>, Self) {
        let (before, rest) = arena.split_at_mut(rank * division.shard_len);
        let (own, after) = rest.split_at_mut(division.shard_len);
        (own, InPlace { before, after, division })
    }
}

impl Vector for InPlace<'_> {
    fn fetch(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn pieces(&mut self, step: usize, _: SliceMut<'_>) -> Result<Vec<Slice<'_>>> {
        let sides = [self.before.as_slice(), self.after.as_slice()];
        let pieces = |side: Slice<'_>| self.division.pieces_of(side.len(), step);
        Ok(sides.into_iter().flat_map(|side| pieces(side).map(move |range| side.range(range))).collect())
    }

    fn destinations(&mut self, step: usize, _: Slice<'_>) -> Result<Vec<SliceMut<'_>>> {
        let mut destinations = Vec::with_capacity(self.division.vectors);
        for side in [&mut self.before, &mut self.after] {
            let pieces = self.division.pieces_of(side.len(), step);
            destinations.extend(side.reborrow().ranges_mut(pieces));
        }
        Ok(destinations)
    }

    fn store(&mut self, _: usize) -> Result<()> {
        Ok(())
    }
}

/// Replaces the arena, which has the tensors `tensors`, by the Adasum of all ranks' arenas, or only this rank's shard of it.
pub(super) fn in_place(
    comm: &dyn Communicator,
    mut parts: BufferParts<'_>,
    granularity: Granularity,
    extent: Extent,
) -> Result<AdasumReport> {
    if let Some(report) = shared_memory(comm, &mut parts, granularity)? {
        return Ok(report);
    }
    let shard = &Shard::of_rank(comm, &parts, granularity);
    Gram { across: comm, all: comm, shard, extent }.run_on_host(parts.arena, parts.scratch)
}

/// Replaces the whole arena where ranks share memory; `None`, on every rank, where they do not.
pub(super) fn shared_memory(
    comm: &dyn Communicator,
    parts: &mut BufferParts<'_>,
    granularity: Granularity,
) -> Result<Option<AdasumReport>> {
    let Some(ranks) = comm.sharing() else { return Ok(None) };
    let shard = &Shard::of_rank(comm, parts, granularity);
    let own = shard.begin..shard.begin + shard.division.shard_len;
    let is_whole = |tensor: &Range<usize>| own.start <= tensor.start && tensor.end <= own.end;
    let are_whole: Vec<bool> = match granularity {
        Granularity::Tensor => parts.tensors.iter().map(is_whole).collect(),
        Granularity::Whole => vec![false],
    };
    let gram = Gram { across: comm, all: comm, shard, extent: Extent::All };
    gram.run_in_shared_memory(ranks, parts.arena.reborrow(), &are_whole)
}
