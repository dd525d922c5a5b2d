//! Linear layers whose weights are divided among ranks.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Linear, Module, VarBuilder};

use super::TensorParallel;
use crate::error::Error;

/// `y = x Wᵀ + b` with `W` and `b` divided by outputs: each rank computes some of the outputs from the whole input.
///
/// Followed by a [`RowParallelLinear`], the two layers need one all-reduce in each direction.
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    linear: Linear,
    group: TensorParallel,
    gathers: bool,
}

/// `y = x Wᵀ + b` with `W` divided by inputs: each rank has some of the inputs, and all get the sum. The bias is not divided; it is the
/// same on all ranks, and is added once.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    linear: Linear,
    bias: Option<Tensor>,
    group: TensorParallel,
    divides: bool,
}

/// A rank's part of a dimension.
fn part(name: &str, len: usize, group: &TensorParallel) -> crate::Result<usize> {
    let world_size = group.world_size();
    if len.is_multiple_of(world_size) {
        return Ok(len / world_size);
    }
    Err(Error::Layer(format!("rank {}: {len} {name} cannot be divided evenly among {world_size} ranks", group.rank())))
}

fn check_weight(weight: &Tensor) -> crate::Result<(usize, usize)> {
    weight
        .dims2()
        .map_err(|_| Error::Layer(format!("a weight has the shape {:?}, and must have 2 dimensions", weight.dims())))
}

fn check_bias(bias: Option<&Tensor>, outputs: usize) -> crate::Result<()> {
    match bias {
        Some(bias) if bias.dims() != [outputs] => {
            Err(Error::Layer(format!("a bias has the shape {:?}, and the layer has {outputs} outputs", bias.dims())))
        }
        _ => Ok(()),
    }
}

/// candle's own initialization of a layer with this number of inputs, of which a rank may have a part.
fn start(inputs: usize) -> (Init, Init) {
    let bound = 1.0 / (inputs as f64).sqrt();
    (Init::Randn { mean: 0.0, stdev: 2f64.sqrt() * bound }, Init::Uniform { lo: -bound, up: bound })
}

impl ColumnParallelLinear {
    /// Creates the layer from this rank's part of the weight, `outputs / ranks × inputs`, and of the bias.
    ///
    /// # Errors
    /// [`Error::Layer`] for shapes that do not match each other.
    pub fn new(weight: Tensor, bias: Option<Tensor>, group: &TensorParallel) -> crate::Result<Self> {
        let (outputs, _) = check_weight(&weight)?;
        check_bias(bias.as_ref(), outputs)?;
        Ok(Self { linear: Linear::new(weight, bias), group: group.clone(), gathers: false })
    }

    /// Creates the layer with new variables for this rank's part, initialized like `candle_nn::linear`.
    ///
    /// # Errors
    /// [`Error::Layer`] if the outputs are not divisible by the number of ranks; candle's.
    pub fn build(
        inputs: usize,
        outputs: usize,
        group: &TensorParallel,
        builder: VarBuilder<'_>,
    ) -> crate::Result<Self> {
        let own = part("outputs", outputs, group)?;
        let (weight, bias) = start(inputs);
        let weight = builder.get_with_hints((own, inputs), "weight", weight)?;
        Self::new(weight, Some(builder.get_with_hints(own, "bias", bias)?), group)
    }

    /// Takes this rank's part of a whole layer, which is the same on all ranks.
    ///
    /// # Errors
    /// The errors of [`build`](Self::build).
    pub fn of(whole: &Linear, group: &TensorParallel) -> crate::Result<Self> {
        let own = part("outputs", check_weight(whole.weight())?.0, group)?;
        let cut = |tensor: &Tensor| tensor.narrow(0, group.rank() * own, own)?.contiguous();
        Self::new(cut(whole.weight())?, whole.bias().map(cut).transpose()?, group)
    }

    /// Sets whether every rank gets all outputs. False by default, for a [`RowParallelLinear`] that follows.
    pub fn with_gathers(self, gathers: bool) -> Self {
        Self { gathers, ..self }
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let output = self.linear.forward(&self.group.all_reduce_gradient(input)?)?;
        match self.gathers {
            true => self.group.gather(&output, output.rank() - 1),
            false => Ok(output),
        }
    }
}

impl RowParallelLinear {
    /// Creates the layer from this rank's part of the weight, `outputs × inputs / ranks`, and the whole bias.
    ///
    /// # Errors
    /// [`Error::Layer`] for shapes that do not match each other.
    pub fn new(weight: Tensor, bias: Option<Tensor>, group: &TensorParallel) -> crate::Result<Self> {
        let (outputs, _) = check_weight(&weight)?;
        check_bias(bias.as_ref(), outputs)?;
        Ok(Self { linear: Linear::new(weight, None), bias, group: group.clone(), divides: false })
    }

    /// Creates the layer with new variables for this rank's part, initialized like `candle_nn::linear`, except the bias, which is zero and
    /// so the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Layer`] if the inputs are not divisible by the number of ranks; candle's.
    pub fn build(
        inputs: usize,
        outputs: usize,
        group: &TensorParallel,
        builder: VarBuilder<'_>,
    ) -> crate::Result<Self> {
        let own = part("inputs", inputs, group)?;
        let weight = builder.get_with_hints((outputs, own), "weight", start(inputs).0)?;
        Self::new(weight, Some(builder.get_with_hints(outputs, "bias", Init::Const(0.0))?), group)
    }

    /// Takes this rank's part of a whole layer, which is the same on all ranks.
    ///
    /// # Errors
    /// The errors of [`build`](Self::build).
    pub fn of(whole: &Linear, group: &TensorParallel) -> crate::Result<Self> {
        let own = part("inputs", check_weight(whole.weight())?.1, group)?;
        let weight = whole.weight().narrow(1, group.rank() * own, own)?.contiguous()?;
        Self::new(weight, whole.bias().cloned(), group)
    }

    /// Sets whether the input is whole and the same on all ranks, so that each takes its part. False by default, for the outputs of a
    /// [`ColumnParallelLinear`].
    pub fn with_divides(self, divides: bool) -> Self {
        Self { divides, ..self }
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let output = match self.divides {
            true => self.linear.forward(&self.group.scatter(input, input.rank() - 1)?)?,
            false => self.linear.forward(input)?,
        };
        let output = self.group.all_reduce(&output)?;
        match &self.bias {
            Some(bias) => output.broadcast_add(bias),
            None => Ok(output),
        }
    }
}
