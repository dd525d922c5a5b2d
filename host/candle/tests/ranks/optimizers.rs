//! Optimizers of candle's variables: against candle's own, on one rank and on several.

use std::sync::mpsc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use candle_nn::optim::{AdamW as CandleAdamW, Optimizer as _, ParamsAdamW, SGD};
use gradsync::comm::Communicator;
use gradsync::train::{
    self, AdamWOptions, LossScaler, NonFinite, ParameterGroup, ReducerOptions, SgdOptions, UpdateOutcome,
};
use gradsync_candle::{AdamW, DataParallel, Error, Optimizer, Sgd, TensorMemory, Variables};

use crate::data_parallel::{self as layers, integers, own, values};
use crate::{Case, gpt, is_last, named};

/// The cases of any memory.
pub(crate) fn all<M: TensorMemory>() -> Vec<Case<M>> {
    vec![
        Case { name: "AdamW as candle's", run: as_candle },
        Case { name: "Sgd as on one rank, bit for bit", run: joined },
        Case { name: "AdamW as candle's with all examples", run: joined_adam },
        Case { name: "frozen groups and variables that some ranks or none use", run: unused },
        Case { name: "clipping as by candle's operations", run: clipped },
        Case { name: "infinities under a scaler", run: skipped },
        Case { name: "NonFinite::Skip makes no step of the optimizer", run: left_to_the_reducer },
        Case { name: "narrow variables with master copies", run: narrow },
        Case { name: "an optimizer of other variables", run: other_variables },
    ]
}

/// The cases of the host, whose errors are those of the call, and whose tests can hold a lock.
pub(crate) fn on_host() -> Vec<Case> {
    let more = [
        Case { name: "infinities without a scaler", run: refused },
        Case { name: "gradients that cannot be lent", run: storages },
        Case { name: "a step while another thread reads", run: contended },
    ];
    all().into_iter().chain(more).collect()
}

const STEPS: usize = 100;
const RATE: f64 = 0.01;

/// The largest difference.
fn distance(one: &[Vec<f64>], other: &[Vec<f64>]) -> f64 {
    let pairs = one.iter().flatten().zip(other.iter().flatten());
    pairs.fold(0.0, |most: f64, (one, other)| most.max((one - other).abs()))
}

/// The values of all variables, by name.
fn weights(variables: &VarMap) -> Vec<Vec<f64>> {
    Variables::from(variables).iter().map(|(_, var)| values(var)).collect()
}

/// Trains by candle's AdamW.
fn by_candle(variables: &VarMap, steps: usize, loss: impl Fn() -> Tensor) -> Vec<Vec<f64>> {
    let params = ParamsAdamW { lr: RATE, ..Default::default() };
    let mut optimizer = CandleAdamW::new(variables.all_vars(), params).unwrap();
    (0..steps).for_each(|_| optimizer.backward_step(&loss()).unwrap());
    weights(variables)
}

/// Trains by this crate's.
fn by_gradsync<M: TensorMemory>(variables: &VarMap, steps: usize, loss: impl Fn() -> Tensor) -> Vec<Vec<f64>> {
    let mut optimizer = AdamW::<M>::new(variables, RATE).unwrap();
    (0..steps).for_each(|_| optimizer.step(&loss().backward().unwrap()).unwrap());
    assert_eq!(optimizer.report().unwrap().applied, steps as u64);
    weights(variables)
}

/// Both evaluate one formula in another order, so results differ by rounding, which each step carries on. Rounding errors are proportional
/// to the unit roundoff: the error of candle's AdamW in `f32` is measured against `f64`. This crate's error in `f32` may be as large, and
/// the difference of both in `f64` 2⁻²⁹ of that, times 16 for errors that happen to be small.
fn compare(runs: impl Fn(DType, bool) -> Vec<Vec<f64>>) {
    let (wide, narrow) = (runs(DType::F64, true), runs(DType::F32, true));
    let error = distance(&wide, &narrow);
    for (dtype, bound) in [(DType::F32, 16.0 * error), (DType::F64, 16.0 * 2f64.powi(-29) * error)] {
        let found = distance(&wide, &runs(dtype, false));
        assert!(found <= bound, "{dtype:?}: {found:e} apart, at most {bound:e}");
    }
}

