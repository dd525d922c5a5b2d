//! Tensor-parallel operations: every direction against the oracle, groups of one, memory handed over, and pipelines.

use gradsync::comm::{Communicator, Ranks};
use gradsync::ops::tensor_parallel::{
    AllGather, AllReduce, AllReduceGradient, OwnedTensor, OwnedTensorMemory, Pipeline, ReduceScatter, TensorOp,
};
use gradsync::{Float, Result, bf16, f16};
use gradsync_tests::array::{Array, patterns_of};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::{Format, reduce};
use gradsync_tests::ranks::{guarded, on_ranks};

/// The tensor of an array's values.
pub(crate) fn tensor(format: Format, values: &[f64], shape: &[usize]) -> OwnedTensor {
    match Array::new(format, values) {
        Array::F64(data) => OwnedTensor::new(data, shape),
        Array::F32(data) => OwnedTensor::new(data, shape),
        Array::F16(data) => OwnedTensor::new(data, shape),
        Array::BF16(data) => OwnedTensor::new(data, shape),
    }
    .unwrap()
}

fn start(tensor: &OwnedTensor) -> *const u8 {
    tensor.as_slice().as_bytes().as_ptr()
}

/// The shape and the bits of a tensor.
type Seen = (Vec<usize>, Vec<u64>);

fn seen(tensor: &OwnedTensor) -> Seen {
    (tensor.shape().to_vec(), patterns_of(tensor.as_slice()))
}

type Pass = fn(OwnedTensor, &dyn Communicator) -> Result<OwnedTensor>;

/// Every pass that moves data, grouped by its effect.
const SUMS: [Pass; 2] = [|t, comm| AllReduce.forward(t, comm), |t, comm| AllReduceGradient.backward(t, comm)];
const GATHERS: [Pass; 2] = [|t, comm| AllGather.forward(t, comm), |t, comm| ReduceScatter.backward(t, comm)];
const SCATTERS: [Pass; 2] = [|t, comm| ReduceScatter.forward(t, comm), |t, comm| AllGather.backward(t, comm)];
const IDENTITIES: [Pass; 2] = [|t, comm| AllReduceGradient.forward(t, comm), |t, comm| AllReduce.backward(t, comm)];

const TAILS: [&[usize]; 5] = [&[], &[1], &[7], &[3, 5], &[2, 0]];

/// Results are compared bit for bit: a sum over ranks is specified as `f64` in rank order with one rounding, and all other passes move
/// bits.
#[test]
fn every_pass_dtype_shape_and_rank_count() {
    guarded(120, || {
        for format in Format::ALL {
            for world_size in [1, 2, 3, 4, 5] {
                for tail in TAILS {
                    for rows in [0, 1, 3] {
                        check(format, world_size, &[&[rows * world_size], tail].concat());
                    }
                }
            }
        }
    });
}

fn check(format: Format, world_size: usize, shape: &[usize]) {
    let what = format!("{format:?} {shape:?} over {world_size}");
    let len: usize = shape.iter().product();
    let inputs: Vec<Vec<f64>> = (0..world_size).map(|rank| vector(format, len, 7 + rank as u64)).collect();
    let sum = reduce::all_reduce(reduce::Op::Sum, format, &inputs);
    let bits = |values: &[f64]| values.iter().map(|&value| format.encode(value)).collect::<Vec<u64>>();
    let mut joined = shape.to_vec();
    joined[0] *= world_size;
    let mut part = shape.to_vec();
    part[0] /= world_size;
    for rank_results in on_ranks(world_size, |comm| {
        let rank = comm.rank();
        let run = |pass: &Pass| seen(&pass(tensor(format, &inputs[rank], shape), &comm).unwrap());
        (rank, [SUMS, GATHERS, SCATTERS, IDENTITIES].map(|passes| passes.each_ref().map(run)))
    }) {
        let (rank, [sums, gathers, scatters, identities]) = rank_results;
        let part_len = len / world_size;
        let expected: [Seen; 4] = [
            (shape.to_vec(), bits(&sum)),
            (joined.clone(), bits(&inputs.concat())),
            (part.clone(), bits(&sum[rank * part_len..(rank + 1) * part_len])),
            (shape.to_vec(), bits(&inputs[rank])),
        ];
        for (got, expected) in [sums, gathers, scatters, identities].into_iter().zip(expected) {
            assert_eq!(got, [expected.clone(), expected], "{what}, rank {rank}");
        }
    }
}

