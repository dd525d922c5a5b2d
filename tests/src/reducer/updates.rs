//! Steps of optimizers that read reduced gradients in their buckets.

use gradsync::comm::Communicator;
use gradsync::train::{
    AdamW, AdamWOptions, LossScaler, NonFinite, Parameter, Reducer, ReducerOptions, Reduction, TensorStep,
    UpdateOutcome,
};

use super::{SHAPES, gradient, parameters, view};
use crate::array::Array;
use crate::oracle::Format;

fn weights(format: Format) -> Vec<Array> {
    (0..SHAPES.len()).map(|index| gradient(format, index, 50, 0)).collect()
}

fn tensors<'a>(
    parameters: &'a [Parameter],
    weights: &'a mut [Array],
    gradients: &'a [Option<Array>],
) -> impl Iterator<Item = TensorStep<'a>> {
    parameters.iter().zip(weights).zip(gradients).enumerate().map(|(index, ((parameter, weights), gradient))| {
        TensorStep {
            name: &parameter.name,
            weights: weights.slice_mut().into(),
            gradient: gradient.as_ref().map(|gradient| view(gradient, index)),
        }
    })
}

/// Updates from buckets of any size have the bits of updates from copies of the gradients. In one step a parameter has a gradient on the
/// last rank alone, in another on none.
pub(super) fn from_buckets(comm: &dyn Communicator) {
    for format in [Format::F32, Format::BF16] {
        let mut all = Vec::new();
        for (first, others) in super::BYTES {
            let options =
                ReducerOptions::from(Reduction::Mean).with_first_bucket_bytes(first).with_bucket_bytes(others);
            let mut reducer = Reducer::new(comm, parameters(&[format]), options).unwrap();
            let declared = reducer.parameters().to_vec();
            let optimizer = || AdamW::new(AdamWOptions::from(0.01)).unwrap().with_max_norm(0.5).unwrap();
            let (mut from_buckets, mut from_copies) = (optimizer(), optimizer());
            let (mut updated, mut expected) = (weights(format), weights(format));
            for number in 0..4 {
                let is_there = |index: usize| match (number, index) {
                    (1, 1) => comm.rank() + 1 == comm.world_size(),
                    (2, 4) => false,
                    _ => true,
                };
                let own = |index| is_there(index).then(|| gradient(format, index, comm.rank(), number));
                let own: Vec<Option<Array>> = (0..SHAPES.len()).map(own).collect();
                let mut step = reducer.step().unwrap();
                for (index, gradient) in own.iter().enumerate() {
                    if let Some(gradient) = gradient {
                        step.ready(index, view(gradient, index)).unwrap();
                    }
                }
                let reduced = step.finish().unwrap();
                let copied: Vec<Option<Array>> = (0..SHAPES.len())
                    .map(|index| {
                        let mut copy = own[index].clone().unwrap_or_else(|| gradient(format, index, 0, 0));
                        reducer.copy_gradients(&mut [(index, copy.slice_mut())]).unwrap();
                        reduced.state(index).has_gradient().then_some(copy)
                    })
                    .collect();
                reducer.update(&mut from_buckets, tensors(&declared, &mut updated, &own)).unwrap();
                from_copies.step_tensors(tensors(&declared, &mut expected, &copied)).unwrap();
                assert_eq!(updated, expected, "{format:?}, step {number}, buckets of {others} bytes");
                assert_eq!(from_buckets.numbers().unwrap(), from_copies.numbers().unwrap());
            }
            all.push(updated);
        }
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{format:?}: buckets change no bit");
    }
}

/// An infinity in one rank's gradient skips the step on every rank, halves the scale of the loss, and changes nothing else.
pub(super) fn skipped(comm: &dyn Communicator) {
    let options = ReducerOptions::from(Reduction::Sum).with_non_finite(NonFinite::Leave);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    let declared = reducer.parameters().to_vec();
    let scaler = LossScaler::default().with_initial(1024.0);
    let mut optimizer = AdamW::new(0.01).unwrap().with_scaler(scaler).unwrap();
    let mut weights = weights(Format::F32);
    for number in 0..3 {
        let mut own: Vec<Option<Array>> =
            (0..SHAPES.len()).map(|index| Some(gradient(Format::F32, index, comm.rank(), number))).collect();
        if number == 1 && comm.rank() + 1 == comm.world_size() {
            own[4] = Some(Array::new(Format::F32, &vec![f64::INFINITY; super::len(4)]));
        }
        let before = (weights.clone(), optimizer.numbers().unwrap());
        let mut step = reducer.step().unwrap();
        own.iter().flatten().enumerate().for_each(|(index, own)| step.ready(index, view(own, index)).unwrap());
        let _reduced = step.finish().unwrap();
        reducer.update(&mut optimizer, tensors(&declared, &mut weights, &own)).unwrap();
        let report = optimizer.report().unwrap();
        let is_skipped = number == 1;
        assert_eq!(report.outcome == UpdateOutcome::NotFinite, is_skipped);
        assert_eq!(report.scale, if number == 0 { 1024.0 } else { 512.0 });
        assert_eq!(weights == before.0, is_skipped, "step {number}");
        assert_eq!((report.applied, report.skipped), ([1, 1, 2][number], [0, 1, 1][number]));
    }
}
