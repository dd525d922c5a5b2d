//! A pipeline on GPUs with known numbers: stage s multiplies by `s + 2`, and the loss by 3.
//!
//! All numbers are integers that f64 represents, so every result is exact. No host waits for a pass.

use gradsync::driver::{DeviceBuffer, DeviceSlice, Queue};
use gradsync::kernels::cuda;
use gradsync::memory::Cuda;
use gradsync::ops::send_recv::{Bundle, Expected, Received, StageWork, TransferHandler, WireTensor, run_stage};
use gradsync::plan::schedule::{Payload, one_forward_one_backward};
use gradsync::{DType, Result};
use gradsync_tests::transfers::pipeline::{MICRO_BATCHES, inputs, rows, weight};

use super::RankContext;

const LOSS: f64 = 3.0;

/// A vector on the device.
enum Vector {
    Own(DeviceBuffer),
    Came(Received<Cuda>),
}

impl Vector {
    fn slice(&self) -> DeviceSlice<'_> {
        match self {
            Vector::Own(buffer) => buffer.as_slice(),
            Vector::Came(received) => received.tensor(0).slice().expect("f64"),
        }
    }

    /// The product of this vector and a factor.
    fn times(&self, queue: &Queue, factor: f64) -> Result<Vector> {
        let mut product = DeviceBuffer::zeroed(queue, DType::F64, self.slice().len())?;
        cuda::scale(product.as_mut_slice(), self.slice(), factor)?;
        Ok(Vector::Own(product))
    }

    fn read(&self) -> Vec<f64> {
        let mut values = vec![0.0; self.slice().len()];
        self.slice().copy_to_host((&mut values).into()).unwrap();
        values
    }
}

/// The work of one stage. Activations are described in every second micro-batch, and known otherwise.
struct Work<'c> {
    queue: &'c Queue,
    stage: usize,
    stages: usize,
    inputs: Vec<Option<Vector>>,
    outputs: Vec<Option<Vector>>,
    /// The gradients of the outputs, kept for the end.
    gradients: Vec<Option<Vector>>,
    /// The gradients of the inputs.
    passed: Vec<Option<Vector>>,
}

impl TransferHandler<Payload, Cuda> for Work<'_> {
    fn send(&self, to: usize, payload: &Payload) -> Result<Bundle<'_, Cuda>> {
        match *payload {
            Payload::Activation(k) => {
                assert_eq!(to, self.stage + 1);
                let values = self.outputs[k].as_ref().expect("computed").slice();
                let bundle = Bundle::new([WireTensor::on_device(values, vec![values.len(), 1])?])?;
                Ok(if k % 2 == 0 { bundle.described(k as u64) } else { bundle })
            }
            Payload::Gradient(k) => {
                assert_eq!(to + 1, self.stage);
                Bundle::new([self.passed[k].as_ref().expect("computed").slice()])
            }
        }
    }

    fn expect(&self, _: usize, payload: &Payload) -> Result<Expected> {
        Ok(match *payload {
            Payload::Activation(k) if k % 2 == 0 => Expected::described(k as u64),
            Payload::Activation(k) => Expected::known([(DType::F64, vec![rows(k), 1])]),
            Payload::Gradient(k) => Expected::known([(DType::F64, vec![rows(k)])]),
        })
    }

    fn received(&mut self, from: usize, payload: &Payload, tensors: Received<Cuda>) -> Result<()> {
        match *payload {
            Payload::Activation(k) => {
                assert_eq!((from + 1, tensors.tensor(0).shape()), (self.stage, &[rows(k), 1][..]));
                self.inputs[k] = Some(Vector::Came(tensors));
            }
            Payload::Gradient(k) => {
                assert_eq!(from, self.stage + 1);
                self.gradients[k] = Some(Vector::Came(tensors));
            }
        }
        Ok(())
    }

    fn sent(&mut self, _: usize, payload: &Payload) -> Result<()> {
        // The memory may be dropped although no work has run yet.
        match *payload {
            Payload::Activation(k) => self.outputs[k] = None,
            Payload::Gradient(k) => self.passed[k] = None,
        }
        Ok(())
    }
}

impl StageWork<Cuda> for Work<'_> {
    fn forward(&mut self, k: usize) -> Result<()> {
        if self.stage == 0 {
            self.inputs[k] = Some(Vector::Own(DeviceBuffer::from_host(self.queue, (&inputs(k)).into())?));
        }
        let output = self.inputs[k].as_ref().expect("it has come").times(self.queue, weight(self.stage))?;
        if self.stage + 1 == self.stages {
            self.gradients[k] = Some(output.times(self.queue, LOSS)?);
        }
        self.outputs[k] = Some(output);
        Ok(())
    }

    fn backward(&mut self, k: usize) -> Result<()> {
        let gradient = self.gradients[k].as_ref().expect("it has come");
        self.passed[k] = Some(gradient.times(self.queue, weight(self.stage))?);
        Ok(())
    }
}

/// Runs a pipeline of one stage per rank, twice, and compares every stage with the expected numbers.
pub(super) fn pipeline(ranks: &RankContext<'_>) {
    let RankContext { comm, queue } = *ranks;
    let (stage, stages) = (ranks.rank(), ranks.size());
    let plan = one_forward_one_backward(stage, stages, MICRO_BATCHES).unwrap();
    let none = || (0..MICRO_BATCHES).map(|_| None).collect::<Vec<Option<Vector>>>();
    let product = |stages: std::ops::Range<usize>| stages.map(weight).product::<f64>();
    for _ in 0..2 {
        let (inputs_of, outputs, gradients, passed) = (none(), none(), none(), none());
        let mut work = Work { queue, stage, stages, inputs: inputs_of, outputs, gradients, passed };
        run_stage(&ranks.transfers(), &plan, &mut work).unwrap();
        comm.synchronize(queue).unwrap();
        for k in 0..MICRO_BATCHES {
            let scaled = |factor: f64| inputs(k).iter().map(|x| x * factor).collect::<Vec<f64>>();
            let what = format!("micro-batch {k} of stage {stage} of {stages}");
            assert_eq!(work.inputs[k].as_ref().expect("kept").read(), scaled(product(0..stage)), "{what}: input");
            let gradient = LOSS * product(0..stages) * product(stage + 1..stages);
            assert_eq!(work.gradients[k].as_ref().expect("kept").read(), scaled(gradient), "{what}: gradient");
        }
    }
}
