//! The variables that a loss depends on: declared ones, local ones, those of another `DataParallel`, and unknown ones, which are errors.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, VarMap, linear_no_bias};
use gradsync::comm::{Communicator, Ranks, local};
use gradsync::train::Reduction;
use gradsync_candle::{DataParallel, Error, TensorMemory, Variables};

use crate::data_parallel::values;
use crate::{Case, is_last, named, names_last};

pub(crate) fn all<M: TensorMemory>() -> Vec<Case<M>> {
    vec![
        Case { name: "backward: a layer that was made later", run: later_layer },
        Case { name: "backward: variables of no map", run: of_no_map },
        Case { name: "backward: a generator and a critic", run: generator_and_critic },
        Case { name: "with_local: a variable that each rank keeps to itself", run: local_variable },
    ]
}

/// A layer with weights of one in its map.
fn layer(map: &VarMap, name: &str, (from, to): (usize, usize), device: &Device) -> Linear {
    let layer = linear_no_bias(from, to, VarBuilder::from_varmap(map, DType::F32, device).pp(name)).unwrap();
    Var::from_tensor(layer.weight()).unwrap().set(&layer.weight().ones_like().unwrap()).unwrap();
    layer
}

/// One rank's loss passes through a layer that was made after `new`. The next step runs.
fn later_layer<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let map = VarMap::new();
    let first = layer(&map, "first", (2, 3), device);
    let mut parallel = DataParallel::new(&map, comm, Reduction::Mean).unwrap();
    let later = layer(&map, "later", (3, 4), device);
    let input = (Tensor::ones((1, 2), DType::F32, device).unwrap() * (comm.rank() + 1) as f64).unwrap();
    let good = || first.forward(&input).unwrap().sum_all().unwrap();
    let bad = || later.forward(&first.forward(&input).unwrap()).unwrap().sum_all().unwrap();
    let check = |text: String, is_own: bool| {
        let parts = ["\"later.weight\"", "[4, 3]", "F32", "with_local", "with_frozen"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(is_own || names_last(comm, &text), "{text}");
    };
    let is_last = is_last(comm);
    let mean = (comm.world_size() + 1) as f64 / 2.0;
    for _ in 0..3 {
        let loss = if is_last { bad() } else { good() };
        check(parallel.backward(&loss).unwrap_err().to_string(), is_last);
        check(parallel.backward_of(Some((&loss, 4))).unwrap_err().to_string(), is_last);
        // On this rank alone; nothing is added to the sums.
        check(parallel.accumulate(&bad()).unwrap_err().to_string(), true);
        let reduced = parallel.backward(&good()).unwrap();
        assert_eq!(values(reduced.get(first.weight()).unwrap()), [mean; 6]);
    }
    // As the error says.
    drop(parallel);
    let mut parallel = DataParallel::new(&map, comm, Reduction::Mean).unwrap();
    let reduced = parallel.backward(&bad()).unwrap();
    assert_eq!(values(reduced.get(later.weight()).unwrap()), [2.0 * mean; 12]);
}

fn of_no_map<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let known = Var::ones(3, DType::F32, device).unwrap();
    let unknown: Vec<Var> = (1..=6).map(|len| Var::ones(len, DType::F64, device).unwrap()).collect();
    let mut parallel = DataParallel::new(named([("known", &known)]), comm, Reduction::Mean).unwrap();
    let loss = |unknown: &[Var]| {
        let sums = unknown.iter().map(|var| var.sum_all().unwrap().to_dtype(DType::F32).unwrap());
        sums.fold(known.sum_all().unwrap(), |sum, term| (sum + term).unwrap())
    };
    for (count, more) in [(1, false), (6, true)] {
        let text = parallel.backward(&loss(&unknown[..count])).unwrap_err().to_string();
        assert!(text.contains("F64") && text.contains("2 more") == more, "{text}");
        assert!(more || text.contains("[1]"), "{text}");
    }
    // A value that is no part of the graph is no variable of it.
    let detached = (known.as_tensor() * unknown[2].detach().to_dtype(DType::F32).unwrap()).unwrap();
    let reduced = parallel.backward(&detached.sum_all().unwrap()).unwrap();
    assert_eq!(values(reduced.get(&known).unwrap()), [1.0; 3]);
    // With all variables, from no map and from two.
    let mut all = Variables::from(&VarMap::new());
    all.extend([("known", known.clone())]);
    all.extend(unknown.iter().enumerate().map(|(index, var)| (format!("added {index}"), var.clone())));
    let mut parallel = DataParallel::new(all, comm, Reduction::Sum).unwrap();
    let reduced = parallel.backward(&loss(&unknown)).unwrap();
    assert_eq!(values(reduced.get(&unknown[5]).unwrap()), [comm.world_size() as f64; 6]);
}

