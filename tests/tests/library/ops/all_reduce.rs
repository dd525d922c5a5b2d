//! ops::all_reduce over a gradient buffer: every tensor against the oracle, gaps still zero.

use gradsync::GradientBuffer;
use gradsync::comm::Ranks;
use gradsync::comm::ReduceOp;
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::{Format, reduce};
use gradsync_tests::ranks::{agreed, guarded};
use gradsync_tests::tolerance::{self, assert_within};

const SHAPES: [&[usize]; 5] = [&[2, 3], &[128], &[0], &[7, 13], &[1024, 3]];

fn buffer(format: Format, world_size: usize) -> GradientBuffer {
    let tensors = SHAPES.iter().enumerate().map(|(i, shape)| (format!("t{i}"), shape.to_vec()));
    GradientBuffer::new(dtype(format), world_size, tensors).unwrap()
}

#[test]
fn every_operation_dtype_and_rank_count() {
    guarded(120, || {
        for format in Format::ALL {
            for (ours, op) in [
                (ReduceOp::Sum, reduce::Op::Sum),
                (ReduceOp::Mean, reduce::Op::Mean),
                (ReduceOp::Max, reduce::Op::Max),
                (ReduceOp::Min, reduce::Op::Min),
            ] {
                for world_size in [1, 2, 3, 4, 8] {
                    check(format, ours, op, world_size);
                }
            }
        }
    });
}

fn check(format: Format, ours: ReduceOp, op: reduce::Op, world_size: usize) {
    let what = format!("{format:?} {op:?} over {world_size}");
    let tensor = |rank: usize, i: usize| vector(format, SHAPES[i].iter().product(), (100 * rank + i) as u64);
    let patterns = agreed(&what, world_size, |comm| {
        let mut buffer = buffer(format, world_size);
        for (i, segment) in buffer.segments().to_vec().into_iter().enumerate() {
            write(buffer.as_mut_slice(), segment.start, &tensor(comm.rank(), i));
        }
        gradsync::ops::all_reduce(&comm, &mut buffer, ours).unwrap();
        patterns_of(buffer.as_slice())
    });
    let layout = buffer(format, world_size);
    let mut rest: Vec<bool> = vec![true; layout.len()];
    for (i, segment) in layout.segments().iter().enumerate() {
        let inputs: Vec<Vec<f64>> = (0..world_size).map(|rank| tensor(rank, i)).collect();
        let got: Vec<f64> = patterns[segment.clone()].iter().map(|&bits| format.decode(bits)).collect();
        let column = |k: usize| inputs.iter().map(|input| input[k]).collect::<Vec<f64>>();
        let exact: Vec<f64> = (0..segment.len()).map(|k| reduce::reduce(op, column(k).into_iter())).collect();
        let bounds: Vec<f64> = (0..segment.len())
            .map(|k| match op {
                reduce::Op::Mean => tolerance::mean(format, &column(k)),
                reduce::Op::Sum => format.rounding_error(exact[k]),
                reduce::Op::Max | reduce::Op::Min => 0.0,
            })
            .collect();
        assert_within(&format!("{what}, tensor {i}"), format, &got, &exact, &bounds);
        rest[segment.clone()].fill(false);
    }
    for (place, _) in rest.iter().enumerate().filter(|(_, gap)| **gap) {
        assert_eq!(patterns[place], 0, "{what}: the gap at {place} is not zero any more");
    }
}