fn as_candle<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    compare(|dtype, of_candle| {
        let variables = layers::variables(dtype, comm.rank(), device);
        let loss = || layers::loss(&variables, dtype, 0..layers::BATCH);
        if of_candle { by_candle(&variables, STEPS, loss) } else { by_gradsync::<M>(&variables, STEPS, loss) }
    });
    let start = VarMap::new();
    gpt::model(&start, DType::F32, device);
    compare(|dtype, of_candle| {
        let variables = VarMap::new();
        let model = gpt::model(&variables, dtype, device);
        for (name, var) in Variables::from(&start).iter() {
            variables.data().lock().unwrap()[name].set(&var.to_dtype(dtype).unwrap()).unwrap();
        }
        let loss = || model.loss(&gpt::text(), &[0, 1]).unwrap();
        if of_candle { by_candle(&variables, 5, loss) } else { by_gradsync::<M>(&variables, 5, loss) }
    });
}

/// Two steps of plain descent: three would round in `f64`. In the second, each example is a micro-batch.
fn joined<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    for options in layers::options() {
        let divided = layers::variables(DType::F64, comm.rank(), device);
        let whole = layers::variables(DType::F64, 0, device);
        let mut parallel = DataParallel::new(&divided, comm, options).unwrap();
        let mut optimizer = Sgd::new(&divided, 0.25).unwrap();
        let mut reference = SGD::new(whole.all_vars(), 0.25).unwrap();
        let (count, last) = (own(comm).len(), own(comm).end - 1);
        let part = |example: usize| (layers::loss(&divided, DType::F64, example..example + 1) / count as f64).unwrap();
        for step in 0..2 {
            match step {
                0 => parallel.step(&layers::loss(&divided, DType::F64, own(comm)), &mut optimizer).unwrap(),
                _ => {
                    own(comm).take(count - 1).for_each(|example| parallel.accumulate(&part(example)).unwrap());
                    parallel.step(&part(last), &mut optimizer).unwrap();
                }
            }
            reference.backward_step(&layers::loss(&whole, DType::F64, 0..layers::BATCH)).unwrap();
            assert_eq!(weights(&divided), weights(&whole), "step {step}");
        }
        parallel.compare().unwrap();
    }
}

/// See [`compare`].
fn joined_adam<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    compare(|dtype, of_candle| {
        let variables = layers::variables(dtype, comm.rank(), device);
        if of_candle {
            return by_candle(&variables, STEPS, || layers::loss(&variables, dtype, 0..layers::BATCH));
        }
        let mut parallel = DataParallel::new(&variables, comm, ReducerOptions::default()).unwrap();
        let mut optimizer = AdamW::new(parallel.variables(), AdamWOptions::default().with_rate(RATE)).unwrap();
        for step in 0..STEPS {
            let loss = layers::loss(&variables, dtype, own(comm));
            parallel.at(step as u64).step(&loss, &mut optimizer).unwrap();
        }
        parallel.compare().unwrap();
        weights(&variables)
    });
}

fn four_ones(device: &Device) -> [Var; 4] {
    std::array::from_fn(|_| Var::ones(3, DType::F32, device).unwrap())
}

fn sum(var: &Var) -> Tensor {
    var.sum_all().unwrap()
}

