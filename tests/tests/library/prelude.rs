//! Lines that a user writes before looking anything up: each compiles with the prelude alone, and does what it says.

use gradsync::CommError;
use gradsync::prelude::*;

/// Gradients of 16 × 8 and 8 elements, of a world of so many ranks.
fn gradients(world_size: usize) -> Result<GradientBuffer, Error> {
    GradientBuffer::new(DType::F32, world_size, [("w1", vec![16, 8]), ("b1", vec![8])])
}

#[test]
fn run_returns_plain_values() {
    assert_eq!(local::run(4, |comm| comm.rank()).unwrap(), [0, 1, 2, 3]);
    assert_eq!(local::run(3, |comm| comm.size()).unwrap(), [3; 3]);
    assert_eq!(local::run(2, |comm| vec![comm.world_size() as f32; 2]).unwrap(), [[2.0; 2]; 2]);
    assert_eq!(local::run(2, |comm| (comm.rank(), Some("rank"))).unwrap(), [(0, Some("rank")), (1, Some("rank"))]);
    local::run(2, |comm| comm.barrier().unwrap()).unwrap();
    assert!(matches!(local::run(0, |_| ()), Err(Error::InvalidArgument { .. })));
}

#[test]
fn run_returns_results_whose_error_is_inferred() {
    let sums = local::run(3, |comm| {
        let mut v = vec![comm.rank() as f64; 2];
        comm.all_reduce(&mut v, ReduceOp::Sum)?;
        Ok(v)
    });
    assert_eq!(sums.unwrap(), [[3.0; 2]; 3]);
    let refused = local::run(2, |comm| {
        comm.barrier()?;
        gradients(comm.world_size())?.tensor(0).to_vec::<f64>()
    });
    assert!(matches!(refused, Err(Error::DTypeMismatch { left: DType::F32, right: DType::F64, .. })));
}

#[test]
fn try_run_returns_errors_of_other_types() {
    let failed: Result<Vec<usize>, Box<dyn std::error::Error + Send + Sync>> =
        local::try_run(2, |comm| if comm.rank() == 1 { Err("a text".into()) } else { Ok(comm.barrier().map(|()| 0)?) });
    assert_eq!(failed.unwrap_err().to_string(), "a text");
}

#[test]
fn all_reduce_and_broadcast_of_vectors_and_scalars() {
    let results = local::run(2, |comm| {
        let mut v = vec![comm.rank() as f32 + 1.0; 3];
        comm.all_reduce(&mut v, ReduceOp::Sum)?;
        comm.all_reduce(&mut v[..], ReduceOp::Mean)?;
        comm.broadcast(&mut v, 0)?;
        comm.barrier()?;
        let loss = comm.all_reduce_scalar(comm.rank() as f64, ReduceOp::Mean)?;
        zero_gradient(&mut v)?;
        Ok((v, loss, comm.all_reduce_scalar(comm.rank() as f32, ReduceOp::Max)?))
    });
    assert_eq!(results.unwrap(), vec![(vec![0.0; 3], 0.5, 1.0); 2]);
}

#[test]
fn adasum_of_a_vector_a_slice_and_a_buffer() {
    let results = local::run(2, |comm| {
        let own = [[3.0f32, 0.0], [0.0, 4.0]][comm.rank()];
        let (mut vector, mut slice, mut array) = (own.to_vec(), [own, own], own);
        let report = adasum(&comm, &mut vector)?;
        assert_eq!(report.weights_of(0), Some(&[1.0, 1.0][..]));
        adasum(&comm, &mut slice[1][..])?;
        adasum(&comm, &mut array)?;
        let mut g = GradientBuffer::new(DType::F32, comm.world_size(), [("w1", [2])])?;
        g.tensor_mut(0).copy_from_slice(&own)?;
        adasum_all_reduce(&comm, &mut g, AdasumOptions::default())?;
        assert_eq!((slice[0], array.to_vec(), g.tensor(0).to_vec()?), (own, vector.clone(), vector.clone()));
        assert_eq!(slice[1], array);
        Ok(vector)
    });
    assert_eq!(results.unwrap(), [[3.0, 4.0]; 2]);
}

#[test]
fn adasum_leaves_vectors_of_different_lengths_unchanged() {
    local::run(2, |comm| {
        let mut v = vec![1.0f32; 4 + comm.rank()];
        let error = adasum(&comm, &mut v).expect_err("4 and 5 elements");
        assert!(matches!(error, Error::Disagreement { .. }), "{error}");
        assert_eq!(v, vec![1.0; 4 + comm.rank()]);
    })
    .unwrap();
}

