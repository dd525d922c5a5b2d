//! A pipeline with known results: stage s multiplies by `s + 2` and adds `s + 1`.
//!
//! All numbers are integers that f64 represents exactly, so that every result is exact.

use gradsync::comm::Communicator;
use gradsync::ops::send_recv::{
    Bundle, Expected, Received, SendRecv, StageWork, TransferHandler, WireTensor, run_stage,
};
use gradsync::plan::schedule::{Payload, one_forward_one_backward};
use gradsync::{DType, Result};

/// The number of micro-batches.
pub const MICRO_BATCHES: usize = 8;

/// Rows of a micro-batch: the number varies, and only the first stage knows it beforehand.
pub fn rows(micro_batch: usize) -> usize {
    3 + micro_batch % 3
}

/// The first stage's inputs.
pub fn inputs(micro_batch: usize) -> Vec<f64> {
    (0..rows(micro_batch)).map(|row| (10 * micro_batch + row) as f64).collect()
}

/// The weight of a stage.
pub fn weight(stage: usize) -> f64 {
    (stage + 2) as f64
}

fn bias(stage: usize) -> f64 {
    (stage + 1) as f64
}

/// The gradient of the last stage's outputs.
pub fn loss_gradient(output: f64) -> f64 {
    output % 5.0 - 1.0
}

/// The results of a stage.
#[derive(Clone, Debug, Default, PartialEq)]
struct Trained {
    /// The outputs of all micro-batches, on the last stage only.
    outputs: Vec<Vec<f64>>,
    weight_gradient: f64,
    bias_gradient: f64,
}

/// The results of all stages, computed one micro-batch after the other, without any schedule.
fn expected(stages: usize) -> Vec<Trained> {
    let mut trained = vec![Trained::default(); stages];
    for micro_batch in 0..MICRO_BATCHES {
        let mut layers = vec![inputs(micro_batch)];
        for stage in 0..stages {
            layers.push(layers[stage].iter().map(|x| weight(stage) * x + bias(stage)).collect());
        }
        let mut gradients: Vec<f64> = layers[stages].iter().map(|&y| loss_gradient(y)).collect();
        trained[stages - 1].outputs.push(layers[stages].clone());
        for stage in (0..stages).rev() {
            trained[stage].weight_gradient += gradients.iter().zip(&layers[stage]).map(|(dy, x)| dy * x).sum::<f64>();
            trained[stage].bias_gradient += gradients.iter().sum::<f64>();
            gradients.iter_mut().for_each(|dy| *dy *= weight(stage));
        }
    }
    trained
}

/// One stage. Activations are sent as described tensors, with a label of micro-batch and stage; gradients have the activations' shape.
struct Work {
    stage: usize,
    stages: usize,
    inputs: Vec<Option<Vec<f64>>>,
    outputs: Vec<Option<(Vec<f64>, [i64; 2])>>,
    /// The gradients of the outputs; the backward pass replaces them with the gradients of the inputs.
    gradients: Vec<Option<Vec<f64>>>,
    rows: Vec<usize>,
    kept: usize,
    most_kept: usize,
    trained: Trained,
}

impl Work {
    fn new(stage: usize, stages: usize) -> Self {
        let none = || vec![None; MICRO_BATCHES];
        let (rows, trained) = (vec![0; MICRO_BATCHES], Trained::default());
        let (outputs, gradients) = (vec![None; MICRO_BATCHES], none());
        Self { stage, stages, inputs: none(), outputs, gradients, rows, kept: 0, most_kept: 0, trained }
    }
}

impl TransferHandler<Payload> for Work {
    fn send(&self, to: usize, payload: &Payload) -> Result<Bundle<'_>> {
        match *payload {
            Payload::Activation(k) => {
                assert_eq!(to, self.stage + 1);
                let (values, label) = self.outputs[k].as_ref().expect("computed");
                let shape = [values.len(), 1].to_vec();
                let tensors = [WireTensor::of(values, shape)?, WireTensor::from(&label[..])];
                Ok(Bundle::new(tensors)?.described(k as u64))
            }
            Payload::Gradient(k) => {
                assert_eq!(to + 1, self.stage);
                Bundle::new([&self.gradients[k].as_ref().expect("computed")[..]])
            }
        }
    }

    fn expect(&self, _: usize, payload: &Payload) -> Result<Expected> {
        Ok(match *payload {
            Payload::Activation(k) => Expected::described(k as u64),
            Payload::Gradient(k) => Expected::known([(DType::F64, vec![self.rows[k]])]),
        })
    }

    fn received(&mut self, from: usize, payload: &Payload, tensors: Received) -> Result<()> {
        match *payload {
            Payload::Activation(k) => {
                assert_eq!(from + 1, self.stage);
                assert_eq!(tensors.tensor(0).shape(), [rows(k), 1]);
                assert_eq!(tensors.tensor(1).typed(), Some(&[k as i64, from as i64][..]));
                self.inputs[k] = tensors.tensor(0).typed().map(<[f64]>::to_vec);
            }
            Payload::Gradient(k) => {
                assert_eq!(from, self.stage + 1);
                self.gradients[k] = tensors.tensor(0).typed().map(<[f64]>::to_vec);
            }
        }
        Ok(())
    }

    fn sent(&mut self, _: usize, payload: &Payload) -> Result<()> {
        match *payload {
            Payload::Activation(k) => self.outputs[k] = None,
            Payload::Gradient(k) => self.gradients[k] = None,
        }
        Ok(())
    }
}

impl StageWork for Work {
    fn forward(&mut self, micro_batch: usize) -> Result<()> {
        if self.stage == 0 {
            self.inputs[micro_batch] = Some(inputs(micro_batch));
        }
        let x = self.inputs[micro_batch].as_ref().expect("the activation has come");
        let y: Vec<f64> = x.iter().map(|x| weight(self.stage) * x + bias(self.stage)).collect();
        self.rows[micro_batch] = y.len();
        self.kept += 1;
        self.most_kept = self.most_kept.max(self.kept);
        if self.stage + 1 == self.stages {
            self.gradients[micro_batch] = Some(y.iter().map(|&y| loss_gradient(y)).collect());
            self.trained.outputs.push(y);
        } else {
            self.outputs[micro_batch] = Some((y, [micro_batch as i64, self.stage as i64]));
        }
        Ok(())
    }

    fn backward(&mut self, micro_batch: usize) -> Result<()> {
        let x = self.inputs[micro_batch].take().expect("kept");
        let gradients = self.gradients[micro_batch].as_mut().expect("the gradient has come");
        self.trained.weight_gradient += gradients.iter().zip(&x).map(|(dy, x)| dy * x).sum::<f64>();
        self.trained.bias_gradient += gradients.iter().sum::<f64>();
        gradients.iter_mut().for_each(|dy| *dy *= weight(self.stage));
        self.kept -= 1;
        Ok(())
    }
}

/// Trains a pipeline with one stage per rank, and compares the results of every stage with the expected ones.
pub fn pipeline(comm: &dyn Communicator) {
    let (rank, stages) = (comm.rank(), comm.world_size());
    let plan = one_forward_one_backward(rank, stages, MICRO_BATCHES).unwrap();
    let mut work = Work::new(rank, stages);
    run_stage(&SendRecv::new(comm), &plan, &mut work).unwrap();
    assert_eq!(work.trained, expected(stages)[rank], "stage {rank} of {stages}");
    assert_eq!(work.most_kept, MICRO_BATCHES.min(stages - rank), "stage {rank} of {stages} kept too much");
}