/// The first variable is frozen by a group, all ranks use the second, rank 0 alone the third, and no rank the fourth.
fn unused<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let vars = four_ones(device);
    let names = ["a.frozen", "b", "c", "d"];
    let variables: Variables = names.into_iter().zip(vars.clone()).collect();
    let mut parallel = DataParallel::new(&variables, comm, ReducerOptions::default()).unwrap();
    let optimizer = train::AdamW::new(0.125).unwrap();
    let groups = [ParameterGroup::matching("*.frozen").with_frozen(true)];
    let mut optimizer = AdamW::of(&variables, optimizer.with_groups(groups).unwrap()).unwrap();
    for _ in 0..3 {
        let mut loss = (sum(&vars[0]) + sum(&vars[1])).unwrap();
        if comm.rank() == 0 {
            loss = (loss + sum(&vars[2])).unwrap();
        }
        parallel.step(&loss, &mut optimizer).unwrap();
    }
    let is_changed = vars.each_ref().map(|var| values(var) != [1.0; 3]);
    assert_eq!(is_changed, [false, true, true, false]);
    let named: Vec<&str> = optimizer.vectors().map(|(name, ..)| name).collect();
    assert_eq!(named, ["b", "b", "c", "c", "d", "d"]);
    for (name, _, vector) in optimizer.vectors() {
        let is_zero = M::to_vec::<f32>(vector).unwrap().iter().all(|value| *value == 0.0);
        assert_eq!(is_zero, name == "d", "{name}");
    }
    parallel.compare().unwrap();
}

/// The gradient of half the square is the variable itself, and the norm is 5.
fn clipped<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    for dtype in [DType::F32, DType::F64] {
        let variables = || {
            let pair = [[3.0, 0.0], [0.0, 4.0]].map(|values| {
                let values = Tensor::new(&values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                Var::from_tensor(&values.to_device(device).unwrap()).unwrap()
            });
            (named([("a", &pair[0]), ("b", &pair[1])]), pair)
        };
        let loss = |[a, b]: &[Var; 2]| {
            let half = |var: &Var| (var.sqr().unwrap().sum_all().unwrap() / 2.0).unwrap();
            (half(a) + half(b)).unwrap()
        };
        for max_norm in [2.5, 10.0] {
            let ((all, fused), (also, apart)) = (variables(), variables());
            let mut parallel = DataParallel::new(&all, comm, ReducerOptions::default()).unwrap();
            let optimizer = train::Sgd::new(0.5).unwrap().with_max_norm(max_norm).unwrap();
            let mut optimizer = Sgd::of(&all, optimizer).unwrap();
            parallel.step(&loss(&fused), &mut optimizer).unwrap();
            assert_eq!(optimizer.report().unwrap().norm, 5.0);
            let mut parallel = DataParallel::new(&also, comm, ReducerOptions::default()).unwrap();
            let mut gradients = parallel.backward(&loss(&apart)).unwrap();
            parallel.clip_gradients(&mut gradients, max_norm).unwrap();
            SGD::new(apart.to_vec(), 0.5).unwrap().step(&gradients).unwrap();
            let factor = 1.0 - 0.5 * (max_norm / 5.0f64).min(1.0);
            assert_eq!(values(&fused[0]), [3.0 * factor, 0.0]);
            assert_eq!(fused.each_ref().map(|var| values(var)), apart.each_ref().map(|var| values(var)));
        }
    }
}

/// A loss whose gradients are ones, but on the last rank in these steps.
fn loss_of<M: TensorMemory>(comm: &dyn Communicator<M>, [a, b]: [&Var; 2], is_odd: bool) -> Tensor {
    let factor = if is_odd && is_last(comm) { f64::INFINITY } else { 1.0 };
    (sum(a) + (sum(b) * factor).unwrap()).unwrap()
}

