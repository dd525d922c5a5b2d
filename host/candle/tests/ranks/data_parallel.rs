//! Gradients of several ranks equal the gradients of one rank with all examples.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, SGD, VarMap};
use gradsync::comm::{Communicator, local};
use gradsync::train::{AbsentGradients, ReducerOptions, Reduction};
use gradsync_candle::{DataParallel, TensorMemory, Variables};

use crate::allocations::{LARGE, during};
use crate::{Case, named};

/// The cases of any memory.
pub(crate) fn all<M: TensorMemory>() -> Vec<Case<M>> {
    vec![
        Case { name: "two layers as on one rank", run: two_layers },
        Case { name: "micro-batches as one batch", run: micro_batches },
        Case { name: "four dtypes", run: dtypes },
        Case { name: "unequal numbers of examples", run: uneven },
        Case { name: "frozen variables under AdamW", run: frozen },
        Case { name: "variables that some ranks or none use", run: unused },
        Case { name: "one variable under two names", run: tied },
        Case { name: "clipping by the global norm", run: clip },
    ]
}

/// The cases of the host: also the count of its allocations.
pub(crate) fn on_host() -> Vec<Case> {
    all().into_iter().chain([Case { name: "no allocation in a step", run: allocations }]).collect()
}

pub(crate) const BATCH: usize = 8;
const SHAPES: [(&str, &[usize]); 4] =
    [("up.weight", &[6, 5]), ("up.bias", &[6]), ("down.weight", &[2, 6]), ("down.bias", &[2])];

