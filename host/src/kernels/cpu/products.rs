//! Inner products per segment in `f64`: [`squared_norms`], [`dots`], [`gram`], and Adasum's weights, which are computed from them.
//!
//! Vectors are multiplied block by block while the blocks are in the cache, so that memory is read once for any number of vectors. Blocks
//! are widened in the cache, unless the kernel widens in registers. Products of f32, f16 and bf16 values are exact in `f64`; sums run in
//! eight interleaved lanes per [chunk](crate::plan::chunks), then over the lanes, then over the chunks in order.

use std::ops::Range;

use gradsync_device::math::adasum::{self, Criterion, product_index, products};
use gradsync_device::math::{Element as Formula, elementwise};

use super::elementwise::cast_piece;
use super::isa::{return_on_lanes, vectorized};
use super::{BLOCK_LEN, for_each};
use crate::dtype::{DType, Float, storage};
use crate::error::{Error, Result, same_len};
use crate::plan::chunks::{Chunk, chunks_of_all};
use crate::plan::segments;
use crate::slice::{Slice, check_floats, with_typed};

/// The number of interleaved sums, which fill one vector register or two.
pub(super) const LANES: usize = 8;

/// Computes `sums[i] += weight × src[i]` for the length of the shorter slice.
pub(super) fn add_weighted<T: Formula>(sums: &mut [f64], src: &[T], weight: f64) {
    return_on_lanes!(add_weighted(sums, src, weight));
    for (to, &from) in sums.iter_mut().zip(src) {
        *to = elementwise::add_weighted(*to, weight, from.to_f64());
    }
}

/// The interleaved sums of one product, aligned to the widest registers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub(super) struct Sums(pub(super) [f64; LANES]);

/// A widened block, aligned to the widest registers.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
struct WideBlock([f64; BLOCK_LEN]);

impl AsRef<[f64]> for WideBlock {
    fn as_ref(&self) -> &[f64] {
        &self.0
    }
}

/// Adds the products of a block of all vectors with each other.
fn add_products(sums: &mut [Sums], wide: &[WideBlock], fused: bool) {
    return_on_lanes!(add_products(sums, wide, &(0..BLOCK_LEN), fused, true));
    let pairs = wide.iter().enumerate().flat_map(|(i, x)| wide[i..].iter().map(move |y| (x, y)));
    sums.iter_mut().zip(pairs).for_each(|(sums, (x, y))| add_dot(&mut sums.0, &x.0, &y.0));
}

vectorized! {
    pub(super) fn add_dot<>(lanes: &mut [f64; LANES], x: &[f64; BLOCK_LEN], y: &[f64; BLOCK_LEN]) {
        let mut sums = *lanes;
        for (x, y) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
            for lane in 0..LANES {
                sums[lane] = elementwise::add_product(sums[lane], x[lane], y[lane]);
            }
        }
        *lanes = sums;
    }
}

/// Adds the lanes in a tree.
pub(super) fn lane_sum(lanes: [f64; LANES]) -> f64 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

/// Widens a range of a vector, at most a block; the rest of the block becomes zero.
pub(super) fn widen(block: &mut [f64; BLOCK_LEN], vector: Slice<'_>, range: Range<usize>) {
    block[range.len()..].fill(0.0);
    with_typed!(vector.range(range), data => cast_piece(block, storage(data), false));
}

/// The number of elements, over all vectors, after which a thread takes no further chunk with the same workspace: two groups for each thread,
/// or more of a length that is long enough.
fn group_len(elements: usize) -> usize {
    const LEAST: usize = 1 << 14;
    const MOST: usize = 1 << 17;
    (elements / (2 * rayon::current_num_threads())).clamp(LEAST, MOST)
}

