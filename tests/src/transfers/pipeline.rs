//! A pipeline with known results: stage s multiplies by `s + 2`, and the loss by 3.
//!
//! All numbers are integers that f64 represents exactly, so that every result is exact. On a GPU the host waits only for described
//! activations.

use gradsync::ops::send_recv::{Bundle, Expected, Payload, Received, Stage, StageWork, TransferHandler, run_stage};
use gradsync::{DType, Result, TensorView};

use super::{Owned, Rank};

const MICRO_BATCHES: usize = 8;
const LOSS: f64 = 3.0;

/// The first stage's inputs. The number of rows varies.
fn inputs(micro_batch: usize) -> Vec<f64> {
    (0..3 + micro_batch % 3).map(|row| (10 * micro_batch + row) as f64).collect()
}

fn weight(stage: usize) -> f64 {
    (stage + 2) as f64
}

/// A vector: this rank's own, or a received one.
enum Vector<R: Rank> {
    Own(R::Tensor),
    Came(Received<R::Memory>),
}

impl<R: Rank> Vector<R> {
    fn view(&self) -> TensorView<'_, R::Memory> {
        match self {
            Vector::Own(tensor) => R::view(tensor),
            Vector::Came(received) => received.tensor(0),
        }
    }

    fn read(&self) -> Vec<u8> {
        match self {
            Vector::Own(tensor) => R::read(tensor).bytes,
            Vector::Came(received) => R::read_all(received).remove(0).bytes,
        }
    }
}

/// The vectors of each micro-batch.
type Vectors<R> = Vec<Option<Vector<R>>>;

/// One stage. Activations are described and labelled in every second micro-batch, and known otherwise.
struct Work<'r, R: Rank> {
    rank: &'r R,
    /// Kept for the end.
    inputs: Vectors<R>,
    outputs: Vectors<R>,
    labels: Vec<R::Tensor>,
    /// The gradients of the outputs, kept for the end.
    gradients: Vectors<R>,
    /// The gradients of the inputs.
    passed: Vectors<R>,
    /// The number of micro-batches between their two passes, now and at most.
    kept: usize,
    most_kept: usize,
}

impl<R: Rank> Work<'_, R> {
    fn scaled(&self, vector: &Option<Vector<R>>, factor: f64) -> Option<Vector<R>> {
        Some(Vector::Own(self.rank.scaled(vector.as_ref().expect("computed or received").view(), factor)))
    }
}

impl<R: Rank> TransferHandler<Payload, R::Memory> for Work<'_, R> {
    fn send(&self, to: usize, payload: &Payload) -> Result<Bundle<'_, R::Memory>> {
        let (from, vector) = match *payload {
            Payload::Activation(k) => (to - 1, &self.outputs[k]),
            Payload::Gradient(k) => (to + 1, &self.passed[k]),
        };
        assert_eq!(from, self.rank.rank());
        let vector = vector.as_ref().expect("computed").view();
        match *payload {
            Payload::Activation(k) if k % 2 == 0 => {
                Ok(Bundle::new([vector, R::view(&self.labels[k])])?.described(k as u64))
            }
            _ => Bundle::new([vector]),
        }
    }

    fn expect(&self, _: usize, payload: &Payload) -> Result<Expected> {
        Ok(match *payload {
            Payload::Activation(k) if k % 2 == 0 => Expected::described(k as u64),
            Payload::Activation(k) | Payload::Gradient(k) => Expected::known([(DType::F64, vec![inputs(k).len()])]),
        })
    }

    fn received(&mut self, from: usize, payload: &Payload, tensors: Received<R::Memory>) -> Result<()> {
        match *payload {
            Payload::Activation(k) => {
                assert_eq!((from + 1, tensors.tensor(0).shape()), (self.rank.rank(), &[inputs(k).len()][..]));
                if k % 2 == 0 {
                    assert_eq!(R::read_all(&tensors)[1], label(k, from));
                }
                self.inputs[k] = Some(Vector::Came(tensors));
            }
            Payload::Gradient(k) => {
                assert_eq!(from, self.rank.rank() + 1);
                self.gradients[k] = Some(Vector::Came(tensors));
            }
        }
        Ok(())
    }

    fn sent(&mut self, _: usize, payload: &Payload) -> Result<()> {
        // On a GPU the memory may be dropped although no work has run yet.
        match *payload {
            Payload::Activation(k) => self.outputs[k] = None,
            Payload::Gradient(k) => self.passed[k] = None,
        }
        Ok(())
    }
}

impl<R: Rank> StageWork<R::Memory> for Work<'_, R> {
    fn forward(&mut self, k: usize) -> Result<()> {
        let stage = self.rank.rank();
        if stage == 0 {
            self.inputs[k] = Some(Vector::Own(self.rank.tensor(&Owned::of(&inputs(k)), 0)));
        }
        self.outputs[k] = self.scaled(&self.inputs[k], weight(stage));
        if stage + 1 == self.rank.world_size() {
            self.gradients[k] = self.scaled(&self.outputs[k], LOSS);
        }
        self.kept += 1;
        self.most_kept = self.most_kept.max(self.kept);
        Ok(())
    }

    fn backward(&mut self, k: usize) -> Result<()> {
        self.passed[k] = self.scaled(&self.gradients[k], weight(self.rank.rank()));
        self.kept -= 1;
        Ok(())
    }
}

/// The second tensor of a described activation.
fn label(micro_batch: usize, stage: usize) -> Owned {
    Owned::new(DType::I16, &[1, 2], (100 * micro_batch + stage) as u64)
}

/// Runs a pipeline with one stage per rank, twice, and compares the vectors of every stage with the expected ones.
pub fn pipeline<R: Rank>(rank: &R) {
    let (stage, stages) = (rank.rank(), rank.world_size());
    let plan = Stage::one_forward_one_backward(stage, stages, MICRO_BATCHES).unwrap();
    let none = || (0..MICRO_BATCHES).map(|_| None).collect::<Vectors<R>>();
    let product = |stages: std::ops::Range<usize>| stages.map(weight).product::<f64>();
    for _ in 0..2 {
        let labels = rank.tensors(&(0..MICRO_BATCHES).map(|k| label(k, stage)).collect::<Vec<_>>());
        let (outputs, gradients, passed) = (none(), none(), none());
        let mut work = Work { rank, inputs: none(), outputs, labels, gradients, passed, kept: 0, most_kept: 0 };
        run_stage(&rank.transfers(), &plan, &mut work).unwrap();
        rank.synchronize();
        assert_eq!(work.most_kept, MICRO_BATCHES.min(stages - stage), "stage {stage} of {stages} kept too much");
        let gradient = LOSS * product(0..stages) * product(stage + 1..stages);
        for k in 0..MICRO_BATCHES {
            for (what, vectors, factor) in
                [("input", &work.inputs, product(0..stage)), ("gradient", &work.gradients, gradient)]
            {
                let expected = Owned::of(&inputs(k).iter().map(|x| x * factor).collect::<Vec<f64>>());
                let got = vectors[k].as_ref().expect("kept").read();
                assert_eq!(got, expected.bytes, "{what} of micro-batch {k} on stage {stage} of {stages}");
            }
        }
    }
}
