//! The vectors of an optimizer's state, in one arena for each vector and precision, and the master copies of 16-bit weights.

use std::ops::Range;

use super::memory::OptimizerMemory;
use super::options::ParameterGroup;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::optimizer::{Target, TensorUpdate};
use crate::plan::layout::TENSOR_ALIGNMENT;

/// One tensor of a step.
#[derive(Debug)]
pub(super) struct Operand<'a, M: OptimizerMemory> {
    pub(super) name: &'a str,
    pub(super) gradient: Option<M::Slice<'a>>,
    /// Weights of any dtype, without a copy, or the deltas.
    pub(super) target: Target<'a, M>,
}

impl<M: OptimizerMemory> Operand<'_, M> {
    pub(super) fn weights(&self) -> M::Slice<'_> {
        match &self.target {
            Target::Weights { weights, .. } => M::as_slice(weights),
            Target::Deltas { weights, .. } => M::shortened(*weights),
        }
    }

    fn deltas(&self) -> Option<DType> {
        match &self.target {
            Target::Weights { .. } => None,
            Target::Deltas { deltas, .. } => Some(M::dtype(M::as_slice(deltas))),
        }
    }

    /// Whether gradients, weights or deltas are of `f64`.
    fn is_wide(&self) -> bool {
        let gradient = self.gradient.map(|gradient| M::dtype(M::shortened(gradient)));
        [gradient, self.deltas(), Some(M::dtype(self.weights()))].contains(&Some(DType::F64))
    }
}

/// One parameter, as in the first step.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) len: usize,
    /// The dtype of the weights.
    dtype: DType,
    /// The index of its precision's arenas.
    pub(super) arena: usize,
    /// The range in the vectors of the arena; empty for a parameter that is frozen.
    pub(super) range: Range<usize>,
    /// The range in the master copies, for weights of another precision than the state.
    pub(super) master: Option<Range<usize>>,
    pub(super) rate: f64,
    pub(super) decay: Option<f64>,
    pub(super) is_frozen: bool,
}

/// The states of the parameters of one precision.
#[derive(Debug)]
pub(super) struct Arena<M: OptimizerMemory> {
    dtype: DType,
    len: usize,
    pub(super) vectors: Vec<M::Buffer>,
    pub(super) masters: Option<M::Buffer>,
}

/// The parameters and their states.
#[derive(Debug)]
pub(super) struct States<M: OptimizerMemory> {
    pub(super) tensors: Vec<Tensor>,
    /// Of `f32` and of `f64`.
    pub(super) arenas: [Arena<M>; 2],
    /// Whether the master copies have the values of the weights.
    pub(super) has_masters: bool,
}

const PRECISIONS: [DType; 2] = [DType::F32, DType::F64];