fn skipped<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let [a, b, ..] = four_ones(device);
    let all = named([("a", &a), ("b", &b)]);
    let mut parallel = DataParallel::new(&all, comm, ReducerOptions::default()).unwrap();
    let optimizer = train::AdamW::new(0.125).unwrap().with_scaler(LossScaler::default().with_initial(1024.0)).unwrap();
    let mut optimizer = AdamW::of(&all, optimizer).unwrap();
    let read = |optimizer: &AdamW<M>| {
        let vectors = optimizer.vectors().map(|(.., vector)| M::to_vec::<f32>(vector).unwrap());
        (values(&a), values(&b), vectors.collect::<Vec<_>>())
    };
    let mut scale = 1024.0;
    for step in 0..6 {
        assert_eq!(optimizer.loss_scale().unwrap(), scale);
        let before = read(&optimizer);
        let is_odd = step % 3 == 1;
        let loss = (loss_of(comm, [&a, &b], is_odd) * scale).unwrap();
        parallel.at(step).step(&loss, &mut optimizer).unwrap();
        let report = optimizer.report().unwrap();
        let words = [report.norm.to_bits(), report.scale.to_bits(), report.applied, report.skipped];
        let all = comm.gather_words(&words).unwrap();
        assert!(all.chunks_exact(words.len()).all(|others| others == words), "{all:?}");
        assert_eq!(read(&optimizer) == before, is_odd);
        if is_odd {
            scale /= 2.0;
            assert_eq!(report.outcome, UpdateOutcome::NotFinite);
        } else {
            assert_eq!(report.outcome, UpdateOutcome::Applied);
            assert!((report.norm - 6f64.sqrt()).abs() < 1e-6, "{report:?}");
        }
        assert_eq!(report.scale, scale);
    }
    assert_eq!(optimizer.report().unwrap().skipped, 2);
    parallel.compare().unwrap();
}

fn left_to_the_reducer<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let [a, b, ..] = four_ones(device);
    let all = named([("a", &a), ("b", &b)]);
    let options = ReducerOptions::default().with_non_finite(NonFinite::Skip);
    let mut parallel = DataParallel::new(&all, comm, options).unwrap();
    let mut optimizer = AdamW::new(&all, 0.125).unwrap();
    for is_odd in [false, true, false] {
        let before = values(&a);
        parallel.step(&loss_of(comm, [&a, &b], is_odd), &mut optimizer).unwrap();
        assert_eq!(values(&a) == before, is_odd);
        assert_eq!(parallel.non_finite().is_some(), is_odd);
    }
    assert_eq!(optimizer.applied_steps().unwrap(), 2);
}

/// The error is of the step with the infinity, and of that step alone.
fn refused(comm: &dyn Communicator, device: &Device) {
    let [a, b, ..] = four_ones(device);
    let all = named([("a", &a), ("b", &b)]);
    let mut parallel = DataParallel::new(&all, comm, ReducerOptions::default()).unwrap();
    let mut optimizer = AdamW::new(&all, 0.125).unwrap();
    for is_odd in [false, true, false, true] {
        let before = values(&a);
        let outcome = parallel.step(&loss_of(comm, [&a, &b], is_odd), &mut optimizer);
        assert_eq!(outcome.is_err(), is_odd, "{outcome:?}");
        if let Err(error) = outcome {
            assert!(error.to_string().contains("NaN or infinities"), "{error}");
        }
        assert_eq!(values(&a) == before, is_odd);
    }
    parallel.compare().unwrap();
}

/// Steps of a hundredth of a unit in the last place of the weight add up in the master copy.
fn narrow<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    for (dtype, rate) in [(DType::BF16, 2f64.powi(-14)), (DType::F16, 2f64.powi(-17))] {
        let var = Var::ones(3, dtype, device).unwrap();
        let all = named([("a", &var)]);
        let mut parallel = DataParallel::new(&all, comm, ReducerOptions::default()).unwrap();
        let mut optimizer = Sgd::new(&all, SgdOptions::default().with_rate(rate)).unwrap();
        for _ in 0..128 {
            parallel.step(&sum(&var), &mut optimizer).unwrap();
        }
        // All numbers are sums of powers of two with few digits: nothing is rounded.
        assert_eq!(values(&var), [1.0 - 128.0 * rate; 3], "{dtype:?}");
    }
}

