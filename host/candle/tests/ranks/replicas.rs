//! Every rank has the same variables: at the start, at checkpoints, and buffers after they were averaged.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{BatchNorm, ModuleT, Optimizer, SGD, VarBuilder, VarMap, batch_norm};
use gradsync::comm::{Communicator, Ranks, local};
use gradsync::train::{Reduction, Start};
use gradsync_candle::{DataParallel, DataParallelOptions, Error, TensorMemory, Variables};

use crate::allocations::{LARGE, during};
use crate::data_parallel::{on, values};
use crate::{Case, is_last, named, names_last};

/// The cases of any memory.
pub(crate) fn all<M: TensorMemory>() -> Vec<Case<M>> {
    vec![
        Case { name: "new: rank 0's values for many variables", run: start },
        Case { name: "new: Start::Compare", run: start_compared },
        Case { name: "broadcast and compare later", run: later },
        Case { name: "compare and average_buffers: a BatchNorm", run: norms },
        Case { name: "average_buffers: dtypes, and equal frozen variables", run: buffers },
    ]
}

/// The cases of the host: also the count of its allocations.
pub(crate) fn on_host() -> Vec<Case> {
    all().into_iter().chain([Case { name: "broadcast: no second copy", run: in_place }]).collect()
}

/// 150 variables of four dtypes, of which every fifth is frozen, with other random values on each rank.
fn random(device: &Device) -> (Vec<Var>, Variables) {
    let kinds = [DType::F16, DType::F32, DType::BF16, DType::F64];
    // CUDA refuses to allocate zero bytes, so that only the host has variables without elements.
    let rows = |index: usize| if device.is_cpu() { index % 7 } else { index % 6 + 1 };
    let var = |index: usize| {
        let random = Var::randn_f64(0.0, 1.0, (rows(index), 3), kinds[index % 4], &Device::Cpu);
        Var::from_tensor(&on(device, random.unwrap().as_detached_tensor())).unwrap()
    };
    let vars: Vec<Var> = (0..150).map(var).collect();
    let all: Variables = vars.iter().enumerate().map(|(index, var)| (format!("{index}"), var.clone())).collect();
    (vars, all.with_frozen(|name| name.ends_with(['4', '9'])))
}

fn all_values(vars: &[Var]) -> Vec<Vec<f64>> {
    vars.iter().map(|var| values(var)).collect()
}

/// Whether all ranks have the same numbers.
fn agree<M: TensorMemory>(comm: &dyn Communicator<M>, numbers: &[f64]) -> bool {
    let words: Vec<u64> = numbers.iter().map(|number| number.to_bits()).collect();
    comm.gather_words(&words).unwrap().chunks_exact(words.len()).all(|rank| rank == words)
}

fn start<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (vars, all) = random(device);
    let before = all_values(&vars);
    let parallel = DataParallel::new(all, comm, Reduction::Mean).unwrap();
    let after = all_values(&vars);
    assert_eq!(before == after, comm.rank() == 0);
    assert!(agree(comm, &after.concat()), "frozen variables too");
    parallel.compare().unwrap();
}

fn start_compared<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let options = DataParallelOptions::from(Reduction::Mean).with_start(Start::Compare);
    let (vars, all) = random(device);
    if comm.world_size() > 1 {
        let before = all_values(&vars);
        let text = DataParallel::new(all.clone(), comm, options).unwrap_err().to_string();
        assert!(text.contains("differ"), "{text}");
        assert_eq!(all_values(&vars), before);
    }
    DataParallel::new(all.clone(), comm, Reduction::Mean).unwrap();
    DataParallel::new(all.clone(), comm, options).unwrap();
    for odd in ["100", "104"] {
        let var = &vars[odd.parse::<usize>().unwrap()];
        let value = var.copy().unwrap();
        if comm.world_size() > 1 && is_last(comm) {
            var.set(&(&value + 1.0).unwrap()).unwrap();
        }
        let refused = DataParallel::new(all.clone(), comm, options).map_err(|error| error.to_string());
        if comm.world_size() > 1 {
            let text = refused.unwrap_err();
            assert!(text.contains(&format!("{odd:?}")) && names_last(comm, &text), "{text}");
        }
        var.set(&value).unwrap();
    }
}

fn later<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (vars, all) = random(device);
    let parallel = DataParallel::new(all, comm, Reduction::Mean).unwrap();
    for _ in 0..2 {
        if comm.world_size() > 1 && is_last(comm) {
            vars[100].set(&(vars[100].as_tensor() + 1.0).unwrap()).unwrap();
        }
        if comm.world_size() > 1 {
            let text = parallel.compare().unwrap_err().to_string();
            assert!(text.contains("\"100\"") && names_last(comm, &text), "{text}");
        }
        parallel.broadcast().unwrap();
        parallel.compare().unwrap();
    }
}

