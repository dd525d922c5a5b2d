//! OrderedAllReduce over NCCL: the bits of a sum in rank order, for any length, any dtype on the wire and any division of tensors into
//! buckets.

use gradsync::comm::{Communicator, ReduceOp};
use gradsync::memory::Cuda;
use gradsync::ops::OrderedAllReduce;
use gradsync::{Error, GradientBuffer};
use gradsync_tests::array::{Array, dtype};
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;

use super::World;
use crate::placed::Placed;
use crate::report::Report;

const LENS: [usize; 5] = [0, 1, 7, 1000, 100_003];

/// Formats of the data and of the wire.
const WIRES: [(Format, Format); 9] = [
    (Format::F64, Format::F64),
    (Format::F32, Format::F32),
    (Format::F16, Format::F16),
    (Format::BF16, Format::BF16),
    (Format::F32, Format::BF16),
    (Format::F32, Format::F16),
    (Format::F64, Format::F32),
    (Format::F64, Format::BF16),
    (Format::BF16, Format::F32),
];

pub(super) fn run(world: &World<'_>, report: &mut Report) {
    for (data, wire) in WIRES {
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            let name = format!("ordered_all_reduce, {op} of {} over {}", data.name(), wire.name());
            report.case(&name, || buckets(world, data, wire, op));
        }
    }
    report.case("ordered_all_reduce, run many times", || again(world));
    report.case("ordered_all_reduce, refused", || refused(world));
}

/// Every rank's numbers, as [`inputs_of`].
pub(super) fn inputs(world: &World<'_>, formats: (Format, Format), len: usize) -> Vec<Vec<f64>> {
    inputs_of(world.size(), formats, len)
}

/// Numbers whose magnitudes differ so much that the order of additions matters, even for f32 in f64, within the range of the formats.
pub(crate) fn inputs_of(world_size: usize, (data, wire): (Format, Format), len: usize) -> Vec<Vec<f64>> {
    let reach = if data == Format::F16 || wire == Format::F16 { 10 } else { 40 };
    let input = |rank: usize| {
        let mut random = Random::new(1000 + rank as u64);
        let mut number = || {
            let exponent = random.below(2 * reach + 1) as i32 - reach as i32;
            data.round(random.sign() * (1.0 + random.unit()) * 2.0_f64.powi(exponent))
        };
        (0..len).map(|_| number()).collect()
    };
    (0..world_size).map(input).collect()
}

/// The documented result, bit for bit: every element is rounded to the wire format, multiplied by the weight, added in `f64` in rank order,
/// rounded to the wire format, and from there to the data format. A sum's weight is 1, and a mean's weight is the rounded `1/P`.
pub(crate) fn oracle((data, wire): (Format, Format), op: ReduceOp, inputs: &[Vec<f64>]) -> Array {
    let weight = if op == ReduceOp::Mean { 1.0 / inputs.len() as f64 } else { 1.0 };
    let element = |index: usize| {
        let terms = inputs.iter().map(|input| weight * wire.round(input[index]));
        let sum = terms.reduce(|sum, term| sum + term).expect("a rank");
        data.round(wire.round(sum))
    };
    let values: Vec<f64> = (0..inputs[0].len()).map(element).collect();
    Array::new(data, &values)
}

/// A bucket of one tensor.
fn bucket(world: &World<'_>, format: Format, len: usize) -> GradientBuffer<Cuda> {
    GradientBuffer::on_queue(&world.context.queue, dtype(format), world.size(), [("tensor", [len])]).unwrap()
}

/// The same elements as one bucket, and cut at random offsets into several buckets.
fn buckets(world: &World<'_>, data: Format, wire: Format, op: ReduceOp) {
    let (comm, queue) = (world.comm, &world.context.queue);
    let mut random = Random::new(77);
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs = inputs(world, (data, wire), len);
        let expected = oracle((data, wire), op, &inputs).patterns();
        let own = Array::new(data, &inputs[world.rank()]);
        let mut cuts: Vec<usize> = (0..3).map(|_| random.below(len as u64 + 1) as usize).collect();
        cuts.sort_unstable();
        cuts.push(len);
        for (begin, ends) in [(0, vec![len]), (1, vec![len]), (0, cuts.clone()), (1, cuts)] {
            let mut placed = Placed::new(queue, &own, begin);
            let mut rest = placed.slice_mut();
            let mut start = 0;
            for &end in &ends {
                let (tensor, others) = rest.split_at_mut(end - start);
                let mut bucket = bucket(world, data, end - start);
                let mut ordered = OrderedAllReduce::over_transport(comm, &bucket, dtype(wire), op).unwrap();
                assert!(!ordered.uses_peers());
                ordered.all_reduce_tensors(&mut bucket, &mut [tensor]).unwrap();
                rest = others;
                start = end;
            }
            let got = placed.read(comm).patterns();
            checks.same_list(format!("{len} elements from {begin} on, cut at {ends:?}"), got, expected.clone());
        }
    }
    checks.finish();
}

