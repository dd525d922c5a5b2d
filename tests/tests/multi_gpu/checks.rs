//! The results of reductions over NCCL.

use std::rc::Rc;

use gradsync::comm::{ReduceOp, Scaling};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::elementwise::scale;
use gradsync_tests::oracle::reduce::{Op, reduce};
use gradsync_tests::suite::checks::Expected;
use gradsync_tests::tolerance::transport::{Factor, ScaledSum};

/// The reduction with factors of one vector per rank, as [`NcclCommunicator`](gradsync::comm::nccl::NcclCommunicator) documents it. Maxima
/// and minima are exact, with the roundings of the `scale` kernel where there are factors; sums and means are within the bound of
/// [`ScaledSum`]. A mean's `1/P` multiplies the inputs where the dtype is f32 or f64 or P is a power of two; otherwise the next smaller
/// power of two does, and the rest multiplies the result.
pub(crate) fn reduced(op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Rc<Expected> {
    let (len, world_size) = (inputs[0].len(), inputs.len());
    let column = |index: usize| inputs.iter().map(move |input| input[index]);
    let extreme = |op: Op| {
        let scaled = |value: f64, factor: f64| if factor == 1.0 { value } else { scale(format, format, value, factor) };
        let value = |index: usize| {
            let inputs: Vec<f64> = column(index).map(|value| scaled(value, scaling.before)).collect();
            scaled(reduce(op, inputs.into_iter()), scaling.after)
        };
        Expected::Values((0..len).map(value).collect())
    };
    let is_mean = match op {
        ReduceOp::Max => return Rc::new(extreme(Op::Max)),
        ReduceOp::Min => return Rc::new(extreme(Op::Min)),
        ReduceOp::Mean => true,
        ReduceOp::Sum => false,
        _ => unreachable!("{op} is not tested here"),
    };
    let is_first = matches!(format, Format::F64 | Format::F32) || world_size.is_power_of_two();
    let divisor = |is_here: bool| if is_mean && is_here { world_size as f64 } else { 1.0 };
    let shrink = if is_mean && !is_first { 1.0 / world_size.next_power_of_two() as f64 } else { 1.0 };
    let first = Factor { numerator: scaling.before * shrink, divisor: divisor(is_first) };
    let last = Factor { numerator: scaling.after / shrink, divisor: divisor(!is_first) };
    let rule = ScaledSum::new(format, world_size, first, last);
    let (exact, bounds) = (0..len).map(|index| rule.expect(column(index))).unzip();
    Rc::new(Expected::Within { exact, bounds })
}