/// Integers from -2 to 2.
pub(crate) fn integers(shape: &[usize], dtype: DType, seed: usize, device: &Device) -> Tensor {
    let len = shape.iter().product::<usize>();
    let value = |index: usize| ((index * 7 + seed * 13 + index * index * seed) % 5) as f64 - 2.0;
    let data: Vec<f64> = (0..len).map(value).collect();
    on(device, Tensor::from_vec(data, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

pub(crate) fn on(device: &Device, tensor: Tensor) -> Tensor {
    tensor.to_device(device).unwrap()
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The variables of two layers, inserted in a different order on each rank.
pub(crate) fn variables(dtype: DType, rank: usize, device: &Device) -> VarMap {
    let variables = VarMap::new();
    let mut shapes = SHAPES.to_vec();
    shapes.rotate_left(rank % SHAPES.len());
    for (name, shape) in shapes {
        let seed = SHAPES.iter().position(|(known, _)| *known == name).unwrap();
        let var = Var::from_tensor(&integers(shape, dtype, seed + 1, device)).unwrap();
        variables.data().lock().unwrap().insert(name.into(), var);
    }
    variables
}

fn tensor(variables: &VarMap, name: &str) -> Tensor {
    variables.data().lock().unwrap()[name].as_tensor().clone()
}

fn forward(variables: &VarMap, input: &Tensor) -> Result<Tensor> {
    let dense = |input: &Tensor, name: &str| {
        let weight = tensor(variables, &format!("{name}.weight"));
        input.matmul(&weight.t()?)?.broadcast_add(&tensor(variables, &format!("{name}.bias")))
    };
    dense(&dense(input, "up")?.relu()?, "down")
}

/// The mean loss over a range of all examples.
pub(crate) fn loss(variables: &VarMap, dtype: DType, examples: std::ops::Range<usize>) -> Tensor {
    let device = tensor(variables, SHAPES[0].0).device().clone();
    let cut = |width: usize, seed: usize| {
        integers(&[BATCH, width], dtype, seed, &device).narrow(0, examples.start, examples.len()).unwrap()
    };
    let (input, target) = (cut(5, 11), cut(2, 12));
    (forward(variables, &input).unwrap() - target).unwrap().sqr().unwrap().mean_all().unwrap()
}

pub(crate) fn own<M: TensorMemory>(comm: &dyn Communicator<M>) -> std::ops::Range<usize> {
    let count = BATCH / comm.world_size();
    comm.rank() * count..(comm.rank() + 1) * count
}

fn gradients(variables: &VarMap, store: &GradStore) -> Vec<Option<Vec<f64>>> {
    SHAPES.iter().map(|(name, _)| store.get(&tensor(variables, name)).map(values)).collect()
}

pub(crate) fn options() -> [ReducerOptions; 2] {
    let whole = ReducerOptions::from(Reduction::Mean);
    [whole, whole.with_first_bucket_bytes(1).with_bucket_bytes(40)]
}

/// Two steps of plain descent: three would round in `f64`.
fn two_layers<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    for (dtype, steps) in [(DType::F64, 2), (DType::F32, 1)] {
        for options in options() {
            let (divided, whole) = (variables(dtype, comm.rank(), device), variables(dtype, 0, device));
            let mut parallel = DataParallel::new(&divided, comm, options).unwrap();
            let mut optimizers = [&divided, &whole].map(|variables| SGD::new(variables.all_vars(), 0.25).unwrap());
            for step in 0..steps {
                let reduced = parallel.backward(&loss(&divided, dtype, own(comm))).unwrap();
                let joined = loss(&whole, dtype, 0..BATCH).backward().unwrap();
                assert_eq!(gradients(&divided, &reduced), gradients(&whole, &joined), "{dtype:?}, step {step}");
                assert!(gradients(&whole, &joined).iter().flatten().flatten().any(|value| *value != 0.0));
                optimizers[0].step(&reduced).unwrap();
                optimizers[1].step(&joined).unwrap();
            }
            parallel.compare().unwrap();
        }
    }
}

/// Each example is a micro-batch.
fn micro_batches<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (divided, whole) = (variables(DType::F32, comm.rank(), device), variables(DType::F32, 0, device));
    let mut parallel = DataParallel::new(&divided, comm, ReducerOptions::default()).unwrap();
    let joined = gradients(&whole, &loss(&whole, DType::F32, 0..BATCH).backward().unwrap());
    for _ in 0..3 {
        // This sum is discarded again.
        parallel.accumulate(&loss(&divided, DType::F32, 0..1)).unwrap();
        parallel.discard_accumulated();
        let (count, last) = (own(comm).len(), own(comm).end - 1);
        let part = |example: usize| (loss(&divided, DType::F32, example..example + 1) / count as f64).unwrap();
        own(comm).take(count - 1).for_each(|example| parallel.accumulate(&part(example)).unwrap());
        let reduced = parallel.backward(&part(last)).unwrap();
        assert_eq!(gradients(&divided, &reduced), joined);
    }
}

fn dtypes<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let kinds = [DType::F16, DType::F32, DType::BF16, DType::F64];
    let vars: Vec<Var> = kinds
        .iter()
        .enumerate()
        .map(|(seed, dtype)| Var::from_tensor(&integers(&[2, 4], *dtype, seed, device)).unwrap())
        .collect();
    let loss = |examples: std::ops::Range<usize>| {
        let losses = vars.iter().map(|var| {
            let input = integers(&[BATCH, 4], var.dtype(), 5, device).narrow(0, examples.start, examples.len())?;
            input.matmul(&var.t()?)?.sqr()?.mean_all()?.to_dtype(DType::F64)
        });
        Tensor::stack(&losses.collect::<Result<Vec<_>>>().unwrap(), 0).unwrap().sum_all().unwrap()
    };
    let all = Variables::from_iter(vars.iter().enumerate().map(|(index, var)| (format!("{index}"), var.clone())));
    let mut parallel = DataParallel::new(all, comm, ReducerOptions::default()).unwrap();
    let joined = loss(0..BATCH).backward().unwrap();
    for _ in 0..3 {
        let reduced = parallel.backward(&loss(own(comm))).unwrap();
        for var in &vars {
            let (found, expected) = (reduced.get(var).unwrap(), joined.get(var).unwrap());
            assert_eq!(found.dtype(), var.dtype());
            assert_eq!(values(found), values(expected), "{:?}", var.dtype());
        }
    }
}

/// Rank 0 has one example more in the first step, and all but rank 0 are out of data in the second. The weights of a mean of three and five
/// of eight examples are not powers of two, so that results are rounded: once by the weight, and once by the mean.
fn uneven<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (divided, whole) = (variables(DType::F64, comm.rank(), device), variables(DType::F64, 0, device));
    let mut parallel = DataParallel::new(&divided, comm, ReducerOptions::default()).unwrap();
    let joined = loss(&whole, DType::F64, 0..BATCH).backward().unwrap();
    let (rank, count) = (comm.rank(), BATCH / comm.world_size());
    let last = rank + 1 == comm.world_size();
    let begin = if rank == 0 { 0 } else { rank * count + 1 };
    let end = if last { BATCH } else { (rank + 1) * count + 1 };
    let own_loss = loss(&divided, DType::F64, begin..end);
    let reduced = parallel.backward_of(Some((&own_loss, end - begin))).unwrap().unwrap();
    for (found, expected) in gradients(&divided, &reduced).into_iter().zip(gradients(&whole, &joined)) {
        let (found, expected) = (found.unwrap(), expected.unwrap());
        // A bound of a rank's own gradient: its examples' gradients are sums of a few dozen integers.
        let largest = 1e4;
        let bound = (4 * comm.world_size()) as f64 * f64::EPSILON * largest;
        found.iter().zip(&expected).for_each(|(found, expected)| assert!((found - expected).abs() <= bound));
    }
    // All ranks have the gradients of rank 0's two examples, although only rank 0 has computed any.
    let pair = loss(&divided, DType::F64, 0..2);
    let reduced = parallel.backward_of((rank == 0).then_some((&pair, 2))).unwrap().unwrap();
    assert_eq!(gradients(&divided, &reduced), gradients(&whole, &loss(&whole, DType::F64, 0..2).backward().unwrap()));
    assert!(parallel.backward_of(None).unwrap().is_none());
}

