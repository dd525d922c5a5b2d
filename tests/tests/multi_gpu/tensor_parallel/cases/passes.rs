//! Every direction of every operation against exact arithmetic, and TransformerEngine's own cases.

use super::RankContext;
use gradsync::memory::Cuda;
use gradsync::ops::tensor_parallel::{AllGather, AllReduce, Pipeline, ReduceScatter, TensorOp};
use gradsync_tests::array::values_of;
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::assert_within;
use gradsync_tests::tolerance::transport::{Factor, ScaledSum};

use super::{GATHERS, IDENTITIES, SCATTERS, SUMS, Seen, bits, integers};

const TAILS: [&[usize]; 4] = [&[], &[1], &[7], &[3, 5]];

pub(super) fn exact(ranks: &RankContext<'_>) {
    for format in Format::ALL {
        for tail in TAILS {
            for rows in [1, 3] {
                check(ranks, format, &[&[rows * ranks.world_size()], tail].concat());
            }
        }
        // The tensor takes many blocks of a kernel, and its length has no small divisor.
        check(ranks, format, &[ranks.world_size(), 5003]);
    }
}

pub(super) fn no_elements(ranks: &RankContext<'_>) {
    for format in Format::ALL {
        check(ranks, format, &[0]);
        check(ranks, format, &[0, 3]);
        check(ranks, format, &[2 * ranks.world_size(), 0]);
    }
}

fn check(ranks: &RankContext<'_>, format: Format, shape: &[usize]) {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let len: usize = shape.iter().product();
    let inputs: Vec<Vec<f64>> = (0..world_size).map(|rank| integers(rank, len)).collect();
    let sum: Vec<f64> = (0..len).map(|index| inputs.iter().map(|input| input[index]).sum()).collect();
    let mut joined = shape.to_vec();
    joined[0] *= world_size;
    let mut part = shape.to_vec();
    part[0] /= world_size;
    let part_len = len / world_size;
    let expected: [(&str, _, Seen); 4] = [
        ("sum", SUMS, (shape.to_vec(), bits(format, &sum))),
        ("concatenation", GATHERS, (joined, bits(format, &inputs.concat()))),
        ("part of the sum", SCATTERS, (part, bits(format, &sum[rank * part_len..(rank + 1) * part_len]))),
        ("identity", IDENTITIES, (shape.to_vec(), bits(format, &inputs[rank]))),
    ];
    for (name, passes, expected) in expected {
        for pass in passes {
            let output = pass(ranks.integers(format, rank, shape), ranks.comm).unwrap();
            assert_eq!(ranks.seen(&output), expected, "{name} of {format:?} {shape:?}, rank {rank} of {world_size}");
        }
    }
}

const SIDE: usize = 32;
const LEN: usize = SIDE * SIDE;
const ONE: Factor = Factor { numerator: 1.0, divisor: 1.0 };

/// Arbitrary numbers for each rank, enough for `blocks` squares; all ranks compute the same numbers.
fn squares(ranks: &RankContext<'_>, format: Format, blocks: usize, seed: u64) -> Vec<Vec<f64>> {
    (0..ranks.world_size()).map(|rank| vector(format, blocks * LEN, seed + rank as u64)).collect()
}

/// Asserts that `values` are as near to the sum of the vectors as any transport guarantees.
fn assert_sum(label: &str, format: Format, values: &[f64], vectors: &[&[f64]]) {
    let rule = ScaledSum::new(format, vectors.len(), ONE, ONE);
    let column = |index: usize| vectors.iter().map(move |vector| vector[index]);
    let (exact, bounds): (Vec<f64>, Vec<f64>) = (0..values.len()).map(|index| rule.expect(column(index))).unzip();
    assert_within(label, format, values, &exact, &bounds);
}

