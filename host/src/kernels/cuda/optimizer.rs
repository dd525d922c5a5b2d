//! The step of an optimizer on the device: [`square_sums`], [`advance_step`] and [`update`]. None of them waits for the queue.

use std::collections::BTreeMap;

use gradsync_device::abi::{SquareRow, UpdateRow, update_tile_len};
use gradsync_device::math::step::StepRules;
use gradsync_device::math::sums;

use super::{pointer, pointer_mut, words_of};
use crate::driver::{Argument, DeviceSlice, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::optimizer::{Target, TensorUpdate, UpdateRule};
use crate::memory::Cuda;

/// Enqueues the sums of squares of each chunk of the tensors, one launch for each dtype. A tensor's sums begin at its number of
/// `first_chunks`.
///
/// # Errors
/// [`Error::InvalidArgument`] for tensors of different queues; [`Error::Cuda`].
pub(crate) fn square_sums(sums: DeviceSliceMut<'_>, first_chunks: &[usize], tensors: &[DeviceSlice<'_>]) -> Result<()> {
    let view = sums.as_slice();
    let queue = view.queue();
    let mut launches: BTreeMap<DType, (Vec<SquareRow>, u64)> = BTreeMap::new();
    for (&first_chunk, tensor) in first_chunks.iter().zip(tensors).filter(|(_, tensor)| !tensor.is_empty()) {
        queue.check_same("norms", tensor.queue())?;
        let (rows, blocks) = launches.entry(tensor.dtype()).or_default();
        let (address, len) = (tensor.address(), tensor.len() as u64);
        rows.push(SquareRow { address, len, first_chunk: first_chunk as u64, first_block: *blocks });
        *blocks += sums::chunks(tensor.len()) as u64;
    }
    let _held = queue.hold();
    for (dtype, (rows, blocks)) in launches {
        let table = queue.table(&words_of(&rows))?;
        let arguments = [pointer_mut(&sums), (&table).into(), rows.len().into()];
        // SAFETY: the tensors are borrowed and belong to this queue; the caller gives room for the sums of all chunks.
        unsafe { queue.launch(&format!("norms_{dtype}"), blocks, &arguments) }?;
    }
    Ok(())
}

/// Enqueues the computation of the memory of the next step from the sums of all chunks.
///
/// # Errors
/// [`Error::Cuda`].
pub(crate) fn advance_step(step: DeviceSliceMut<'_>, rules: &StepRules, chunks: DeviceSlice<'_>) -> Result<()> {
    let view = step.as_slice();
    let queue = view.queue();
    let _held = queue.hold();
    let table = queue.table(&rules.to_numbers().map(f64::to_bits))?;
    let arguments = [pointer_mut(&step), (&table).into(), pointer(chunks), chunks.len().into()];
    // SAFETY: the memory is borrowed mutably and has the numbers of a step; the table has those of the rules.
    Ok(unsafe { queue.launch("advance_step", 1, &arguments) }?)
}

/// Enqueues the update of tensors, whose dtypes [`check_update`] accepts, one launch for each set of dtypes; a skipped step changes nothing.
///
/// # Errors
/// [`Error::InvalidArgument`] for tensors of different queues; [`Error::Cuda`].
pub(crate) fn update(rule: UpdateRule, step: DeviceSlice<'_>, tensors: Vec<TensorUpdate<'_, Cuda>>) -> Result<()> {
    let queue = step.queue();
    let family = match rule {
        UpdateRule::Sgd(_) => "sgd",
        UpdateRule::AdamW => "adamw",
    };
    let mut launches: BTreeMap<&str, (Vec<UpdateRow>, u64)> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.len() > 0) {
        for operand in [Some(tensor.gradients), Some(tensor.weights()), tensor.output()].into_iter().flatten() {
            queue.check_same("update", operand.queue())?;
        }
        let deltas = matches!(tensor.target, Target::Deltas { .. });
        let inputs = [tensor.dtype(), tensor.gradients.dtype()];
        let output = tensor.output().map(|output| output.dtype());
        let dtypes = dtypes_of(inputs, output, deltas).expect("the caller has checked the dtypes");
        let (rows, blocks) = launches.entry(dtypes).or_default();
        let state = |state: &Option<DeviceSliceMut<'_>>| state.as_ref().map_or(0, |state| state.as_slice().address());
        let row = UpdateRow {
            weights: tensor.weights().address(),
            gradients: tensor.gradients.address(),
            states: tensor.states.each_ref().map(state),
            output: tensor.output().map_or(0, |output| output.address()),
            len: tensor.len() as u64,
            first_block: *blocks,
            ..UpdateRow::default()
        };
        rows.push(row.with_rate(tensor.rate, tensor.decay));
        *blocks += tensor.len().div_ceil(update_tile_len(tensor.dtype())) as u64;
    }
    let _held = queue.hold();
    for (dtypes, (rows, blocks)) in launches {
        let table = queue.table(&words_of(&rows))?;
        let mut arguments = vec![(&table).into(), rows.len().into(), pointer(step)];
        if let UpdateRule::Sgd(scalars) = rule {
            arguments.extend([scalars.momentum, scalars.nesterov].map(Argument::F64));
        }
        // SAFETY: the operands are borrowed, have one length and the dtypes of the kernel, and belong to this queue.
        unsafe { queue.launch(&format!("{family}_{dtypes}"), blocks, &arguments) }?;
    }
    Ok(())
}

/// The dtypes in the name of the entry point for weights and gradients of these dtypes and an output, which is a copy of the weights or
/// `deltas`; `None` if there is none.
fn dtypes_of([weights, gradients]: [DType; 2], output: Option<DType>, deltas: bool) -> Option<&'static str> {
    use DType::{BF16, F16, F32, F64};
    Some(match (deltas, weights, gradients, output) {
        (false, F64, F64, None) => "f64",
        (false, F32, F32, None) => "f32",
        (false, F32, F16, None) => "f16",
        (false, F32, BF16, None) => "bf16",
        (false, F32, F32, Some(F16)) => "f32_f16",
        (false, F32, F16, Some(F16)) => "f16_f16",
        (false, F32, BF16, Some(F16)) => "bf16_f16",
        (false, F32, F32, Some(BF16)) => "f32_bf16",
        (false, F32, F16, Some(BF16)) => "f16_bf16",
        (false, F32, BF16, Some(BF16)) => "bf16_bf16",
        (true, F64, F64, Some(F64)) => "deltas_f64_f64",
        (true, F32, F32, Some(F32)) => "deltas_f32_f32",
        (true, F32, F32, Some(F16)) => "deltas_f32_f16",
        (true, F32, BF16, Some(F32)) => "deltas_bf16_f32",
        (true, F32, F16, Some(F16)) => "deltas_f16_f16",
        _ => return None,
    })
}

/// Refuses dtypes without a kernel, naming the tensor.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub(crate) fn check_update(
    operation: &'static str,
    name: &str,
    inputs: [DType; 2],
    output: Option<DType>,
    deltas: bool,
) -> Result<()> {
    if dtypes_of(inputs, output, deltas).is_some() {
        return Ok(());
    }
    let [weights, gradients] = inputs;
    let output = output.map_or(String::new(), |output| {
        if deltas { format!(", to deltas of {output}") } else { format!(", with a copy in {output}") }
    });
    let reason = format!("no kernel updates {name:?} in {weights} by gradients of {gradients}{output}");
    Err(Error::InvalidArgument { operation, reason })
}
