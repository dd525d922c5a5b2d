//! A small GPT that learns to continue a text, character by character, on any number of ranks.
//!
//! ```sh
//! cargo build --release --example gpt # with `--features cuda` for GPUs
//! gradsync launch -n 4 -- target/release/examples/gpt text.txt 500
//! ```

#![forbid(unsafe_code)]

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, embedding, linear, loss, ops, rms_norm};
use gradsync::comm::Communicator;
use gradsync::train::{self, Reduction, Schedule, ShardOptions, ShardedIndices, Tail, mean_over_ranks};
use gradsync_candle::{AdamW, DataParallel, Result, TensorMemory, join_or_alone};

/// The number of bytes that the model sees at once.
const WINDOW: usize = 32;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const BATCH: usize = 8;

/// Two layers of attention and dense units over bytes.
pub(crate) struct Gpt {
    bytes: candle_nn::Embedding,
    places: Tensor,
    blocks: Vec<(candle_nn::RmsNorm, candle_nn::RmsNorm, [candle_nn::Linear; 4])>,
    scores: candle_nn::Linear,
    later: Tensor,
}

impl Gpt {
    /// Creates a model with variables of this builder.
    pub(crate) fn new(builder: VarBuilder<'_>) -> Result<Self> {
        let block = |index: usize| {
            let builder = builder.pp(format!("block.{index}"));
            let dense = |name: &str, from: usize, to: usize| linear(from * WIDTH, to * WIDTH, builder.pp(name));
            let layers = [dense("qkv", 1, 3)?, dense("attention", 1, 1)?, dense("up", 1, 4)?, dense("down", 4, 1)?];
            Ok((rms_norm(WIDTH, 1e-5, builder.pp("norm1"))?, rms_norm(WIDTH, 1e-5, builder.pp("norm2"))?, layers))
        };
        let later = (0..WINDOW * WINDOW).map(|place| if place % WINDOW > place / WINDOW { -1e9f32 } else { 0.0 });
        let later = Tensor::from_iter(later, builder.device())?.reshape((WINDOW, WINDOW))?.to_dtype(builder.dtype())?;
        Ok(Self {
            bytes: embedding(256, WIDTH, builder.pp("bytes"))?,
            places: builder.get_with_hints((WINDOW, WIDTH), "places", candle_nn::init::DEFAULT_KAIMING_NORMAL)?,
            blocks: (0..2).map(block).collect::<Result<_>>()?,
            scores: linear(WIDTH, 256, builder.pp("scores"))?,
            later,
        })
    }

    /// The mean loss over the bytes after each byte of these windows of a text.
    pub(crate) fn loss(&self, text: &[u8], windows: &[usize]) -> Result<Tensor> {
        let bytes = |shift: usize| {
            let of = |&window: &usize| &text[window * WINDOW + shift..][..WINDOW];
            Tensor::from_iter(windows.iter().flat_map(of).map(|&byte| u32::from(byte)), self.places.device())
        };
        let count = windows.len();
        let mut values = self.bytes.forward(&bytes(0)?.reshape((count, WINDOW))?)?.broadcast_add(&self.places)?;
        for (norm1, norm2, [qkv, attention, up, down]) in &self.blocks {
            let parts = (norm1.forward_diff(&values)?.apply(qkv)?).reshape((count, WINDOW, 3, HEADS, WIDTH / HEADS))?;
            let part = |index: usize| parts.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
            let fit = (part(0)?.matmul(&part(1)?.t()?)? / ((WIDTH / HEADS) as f64).sqrt())?;
            let seen = ops::softmax(&fit.broadcast_add(&self.later)?, D::Minus1)?.matmul(&part(2)?)?;
            values = (&values + attention.forward(&seen.transpose(1, 2)?.reshape((count, WINDOW, WIDTH))?)?)?;
            values = (&values + down.forward(&up.forward(&norm2.forward_diff(&values)?)?.gelu()?)?)?;
        }
        Ok(loss::cross_entropy(&self.scores.forward(&values)?.reshape((count * WINDOW, 256))?, &bytes(1)?)?)
    }
}

/// Trains on nine tenths of the text, and returns the mean loss over all ranks on the last tenth.
pub(crate) fn train<M: TensorMemory>(comm: &dyn Communicator<M>, on: &Device, text: &[u8], end: usize) -> Result<f64> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let log = |line: String| (rank == 0).then(|| println!("{line}"));
    let windows = text.len().saturating_sub(1) / WINDOW;
    let (trained, tested) = (windows - windows / 10, windows / 10);
    let variables = VarMap::new();
    let model = Gpt::new(VarBuilder::from_varmap(&variables, DType::F32, on))?;
    let mut parallel = DataParallel::new(&variables, comm, Reduction::Mean)?; // all start from rank 0's weights
    let schedule = Schedule::cosine(end as u64).with_warm_up(end as u64 / 10).with_last(0.1);
    let optimizer = train::AdamW::new(3e-3)?.with_max_norm(1.0)?.with_schedule(schedule)?;
    let mut optimizer = AdamW::of(&variables, optimizer)?;
    let mut indices = ShardedIndices::new(trained, rank, world_size, ShardOptions::default())?;
    let start = std::time::Instant::now();
    for step in 1..=end {
        if indices.remaining() < BATCH {
            indices.next_epoch()?;
        }
        let loss = model.loss(text, &indices.next_batch(BATCH))?;
        parallel.at(step as u64).step(&loss, &mut optimizer)?; // with the mean over all ranks
        if step % 50 == 0 || step == end {
            let loss = mean_over_ranks(comm, f64::from(loss.to_scalar::<f32>()?), 1)?.expect("every rank has a loss");
            let tokens = (step * BATCH * WINDOW * world_size) as f64 / start.elapsed().as_secs_f64();
            log(format!("step {step:5}  loss {loss:.4}  {tokens:.0} tokens/s on {world_size} ranks"));
        }
    }
    let held_back = ShardedIndices::new(tested, rank, world_size, ShardOptions::default().with_tail(Tail::Uneven))?;
    let count = held_back.len() as u64;
    let losses = held_back.map(|window| Ok(f64::from(model.loss(text, &[trained + window])?.to_scalar::<f32>()?)));
    let loss = mean_over_ranks(comm, losses.sum::<Result<f64>>()?, count)?.unwrap_or(f64::NAN);
    log(format!("mean loss of {loss:.4} on the held back tenth"));
    Ok(loss)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, steps] = &arguments[..] else { panic!("usage: gpt TEXT STEPS") };
    let text = std::fs::read(path).map_err(candle_core::Error::from)?;
    let steps = steps.parse().unwrap_or_else(|_| panic!("{steps:?} is no number"));
    let (comm, device) = join_or_alone()?;
    train(&comm, &device, &text, steps).map(drop)
}
