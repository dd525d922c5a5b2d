//! A result, weights included, depends on the tensors and the number of vectors alone, to the bit. It does not depend on other tensors in
//! the buffer, their order, the number of shards, or on whether ranks reach each other's memory.

use gradsync::GradientBuffer;
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Communicator, Ranks, ReduceOp};
use gradsync::ops::{
    AdasumOptions, AdasumReport, Algorithm, Granularity, adasum_all_reduce, hierarchical_adasum_all_reduce,
};
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::agreed;
use gradsync_tests::suite::adasum::on_nodes::Groups;

use super::shared_memory::WithoutWindows;

/// Lengths of one chunk and of many chunks, for all three chunk lengths; some are multiples of the chunk length and some are not.
const LENS: [usize; 11] = [700, 300_001, 64, 20_000, 1, 16_384, 262_145, 513, 0, 50_000, 9];
const VECTORS: usize = 4;

/// The tensors of every vector.
struct Tensors {
    format: Format,
    /// `vectors × tensors × elements`.
    of_vectors: Vec<Vec<Vec<f64>>>,
}

/// For each tensor, the bits of its result and the bits of its weights, if there are any.
type Outcome = Vec<(Vec<u64>, Option<Vec<u64>>)>;

impl Tensors {
    fn new(format: Format) -> Self {
        let of_tensor = |(index, &len)| generate(Kind::Random, format, VECTORS, len, 70 + index as u64);
        let of_tensors: Vec<Vec<Vec<f64>>> = LENS.iter().enumerate().map(of_tensor).collect();
        let of_vector = |vector: usize| of_tensors.iter().map(|tensor| tensor[vector].clone()).collect();
        Self { format, of_vectors: (0..VECTORS).map(of_vector).collect() }
    }

    /// Reduces these tensors, in this order, in one buffer with one shard per rank. Each vector belongs to `ranks / VECTORS` consecutive
    /// ranks; the first of them has the vector's values, and the others have zeros.
    fn reduce(
        &self,
        order: &[usize],
        ranks: usize,
        reduce: &(dyn Fn(&LocalCommunicator, &mut GradientBuffer) -> AdasumReport + Sync),
    ) -> Outcome {
        agreed(&format!("{order:?} on {ranks} ranks"), ranks, |comm| {
            let tensors = order.iter().map(|&index| (format!("tensor{index}"), [LENS[index]]));
            let mut buffer = GradientBuffer::new(dtype(self.format), ranks, tensors).unwrap();
            let (vector, place) = (comm.rank() * VECTORS / ranks, comm.rank() % (ranks / VECTORS));
            for (segment, &index) in buffer.segments().to_vec().into_iter().zip(order).filter(|_| place == 0) {
                write(buffer.as_mut_slice(), segment.start, &self.of_vectors[vector][index]);
            }
            let weights = reduce(&comm, &mut buffer).weights;
            let each = weights.as_ref().map(|weights| weights.len() / VECTORS);
            let of_tensor = |index: usize| {
                let layer = if each == Some(1) { 0 } else { index };
                let weights = weights.as_ref().map(|weights| weights[layer * VECTORS..][..VECTORS].to_vec());
                let data = patterns_of(buffer.as_slice().range(buffer.segments()[index].clone()));
                (data, weights.map(|weights| weights.into_iter().map(f64::to_bits).collect()))
            };
            (0..order.len()).map(of_tensor).collect()
        })
    }
}

/// Reduces over one rank per vector, by messages if `without_windows`, else over shared memory.
fn flat(
    options: AdasumOptions,
    without_windows: bool,
) -> impl Fn(&LocalCommunicator, &mut GradientBuffer) -> AdasumReport + Sync {
    move |comm, buffer| {
        let hidden = WithoutWindows(comm);
        let comm: &dyn Communicator = if without_windows { &hidden } else { comm };
        adasum_all_reduce(comm, buffer, options).unwrap()
    }
}

/// Reduces over nodes of several ranks, one node per vector.
fn on_nodes(options: AdasumOptions) -> impl Fn(&LocalCommunicator, &mut GradientBuffer) -> AdasumReport + Sync {
    move |all, buffer| {
        let groups = Groups::of(all, all.world_size() / VECTORS);
        hierarchical_adasum_all_reduce(groups.nodes(), buffer, ReduceOp::Sum, options).unwrap()
    }
}

fn check(format: Format, algorithm: Algorithm) {
    let tensors = Tensors::new(format);
    let order: Vec<usize> = (0..LENS.len()).collect();
    let options = AdasumOptions::default().with_algorithm(algorithm).with_granularity(Granularity::Tensor);
    let expected = tensors.reduce(&order, VECTORS, &flat(options, true));
    let same = |what: &str, order: &[usize], found: Outcome| {
        for (&index, found) in order.iter().zip(found) {
            assert!(
                found == expected[index],
                "{what}, {algorithm:?}, {format:?}: the tensor of {} elements",
                LENS[index]
            );
        }
    };
    same("in shared memory", &order, tensors.reduce(&order, VECTORS, &flat(options, false)));
    for without_windows in [false, true] {
        let reversed: Vec<usize> = order.iter().rev().copied().collect();
        same("in another order", &reversed, tensors.reduce(&reversed, VECTORS, &flat(options, without_windows)));
        for one in &order {
            same("in a buffer of its own", &[*one], tensors.reduce(&[*one], VECTORS, &flat(options, without_windows)));
        }
        for part in order.chunks(3) {
            same("in four buffers", part, tensors.reduce(part, VECTORS, &flat(options, without_windows)));
        }
    }
    for per_node in 2..=4 {
        let found = tensors.reduce(&order, VECTORS * per_node, &on_nodes(options));
        same(&format!("in {} shards", VECTORS * per_node), &order, found);
    }
    let whole = options.with_granularity(Granularity::Whole);
    let expected = tensors.reduce(&order, VECTORS, &flat(whole, true));
    assert!(tensors.reduce(&order, VECTORS, &flat(whole, false)) == expected, "a whole buffer in shared memory");
    for per_node in 2..=4 {
        let found = tensors.reduce(&order, VECTORS * per_node, &on_nodes(whole));
        assert!(found == expected, "a whole buffer in {} shards, {algorithm:?}, {format:?}", VECTORS * per_node);
    }
}

#[test]
fn f64_by_the_gram_matrix() {
    check(Format::F64, Algorithm::Gram);
}

#[test]
fn f32_by_the_gram_matrix() {
    check(Format::F32, Algorithm::Gram);
}

#[test]
fn f64_by_the_tree() {
    check(Format::F64, Algorithm::Tree);
}

#[test]
fn bf16_by_the_tree() {
    check(Format::BF16, Algorithm::Tree);
}