/// Passes without work copy nothing, and sums are formed in the memory of the given tensor.
#[test]
fn tensors_stay_where_they_are() {
    guarded(60, || {
        fn in_place<T: Float>(comm: &dyn Communicator, passes: &[Pass], value: f64) {
            for pass in passes {
                let data = vec![T::from_f64(value); 12];
                let place = data.as_ptr();
                let given = OwnedTensor::new(data, [4, 3]).unwrap();
                let back = pass(given, comm).unwrap().into_vec::<T>().expect("the dtype is kept");
                assert_eq!(back.as_ptr(), place, "{} over {}", T::DTYPE, comm.world_size());
            }
        }
        let every = [SUMS, GATHERS, SCATTERS, IDENTITIES].concat();
        let no_moves = [SUMS, IDENTITIES].concat();
        for (world_size, passes) in [(1, &every), (2, &no_moves)] {
            on_ranks(world_size, |comm| {
                in_place::<f64>(&comm, passes, 1.5);
                in_place::<f32>(&comm, passes, 1.5);
                in_place::<f16>(&comm, passes, 1.5);
                in_place::<bf16>(&comm, passes, 1.5);
            });
        }
        // A pipeline on one rank moves nothing either, and does not even check a scalar.
        on_ranks(1, |comm| {
            let mut pipeline =
                Pipeline::new().then(AllGather).then(AllReduce).then(ReduceScatter).then(AllReduceGradient);
            let scalar = OwnedTensor::new(vec![2.0f32], []).unwrap();
            let place = start(&scalar);
            let output = pipeline.forward(scalar, &comm).unwrap();
            assert_eq!(start(&output), place);
            assert_eq!(start(&pipeline.backward(output, &comm).unwrap()), place);
        });
    });
}

/// The caller keeps a clone, and the operation works in the tensor that it was given.
#[test]
fn what_the_caller_keeps_is_not_written() {
    guarded(60, || {
        on_ranks(3, |comm| {
            for pass in [SUMS, GATHERS, SCATTERS, IDENTITIES].concat() {
                let kept = tensor(Format::F16, &vector(Format::F16, 12, 3), &[6, 2]);
                let before = seen(&kept);
                pass(kept.clone(), &comm).unwrap();
                assert_eq!(seen(&kept), before);
            }
        });
    });
}

/// The group stays usable: the calls are refused before any data moves.
fn refused_everywhere(
    world_size: usize,
    words: &[&str],
    call: impl Fn(&dyn Communicator) -> Result<OwnedTensor> + Sync,
) {
    let texts = on_ranks(world_size, |comm| {
        let error = call(&comm).expect_err("a bad call");
        comm.barrier().unwrap();
        error.to_string()
    });
    for text in texts {
        for word in words {
            assert!(text.contains(word), "\"{text}\" does not say \"{word}\"");
        }
    }
}

#[test]
fn dimension_0_is_missing_or_not_divided() {
    guarded(60, || {
        let ones = |shape: &[usize]| tensor(Format::F32, &vec![1.0; shape.iter().product()], shape);
        for pass in SCATTERS {
            refused_everywhere(3, &["[4, 3]", "3 ranks"], |comm| pass(ones(&[4, 3]), comm));
            refused_everywhere(4, &["[6]", "4 ranks"], |comm| pass(ones(&[6]), comm));
            refused_everywhere(2, &["[]", "2 ranks"], |comm| pass(ones(&[]), comm));
        }
        for pass in GATHERS {
            refused_everywhere(3, &["[]", "3 tensors"], |comm| pass(ones(&[]), comm));
            refused_everywhere(2, &["18446744073709551615", "2 tensors"], |comm| pass(ones(&[usize::MAX, 0]), comm));
        }
    });
}