/// The next step runs after the refusal.
fn other_variables<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let [a, b, c, _] = four_ones(device);
    let all = named([("a", &a), ("b", &b)]);
    let mut parallel = DataParallel::new(&all, comm, ReducerOptions::default()).unwrap();
    let mut optimizer = AdamW::new(&all, 0.125).unwrap();
    for (others, name) in [
        (named([("a", &a)]), "\"b\""),
        (named([("a", &a), ("other", &b)]), "\"b\""),
        (named([("a", &a), ("b", &b), ("more", &c)]), "\"more\""),
    ] {
        let mut others = AdamW::new(if is_last(comm) { others } else { all.clone() }, 0.125).unwrap();
        let text = parallel.step(&loss_of(comm, [&a, &b], false), &mut others).unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
        assert_eq!(values(&a), [1.0; 3]);
    }
    parallel.step(&loss_of(comm, [&a, &b], false), &mut optimizer).unwrap();
    assert_ne!(values(&a), [1.0; 3]);
    // Frozen variables belong to neither.
    let declared = all.with_frozen(|name| name == "b");
    let mut parallel = DataParallel::new(&declared, comm, ReducerOptions::default()).unwrap();
    let mut optimizer = AdamW::new(&declared, 0.125).unwrap();
    let before = values(&b);
    parallel.step(&loss_of(comm, [&a, &b], false), &mut optimizer).unwrap();
    assert_eq!(values(&b), before);
}

fn storages(_: &dyn Communicator, device: &Device) {
    let [a, b, counter, _] = four_ones(device);
    let mut optimizer: AdamW = AdamW::new(named([("a", &a), ("b", &b)]), 0.125).unwrap();
    let mut gradients = (sum(&a) + sum(&b)).unwrap().backward().unwrap();
    let shared = gradients.get(&a).unwrap().clone();
    gradients.insert(&b, shared);
    let error = optimizer.step(&gradients).unwrap_err();
    assert!(matches!(&error, Error::Storage { name, .. } if name == "b"), "{error}");
    gradients.insert(&b, b.as_tensor().clone());
    let error = optimizer.step(&gradients).unwrap_err();
    assert!(matches!(&error, Error::Storage { name, .. } if name == "b"), "{error}");
    gradients.insert(&b, integers(&[1, 3], DType::F32, 1, device));
    let text = optimizer.step(&gradients).unwrap_err().to_string();
    assert!(text.contains("\"b\"") && text.contains("[1, 3]"), "{text}");
    assert_eq!(values(&a), [1.0; 3]);
    let counter = Var::from_tensor(&counter.to_dtype(DType::U32).unwrap()).unwrap();
    let error = Sgd::<gradsync::memory::Host>::new(named([("counter", &counter)]), 0.1).unwrap_err();
    assert!(matches!(&error, Error::DType { name, .. } if name == "counter"), "{error}");
    let text = AdamW::<gradsync::memory::Host>::new(named([("a", &a)]), f64::NAN).unwrap_err().to_string();
    assert!(text.contains("rate is NaN"), "{text}");
}

/// The other thread holds the storage of one variable while it takes the other one's: a step that held one of two would wait forever.
fn contended(_: &dyn Communicator, device: &Device) {
    let [a, b, ..] = four_ones(device);
    let mut optimizer: Optimizer<SgdOptions> = Optimizer::new(named([("a", &a), ("b", &b)]), 0.25).unwrap();
    let gradients = (sum(&a) + sum(&b)).unwrap().backward().unwrap();
    for (held, taken) in [(&a, &b), (&b, &a)] {
        std::thread::scope(|scope| {
            let (sender, holds) = mpsc::channel();
            scope.spawn(move || {
                let storage = held.storage_and_layout();
                sender.send(()).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(50));
                taken.set(&taken.ones_like().unwrap()).unwrap();
                drop(storage);
            });
            holds.recv().unwrap();
            optimizer.step(&gradients).unwrap();
        });
    }
    assert_eq!(values(&a), [0.75; 3]);
}