/// A frozen layer inside the graph, and a running mean outside it.
fn frozen<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let variables = variables(DType::F32, comm.rank(), device);
    let mean = Var::from_tensor(&integers(&[3], DType::F32, 3, device)).unwrap();
    variables.data().lock().unwrap().insert("norm.running_mean".into(), mean);
    let read = |name: &str| values(&tensor(&variables, name));
    let names = ["down.weight", "down.bias", "norm.running_mean", "up.weight"];
    let before = names.map(read);
    let declared = Variables::from(&variables).with_frozen(|name| name.starts_with("down"));
    assert_eq!(declared.trained().count(), 3);
    let mut parallel = DataParallel::new(declared, comm, ReducerOptions::default()).unwrap();
    let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.125).unwrap();
    for _ in 0..3 {
        let reduced = parallel.backward(&loss(&variables, DType::F32, own(comm))).unwrap();
        let has = SHAPES.map(|(name, _)| reduced.get(&tensor(&variables, name)).is_some());
        assert_eq!(has, [true, true, false, false]);
        optimizer.step(&reduced).unwrap();
    }
    let after = names.map(read);
    assert_eq!(after[..3], before[..3]);
    assert_ne!(after[3], before[3]);
    parallel.compare().unwrap();
}

/// Rank 0 uses both layers, the others the second alone; no rank uses a third.
fn unused<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let vars = [1, 2, 3].map(|seed| Var::from_tensor(&integers(&[4], DType::F32, seed, device)).unwrap());
    let [first, second, third] = &vars;
    let all = || ["first", "second", "third"].into_iter().zip(vars.clone()).collect::<Variables>();
    let loss = |rank: usize| {
        let own = (second.as_tensor() * (rank + 1) as f64).unwrap().sum_all().unwrap();
        if rank == 0 { (own + first.sum_all().unwrap()).unwrap() } else { own }
    };
    let world_size = comm.world_size();
    let mut parallel = DataParallel::new(all(), comm, ReducerOptions::default()).unwrap();
    for _ in 0..3 {
        let reduced = parallel.backward(&loss(comm.rank())).unwrap();
        let mean = (1..=world_size).sum::<usize>() as f64 / world_size as f64;
        assert_eq!(values(reduced.get(first).unwrap()), [1.0 / world_size as f64; 4]);
        assert_eq!(values(reduced.get(second).unwrap()), [mean; 4]);
        assert!(reduced.get(third).is_none());
    }
    let mut strict =
        DataParallel::new(all(), comm, ReducerOptions::default().with_absent(AbsentGradients::Error)).unwrap();
    let text = strict.backward(&loss(comm.rank())).unwrap_err().to_string();
    assert!(text.contains("\"third\"") && text.contains("rank 0"), "{text}");
}

fn tied<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let var = Var::from_tensor(&integers(&[4], DType::F32, 1, device)).unwrap();
    let all = named([("tokens", &var), ("scores", &var)]);
    let mut parallel = DataParallel::new(all, comm, ReducerOptions::default()).unwrap();
    for _ in 0..3 {
        let reduced =
            parallel.backward(&(var.as_tensor() * (comm.rank() + 1) as f64).unwrap().sum_all().unwrap()).unwrap();
        assert_eq!(values(reduced.get(&var).unwrap()), [(comm.world_size() + 1) as f64 / 2.0; 4]);
    }
}

