//! `--tensors`: the gradients of well-known models in separate allocations, accumulated, cast and cleared with one call for all of them.
//!
//! bf16 gradients are added to f32 sums, and f32 weights are copied to bf16 ones, as in mixed-precision training. On a GPU each call is one
//! launch, whatever the number of tensors; on the CPU it processes them one by one. A step of AdamW is three launches.

use std::ops::Range;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use gradsync::internal::kernels::cpu;
use gradsync::train::{AdamW, AdamWOptions, OptimizerMemory};
use gradsync::{DType, GradientBuffer};

use super::PerfError;
use super::data::{count_wrong, fill, value};
use super::host::baseline::Baseline;
use super::layers::Layers;
use super::operation::{Operation, Redop, Row, Types};
use super::output::Output;
use super::places::Places;
use super::plan::{Place, Section};
use super::subject::{self, Found, Side, Subject};

/// A model with known tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Model {
    /// ResNet-50: 161 tensors, 25.6 million elements.
    Resnet50,
    /// BERT-large with the heads of its pre-training: 398 tensors, 336 million elements.
    BertLarge,
}

/// The operations on the tensors.
pub(crate) const OPERATIONS: [Operation; 4] =
    [Operation::Accumulate, Operation::Cast, Operation::Zero, Operation::AdamwStep];

/// The dtypes of an operation's tensors.
pub(crate) fn types(operation: Operation) -> Types {
    match operation {
        Operation::Accumulate | Operation::AdamwStep => Types { to: DType::F32, from: DType::BF16 },
        Operation::Cast => Types { to: DType::BF16, from: DType::F32 },
        _ => Types::both(DType::F32),
    }
}

impl Model {
    /// The number of elements of each tensor, in the order of the model.
    pub(crate) fn lens(self) -> Vec<usize> {
        match self {
            Model::Resnet50 => resnet50(),
            Model::BertLarge => bert_large(),
        }
    }

    /// The name on the command line.
    pub(crate) fn argument(self) -> &'static str {
        match self {
            Model::Resnet50 => "resnet50",
            Model::BertLarge => "bert-large",
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Model::Resnet50 => "ResNet-50",
            Model::BertLarge => "BERT-large",
        }
    }
}

fn resnet50() -> Vec<usize> {
    // A convolution without bias, and the scale and shift of its normalisation.
    let convolution = |from: usize, to: usize, width: usize| [from * to * width * width, to, to];
    let mut lens = convolution(3, 64, 7).to_vec();
    let mut from = 64;
    for (blocks, width) in [(3, 64), (4, 128), (6, 256), (3, 512)] {
        for block in 0..blocks {
            lens.extend(convolution(from, width, 1));
            lens.extend(convolution(width, width, 3));
            lens.extend(convolution(width, 4 * width, 1));
            if block == 0 {
                lens.extend(convolution(from, 4 * width, 1));
            }
            from = 4 * width;
        }
    }
    lens.extend([2048 * 1000, 1000]);
    lens
}

fn bert_large() -> Vec<usize> {
    const WIDTH: usize = 1024;
    const WORDS: usize = 30522;
    let linear = |from: usize, to: usize| [from * to, to];
    let norm = [WIDTH, WIDTH];
    let mut lens = vec![WORDS * WIDTH, 512 * WIDTH, 2 * WIDTH];
    lens.extend(norm);
    for _ in 0..24 {
        // Query, key, value, and the output projection.
        (0..4).for_each(|_| lens.extend(linear(WIDTH, WIDTH)));
        lens.extend(norm);
        lens.extend(linear(WIDTH, 4 * WIDTH));
        lens.extend(linear(4 * WIDTH, WIDTH));
        lens.extend(norm);
    }
    // The pooler; the word prediction, which shares its matrix with the word embedding; the next-sentence prediction.
    lens.extend(linear(WIDTH, WIDTH));
    lens.push(WORDS);
    lens.extend(linear(WIDTH, WIDTH));
    lens.extend(norm);
    lens.extend(linear(WIDTH, 2));
    lens
}