/// The generator's loss passes through the critic, whose gradients it must leave to the critic, and the other way round. Its optimizer may
/// have all variables.
fn generator_and_critic<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (of_generator, of_critic) = (VarMap::new(), VarMap::new());
    let generator = layer(&of_generator, "generator", (1, 2), device);
    let critic = layer(&of_critic, "critic", (2, 1), device);
    let mut generates = DataParallel::new(&of_generator, comm, Reduction::Mean).unwrap();
    let mut criticizes = DataParallel::new(&of_critic, comm, Reduction::Mean).unwrap();
    let noise = (Tensor::ones((1, 1), DType::F32, device).unwrap() * (comm.rank() + 1) as f64).unwrap();
    let loss = || critic.forward(&generator.forward(&noise).unwrap()).unwrap().sum_all().unwrap();
    let mean = (comm.world_size() + 1) as f64 / 2.0;
    let all = of_generator.all_vars().into_iter().chain(of_critic.all_vars()).collect();
    let mut optimizer = SGD::new(all, 0.5).unwrap();
    let mut expected = [1.0, 1.0];
    for _ in 0..2 {
        let reduced = generates.backward(&loss()).unwrap();
        assert_eq!(values(reduced.get(generator.weight()).unwrap()), [mean * expected[1]; 2]);
        assert!(reduced.get(critic.weight()).is_none());
        optimizer.step(&reduced).unwrap();
        expected[0] -= 0.5 * mean * expected[1];
        let reduced = criticizes.backward(&loss()).unwrap();
        assert_eq!(values(reduced.get(critic.weight()).unwrap()), [mean * expected[0]; 2]);
        assert!(reduced.get(generator.weight()).is_none());
        optimizer.step(&reduced).unwrap();
        expected[1] -= 0.5 * mean * expected[0];
        assert_eq!(values(generator.weight()), [expected[0]; 2]);
        assert_eq!(values(critic.weight()), [expected[1]; 2]);
    }
    generates.compare().unwrap();
    criticizes.compare().unwrap();
    // Without its `DataParallel`, nobody reduces the critic's gradients.
    drop(criticizes);
    let text = generates.backward(&loss()).unwrap_err().to_string();
    assert!(text.contains("[1, 2]"), "{text}");
}

/// Each rank trains a factor of its own, of another shape and dtype on each.
fn local_variable<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let map = VarMap::new();
    let shared = layer(&map, "shared", (1, 1), device);
    let (rank, len) = (comm.rank(), comm.rank() + 1);
    let dtype = if rank == 0 { DType::F64 } else { DType::F32 };
    let own = Var::from_tensor(&Tensor::ones(len, dtype, device).unwrap().affine(1.0, rank as f64).unwrap()).unwrap();
    map.data().lock().unwrap().insert("own".into(), own.clone());
    let frozen = Var::ones(1, DType::F32, device).unwrap();
    map.data().lock().unwrap().insert("still".into(), frozen.clone());
    let variables = Variables::from(&map).with_local(|name| name == "own").with_frozen(|name| name == "still");
    assert_eq!(variables.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["shared.weight", "still", "own"]);
    assert_eq!(variables.trained().count(), 2);
    let tied = || named([("own", &own), ("also", &own)]).with_local(|name| name == "own");
    let mut parallel = DataParallel::new(variables, comm, Reduction::Mean).unwrap();
    assert_eq!(values(&own), vec![(rank + 1) as f64; len], "not broadcast");
    let loss = || {
        let input = Tensor::ones((1, 1), DType::F32, device).unwrap();
        let output = (shared.forward(&input).unwrap().sum_all().unwrap() * (rank + 1) as f64).unwrap();
        let frozen = frozen.sum_all().unwrap().to_dtype(dtype).unwrap();
        let factor = (own.sum_all().unwrap() * frozen).unwrap().to_dtype(DType::F32).unwrap();
        (output + (factor * 10.0).unwrap()).unwrap()
    };
    for _ in 0..3 {
        let mut reduced = parallel.backward(&loss()).unwrap();
        let mean = (comm.world_size() + 1) as f64 / 2.0;
        assert_eq!(values(reduced.get(shared.weight()).unwrap()), [mean]);
        assert_eq!(values(reduced.get(&own).unwrap()), vec![10.0; len]);
        assert!(reduced.get(&frozen).is_none());
        let norm = parallel.clip_gradients(&mut reduced, 100.0).unwrap();
        assert_eq!(values(&norm), [mean]);
    }
    parallel.compare().unwrap();
    let text = DataParallel::new(tied(), comm, Reduction::Mean).unwrap_err().to_string();
    assert!(text.contains("\"own\"") && text.contains("local"), "{text}");
}

/// Ranks that are threads and share one model by mistake would wait for each other's borrows. They may share what they only read.
#[test]
fn new_of_variables_that_threads_share() {
    let [one, other] = [1, 2].map(|len| Var::ones(len, DType::F32, &Device::Cpu).unwrap());
    let shared = || named([("one", &one), ("other", &other)]);
    local::run(3, |comm| {
        let text = DataParallel::new(shared(), &comm, Reduction::Mean).unwrap_err().to_string();
        assert!(text.contains("\"one\"") && text.contains("ranks 0 and 1"), "{text}");
        let own = Var::ones(4, DType::F32, &Device::Cpu)?;
        let mut frozen = shared().with_frozen(|_| true);
        frozen.extend([("own", own.clone())]);
        let mut parallel = DataParallel::new(frozen, &comm, Reduction::Mean)?;
        let reduced = parallel.backward(&(own.as_tensor() * one.broadcast_as(4)?)?.sum_all()?)?;
        assert_eq!(values(reduced.get(&own).unwrap()), [1.0; 4]);
        parallel.average_buffers()?;
        parallel.compare()?;
        // Ranks 0 and 1 share one that rank 2 does not.
        let part = if comm.rank() < 2 { one.clone() } else { Var::ones(1, DType::F32, &Device::Cpu)? };
        let part = named([("part", &part)]).with_frozen(|_| true);
        let text = DataParallel::new(part, &comm, Reduction::Mean).unwrap_err().to_string();
        assert!(text.contains("\"part\""), "{text}");
        Ok::<_, Error>(())
    })
    .unwrap();
}