pub(super) fn all_reduce_of_32(ranks: &RankContext<'_>) {
    for format in Format::ALL {
        let (x, dy) = (squares(ranks, format, 1, 1), vector(format, LEN, 9));
        let output = AllReduce.forward(ranks.tensor(format, &x[ranks.rank()], &[SIDE, SIDE]), ranks.comm).unwrap();
        ranks.assert_same_everywhere("the sum", &ranks.seen(&output));
        let values = values_of(ranks.read(&output).as_slice());
        assert_sum("the sum", format, &values, &x.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let gradient = AllReduce.backward(ranks.tensor(format, &dy, &[SIDE, SIDE]), ranks.comm).unwrap();
        assert_eq!(ranks.seen(&gradient), (vec![SIDE, SIDE], bits(format, &dy)));
    }
}

pub(super) fn all_gather_of_32(ranks: &RankContext<'_>) {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let joined = [world_size * SIDE, SIDE];
    for format in Format::ALL {
        let (x, dy) = (squares(ranks, format, 1, 1), squares(ranks, format, world_size, 11));
        let output = AllGather.forward(ranks.tensor(format, &x[rank], &[SIDE, SIDE]), ranks.comm).unwrap();
        assert_eq!(ranks.seen(&output), (joined.to_vec(), bits(format, &x.concat())));
        let gradient = AllGather.backward(ranks.tensor(format, &dy[rank], &joined), ranks.comm).unwrap();
        assert_eq!(gradient.shape(), [SIDE, SIDE]);
        let own: Vec<&[f64]> = dy.iter().map(|dy| &dy[rank * LEN..(rank + 1) * LEN]).collect();
        assert_sum("the gradient", format, &values_of(ranks.read(&gradient).as_slice()), &own);
    }
}

pub(super) fn reduce_scatter_of_32(ranks: &RankContext<'_>) {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let joined = [world_size * SIDE, SIDE];
    for format in Format::ALL {
        let (x, dy) = (squares(ranks, format, world_size, 1), squares(ranks, format, 1, 11));
        let output = ReduceScatter.forward(ranks.tensor(format, &x[rank], &joined), ranks.comm).unwrap();
        assert_eq!(output.shape(), [SIDE, SIDE]);
        let own: Vec<&[f64]> = x.iter().map(|x| &x[rank * LEN..(rank + 1) * LEN]).collect();
        assert_sum("the part", format, &values_of(ranks.read(&output).as_slice()), &own);
        let gradient = ReduceScatter.backward(ranks.tensor(format, &dy[rank], &[SIDE, SIDE]), ranks.comm).unwrap();
        assert_eq!(ranks.seen(&gradient), (joined.to_vec(), bits(format, &dy.concat())));
    }
}

/// `<A x, y> = <x, Aᵀ y>`, summed over the ranks, with numbers for which every sum is exact.
pub(super) fn adjoint(ranks: &RankContext<'_>) {
    type Maker = fn() -> Box<dyn TensorOp<Cuda>>;
    let makers: [Maker; 4] = [
        || Box::new(AllGather),
        || Box::new(ReduceScatter),
        || Box::new(Pipeline::new().then(ReduceScatter).then(AllGather).then(AllGather)),
        || Box::new(Pipeline::new().then(Pipeline::new().then(AllGather)).then(ReduceScatter).then(ReduceScatter)),
    ];
    let (rank, rows) = (ranks.rank(), ranks.world_size().pow(2));
    let inner = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for maker in makers {
        let mut operation = maker();
        let x = integers(rank, rows * 2);
        let output = operation.forward(ranks.tensor(Format::F64, &x, &[rows, 2]), ranks.comm).unwrap();
        let y = integers(rank + 9, output.as_slice().len());
        let left = inner(&values_of(ranks.read(&output).as_slice()), &y);
        let gradient = operation.backward(ranks.tensor(Format::F64, &y, output.shape()), ranks.comm).unwrap();
        assert_eq!(gradient.shape(), [rows, 2]);
        let right = inner(&x, &values_of(ranks.read(&gradient).as_slice()));
        let sides = ranks.comm.gather_words(&[left.to_bits(), right.to_bits()]).unwrap();
        let total = |side: usize| sides.iter().skip(side).step_by(2).map(|&word| f64::from_bits(word)).sum::<f64>();
        assert_eq!(total(0), total(1), "{}", operation.name());
    }
}
