//! Steps of optimizers on the device: the bits of the CPU's, in plain calls and in graphs.

use gradsync::driver::Queue;
use gradsync::memory::{Cuda, Host};
use gradsync::train::{
    AdamW, AdamWOptions, DeltaOptimizer, LossScaler, Optimizer, OptimizerMemory, OptimizerOptions, ParameterGroup,
    Schedule, Sgd, SgdOptions, TensorStep, UpdateOutcome,
};
use gradsync::{DType, GradientBuffer, Slice};

use crate::{assert_same, queue, uniform};

/// Tensors of no element, around the borders of vectors, tiles and chunks, and of several chunks.
const LENS: [usize; 9] = [0, 1, 3, 511, 513, 4099, 16_384, 16_385, 70_001];
const STEPS: u64 = 100;

fn tensors() -> impl Iterator<Item = (String, [usize; 1])> {
    LENS.iter().enumerate().map(|(index, &len)| (format!("layer{index}.weight"), [len]))
}

/// A buffer of all tensors on the host, with random numbers times `scale`.
fn random(dtype: DType, seed: u64, scale: f64) -> GradientBuffer {
    let mut buffer = GradientBuffer::new(dtype, 1, tensors()).unwrap();
    for (index, (_, tensor)) in buffer.tensors_mut().enumerate() {
        let numbers: Vec<f64> = uniform(DType::F64, LENS[index], 1000 * seed + index as u64)
            .tensor(0)
            .data()
            .to_f64_vec()
            .iter()
            .map(|number| scale * number)
            .collect();
        gradsync::internal::kernels::cpu::cast(tensor.into_data(), Slice::from(&numbers)).unwrap();
    }
    buffer
}

fn on_device(queue: &Queue, host: &GradientBuffer) -> GradientBuffer<Cuda> {
    let mut buffer = GradientBuffer::on_queue(queue, host.dtype(), 1, tensors()).unwrap();
    buffer.copy_from_host(host).unwrap();
    buffer
}

/// Compares all tensors of both.
fn assert_equal(device: &GradientBuffer<Cuda>, host: &GradientBuffer, what: &str) {
    let mut found = GradientBuffer::new(host.dtype(), 1, tensors()).unwrap();
    device.copy_to_host(&mut found).unwrap();
    for index in 0..LENS.len() {
        assert_same(found.tensor(index).data(), host.tensor(index).data(), &format!("{what}, {}", host.name(index)));
    }
}

/// Compares the states of both, and the numbers of their steps.
fn assert_equal_states<O: OptimizerOptions>(device: &Optimizer<O, Cuda>, host: &Optimizer<O, Host>, what: &str) {
    let (left, right) = (device.numbers().unwrap(), host.numbers().unwrap());
    assert_eq!(
        left.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        right.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        "{what}: {left:?} and {right:?}"
    );
    let (mut device, mut host) = (device.vectors(), host.vectors());
    loop {
        match (device.next(), host.next()) {
            (Some((name, vector, left)), Some((other_name, other_vector, right))) => {
                assert_eq!((name, vector), (other_name, other_vector));
                let mut found = GradientBuffer::new(left.dtype(), 1, [("vector", [left.len()])]).unwrap();
                left.copy_to_host(found.tensor_mut(0).into_data()).unwrap();
                assert_same(found.tensor(0).data(), right, &format!("{what}: {vector} of {name}"));
            }
            (None, None) => return,
            _ => panic!("{what}: the states have other vectors"),
        }
    }
}

/// Both optimizers with every part of a step: clipping, a scale of the loss, a schedule, groups.
fn configured<O: OptimizerOptions, M: OptimizerMemory>(options: O) -> Optimizer<O, M> {
    Optimizer::new(options)
        .unwrap()
        .with_max_norm(0.75)
        .unwrap()
        .with_schedule(Schedule::cosine(80).with_warm_up(10).with_last(0.1))
        .unwrap()
        .with_scaler(LossScaler::default().with_initial(256.0).with_growth_interval(7))
        .unwrap()
        .with_groups([
            ParameterGroup::matching("layer3.*").with_weight_decay(Some(0.0)).with_rate(0.5),
            ParameterGroup::matching("layer4.*").with_frozen(true),
        ])
        .unwrap()
}