/// One rank alone makes another call: every rank learns which rank it is, and the calls of that rank and of rank 0.
#[test]
fn ranks_that_disagree() {
    guarded(60, || {
        let ones = |format, shape: &[usize]| tensor(format, &vec![1.0; shape.iter().product()], shape);
        for pass in [SUMS, GATHERS, SCATTERS].concat() {
            refused_everywhere(3, &["shape: rank 0 has shape [6, 2], rank 2 has shape [12]"], |comm| {
                let shape: &[usize] = if comm.rank() == 2 { &[12] } else { &[6, 2] };
                pass(ones(Format::F32, shape), comm)
            });
            refused_everywhere(4, &["dtype: rank 0 has f16, rank 1 has f64"], |comm| {
                pass(ones(if comm.rank() == 1 { Format::F64 } else { Format::F16 }, &[8]), comm)
            });
            // Only one of the ranks would have refused its call alone.
            refused_everywhere(2, &["shape: rank 0 has shape [2], rank 1 has shape []"], |comm| {
                pass(ones(Format::F32, if comm.rank() == 1 { &[] } else { &[2] }), comm)
            });
        }
        refused_everywhere(3, &["rank 0 called AllReduce forward, rank 1 called AllGather backward"], |comm| {
            let tensor = ones(Format::F32, &[3]);
            if comm.rank() == 1 { AllGather.backward(tensor, comm) } else { AllReduce.forward(tensor, comm) }
        });
        refused_everywhere(2, &["rank 0 called AllReduce forward, rank 1 called Pipeline forward"], |comm| {
            let tensor = ones(Format::F32, &[3]);
            let mut pipeline = Pipeline::new().then(AllReduce).then(AllGather);
            if comm.rank() == 1 { pipeline.forward(tensor, comm) } else { AllReduce.forward(tensor, comm) }
        });
        refused_everywhere(
            2,
            &["Pipeline forward: ranks disagree on layer 1: rank 0 has \"AllGather\", rank 1 has none"],
            |comm| {
                let pipeline = Pipeline::new().then(AllReduce);
                let mut pipeline = if comm.rank() == 0 { pipeline.then(AllGather) } else { pipeline };
                pipeline.forward(ones(Format::F32, &[3]), comm)
            },
        );
    });
}

#[test]
fn a_shape_has_to_fit_its_elements() {
    for shape in [&[5][..], &[7], &[2, 2], &[], &[usize::MAX, 2]] {
        let error = OwnedTensor::new(vec![0.0f32; 6], shape).expect_err("6 elements").to_string();
        assert!(error.contains(&format!("{shape:?}")), "\"{error}\" does not name {shape:?}");
    }
    let error = OwnedTensor::new(vec![1.0f32], []).unwrap().into_vec::<f64>().unwrap_err().to_string();
    assert!(error.contains("f32 and f64 differ"), "{error}");
    let debug = format!("{:?}", OwnedTensor::new(vec![1.0f32; 6], [2, 3]).unwrap());
    assert!(debug.contains("[2, 3]") && debug.contains("F32"), "{debug}");
}

/// `<A x, y> = <x, Aᵀ y>`, summed over the ranks: the backward pass is the adjoint of the forward pass, for each operation and for a
/// pipeline.
///
/// Numbers are small integers, so every sum is exact.
#[test]
fn the_way_back_is_the_adjoint() {
    guarded(60, || {
        let makers: [fn() -> Box<dyn TensorOp>; 4] = [
            || Box::new(AllGather),
            || Box::new(ReduceScatter),
            || Box::new(Pipeline::new().then(ReduceScatter).then(AllGather).then(AllGather)),
            || Box::new(Pipeline::new().then(Pipeline::new().then(AllGather)).then(ReduceScatter).then(ReduceScatter)),
        ];
        for world_size in [1, 2, 3, 4] {
            for maker in makers {
                let rows = world_size * world_size;
                let inner = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let integers = |seed: usize, len: usize| (0..len).map(move |i| ((i * 7 + seed * 5) % 11) as f64 - 5.0);
                let sides = on_ranks(world_size, |comm| {
                    let mut operation = maker();
                    let x: Vec<f64> = integers(comm.rank(), rows * 2).collect();
                    let output = operation.forward(tensor(Format::F64, &x, &[rows, 2]), &comm).unwrap();
                    let y: Vec<f64> = integers(comm.rank() + 9, output.as_slice().len()).collect();
                    let left = inner(&output.as_slice().to_f64_vec(), &y);
                    let gradient = operation.backward(tensor(Format::F64, &y, output.shape()), &comm).unwrap();
                    assert_eq!(gradient.shape(), [rows, 2]);
                    (left, inner(&x, &gradient.as_slice().to_f64_vec()))
                });
                let (left, right): (Vec<f64>, Vec<f64>) = sides.into_iter().unzip();
                assert_eq!(left.iter().sum::<f64>(), right.iter().sum::<f64>(), "{} over {world_size}", maker().name());
            }
        }
    });
}

/// An operation that records the order in which a pipeline runs its operations.
struct Digit(f64);

impl TensorOp for Digit {
    fn name(&self) -> &str {
        "Digit"
    }

    fn forward(&mut self, input: OwnedTensor, _: &dyn Communicator) -> Result<OwnedTensor> {
        OwnedTensor::new(vec![input.as_slice().to_f64_vec()[0] * 10.0 + self.0], [1])
    }

    fn backward(&mut self, gradient: OwnedTensor, comm: &dyn Communicator) -> Result<OwnedTensor> {
        self.forward(gradient, comm)
    }
}

