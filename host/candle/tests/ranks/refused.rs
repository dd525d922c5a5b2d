//! Any failure on one rank is an error of every rank.

use candle_core::{DType, Device, Tensor, Var};
use gradsync::comm::Communicator;
use gradsync::train::ReducerOptions;
use gradsync_candle::{DataParallel, Error, TensorMemory, Variables};

use crate::Case;
use crate::data_parallel::values;

pub(crate) fn all<M: TensorMemory>() -> Vec<Case<M>> {
    vec![
        Case { name: "a dtype that is not reduced", run: dtype },
        Case { name: "other shapes, names and numbers", run: disagreements },
        Case { name: "a loss without gradient", run: loss },
        Case { name: "an error of one rank's micro-batch is its own", run: micro_batch },
    ]
}

fn ones(shape: &[usize], dtype: DType, device: &Device) -> Var {
    Var::ones(shape, dtype, device).unwrap()
}

fn is_last<M: TensorMemory>(comm: &dyn Communicator<M>) -> bool {
    comm.rank() + 1 == comm.world_size()
}

fn named<const N: usize>(vars: [(&str, Var); N]) -> Variables {
    vars.into_iter().collect()
}

fn dtype<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let odd = if is_last(comm) { DType::U32 } else { DType::F32 };
    let error = DataParallel::new(
        named([("a", ones(&[2], DType::F32, device)), ("counter", ones(&[1], odd, device))]),
        comm,
        ReducerOptions::default(),
    )
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("\"counter\"") && text.contains("U32"), "{text}");
    assert_eq!(format!("{error:?}"), text, "what a `main` that returns it prints");
    match error {
        Error::DType { .. } => assert!(is_last(comm)),
        Error::Gradsync(gradsync::Error::InvalidArgument { .. }) => {
            assert!(text.contains(&format!("rank {}", comm.world_size() - 1)) && !is_last(comm));
        }
        error => panic!("{error:?}"),
    }
}

fn disagreements<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let last = is_last(comm);
    let size = if last { 3 } else { 2 };
    let odd_name = if last { "bias" } else { "weight" };
    let mut more = vec![("a", ones(&[2], DType::F32, device))];
    more.extend(last.then(|| ("b", ones(&[2], DType::F32, device))));
    let cases = [
        (named([("a", ones(&[size], DType::F32, device))]), "[3]"),
        (named([(odd_name, ones(&[2], DType::F32, device))]), "bias"),
        (more.into_iter().collect(), "\"b\""),
        (named([("a", ones(&[2], if last { DType::F16 } else { DType::F32 }, device))]), "f16"),
        (named([("a", ones(&[2], DType::F32, device))]).with_frozen(|_| last), "trained"),
    ];
    for (variables, value) in cases {
        let error = DataParallel::new(variables, comm, ReducerOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Gradsync(gradsync::Error::Disagreement(_))), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(value) && text.contains(&format!("rank {}", comm.world_size() - 1)), "{text}");
    }
}

/// candle's transposed convolution in one dimension has no gradient.
fn one_way(var: &Var) -> Tensor {
    let kernel = Tensor::ones((2, 1, 1), DType::F32, var.device()).unwrap();
    var.reshape((1, 2, 4)).unwrap().conv_transpose1d(&kernel, 0, 0, 1, 1, 1).unwrap()
}

/// The next step runs after a failure.
fn loss<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let var = ones(&[2, 4], DType::F32, device);
    let mut parallel = DataParallel::new(named([("a", var.clone())]), comm, ReducerOptions::default()).unwrap();
    for _ in 0..2 {
        let loss = match is_last(comm) {
            true => one_way(&var),
            false => var.as_tensor().clone(),
        };
        let text = parallel.backward(&loss.sum_all().unwrap()).unwrap_err().to_string();
        let names_rank = text.contains(&format!("rank {}", comm.world_size() - 1));
        assert!(text.contains("backward") && (is_last(comm) || names_rank), "{text}");
        let reduced =
            parallel.backward(&(var.as_tensor() * (comm.rank() + 1) as f64).unwrap().sum_all().unwrap()).unwrap();
        let mean = (comm.world_size() + 1) as f64 / 2.0;
        assert_eq!(values(reduced.get(&var).unwrap()), [mean; 8]);
    }
}

fn micro_batch<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let var = ones(&[2, 4], DType::F32, device);
    let mut parallel = DataParallel::new(named([("a", var.clone())]), comm, ReducerOptions::default()).unwrap();
    let good = var.sum_all().unwrap();
    parallel.accumulate(&good).unwrap();
    if is_last(comm) {
        assert!(matches!(parallel.accumulate(&one_way(&var).sum_all().unwrap()), Err(Error::Candle(_))));
    }
    let reduced = parallel.backward(&good).unwrap();
    assert_eq!(values(reduced.get(&var).unwrap()), [2.0; 8]);
}