impl<M: OptimizerMemory> States<M> {
    /// Plans the states of these tensors, and allocates master copies.
    pub(super) fn new(operation: &'static str, operands: &[Operand<'_, M>], groups: &[ParameterGroup]) -> Result<Self> {
        let mut names: Vec<&str> = operands.iter().map(|operand| operand.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let reason = format!("two tensors are named {:?}: pass a tied parameter once", pair[0]);
            return Err(Error::InvalidArgument { operation, reason });
        }
        if let Some(group) = groups.iter().find(|group| !names.iter().any(|name| group.matches(name))) {
            let reason = format!("no parameter matches the group {:?}; there are {names:?}", group.pattern);
            return Err(Error::InvalidArgument { operation, reason });
        }
        let (mut lens, mut master_lens) = ([0; 2], [0; 2]);
        let next = |lens: &mut [usize; 2], arena: usize, len: usize| {
            let begin = lens[arena];
            lens[arena] = (begin + len).next_multiple_of(TENSOR_ALIGNMENT / PRECISIONS[arena].size_bytes());
            begin..begin + len
        };
        let mut tensors = Vec::with_capacity(operands.len());
        for operand in operands {
            let (weights, arena) = (operand.weights(), usize::from(operand.is_wide()));
            M::check_floats(operation, M::shortened(weights))?;
            let (len, dtype) = (M::len(M::shortened(weights)), M::dtype(weights));
            let group = groups.iter().find(|group| group.matches(operand.name));
            let is_frozen = group.is_some_and(|group| group.frozen);
            let needs_master = !is_frozen && dtype != PRECISIONS[arena];
            tensors.push(Tensor {
                name: operand.name.to_owned(),
                len,
                dtype,
                arena,
                range: next(&mut lens, arena, if is_frozen { 0 } else { len }),
                master: needs_master.then(|| next(&mut master_lens, arena, len)),
                rate: group.map_or(1.0, |group| group.rate),
                decay: group.and_then(|group| group.weight_decay),
                is_frozen,
            });
        }
        let arena = |index: usize| -> Result<Arena<M>> {
            let (dtype, len) = (PRECISIONS[index], lens[index]);
            let near = operands.first().filter(|_| master_lens[index] > 0);
            let masters =
                near.map(|near| M::zeros_near(operation, near.weights(), dtype, master_lens[index])).transpose()?;
            Ok(Arena { dtype, len, vectors: Vec::new(), masters })
        };
        Ok(Self { arenas: [arena(0)?, arena(1)?], tensors, has_masters: false })
    }

    /// Makes as many vectors as the options need; new ones are zeros.
    pub(super) fn resize(&mut self, operation: &'static str, near: M::Slice<'_>, vectors: usize) -> Result<()> {
        for arena in self.arenas.iter_mut().filter(|arena| arena.len > 0) {
            arena.vectors.truncate(vectors);
            while arena.vectors.len() < vectors {
                arena.vectors.push(M::zeros_near(operation, M::shortened(near), arena.dtype, arena.len)?);
            }
        }
        Ok(())
    }

    /// The gradients that count in a step of these operands, with the names of their tensors.
    pub(super) fn gradients<'o>(
        &'o self,
        operands: &'o [Operand<'_, M>],
    ) -> impl Iterator<Item = (&'o str, M::Slice<'o>)> {
        let trained = self.tensors.iter().zip(operands).filter(|(tensor, _)| !tensor.is_frozen);
        trained.filter_map(|(_, operand)| Some((operand.name, M::shortened(operand.gradient?))))
    }

    /// Refuses tensors that are not those of the first step, and dtypes that the states cannot take.
    pub(super) fn check(&self, operation: &'static str, operands: &[Operand<'_, M>]) -> Result<()> {
        let refuse = |reason: String| Err(Error::InvalidArgument { operation, reason });
        if operands.len() != self.tensors.len() {
            return refuse(format!("{} tensors, and the state is of {}", operands.len(), self.tensors.len()));
        }
        for (tensor, operand) in self.tensors.iter().zip(operands) {
            let (weights, name) = (operand.weights(), operand.name);
            let (len, dtype) = (M::len(M::shortened(weights)), M::dtype(M::shortened(weights)));
            if tensor.name != name {
                return refuse(format!("a tensor is named {name:?}, and the state has {:?} in its place", tensor.name));
            }
            if (tensor.len, tensor.dtype) != (len, dtype) {
                let (old_len, old) = (tensor.len, tensor.dtype);
                return refuse(format!(
                    "the weights {name:?} have {len} elements of {dtype}, and the state is of {old_len} of {old}"
                ));
            }
            M::check_floats(operation, M::shortened(weights))?;
            if let Target::Deltas { deltas, .. } = &operand.target {
                M::check_floats(operation, M::as_slice(deltas))?;
                let deltas = M::len(M::as_slice(deltas));
                if deltas != len {
                    return refuse(format!("the deltas {name:?} have {deltas} elements, and its weights have {len}"));
                }
            }
            let Some(gradient) = operand.gradient else { continue };
            M::check_floats(operation, M::shortened(gradient))?;
            let (gradients, gradient) = (M::len(M::shortened(gradient)), M::dtype(M::shortened(gradient)));
            if gradients != len {
                return refuse(format!(
                    "the gradient of {name:?} has {gradients} elements, and its weights have {len}"
                ));
            }
            let state = PRECISIONS[tensor.arena];
            if operand.is_wide() && state != DType::F64 {
                return refuse(format!(
                    "{name:?} has operands of f64, and its state is of {state} since the first step"
                ));
            }
            let output = operand.deltas().or((dtype != state).then_some(dtype));
            M::check_update(operation, name, [state, gradient], output, operand.deltas().is_some())?;
        }
        Ok(())
    }
}