#[test]
fn all_reduce_of_a_buffer() {
    let means = local::run(2, |comm| {
        let mut grads = gradients(2)?;
        for tensor in &mut grads {
            tensor.1.data_mut::<f32>().fill(comm.rank() as f32);
        }
        ops::all_reduce(&comm, &mut grads, ReduceOp::Mean)?;
        grads.tensor(1).to_vec::<f32>()
    });
    assert_eq!(means.unwrap(), [[0.5; 8]; 2]);
}

#[test]
fn data_mut_and_as_slice_of_their_type() {
    let mut grads = gradients(1).unwrap();
    let weights: &mut [f32] = grads.tensor_mut(0).data_mut();
    weights[3] = 2.0;
    grads.tensor_mut(1).data_mut::<f32>()[0] = 1.0;
    grads.tensor_mut(1).as_mut_slice::<f32>().unwrap()[1] = 3.0;
    let bias: Vec<f32> = grads.tensor(1).as_slice::<f32>().unwrap().to_vec();
    assert_eq!(bias, [1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(grads.tensor_mut(1).as_slice::<f32>().unwrap(), bias);
    assert_eq!(grads.tensor(0).to_vec::<f32>().unwrap()[2..5], [0.0, 2.0, 0.0]);
    let refusals = [
        grads.tensor(0).as_slice::<f64>().map(drop),
        grads.tensor_mut(0).as_slice::<f64>().map(drop),
        grads.tensor_mut(0).as_mut_slice::<f64>().map(drop),
    ];
    for refusal in refusals {
        assert!(
            matches!(refusal, Err(Error::DTypeMismatch { left: DType::F32, right: DType::F64, .. })),
            "{refusal:?}"
        );
    }
}

#[test]
#[should_panic(expected = "data_mut: dtypes f32 and f64 differ")]
fn data_mut_of_another_type() {
    gradients(1).unwrap().tensor_mut(0).data_mut::<f64>();
}

#[test]
fn gradient_buffer_in_loops() {
    let mut grads = gradients(1).unwrap();
    for (name, tensor) in &mut grads {
        tensor.data_mut::<f32>().fill(if name == "w1" { 1.0 } else { 2.0 });
    }
    for (_, mut tensor) in grads.iter_mut() {
        for x in tensor.as_mut_slice::<f32>().unwrap() {
            *x += 1.0;
        }
    }
    let mut names = Vec::new();
    for (name, tensor) in &grads {
        names.push((name.to_owned(), tensor.shape().to_vec()));
    }
    assert_eq!(names, [("w1".to_owned(), vec![16, 8]), ("b1".to_owned(), vec![8])]);
    let firsts: Vec<f32> = grads.iter().map(|(_, tensor)| tensor.as_slice::<f32>().unwrap()[0]).collect();
    assert_eq!(firsts, [2.0, 3.0]);
    grads.zero().unwrap();
    assert!(grads.iter().all(|(_, tensor)| tensor.to_vec::<f32>().unwrap().iter().all(|&x| x == 0.0)));
}

#[test]
fn sgd_and_adam_from_a_rate() {
    let (mut w, mut g) = (gradients(1).unwrap(), gradients(1).unwrap());
    g.tensor_mut(1).copy_from_slice(&[1.0f32; 8]).unwrap();
    let mut sgd = Sgd::new(0.125).unwrap();
    assert_eq!(sgd.options(), train::SgdOptions::default().with_rate(0.125));
    sgd.step(&mut w, &g).unwrap();
    assert_eq!(w.tensor(1).to_vec::<f32>().unwrap(), [-0.125; 8]);
    let mut adam = train::AdamW::new(0.5).unwrap();
    assert_eq!(adam.options(), train::AdamWOptions::default().with_rate(0.5));
    adam.step(&mut w, &g).unwrap();
    // The first step is the rate, and the decay of the weight.
    let expected = -0.125 * (1.0 - 0.5 * 0.01) - 0.5;
    assert!(w.tensor(1).to_vec::<f32>().unwrap().iter().all(|x| (x - expected).abs() < 1e-6));
    assert!(matches!(Sgd::<gradsync::memory::Host>::new(-0.1), Err(Error::InvalidArgument { .. })));
    assert!(matches!(train::AdamW::<gradsync::memory::Host>::new(f64::NAN), Err(Error::InvalidArgument { .. })));
}

#[test]
fn send_waits_for_its_receiver() {
    let group = local::group_with_deadline(2, std::time::Duration::from_millis(50)).unwrap();
    let alone = group[0].send(&[1.0f32; 4], 1).expect_err("rank 1 receives nothing");
    assert!(matches!(alone, Error::Comm(CommError::Timeout { .. })), "{alone}");
}
