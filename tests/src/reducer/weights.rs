//! Means over different numbers of examples, whose weights must not take a value out of the range of its dtype.

use gradsync::comm::Communicator;
use gradsync::train::{BucketMemory, Parameter, Reducer, ReducerOptions, Reduction};
use gradsync::{DType, TensorView};

use super::{SHAPES, gradient, len, parameters, view};
use crate::array::{Array, dtype, values_of};
use crate::oracle::{Format, elementwise};
use crate::out_of_range::{WEIGHTS, weighted_mean, weights_of};
use crate::tolerance::assert_equal;

/// In every dtype, on every wire, in memory of both kinds: the mean over all examples with one rounding, also of the largest numbers.
pub(super) fn weighted(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for (format, wire) in Format::ALL.into_iter().flat_map(|format| [(format, None), (format, Some(Format::F16))]) {
        // bf16 is not wider than f16, and stays as it is.
        let on_wire = wire.filter(|_| format != Format::BF16 && world_size > 1).unwrap_or(format);
        for memory in [BucketMemory::Own, BucketMemory::Automatic] {
            let options = ReducerOptions::default().with_bucket_bytes(3000).with_shared_memory(memory);
            let mut reducer =
                Reducer::new(comm, parameters(&[format]), options.with_wire_dtype(wire.map(dtype))).unwrap();
            for turn in 0..WEIGHTS.len() {
                let examples = weights_of(turn, world_size);
                // In every second step, all gradients are the largest number.
                let own = |index: usize, rank: usize| match turn % 2 {
                    0 => vec![on_wire.max_finite().min(format.max_finite()); len(index)],
                    _ => gradient(format, index, rank, turn).values(),
                };
                let mut step = reducer.step_of(examples[rank] as usize).unwrap().expect("rank 0 has data");
                for index in (0..SHAPES.len()).filter(|_| examples[rank] > 0.0) {
                    step.ready(index, view(&Array::new(format, &own(index, rank)), index)).unwrap();
                }
                let reduced = step.finish().unwrap();
                assert_eq!(reduced.examples(), Some(examples.iter().sum::<f64>() as usize));
                for index in (0..SHAPES.len()).filter(|_| world_size > 1) {
                    let found = values_of(reducer.gradient(index).expect("reduced").data());
                    let sent: Vec<Vec<f64>> = (0..world_size).map(|rank| own(index, rank)).collect();
                    let mean = |at: usize| {
                        let values = sent.iter().map(|values| elementwise::cast(on_wire, values[at]));
                        weighted_mean(on_wire, &examples, values)
                    };
                    let expected: Vec<f64> = (0..len(index)).step_by(97).map(mean).collect();
                    let found: Vec<f64> = found.into_iter().step_by(97).collect();
                    let label = format!("{index} of {format:?} on {on_wire:?} with {examples:?}, memory: {memory:?}");
                    assert_equal(&label, &found, &expected);
                }
            }
        }
    }
}

/// A mean of equal numbers is that number, and a sum takes no weights.
pub(super) fn equal_gradients(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let examples = if rank == 0 { 97 } else { 1 };
    for (format, wire, number) in [
        (Format::F16, None, 30_000.0),
        (Format::F32, Some(DType::F16), 30_000.0),
        (Format::F32, None, f64::from(f32::MAX)),
        (Format::BF16, None, 2f64.powi(127)),
        (Format::F64, None, 2f64.powi(1023)),
    ] {
        for (reduction, own, expected) in [(Reduction::Mean, number, number), (Reduction::Sum, 1.0, world_size as f64)]
        {
            let options = ReducerOptions::from(reduction).with_wire_dtype(wire);
            let mut reducer = Reducer::new(comm, [Parameter::new("weight", [3], dtype(format))], options).unwrap();
            let mut step = reducer.step_of(examples).unwrap().expect("data");
            let gradient = Array::new(format, &[own; 3]);
            step.ready(0, TensorView::new(gradient.slice(), &[3][..]).unwrap()).unwrap();
            let _reduced = step.finish().unwrap();
            let found = reducer.gradient(0).map_or(vec![own; 3], |found| values_of(found.data()));
            assert_eq!(found, [expected; 3], "{reduction:?} of {format:?} on {wire:?}");
        }
    }
}