/// One object serves many steps, whose calls are all in progress at once.
fn again(world: &World<'_>) {
    const LEN: usize = 4097;
    let (comm, queue) = (world.comm, &world.context.queue);
    let formats = (Format::F32, Format::BF16);
    let mut bucket = bucket(world, formats.0, LEN);
    let mut ordered = OrderedAllReduce::over_transport(comm, &bucket, dtype(formats.1), ReduceOp::Mean).unwrap();
    assert_eq!((ordered.wire(), ordered.op()), (dtype(Format::BF16), ReduceOp::Mean));
    let all = inputs(world, formats, 10 * LEN);
    let step = |step: usize| -> Vec<Vec<f64>> {
        all.iter().map(|input| input[step * LEN..(step + 1) * LEN].to_vec()).collect()
    };
    let place = |index: usize| Placed::new(queue, &Array::new(formats.0, &step(index)[world.rank()]), index % 2);
    let mut steps: Vec<Placed> = (0..10).map(place).collect();
    for data in &mut steps {
        ordered.all_reduce_tensors(&mut bucket, &mut [data.slice_mut()]).unwrap();
    }
    let mut checks = Checks::new(comm);
    for (index, data) in steps.iter().enumerate() {
        let expected = oracle(formats, ReduceOp::Mean, &step(index)).patterns();
        checks.same_list(format!("step {index}"), data.read(comm).patterns(), expected);
    }
    checks.finish();
}

/// Invalid reductions, buffers and lengths are refused before any communication, and the object can still be used.
fn refused(world: &World<'_>) {
    let (comm, queue) = (world.comm, &world.context.queue);
    let f32 = dtype(Format::F32);
    let mut bucket_of_33 = bucket(world, Format::F32, 33);
    for op in [ReduceOp::Max, ReduceOp::Min] {
        match OrderedAllReduce::over_transport(comm, &bucket_of_33, f32, op) {
            Err(Error::InvalidArgument { operation: "ordered all_reduce", reason }) => {
                assert!(reason.contains(&op.to_string()), "{reason}");
            }
            other => panic!("an ordered {op} gave {other:?}"),
        }
    }
    let mut ordered = OrderedAllReduce::over_transport(comm, &bucket_of_33, f32, ReduceOp::Sum).unwrap();
    for mut other in [bucket(world, Format::F32, 32), bucket(world, Format::F16, 33)] {
        let outcome = ordered.all_reduce(&mut other);
        let is_refused =
            matches!(&outcome, Err(Error::InvalidArgument { reason, .. }) if reason.contains("other tensors"));
        assert!(is_refused, "{outcome:?}");
    }
    let mut short = Placed::unwritten(queue, Format::F32, 32, 0);
    let outcome = ordered.all_reduce_tensors(&mut bucket_of_33, &mut [short.slice_mut()]);
    assert!(matches!(outcome, Err(Error::LengthMismatch { left: 33, right: 32, .. })), "{outcome:?}");

    let formats = (Format::F32, Format::F32);
    let inputs = inputs(world, formats, 33);
    let mut data = Placed::new(queue, &Array::new(Format::F32, &inputs[world.rank()]), 0);
    ordered.all_reduce_tensors(&mut bucket_of_33, &mut [data.slice_mut()]).unwrap();
    comm.synchronize(queue).unwrap();
    let mut checks = Checks::new(comm);
    let expected = oracle(formats, ReduceOp::Sum, &inputs).patterns();
    checks.same_list("a sum after refusals", data.read(comm).patterns(), expected);
    checks.finish();
}
