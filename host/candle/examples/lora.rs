//! LoRA on any number of ranks: the weights of a base stay frozen, and all ranks together train adapters.
//!
//! ```sh
//! cargo build --release --example lora # with `--features cuda` for GPUs
//! gradsync launch -n 4 -- target/release/examples/lora
//! ```
//!
//! prints, with other losses in every run, because the weights start at random:
//!
//! ```text
//! [0] 146 numbers are trained, and 321 are frozen
//! [0] step  50: loss 0.0533
//! [0] step 100: loss 0.0186
//! [0] step 150: loss 0.0103
//! [0] step 200: loss 0.0068
//! ```
//!
//! Only the gradients of the adapters are reduced, and the optimizer has no state for the base. A base from
//! `VarBuilder::from_mmaped_safetensors` consists of tensors, not of variables: then nothing has to be declared.

#![forbid(unsafe_code)]

use candle_core::{DType, Tensor};
use candle_nn::{Init, Linear, Module, VarBuilder, VarMap, init, linear, loss::mse};
use gradsync::comm::Communicator;
use gradsync::train::{Reduction, mean_over_ranks};
use gradsync_candle::{AdamW, DataParallel, Result, TensorMemory, Variables, join_or_alone};

const INPUTS: usize = 8;
const HIDDEN: usize = 32;
/// The rank of the adapters' products.
const ADAPTED: usize = 2;
/// The number of examples of all ranks.
const EXAMPLES: usize = 96;

/// A layer `base(x) + up · down · x`, whose base is frozen.
struct Adapted {
    base: Linear,
    down: Tensor,
    up: Tensor,
}

impl Adapted {
    fn new(inputs: usize, outputs: usize, builder: VarBuilder<'_>) -> Result<Self> {
        let (base, adapter) = (linear(inputs, outputs, builder.pp("base"))?, builder.pp("adapter"));
        let down = adapter.get_with_hints((ADAPTED, inputs), "down", init::DEFAULT_KAIMING_NORMAL)?;
        let up = adapter.get_with_hints((outputs, ADAPTED), "up", Init::Const(0.0))?; // training begins at the base
        Ok(Self { base, down, up })
    }
}

impl Module for Adapted {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        self.base.forward(input)? + input.matmul(&self.down.t()?)?.matmul(&self.up.t()?)?
    }
}

/// Two layers with adapters, which are to learn the sum of the inputs.
pub(crate) struct Model([Adapted; 2]);

impl Model {
    pub(crate) fn new(builder: VarBuilder<'_>) -> Result<Self> {
        let layer = |inputs, outputs, name: &str| Adapted::new(inputs, outputs, builder.pp(name));
        Ok(Self([layer(INPUTS, HIDDEN, "first")?, layer(HIDDEN, 1, "second")?]))
    }

    /// The mean loss of part `index` of `count` equal parts of the examples.
    pub(crate) fn loss(&self, index: usize, count: usize) -> Result<Tensor> {
        let [first, second] = &self.0;
        let numbers = (0..EXAMPLES * INPUTS).map(|place| ((place * place + 3 * place) % 101) as f64 / 50.0 - 1.0);
        let all = Tensor::from_iter(numbers, first.up.device())?.reshape((EXAMPLES, INPUTS))?;
        let len = EXAMPLES / count;
        let examples = all.to_dtype(first.up.dtype())?.narrow(0, index * len, len)?;
        let found = second.forward(&first.forward(&examples)?.relu()?)?;
        Ok(mse(&found, &examples.sum_keepdim(1)?)?)
    }
}

/// Trains the adapters among these variables, and returns the mean loss over all ranks before each step.
pub(crate) fn train<M: TensorMemory>(
    comm: &dyn Communicator<M>,
    builder: VarBuilder<'_>,
    variables: &VarMap,
    steps: u64,
) -> Result<Vec<f64>> {
    let log = |line: String| (comm.rank() == 0).then(|| println!("{line}"));
    let model = Model::new(builder)?;
    let variables = Variables::from(variables).with_frozen(|name| name.contains(".base."));
    let count = |total: usize, tensor: &Tensor| total + tensor.elem_count();
    let trained = variables.trained().map(|var| var.as_tensor()).fold(0, count);
    let all = variables.iter().map(|(_, var)| var.as_tensor()).fold(0, count);
    log(format!("{trained} numbers are trained, and {} are frozen", all - trained));
    let mut parallel = DataParallel::new(variables, comm, Reduction::Mean)?; // rank 0's base and adapters for all
    let mut optimizer = AdamW::new(parallel.variables(), 0.02)?;
    let mut losses = Vec::new();
    for step in 1..=steps {
        let loss = model.loss(comm.rank(), comm.world_size())?;
        parallel.at(step).step(&loss, &mut optimizer)?;
        let own = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        losses.push(mean_over_ranks(comm, own, 1)?.expect("every rank has a loss"));
        if step % 50 == 0 {
            log(format!("step {step:3}: loss {:.4}", losses.last().expect("a loss")));
        }
    }
    Ok(losses)
}

fn main() -> Result<()> {
    let (comm, device) = join_or_alone()?;
    let variables = VarMap::new();
    train(&comm, VarBuilder::from_varmap(&variables, DType::F32, &device), &variables, 200).map(drop)
}