fn clip<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let vars = [[3.0, 0.0], [0.0, 4.0]].map(|values| {
            let tensor = Tensor::new(&values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            Var::from_tensor(&on(device, tensor)).unwrap()
        });
        let all = named([("a", &vars[0]), ("b", &vars[1])]);
        let mut parallel = DataParallel::new(all, comm, ReducerOptions::default()).unwrap();
        // The gradient of half the square is the variable itself.
        let half = |var: &Var| (var.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap() / 2.0).unwrap();
        let loss = (half(&vars[0]) + half(&vars[1])).unwrap();
        let mut reduced = parallel.backward(&loss).unwrap();
        let norm = |norm: Tensor| norm.to_dtype(DType::F64).unwrap().to_scalar::<f64>().unwrap();
        assert_eq!(norm(parallel.clip_gradients(&mut reduced, 5.0).unwrap()), 5.0);
        assert_eq!(values(reduced.get(&vars[0]).unwrap()), [3.0, 0.0]);
        assert_eq!(norm(parallel.clip_gradients(&mut reduced, 2.5).unwrap()), 5.0);
        assert_eq!(values(reduced.get(&vars[0]).unwrap()), [1.5, 0.0]);
        assert_eq!(values(reduced.get(&vars[1]).unwrap()), [0.0, 2.0]);
        let text = parallel.clip_gradients(&mut reduced, f64::NAN).unwrap_err().to_string();
        assert!(text.contains("max_norm is NaN"), "{text}");
        // Two gradients in one storage would be scaled twice.
        let shared = reduced.get(&vars[0]).unwrap().clone();
        reduced.insert(&vars[1], shared);
        let text = parallel.clip_gradients(&mut reduced, 0.5).unwrap_err().to_string();
        assert!(text.contains("\"b\"") && text.contains("storage"), "{text}");
        assert_eq!(values(reduced.get(&vars[0]).unwrap()), [1.5, 0.0]);
    }
    if device.is_cpu() {
        clip_of_any_magnitude(comm);
    }
}

/// Squares, and the factor that clips, may leave the range of their dtypes where neither the norm nor the clipped gradients do.
fn clip_of_any_magnitude<M: TensorMemory>(comm: &dyn Communicator<M>) {
    let near = |found: f64, expected: f64, digits: f64| assert!((found / expected - 1.0).abs() < digits, "{found:e}");
    for (dtype, magnitude, digits) in
        [(DType::F64, 2e200, 1e-14), (DType::F64, 3e307, 1e-14), (DType::F64, 2e-200, 1e-14), (DType::F32, 6e37, 1e-6)]
    {
        let tensor = Tensor::new(&[3.0f64 * magnitude, 4.0 * magnitude], &Device::Cpu).unwrap();
        let var = Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap();
        let mut parallel = DataParallel::new(named([("a", &var)]), comm, ReducerOptions::default()).unwrap();
        for max_norm in [1.0, 1e-3, 1e-220] {
            // The gradient of a product with a constant is the constant.
            let loss = (var.as_tensor() * var.as_detached_tensor()).unwrap().sum_all().unwrap();
            let mut reduced = parallel.backward(&loss).unwrap();
            let norm = parallel.clip_gradients(&mut reduced, max_norm).unwrap().to_scalar::<f64>().unwrap();
            near(norm, 5.0 * magnitude, digits);
            let clipped = values(reduced.get(&var).unwrap());
            let expected = (5.0 * magnitude).min(max_norm);
            match dtype {
                DType::F32 if max_norm < 1e-45 => assert_eq!(clipped, [0.0, 0.0]),
                _ => clipped.iter().zip([0.6, 0.8]).for_each(|(found, part)| near(*found, part * expected, digits)),
            }
        }
    }
}

/// Counts from the third step on, when the buckets are final.
fn allocations(comm: &dyn Communicator, device: &Device) {
    let var = Var::zeros(LARGE / 4, DType::F32, device).unwrap();
    let all = || named([("large", &var)]);
    let loss = || (var.as_tensor() * (comm.rank() + 1) as f64).unwrap().sum_all().unwrap();
    let mut parallel = DataParallel::new(all(), comm, ReducerOptions::default()).unwrap();
    for step in 0..4 {
        let (_, of_candle) = during(|| loss().backward().unwrap());
        let (_, of_both) = during(|| parallel.backward(&loss()).unwrap());
        assert!(of_candle > 0);
        assert!(step < 2 || of_both == of_candle, "{of_both} large allocations, {of_candle} of candle");
    }
    let alone = local::group(1).unwrap().remove(0);
    let mut parallel = DataParallel::new(all(), &alone, ReducerOptions::default()).unwrap();
    let (_, of_candle) = during(|| loss().backward().unwrap());
    let (_, of_both) = during(|| parallel.backward(&loss()).unwrap());
    assert_eq!(of_both, of_candle, "one rank copies nothing, from the first step on");
}