/// Measures the calls on every backend that runs kernels.
pub(crate) fn run(model: Model, places: &Places, output: &Output) -> Result<(), PerfError> {
    let lens = model.lens();
    for &place in places.kernels.iter().filter(|_| places.is_speaker) {
        for operation in OPERATIONS {
            let (types, redop, len) = (types(operation), Redop::None, lens.iter().sum());
            let row = Row { operation, types, redop, ranks: 1, len, layers: Layers::Equal(lens.len()) };
            let section = Section { operation, place, ranks: 1, rows: vec![row], left_out: Vec::new() };
            let calls = if place == Place::Cpu { "a call for each" } else { "in one call" };
            let (name, count) = (model.name(), lens.len());
            output.say(&format!("\n# {name}: {count} tensors, separately allocated, {calls}\n"))?;
            match place {
                #[cfg(feature = "cuda")]
                Place::Cuda if operation == Operation::AdamwStep => {
                    super::cuda::tensors::run_steps(&section, &lens, output)?;
                }
                #[cfg(feature = "cuda")]
                Place::Cuda => super::cuda::tensors::run(&section, &lens, output)?,
                _ if operation == Operation::AdamwStep => steps_on_cpu(&section, &lens, output)?,
                _ => on_cpu(&section, &lens, output)?,
            }
        }
    }
    Ok(())
}

fn on_cpu(section: &Section, lens: &[usize], output: &Output) -> Result<(), PerfError> {
    let name = Baseline::name(section.operation);
    output.begin(section, name)?;
    for row in &section.rows {
        let mut tensors = Tensors::new(row, lens, output)?;
        let seconds = subject::time(&mut tensors, output.counts, || Ok(()))?;
        let wrong = subject::check(&mut tensors, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, name)?;
    }
    Ok(())
}

fn steps_on_cpu(section: &Section, lens: &[usize], output: &Output) -> Result<(), PerfError> {
    let name = Baseline::name(section.operation);
    output.begin(section, name)?;
    for row in &section.rows {
        let mut baseline = output.counts.baseline.then(|| Baseline::new(row, 1)).transpose()?;
        let buffer = |dtype| GradientBuffer::new(dtype, 1, named(lens)).map_err(PerfError::from);
        let call = baseline.as_mut().map(|baseline| {
            |round| -> Result<(), PerfError> {
                baseline.call(round);
                Ok(())
            }
        });
        let mut steps = Steps::new([buffer(DType::BF16)?, buffer(DType::BF16)?], call)?;
        let seconds = subject::time(&mut steps, output.counts, || Ok(()))?;
        let wrong = subject::check(&mut steps, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, name)?;
        output.say(&format!("\n{}\n", steps.host_time()))?;
    }
    Ok(())
}

/// Tensors of these lengths with names.
pub(crate) fn named(lens: &[usize]) -> impl Iterator<Item = (String, [usize; 1])> {
    lens.iter().enumerate().map(|(index, &len)| (format!("tensor {index}"), [len]))
}

/// Steps of AdamW on either memory. The weights of each step are those of the last one.
pub(crate) struct Steps<M: OptimizerMemory, B> {
    weights: GradientBuffer<M>,
    gradients: GradientBuffer<M>,
    optimizer: AdamW<M>,
    baseline: Option<B>,
    /// The time of each call on the host, without waits for a device.
    host: Vec<Duration>,
}

/// The learning rate, with which the first step changes every digit of the weights.
const RATE: f64 = 0.5;
const DECAY: f64 = 0.125;

fn adamw<M: OptimizerMemory>() -> gradsync::Result<AdamW<M>> {
    AdamW::new(AdamWOptions::default().with_rate(RATE).with_weight_decay(DECAY))?.with_max_norm(1.0)
}

impl<M: OptimizerMemory, B: FnMut(usize) -> Result<(), PerfError>> Steps<M, B> {
    /// From buffers of zeros for weights and gradients.
    pub(crate) fn new([weights, gradients]: [GradientBuffer<M>; 2], baseline: Option<B>) -> Result<Self, PerfError> {
        let mut steps = Self { weights, gradients, optimizer: adamw()?, baseline, host: Vec::new() };
        steps.fill()?;
        Ok(steps)
    }

    fn fill(&mut self) -> Result<(), PerfError> {
        for (rank, buffer) in [(1, &mut self.weights), (0, &mut self.gradients)] {
            let longest = buffer.segments().iter().map(Range::len).max().unwrap_or(0);
            let mut host = GradientBuffer::new(buffer.dtype(), 1, [("tensor", [longest])])?;
            fill(host.tensor_mut(0).into_data(), |index| value(rank, index));
            for (_, tensor) in buffer.tensors_mut() {
                let len = tensor.shape().iter().product();
                M::copy_from_slice(tensor.into_data(), host.tensor(0).data().range(0..len))?;
            }
        }
        Ok(())
    }

