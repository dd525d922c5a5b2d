//! Any failure on one rank is an error of every rank.

use candle_core::{DType, Device, Tensor, Var};
use gradsync::comm::Communicator;
use gradsync::train::ReducerOptions;
use gradsync_candle::{DataParallel, Error, TensorMemory};

use crate::data_parallel::values;
use crate::{Case, is_last, named, names_last};

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

fn dtype<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let odd = if is_last(comm) { DType::U32 } else { DType::F32 };
    let all = named([("a", &ones(&[2], DType::F32, device)), ("counter", &ones(&[1], odd, device))]);
    let error = DataParallel::new(all, comm, ReducerOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("\"counter\"") && text.contains("U32"), "{text}");
    assert_eq!(format!("{error:?}"), text, "what a `main` that returns it prints");
    match error {
        Error::DType { .. } => assert!(is_last(comm)),
        Error::Gradsync(gradsync::Error::InvalidArgument { .. }) => assert!(names_last(comm, &text) && !is_last(comm)),
        error => panic!("{error:?}"),
    }
}

fn disagreements<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let last = is_last(comm);
    let size = if last { 3 } else { 2 };
    let odd_name = if last { "bias" } else { "weight" };
    let odd_dtype = if last { DType::F16 } else { DType::F32 };
    let two = || ones(&[2], DType::F32, device);
    let mut more = named([("a", &two())]);
    more.extend(last.then(|| ("b", two())));
    let cases = [
        (named([("a", &ones(&[size], DType::F32, device))]), "[3]"),
        (named([(odd_name, &two())]), "bias"),
        (more, "\"b\""),
        (named([("a", &ones(&[2], odd_dtype, device))]), "f16"),
        (named([("a", &two())]).with_frozen(|_| last), "trained"),
    ];
    for (variables, value) in cases {
        let error = DataParallel::new(variables, comm, ReducerOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Gradsync(gradsync::Error::Disagreement(_))), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(value) && names_last(comm, &text), "{text}");
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
    let mut parallel = DataParallel::new(named([("a", &var)]), comm, ReducerOptions::default()).unwrap();
    for _ in 0..2 {
        let loss = if is_last(comm) { one_way(&var) } else { var.as_tensor().clone() };
        let text = parallel.backward(&loss.sum_all().unwrap()).unwrap_err().to_string();
        assert!(text.contains("backward") && (is_last(comm) || names_last(comm, &text)), "{text}");
        let reduced =
            parallel.backward(&(var.as_tensor() * (comm.rank() + 1) as f64).unwrap().sum_all().unwrap()).unwrap();
        let mean = (comm.world_size() + 1) as f64 / 2.0;
        assert_eq!(values(reduced.get(&var).unwrap()), [mean; 8]);
    }
}

fn micro_batch<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let var = ones(&[2, 4], DType::F32, device);
    let mut parallel = DataParallel::new(named([("a", &var)]), comm, ReducerOptions::default()).unwrap();
    let good = var.sum_all().unwrap();
    parallel.accumulate(&good).unwrap();
    if is_last(comm) {
        assert!(matches!(parallel.accumulate(&one_way(&var).sum_all().unwrap()), Err(Error::Candle(_))));
    }
    let reduced = parallel.backward(&good).unwrap();
    assert_eq!(values(reduced.get(&var).unwrap()), [2.0; 8]);
}