#[test]
fn a_pipeline_goes_back_in_reverse() {
    on_ranks(1, |comm| {
        let mut pipeline = Pipeline::new().then(Digit(1.0)).then(Digit(2.0)).then(Digit(3.0));
        let zero = || OwnedTensor::new(vec![0.0f64], [1]).unwrap();
        assert_eq!(pipeline.forward(zero(), &comm).unwrap().into_vec::<f64>().unwrap(), [123.0]);
        assert_eq!(pipeline.backward(zero(), &comm).unwrap().into_vec::<f64>().unwrap(), [321.0]);
        assert_eq!(pipeline.names().collect::<Vec<_>>(), ["Digit"; 3]);
    });
}

/// An operation of a caller, written once for every kind of tensor.
struct Twice<O>(O);

impl<M: OwnedTensorMemory, O: TensorOp<M>> TensorOp<M> for Twice<O> {
    fn name(&self) -> &str {
        "Twice"
    }

    fn forward(&mut self, input: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        let once = self.0.forward(input, comm)?;
        assert_eq!(once.dtype().to_string(), "f32");
        self.0.forward(once, comm)
    }

    fn backward(&mut self, gradient: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        let once = self.0.backward(gradient, comm)?;
        assert_eq!(once.shape().len(), 1);
        self.0.backward(once, comm)
    }
}

#[test]
fn operations_for_every_kind_of_tensor() {
    guarded(60, || {
        on_ranks(2, |comm| {
            let mut pipeline = Pipeline::new().then(Twice(AllGather)).then(Twice(AllReduce));
            let input = tensor(Format::F32, &[1.0, 2.0, 4.0].map(|value| value * (comm.rank() + 1) as f64), &[3]);
            let output = pipeline.forward(input, &comm).unwrap();
            let joined = [4.0, 8.0, 16.0, 8.0, 16.0, 32.0];
            assert_eq!(output.as_slice().to_f64_vec(), [joined, joined].concat());
            let gradient = pipeline.backward(output, &comm).unwrap();
            // The gradient passes two sums over two ranks with equal values.
            let own = &joined[3 * comm.rank()..][..3];
            assert_eq!(gradient.as_slice().to_f64_vec(), own.iter().map(|value| value * 4.0).collect::<Vec<_>>());
            assert_eq!(pipeline.names().collect::<Vec<_>>(), ["Twice", "Twice"]);
        });
    });
}

/// A backward pass without a forward pass, a second backward pass, on one rank or all, or a gradient of the wrong shape.
#[test]
fn a_pipeline_goes_back_only_where_it_came_from() {
    guarded(60, || {
        let ones = |format, rows: usize| tensor(format, &vec![1.0; rows], &[rows]);
        let pipeline = || Pipeline::new().then(AllGather).then(AllReduce);
        refused_everywhere(2, &["no pass forward"], |comm| pipeline().backward(ones(Format::F32, 4), comm));
        refused_everywhere(
            2,
            &["Pipeline backward: ranks disagree on pass forward: rank 0 has one, rank 1 has none"],
            |comm| {
                let mut pipeline = pipeline();
                let output = pipeline.forward(ones(Format::F32, 2), comm)?;
                let mut other = self::Pipeline::new().then(AllGather).then(AllReduce);
                if comm.rank() == 1 { other.backward(output, comm) } else { pipeline.backward(output, comm) }
            },
        );
        refused_everywhere(2, &["no pass forward"], |comm| {
            let mut pipeline = pipeline();
            let output = pipeline.forward(ones(Format::F32, 2), comm).unwrap();
            pipeline.backward(output.clone(), comm).unwrap();
            pipeline.backward(output, comm)
        });
        refused_everywhere(2, &["[4]", "[6]"], |comm| {
            let mut pipeline = pipeline();
            pipeline.forward(ones(Format::F32, 2), comm).unwrap();
            let outcome = pipeline.backward(ones(Format::F32, 6), comm);
            // The forward pass is still recorded.
            assert_eq!(pipeline.backward(ones(Format::F32, 4), comm).unwrap().shape(), [2]);
            outcome
        });
        refused_everywhere(2, &["f32", "bf16"], |comm| {
            let mut pipeline = pipeline();
            pipeline.forward(ones(Format::F32, 2), comm).unwrap();
            pipeline.backward(ones(Format::BF16, 4), comm)
        });
        // A failed forward pass does not count.
        refused_everywhere(2, &["no pass forward"], |comm| {
            let mut pipeline = Pipeline::new().then(ReduceScatter);
            let output = pipeline.forward(ones(Format::F32, 2), comm).unwrap();
            pipeline.forward(ones(Format::F32, 3), comm).expect_err("2 ranks do not divide 3");
            pipeline.backward(output, comm)
        });
    });
}