    /// The median of the calls' times on the host, in words.
    pub(crate) fn host_time(&mut self) -> String {
        self.host.sort_unstable();
        let median = self.host.get(self.host.len() / 2).copied().unwrap_or_default();
        format!("The host's part of a call: {:.0} us (median)", median.as_secs_f64() * 1e6)
    }
}

impl<M: OptimizerMemory, B: FnMut(usize) -> Result<(), PerfError>> Subject for Steps<M, B> {
    fn has(&self, side: Side) -> bool {
        side == Side::InPlace || side == Side::Baseline && self.baseline.is_some()
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match (side, &mut self.baseline) {
            (Side::Baseline, Some(baseline)) => baseline(round),
            _ => {
                let begin = Instant::now();
                self.optimizer.step(&mut self.weights, &self.gradients)?;
                self.host.push(begin.elapsed());
                Ok(())
            }
        }
    }

    /// The first step of AdamW is the rate, with the gradient's sign, and the decay.
    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        self.fill()?;
        self.optimizer = adamw()?;
        self.optimizer.step(&mut self.weights, &self.gradients)?;
        let mut wrong = 0;
        for (_, tensor) in self.weights.tensors() {
            let found = tensor.to_vec::<gradsync::bf16>()?;
            // The values are not negative.
            let step = |index: usize| if value(0, index) > 0.0 { RATE } else { 0.0 };
            let expected = |index: usize| (1.0 - RATE * DECAY) * value(1, index) - step(index);
            wrong += count_wrong(found[..].into(), 1.0 / 64.0, expected);
        }
        Ok(wrong)
    }
}

struct Tensors {
    operation: Operation,
    to: Vec<GradientBuffer>,
    from: Vec<GradientBuffer>,
    baseline: Option<Baseline>,
}

impl Tensors {
    fn new(row: &Row, lens: &[usize], output: &Output) -> Result<Self, PerfError> {
        let buffer = |dtype: DType, rank: usize, len: usize| {
            let mut buffer = GradientBuffer::new(dtype, 1, [("tensor", [len])])?;
            fill(buffer.tensor_mut(0).into_data(), |index| value(rank, index));
            Ok(buffer)
        };
        let buffers = |dtype, rank| lens.iter().map(|&len| buffer(dtype, rank, len)).collect::<Result<_, PerfError>>();
        Ok(Self {
            operation: row.operation,
            to: buffers(row.types.to, 1)?,
            from: if row.operation == Operation::Zero { Vec::new() } else { buffers(row.types.from, 0)? },
            baseline: output.counts.baseline.then(|| Baseline::new(row, 1)).transpose()?,
        })
    }

    fn run(&mut self) -> Result<(), PerfError> {
        if self.operation == Operation::Zero {
            self.to.iter_mut().for_each(|to| cpu::zero(to.tensor_mut(0).into_data()));
            return Ok(());
        }
        let run = if self.operation == Operation::Cast { cpu::cast } else { cpu::accumulate };
        let mut pairs = self.to.iter_mut().zip(&self.from);
        Ok(pairs.try_for_each(|(to, from)| run(to.tensor_mut(0).into_data(), from.tensor(0).data()))?)
    }
}

impl Subject for Tensors {
    fn has(&self, side: Side) -> bool {
        side == own_side(self.operation) || side == Side::Baseline && self.baseline.is_some()
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match (side, &mut self.baseline) {
            (Side::Baseline, Some(baseline)) => baseline.call(round),
            _ => self.run()?,
        }
        Ok(())
    }

    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        self.to.iter_mut().for_each(|to| fill(to.tensor_mut(0).into_data(), |index| value(1, index)));
        self.run()?;
        let operation = self.operation;
        Ok(self.to.iter().map(|to| count_wrong(to.tensor(0).data(), 0.0, |index| expected(operation, index))).sum())
    }
}

/// The side of an operation on tensors.
pub(crate) fn own_side(operation: Operation) -> Side {
    if operation == Operation::Cast { Side::OutOfPlace } else { Side::InPlace }
}

/// The expected element at an index of a tensor after a call.
pub(crate) fn expected(operation: Operation, index: usize) -> f64 {
    match operation {
        Operation::Zero => 0.0,
        Operation::Cast => value(0, index),
        _ => value(0, index) + value(1, index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_has_its_published_tensors_and_elements() {
        let counted = |model: Model| (model.lens().len(), model.lens().iter().sum::<usize>());
        assert_eq!(counted(Model::Resnet50), (161, 25_557_032));
        assert_eq!(counted(Model::BertLarge), (398, 336_226_108));
    }
}