/// The first element below 0, of `f32` or `f64`.
pub(super) fn first_negative<M: OptimizerMemory>(data: M::Slice<'_>) -> Result<Option<f64>> {
    let numbers: Vec<f64> = match M::dtype(data) {
        DType::F64 => M::to_vec::<f64>(data)?,
        _ => M::to_vec::<f32>(data)?.into_iter().map(f64::from).collect(),
    };
    Ok(numbers.into_iter().find(|number| *number < 0.0))
}

/// The operands of the kernels: weights of another precision than their state are updated in their master copies.
pub(super) fn updates<'a, M: OptimizerMemory>(
    states: &'a mut States<M>,
    operands: &'a mut [Operand<'_, M>],
    decay: f64,
) -> Result<Vec<TensorUpdate<'a, M>>> {
    let States { tensors, arenas, has_masters } = states;
    let tensors = &*tensors;
    // The program applies deltas itself, so that weights change behind their copies.
    let changes_weights = operands.iter().all(|operand| matches!(operand.target, Target::Weights { .. }));
    let with_masters = std::mem::replace(has_masters, changes_weights);
    /// For each tensor its range of one buffer.
    fn divided<'a, M: OptimizerMemory>(
        tensors: &[Tensor],
        arena: usize,
        buffer: &'a mut M::Buffer,
        range: impl Fn(&Tensor) -> Option<Range<usize>>,
    ) -> Vec<Option<M::SliceMut<'a>>> {
        let of_arena = |tensor: &Tensor| (tensor.arena == arena).then(|| range(tensor)).flatten();
        let ranges: Vec<_> = tensors.iter().filter_map(of_arena).collect();
        let mut pieces = M::ranges_mut(M::buffer_mut(buffer), &ranges).into_iter();
        tensors.iter().map(|tensor| of_arena(tensor).and_then(|_| pieces.next())).collect()
    }
    let mut vectors: Vec<[Option<M::SliceMut<'a>>; 2]> = tensors.iter().map(|_| [None, None]).collect();
    let mut masters: Vec<Option<M::SliceMut<'a>>> = tensors.iter().map(|_| None).collect();
    for (index, arena) in arenas.iter_mut().enumerate() {
        for (place, buffer) in arena.vectors.iter_mut().enumerate() {
            let pieces = divided::<M>(tensors, index, buffer, |tensor| Some(tensor.range.clone()));
            vectors
                .iter_mut()
                .zip(pieces)
                .for_each(|(vectors, piece)| vectors[place] = piece.or(vectors[place].take()));
        }
        if let Some(buffer) = &mut arena.masters {
            let pieces = divided::<M>(tensors, index, buffer, |tensor| tensor.master.clone());
            masters.iter_mut().zip(pieces).for_each(|(master, piece)| *master = piece.or(master.take()));
        }
    }
    let mut updates = Vec::with_capacity(operands.len());
    for (((tensor, operand), states), master) in tensors.iter().zip(operands).zip(vectors).zip(masters) {
        let target = match (&mut operand.target, master) {
            (Target::Weights { weights, .. }, Some(mut master)) => {
                if !with_masters {
                    M::cast(M::reborrow(&mut master), M::as_slice(weights))?;
                }
                Target::Weights { weights: master, copy: Some(M::reborrow(weights)) }
            }
            (Target::Weights { weights, .. }, None) => Target::Weights { weights: M::reborrow(weights), copy: None },
            (Target::Deltas { weights, deltas }, Some(mut master)) => {
                M::cast(M::reborrow(&mut master), M::shortened(*weights))?;
                Target::Deltas { weights: M::into_slice(master), deltas: M::reborrow(deltas) }
            }
            (Target::Deltas { weights, deltas }, None) => {
                Target::Deltas { weights: M::shortened(*weights), deltas: M::reborrow(deltas) }
            }
        };
        let Some(gradients) = operand.gradient.filter(|_| !tensor.is_frozen).map(M::shortened) else { continue };
        updates.push(TensorUpdate {
            gradients,
            states,
            target,
            rate: tensor.rate,
            decay: tensor.decay.unwrap_or(decay),
        });
    }
    Ok(updates)
}