/// A hundred steps of both, of which some are skipped, and some have no gradient of a tensor.
fn hundred_steps<O: OptimizerOptions>(options: O, weight_dtype: DType, gradient_dtype: DType) {
    let queue = queue();
    let what = format!("{options:?} of {weight_dtype} by {gradient_dtype}");
    let mut weights = random(weight_dtype, 1, 1.0);
    let mut device_weights = on_device(&queue, &weights);
    let (mut host, mut device) = (configured::<O, Host>(options), configured::<O, Cuda>(options));
    let mut skipped = 0;
    for step in 0..STEPS {
        let mut gradients = random(gradient_dtype, 100 + step, if step % 3 == 0 { 0.01 } else { 4.0 });
        if step % 17 == 5 {
            let bad = [if step % 2 == 0 { f64::INFINITY } else { f64::NAN }];
            let place = gradients.tensor_mut(7).into_data().range_mut(16_000..16_001);
            gradsync::internal::kernels::cpu::cast(place, Slice::from(&bad)).unwrap();
            skipped += 1;
        }
        let device_gradients = on_device(&queue, &gradients);
        let is_there = |index: usize| !(step % 5 == 1 && index == 6);
        let of_host = weights.tensors_mut().zip(gradients.tensors()).enumerate();
        host.step_tensors(of_host.map(|(index, ((name, weights), (_, gradient)))| TensorStep {
            name,
            weights,
            gradient: is_there(index).then_some(gradient),
        }))
        .unwrap();
        let of_device = device_weights.tensors_mut().zip(device_gradients.tensors()).enumerate();
        device
            .step_tensors(of_device.map(|(index, ((name, weights), (_, gradient)))| TensorStep {
                name,
                weights,
                gradient: is_there(index).then_some(gradient),
            }))
            .unwrap();
        if step < 3 || step % 20 == 0 || step == STEPS - 1 {
            assert_equal(&device_weights, &weights, &format!("{what}, step {step}"));
            assert_equal_states(&device, &host, &format!("{what}, step {step}"));
        }
    }
    let report = device.report().unwrap();
    assert_eq!((report.skipped, report.applied), (skipped, STEPS - skipped), "{what}");
    assert_eq!(host.report().unwrap(), report);
    queue.synchronize().unwrap();
    assert_eq!(device.latest_report().unwrap(), Some(report));
}

const PAIRS: [(DType, DType); 10] = [
    (DType::F64, DType::F64),
    (DType::F32, DType::F32),
    (DType::F32, DType::F16),
    (DType::F32, DType::BF16),
    (DType::F16, DType::F32),
    (DType::F16, DType::F16),
    (DType::F16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::BF16, DType::F16),
    (DType::BF16, DType::BF16),
];

#[test]
fn sgd_has_the_bits_of_the_cpu() {
    for (weights, gradients) in PAIRS {
        let options = SgdOptions::default().with_rate(0.1).with_weight_decay(0.01);
        hundred_steps(options.with_momentum(0.9), weights, gradients);
        if weights == gradients {
            hundred_steps(options.with_momentum(0.9).with_nesterov(true), weights, gradients);
            hundred_steps(options, weights, gradients);
        }
    }
}

#[test]
fn adamw_has_the_bits_of_the_cpu() {
    for (weights, gradients) in PAIRS {
        let options = AdamWOptions::default().with_rate(0.01);
        hundred_steps(options, weights, gradients);
        if weights == gradients {
            hundred_steps(options.with_bias_correction(false).with_weight_decay(0.0), weights, gradients);
        }
    }
}

/// Weights and gradients that begin anywhere: one element after an aligned address.
#[test]
fn step_tensors_takes_any_alignment() {
    let queue = queue();
    for dtype in DType::FLOATS {
        let len = 40_001;
        let (weights, gradients) = (uniform(dtype, len + 1, 1), uniform(dtype, len + 1, 2));
        let mut host_weights = uniform(dtype, len + 1, 1);
        let (mut host, mut device) = (AdamW::<Host>::new(0.01).unwrap(), AdamW::<Cuda>::new(0.01).unwrap());
        let mut device_weights = crate::upload(&queue, weights.tensor(0).data(), 0);
        let device_gradients = crate::upload(&queue, gradients.tensor(0).data(), 0);
        for _ in 0..3 {
            let gradient: Slice<'_> = gradients.tensor(0).data().range(1..len + 1);
            let target = host_weights.tensor_mut(0).into_data().range_mut(1..len + 1);
            host.step_tensors([TensorStep { name: "all", weights: target.into(), gradient: Some(gradient.into()) }])
                .unwrap();
            let gradient = device_gradients.as_slice().range(1..len + 1);
            let target = device_weights.as_mut_slice().range_mut(1..len + 1);
            device
                .step_tensors([TensorStep { name: "all", weights: target.into(), gradient: Some(gradient.into()) }])
                .unwrap();
        }
        let found = crate::download(&device_weights, 0);
        assert_same(found.tensor(0).data(), host_weights.tensor(0).data(), &format!("{dtype}"));
        assert_equal_states(&device, &host, &format!("{dtype}"));
    }
}