/// The rank's own examples, of two features.
fn examples(dtype: DType, rank: usize, step: usize, device: &Device) -> Tensor {
    let value = |index: usize| ((index * 5 + rank * 7 + step * 3) % 11) as f64 / 4.0;
    let data: Vec<f64> = (0..16).map(value).collect();
    on(device, Tensor::from_vec(data, (8, 2), &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

fn norm(dtype: DType, device: &Device) -> (VarMap, BatchNorm) {
    let map = VarMap::new();
    let norm = batch_norm(2, 1e-5, VarBuilder::from_varmap(&map, dtype, device).pp("norm")).unwrap();
    (map, norm)
}

/// Running statistics differ between ranks, whether they are declared as frozen or not; trained variables do not, and are compared.
fn norms<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    for (dtype, is_declared) in [(DType::F32, true), (DType::F32, false), (DType::F64, true)] {
        let (map, norm) = norm(dtype, device);
        let variables = Variables::from(&map).with_frozen(|name| is_declared && name.contains("running_"));
        let mut parallel = DataParallel::new(variables, comm, Reduction::Mean).unwrap();
        let mut optimizer = SGD::new(map.all_vars(), 0.125).unwrap();
        for step in 0..3 {
            let output = norm.forward_t(&examples(dtype, comm.rank(), step, device), true).unwrap();
            let loss = (output - 1.0).unwrap().powf(4.0).unwrap().mean_all().unwrap();
            optimizer.step(&parallel.backward(&loss).unwrap()).unwrap();
        }
        let statistics = || [values(norm.running_mean()), values(norm.running_var())].concat();
        let own = statistics();
        assert_eq!(agree(comm, &own), comm.world_size() == 1);
        parallel.compare().unwrap();
        assert_eq!(statistics(), own);
        let words: Vec<u64> = own.iter().map(|number| number.to_bits()).collect();
        let of_ranks = comm.gather_words(&words).unwrap();
        parallel.average_buffers().unwrap();
        for (index, found) in statistics().into_iter().enumerate() {
            let of_ranks = of_ranks.iter().skip(index).step_by(own.len()).map(|word| f64::from_bits(*word));
            let mean = of_ranks.sum::<f64>() / comm.world_size() as f64;
            // Sums of a few positive numbers, rounded to `f32` at most once for each rank.
            let bound = mean.abs() * comm.world_size() as f64 * if dtype == DType::F32 { 2e-7 } else { 1e-15 };
            assert!((found - mean).abs() <= bound, "{found} and {mean}");
        }
        assert!(agree(comm, &statistics()));
        parallel.compare().unwrap();
        // A trained variable that differs is still found, and no call of this page changes it.
        let (weight, _) = norm.weight_and_bias().unwrap();
        if comm.world_size() > 1 && is_last(comm) {
            Var::from_tensor(weight).unwrap().set(&weight.zeros_like().unwrap()).unwrap();
        }
        if comm.world_size() > 1 {
            parallel.average_buffers().unwrap();
            let text = parallel.compare().unwrap_err().to_string();
            assert!(text.contains("\"norm.weight\"") && names_last(comm, &text), "{text}");
        }
    }
}

/// Means that need more than the range of `f16`, and variables that are equal: three times a third, divided by three, is another number.
fn buffers<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (rank, world_size) = (comm.rank() as f64, comm.world_size() as f64);
    let base: Vec<f64> = (1..200).map(|index| 1.0 + 1.0 / f64::from(index)).collect();
    let base = Var::from_tensor(&Tensor::from_vec(base, 199, device).unwrap()).unwrap();
    let kinds = [DType::F16, DType::BF16, DType::F32, DType::F64];
    let vars = kinds.map(|dtype| Var::ones(3, dtype, device).unwrap());
    let trained = Var::ones(2, DType::F32, device).unwrap();
    let named = ["a", "b", "c", "d"].into_iter().zip(vars.clone());
    let all: Variables = named.chain([("base", base.clone()), ("trained", trained.clone())]).collect();
    let parallel = DataParallel::new(all.with_frozen(|name| name != "trained"), comm, Reduction::Mean).unwrap();
    let before = values(&base);
    for var in &vars {
        var.set(&(var.ones_like().unwrap() * (32768.0 - 256.0 * rank)).unwrap()).unwrap();
    }
    parallel.average_buffers().unwrap();
    let mean = 32768.0 - 128.0 * (world_size - 1.0);
    for var in &vars {
        let rounded = Tensor::new(mean, &Device::Cpu).unwrap().to_dtype(var.dtype()).unwrap();
        assert_eq!(values(var), values(&rounded).repeat(3), "{:?}", var.dtype());
    }
    assert_eq!(values(&base), before);
}

fn in_place(comm: &dyn Communicator, device: &Device) {
    let large = Var::ones(LARGE, DType::F32, device).unwrap();
    let parallel = DataParallel::new(named([("large", &large)]), comm, Reduction::Mean).unwrap();
    let (_, copies) = during(|| parallel.broadcast().unwrap());
    assert_eq!(copies, 0);
}

#[test]
fn new_with_another_start_on_one_rank() {
    let texts = local::run(3, |comm| {
        let all = named([("one", &Var::ones(2, DType::F32, &Device::Cpu)?)]);
        let start = if comm.rank() == 1 { Start::Compare } else { Start::Broadcast };
        let options = DataParallelOptions::default().with_start(start);
        Ok::<_, Error>(DataParallel::new(all, &comm, options).unwrap_err().to_string())
    });
    for text in texts.unwrap() {
        assert!(text.contains("rank 1") && text.contains("broadcast") && text.contains("compare"), "{text}");
    }
}