/// Adds the `width` numbers that `of_chunk` writes for each chunk of `vectors` vectors to the chunk's row of the totals; chunk by chunk,
/// in order. The numbers are zeros before; `of_chunk` also gets a workspace, which other chunks have used.
pub(super) fn sum_chunks<W>(
    vectors: usize,
    chunks: &[Chunk],
    (totals, width): (&mut [f64], usize),
    workspace: impl Fn() -> W + Sync + Send,
    of_chunk: impl Fn(&Chunk, &mut W, &mut [f64]) + Sync + Send,
) {
    let mut sums = vec![0.0; chunks.len() * width];
    let elements = vectors * chunks.iter().map(|chunk| chunk.range.len()).sum::<usize>();
    let (group_len, mut groups) = (group_len(elements), Vec::new());
    let (mut rest, mut rest_of_sums) = (chunks, &mut sums[..]);
    while !rest.is_empty() {
        let mut len = 0;
        let is_of_group = |chunk: &&Chunk| {
            let has_room = vectors * len < group_len;
            len += if has_room { chunk.range.len() } else { 0 };
            has_room
        };
        let count = rest.iter().take_while(is_of_group).count();
        let (group, others) = rest.split_at(count);
        let (sums, sums_of_others) = std::mem::take(&mut rest_of_sums).split_at_mut(count * width);
        groups.push((group, sums));
        (rest, rest_of_sums) = (others, sums_of_others);
    }
    for_each(groups, elements, |(chunks, sums)| {
        let mut workspace = workspace();
        for (chunk, sums) in chunks.iter().zip(sums.chunks_exact_mut(width)) {
            of_chunk(chunk, &mut workspace, sums);
        }
    });
    for (chunk, sums) in chunks.iter().zip(sums.chunks_exact(width)) {
        totals[chunk.row * width..][..width].iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
}

/// The blocks of a chunk, as ranges.
pub(super) fn blocks(chunk: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    segments::pieces(chunk, BLOCK_LEN)
}

/// Computes `Σ src[i]²` of each segment, in `f64`. The square root of a sum is ONNX Runtime's ReduceAllL2.
///
/// # Errors
/// [`Error::InvalidArgument`] for segments that overlap, descend or exceed the slice.
pub fn squared_norms(src: Slice<'_>, segments: &[Range<usize>]) -> Result<Vec<f64>> {
    all_products("squared_norms", &[src], segments)
}

/// Computes `[a·b, |a|², |b|²]` of each segment, in `f64`.
///
/// # Errors
/// [`Error::LengthMismatch`] for vectors of different lengths, [`Error::InvalidArgument`] for segments that overlap,
/// descend or exceed them.
pub fn dots(a: Slice<'_>, b: Slice<'_>, segments: &[Range<usize>]) -> Result<Vec<[f64; 3]>> {
    same_len("dots", ("a", a.len()), ("b", b.len()))?;
    let gram = all_products("dots", &[a, b], segments)?;
    Ok(gram.chunks_exact(3).map(|products| [products[1], products[0], products[2]]).collect())
}

/// Computes all inner products of the vectors with each other in each segment: `segments × P(P+1)/2` numbers, the upper triangle row by
/// row, `(0,0) (0,1) … (0,P-1) (1,1) …`. The vectors may differ in dtype.
///
/// # Errors
/// [`Error::LengthMismatch`] for vectors of different lengths, [`Error::InvalidArgument`] for no vectors or for
/// segments that overlap, descend or exceed them.
pub fn gram(vectors: &[Slice<'_>], segments: &[Range<usize>]) -> Result<Vec<f64>> {
    all_products("gram", vectors, segments)
}

fn all_products(operation: &'static str, vectors: &[Slice<'_>], segments: &[Range<usize>]) -> Result<Vec<f64>> {
    check_vectors(operation, vectors, segments)?;
    let mut totals = vec![0.0; segments.len() * products(vectors.len())];
    add_gram(&mut totals, vectors, &chunks_of_all(segments));
    Ok(totals)
}

/// Adds the products of all vectors with each other over each chunk, as in [`gram`], to the chunk's row of the totals. There must be at
/// least one vector; all must have one length, and include the chunks.
pub(crate) fn add_gram(totals: &mut [f64], vectors: &[Slice<'_>], chunks: &[Chunk]) {
    // Products of f32 and narrower are exact in f64; only then a fused addition gives the same sum.
    let fused = vectors.iter().all(|vector| vector.dtype() != DType::F64);
    with_typed!(vectors[0], first => {
        let alike: Option<Vec<_>> = of_one_type(first, vectors).map(|alike| alike.into_iter().map(storage).collect());
        let totals = (totals, products(vectors.len()));
        sum_chunks(vectors.len(), chunks, totals, Workspace::default, |chunk, workspace, sums| {
            workspace.multiply(sums, (alike.as_deref(), vectors), chunk.range.clone(), fused);
        });
    });
}

/// The memory that a thread needs to multiply chunks.
#[derive(Default)]
struct Workspace {
    sums: Vec<Sums>,
    wide: Vec<WideBlock>,
}

impl Workspace {
    /// Computes the products of all vectors with each other in a chunk. `alike` are the vectors as typed slices, if they have one dtype;
    /// `fused` is set for exact products.
    fn multiply<S: Formula>(
        &mut self,
        products: &mut [f64],
        (alike, vectors): (Option<&[&[S]]>, &[Slice<'_>]),
        chunk: Range<usize>,
        fused: bool,
    ) {
        self.sums.clear();
        self.sums.resize(products.len(), Sums([0.0; LANES]));
        self.add(alike, vectors, chunk, fused);
        products.iter_mut().zip(&self.sums).for_each(|(product, sums)| *product = lane_sum(sums.0));
    }

    fn add<S: Formula>(&mut self, alike: Option<&[&[S]]>, vectors: &[Slice<'_>], chunk: Range<usize>, fused: bool) {
        let Self { sums, wide } = self;
        if let Some(alike) = alike {
            return_on_lanes!(add_products_of_chunk(sums, alike, &chunk));
        }
        wide.resize(vectors.len(), WideBlock([0.0; BLOCK_LEN]));
        for block in blocks(chunk) {
            for (wide, vector) in wide.iter_mut().zip(vectors) {
                widen(&mut wide.0, *vector, block.clone());
            }
            add_products(sums, wide, fused);
        }
    }
}

/// The vectors as slices of the type of `_first`, if all have that type.
pub(super) fn of_one_type<'a, T: Float>(_first: &[T], vectors: &[Slice<'a>]) -> Option<Vec<&'a [T]>> {
    vectors.iter().map(|vector| vector.typed()).collect()
}

/// Adasum's weights of every rank's vector in each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Coefficients {
    /// The weights, `layers × P`: the result of a layer is the sum of its ranks' vectors with these weights.
    pub weights: Vec<f64>,
    /// For each layer, whether it takes the exact path ([`Criterion`]). The weights of such a layer are those after the first level of the
    /// tree, and are not the final ones.
    pub cancelled: Vec<bool>,
}

/// Computes Adasum's weights from the Gram matrices of layers of `f32` or narrower dtypes.
///
/// # Errors
/// [`Error::InvalidArgument`] for a world size of 0 or above 65536, or a length that is no multiple of `P(P+1)/2`.
pub fn coefficients(gram: &[f64], world_size: usize) -> Result<Coefficients> {
    coefficients_by(gram, world_size, |_| Criterion::Narrow)
}

/// Computes Adasum's weights from the Gram matrices of the layers, with a criterion of its own for the exact path of each layer.
///
/// # Errors
/// The errors of [`coefficients`].
pub fn coefficients_by(
    gram: &[f64],
    world_size: usize,
    criterion: impl Fn(usize) -> Criterion,
) -> Result<Coefficients> {
    check_world("coefficients", world_size)?;
    let count = products(world_size);
    if gram.len() % count != 0 {
        let reason = format!("{} products are no Gram matrices of {world_size} ranks, {count} each", gram.len());
        return Err(Error::InvalidArgument { operation: "coefficients", reason });
    }
    let layers = gram.len() / count;
    let mut weights = vec![0.0; layers * world_size];
    // The coefficients of the pairs of single ranks, in order.
    let mut first_level = Vec::with_capacity(world_size / 2);
    let cancelled = weights
        .chunks_exact_mut(world_size)
        .zip(gram.chunks_exact(count))
        .enumerate()
        .map(|(layer, (weights, gram))| {
            let product = |i, j| gram[product_index(i, j, world_size)];
            first_level.clear();
            let keep = |_, both| first_level.push(both);
            let cancelled = adasum::weights(weights, world_size, criterion(layer), product, keep);
            if cancelled {
                adasum::start_tree(weights, world_size, |pair| first_level[pair.begin / 2]);
            }
            cancelled
        })
        .collect();
    Ok(Coefficients { weights, cancelled })
}

/// Refuses worlds that have no pairs, or too many to count.
pub(super) fn check_world(operation: &'static str, world_size: usize) -> Result<()> {
    const MOST: usize = 1 << 16;
    if (1..=MOST).contains(&world_size) {
        return Ok(());
    }
    let reason = format!("the world size is {world_size}, and must be from 1 to {MOST}");
    Err(Error::InvalidArgument { operation, reason })
}

pub(super) fn check_vectors(operation: &'static str, vectors: &[Slice<'_>], segments: &[Range<usize>]) -> Result<()> {
    let Some(first) = vectors.first() else {
        return Err(Error::InvalidArgument { operation, reason: "there are no vectors".into() });
    };
    for (rank, vector) in vectors.iter().enumerate() {
        same_len(operation, ("vector 0", first.len()), (&format!("vector {rank}"), vector.len()))?;
        check_floats(operation, *vector)?;
    }
    segments::check(operation, segments, first.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::isa;
    use crate::plan::chunks::chunks;

    /// Tiles equal single products, for every shape of a tile, fused or not, on any machine.
    #[test]
    fn add_products_equals_single_products() {
        let wide = |digits: u32| -> Vec<WideBlock> {
            let value = |index: usize| (index as f64).sin() * 1e3;
            let kept = |value: f64| f64::from_bits(value.to_bits() & !0 << (53 - digits));
            (0..9).map(|vector| WideBlock(std::array::from_fn(|index| kept(value(index + 1000 * vector))))).collect()
        };
        isa::on_each(|| {
            for (digits, fused) in [(24, true), (24, false), (53, false)] {
                let wide = wide(digits);
                for count in 1..=wide.len() {
                    let mut sums = vec![Sums([0.5; LANES]); products(count)];
                    let mut expected = sums.clone();
                    for i in 0..count {
                        for j in i..count {
                            add_dot(&mut expected[product_index(i, j, count)].0, &wide[i].0, &wide[j].0);
                        }
                    }
                    add_products(&mut sums, &wide[..count], fused);
                    assert_eq!(sums, expected, "{count} vectors of {digits} digits");
                }
            }
        });
    }

    /// Sums of any number of vectors, of one dtype and of several, equal the formula applied term by term.
    #[test]
    fn lane_sum_follows_the_formula() {
        const SEGMENTS: [Range<usize>; 4] = [3..35, 35..36, 40..1333, 1400..2200];
        const MOST: usize = 9;

        fn widened<T: Formula>(data: &[T]) -> Vec<f64> {
            data.iter().map(|value| value.to_f64()).collect()
        }

        fn check(vectors: &[Slice<'_>]) {
            let wide: Vec<Vec<f64>> =
                vectors.iter().map(|&vector| with_typed!(vector, data => widened(storage(data)))).collect();
            for count in 1..=vectors.len() {
                let mut expected = Vec::new();
                for segment in SEGMENTS {
                    for (i, x) in wide[..count].iter().enumerate() {
                        expected.extend(wide[i..count].iter().map(|y| {
                            let mut total = 0.0;
                            for chunk in chunks(segment.clone()) {
                                let mut lanes = [0.0; LANES];
                                for (position, index) in chunk.enumerate() {
                                    let sum = &mut lanes[position % LANES];
                                    *sum = elementwise::add_product(*sum, x[index], y[index]);
                                }
                                total += lane_sum(lanes);
                            }
                            total
                        }));
                    }
                }
                let found = gram(&vectors[..count], &SEGMENTS).unwrap();
                let bits = |sums: &[f64]| sums.iter().map(|sum| sum.to_bits()).collect::<Vec<u64>>();
                assert_eq!(bits(&found), bits(&expected), "{count} vectors, the first of {}", vectors[0].dtype());
            }
        }

        fn vectors<T: Float>() -> Vec<Vec<T>> {
            let value = |rank: usize, index: usize| T::from_f64(((index * 7 + rank * 1000) as f64).sin() * 100.0);
            (0..MOST).map(|rank| (0..2200).map(|index| value(rank, index)).collect()).collect()
        }

        fn slices<T: Float>(vectors: &[Vec<T>]) -> Vec<Slice<'_>> {
            vectors.iter().map(Slice::from).collect()
        }

        let (f64s, f32s) = (vectors::<f64>(), vectors::<f32>());
        let (f16s, bf16s) = (vectors::<half::f16>(), vectors::<half::bf16>());
        isa::on_each(|| {
            check(&slices(&f64s));
            check(&slices(&f32s));
            check(&slices(&f16s));
            check(&slices(&bf16s));
            check(&[slices(&bf16s), slices(&f16s), slices(&f32s)].concat()[5..14]);
        });
    }
}