#[test]
fn deltas_have_the_bits_of_the_cpu() {
    let queue = queue();
    let types = [
        (DType::F64, DType::F64),
        (DType::F32, DType::F32),
        (DType::F32, DType::F16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
    ];
    for (gradient, delta) in types {
        for weight in if gradient == DType::F64 { vec![DType::F64] } else { vec![DType::F32, DType::BF16] } {
            let weights = random(weight, 1, 1.0);
            let device_weights = on_device(&queue, &weights);
            let (mut host, mut device) =
                (configured::<_, Host>(AdamWOptions::default()), configured::<_, Cuda>(AdamWOptions::default()));
            let mut host_sgd = Sgd::<Host>::new(SgdOptions::default().with_momentum(0.9)).unwrap();
            let mut device_sgd = Sgd::<Cuda>::new(SgdOptions::default().with_momentum(0.9)).unwrap();
            for step in 0..5 {
                let gradients = random(gradient, 10 + step, 1.0);
                let device_gradients = on_device(&queue, &gradients);
                let mut pairs: [(&mut dyn DeltaOptimizer<Host>, &mut dyn DeltaOptimizer<Cuda>); 2] =
                    [(&mut host, &mut device), (&mut host_sgd, &mut device_sgd)];
                for (host, device) in &mut pairs {
                    let mut deltas = random(delta, 2, 0.0);
                    let mut device_deltas = on_device(&queue, &deltas);
                    host.deltas(&gradients, &weights, &mut deltas).unwrap();
                    device.deltas(&device_gradients, &device_weights, &mut device_deltas).unwrap();
                    assert_equal(&device_deltas, &deltas, &format!("{gradient} to {delta}, step {step}"));
                }
            }
            assert_equal_states(&device, &host, &format!("{gradient} to {delta}"));
            assert_equal_states(&device_sgd, &host_sgd, &format!("{gradient} to {delta}"));
        }
    }
}

/// A recorded step follows the schedule, the scale and the products of β, which are in the memory of the device.
#[test]
fn step_in_a_graph_equals_plain_steps() {
    let queue = queue();
    let mut weights = random(DType::BF16, 1, 1.0);
    let gradients = random(DType::BF16, 2, 1.0);
    let mut device_weights = on_device(&queue, &weights);
    let device_gradients = on_device(&queue, &gradients);
    let options = AdamWOptions::default().with_rate(0.01);
    let (mut host, mut device) = (configured::<_, Host>(options), configured::<_, Cuda>(options));
    device.step(&mut device_weights, &device_gradients).unwrap();
    let graph = queue.capture(|| device.step(&mut device_weights, &device_gradients)).unwrap();
    for _ in 0..29 {
        graph.launch().unwrap();
    }
    for _ in 0..30 {
        host.step(&mut weights, &gradients).unwrap();
    }
    assert_equal(&device_weights, &weights, "30 steps, 29 of them in a graph");
    assert_equal_states(&device, &host, "30 steps, 29 of them in a graph");
    assert_eq!(device.report().unwrap().applied, 30);
}

/// Without a scale of the loss a skipped step is an error, of a later call; nothing has changed by it.
#[test]
fn skipped_step_is_an_error_of_a_later_step() {
    let queue = queue();
    let weights = random(DType::F32, 1, 1.0);
    let mut device_weights = on_device(&queue, &weights);
    let bad = random(DType::F32, 2, f64::INFINITY);
    let device_bad = on_device(&queue, &bad);
    let mut device = AdamW::<Cuda>::new(0.01).unwrap();
    device.step(&mut device_weights, &device_bad).unwrap();
    assert_eq!(device.report().unwrap().outcome, UpdateOutcome::NotFinite);
    let error = device.step(&mut device_weights, &device_bad).unwrap_err().to_string();
    assert!(error.contains("NaN or infinities") && error.contains("0 applied and 0 skipped"), "{error}");
    assert_equal(&device_weights, &weights, "a skipped step");
}

/// Dtypes without a kernel are refused before anything is enqueued.
#[test]
fn step_refuses_dtypes_without_a_kernel() {
    let queue = queue();
    let mut weights = on_device(&queue, &random(DType::F32, 1, 1.0));
    let gradients = on_device(&queue, &random(DType::F64, 2, 1.0));
    let error = AdamW::<Cuda>::new(0.01).unwrap().step(&mut weights, &gradients).unwrap_err().to_string();
    assert!(error.contains("layer0.weight") && error.contains("f64"), "{error}");
}
