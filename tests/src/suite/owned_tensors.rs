//! nccl_all_gather and nccl_reduce_scatter, in any memory, against section 1.2 of the specification, which defines shards.

use gradsync::comm::{ReduceOp, Scaling};
use gradsync::onnx::{nccl_all_gather, nccl_all_gather_into, nccl_reduce_scatter, nccl_reduce_scatter_into};
use gradsync::{Error, Result};

use super::Report;
use super::checks::{Checks, Expected};
use super::operands::Operands;
use super::tensors::{SliceMut, of_all, place, slices, slices_mut, tensors};
use crate::array::Array;
use crate::inputs::Random;
use crate::oracle::Format;

/// The shapes of upstream's test: {2,3}, {5,17}, {512}, {7,13}, {256}.
const UPSTREAM: [usize; 5] = [6, 85, 512, 91, 256];

/// All cases.
pub fn run<O: Operands>(operands: &O, report: &mut impl Report) {
    report.case("upstream's tensors, owned", || {
        // The tensors have 950 elements together: one rank has a shard of 960, two ranks have shards of 480, three of 320, and four of
        // 256. The third tensor fits only into the shard of 960.
        assert_eq!(owners(operands.comm().world_size(), &UPSTREAM).is_ok(), operands.comm().world_size() == 1);
        [Format::F16, Format::F32, Format::F64].iter().for_each(|&format| check(operands, format, &UPSTREAM));
    });
    report.case("upstream's tensors in every shard", || {
        let lens = full_shards(operands.comm().world_size());
        let expected: Vec<usize> = (0..lens.len()).map(|index| index / 6).collect();
        assert_eq!(owners(operands.comm().world_size(), &lens), Ok(expected));
        Format::ALL.iter().for_each(|&format| check(operands, format, &lens));
    });
    report.case("no tensors, and tensors without elements, owned", || {
        for lens in [&[][..], &[0], &[0, 0, 3, 0], &[1]] {
            check(operands, Format::F32, lens);
        }
    });
    report.case("totals that are multiples of the block", || {
        let size = operands.comm().world_size();
        for lens in [vec![32; size], vec![32; 2 * size], vec![16; 4 * size - 1]] {
            check(operands, Format::BF16, &lens);
        }
    });
    report.case("lists of any lengths, owned", || any_lists(operands));
}

/// Lengths whose shards of 960 elements are full: each shard holds upstream's tensors and one tensor of 10 elements. The last shard
/// lacks this tensor, so the padding is 10 elements, below the limit of 32 P.
fn full_shards(world_size: usize) -> Vec<usize> {
    let mut lens = Vec::new();
    for _ in 0..world_size {
        lens.extend(UPSTREAM);
        lens.push(10);
    }
    lens.pop();
    lens
}

/// The owner of each tensor, or the first tensor without a rank that owns it entirely.
///
/// The total gains `A − total mod A` elements with `A = 32 P`, and each rank has an equal shard of the sum. Tensors lie back to back; the
/// rank whose shard contains a tensor's start owns it, and the tensor must end in that shard too.
fn owners(world_size: usize, lens: &[usize]) -> Result<Vec<usize>, usize> {
    let total: usize = lens.iter().sum();
    let block = 32 * world_size;
    let shard = (total + block - total % block) / world_size;
    let mut begin = 0;
    let mut owners = Vec::new();
    for (index, &len) in lens.iter().enumerate() {
        let owner = begin / shard;
        if begin + len > (owner + 1) * shard {
            return Err(index);
        }
        owners.push(owner);
        begin += len;
    }
    Ok(owners)
}

/// Both operations on tensors of these lengths: they succeed if every tensor has an owner, and otherwise fail with an error that names the
/// tensor.
fn check<O: Operands>(operands: &O, format: Format, lens: &[usize]) {
    let owners = owners(operands.comm().world_size(), lens);
    check_gather(operands, format, lens, &owners);
    for op in [ReduceOp::Sum, ReduceOp::Mean] {
        check_scatter(operands, format, lens, &owners, op);
    }
}

type Operation<'a, O> = dyn Fn(&mut [SliceMut<'_, O>]) -> Result<()> + 'a;

/// Runs an operation on this rank's tensors. Returns them, or nothing where the operation is refused, as it must be, for the tensor without
/// an owner.
fn run_on<O: Operands>(
    operands: &O,
    format: Format,
    tensors: &[Vec<f64>],
    owners: &Result<Vec<usize>, usize>,
    (name, operation): (&str, &Operation<'_, O>),
) -> Option<Vec<O::Placed>> {
    let mut placed = place(operands, format, tensors);
    let outcome = operation(&mut slices_mut::<O>(&mut placed));
    match (outcome, owners) {
        (Ok(()), Ok(_)) => Some(placed),
        (Err(Error::InvalidArgument { operation, reason }), Err(straddler)) => {
            assert_eq!(operation, name);
            assert!(reason.contains(&format!("tensor {straddler} ")), "{reason} does not name tensor {straddler}");
            // Nothing was communicated, and nothing was written.
            for (tensor, before) in placed.iter().zip(tensors) {
                assert_eq!(operands.read(tensor), Array::new(format, before));
            }
            None
        }
        (outcome, owners) => panic!("{name} gave {outcome:?} where the owners are {owners:?}"),
    }
}

/// Outputs in which an unwritten element is recognisable.
fn unwritten<O: Operands>(operands: &O, format: Format, lens: &[usize]) -> Vec<O::Placed> {
    lens.iter().map(|&len| operands.room(format, len, 1)).collect()
}

/// Asserts that the inputs are unchanged.
fn assert_same<O: Operands>(operands: &O, format: Format, inputs: &[O::Placed], before: &[Vec<f64>]) {
    for (input, before) in inputs.iter().zip(before) {
        assert_eq!(operands.read(input), Array::new(format, before), "an input");
    }
}

fn check_gather<O: Operands>(operands: &O, format: Format, lens: &[usize], owners: &Result<Vec<usize>, usize>) {
    let ranks = tensors(operands, format, lens, 6);
    let run = |tensors: &mut [SliceMut<'_, O>]| nccl_all_gather(operands.comm(), tensors);
    let operation: (&str, &Operation<'_, O>) = ("nccl_all_gather", &run);
    let mut checks = Checks::new(operands.comm());
    if let (Some(placed), Ok(owners)) =
        (run_on(operands, format, &ranks[operands.comm().rank()], owners, operation), owners)
    {
        for (index, (tensor, &owner)) in placed.iter().zip(owners).enumerate() {
            let expected = Expected::bits(Array::new(format, &ranks[owner][index]));
            let label = format!("tensor {index} of {lens:?}, gathered from rank {owner}");
            checks.same(label, operands.read(tensor), &expected);
        }
        let inputs = place(operands, format, &ranks[operands.comm().rank()]);
        let mut outputs = unwritten(operands, format, lens);
        nccl_all_gather_into(operands.comm(), &slices::<O>(&inputs), &mut slices_mut::<O>(&mut outputs)).unwrap();
        for (index, (tensor, &owner)) in outputs.iter().zip(owners).enumerate() {
            let expected = Expected::bits(Array::new(format, &ranks[owner][index]));
            checks.same(format!("output {index} of {lens:?}"), operands.read(tensor), &expected);
        }
        assert_same(operands, format, &inputs, &ranks[operands.comm().rank()]);
    }
    checks.finish();
}

fn check_scatter<O: Operands>(
    operands: &O,
    format: Format,
    lens: &[usize],
    owners: &Result<Vec<usize>, usize>,
    op: ReduceOp,
) {
    let ranks = tensors(operands, format, lens, 7);
    let run = |tensors: &mut [SliceMut<'_, O>]| nccl_reduce_scatter(operands.comm(), tensors, op);
    let operation: (&str, &Operation<'_, O>) = ("nccl_reduce_scatter", &run);
    let mut checks = Checks::new(operands.comm());
    let own = &ranks[operands.comm().rank()];
    if let (Some(placed), Ok(owners)) = (run_on(operands, format, own, owners, operation), owners) {
        for (index, (tensor, &owner)) in placed.iter().zip(owners).enumerate() {
            let expected = if owner == operands.comm().rank() {
                operands.reduced(op, format, Scaling::NONE, &of_all(&ranks, index))
            } else {
                Expected::bits(Array::new(format, &own[index]))
            };
            let label = format!("tensor {index} of {lens:?}, {op} for rank {owner}");
            checks.own(label, operands.read(tensor), &expected);
        }
        let inputs = place(operands, format, own);
        let mut outputs = unwritten(operands, format, lens);
        nccl_reduce_scatter_into(operands.comm(), &slices::<O>(&inputs), &mut slices_mut::<O>(&mut outputs), op)
            .unwrap();
        for (index, (tensor, &owner)) in outputs.iter().zip(owners).enumerate() {
            let expected = if owner == operands.comm().rank() {
                operands.reduced(op, format, Scaling::NONE, &of_all(&ranks, index))
            } else {
                Expected::bits(Array::unwritten(format, lens[index]))
            };
            checks.own(format!("output {index} of {lens:?}, {op}"), operands.read(tensor), &expected);
        }
        assert_same(operands, format, &inputs, own);
    }
    checks.finish();
}

/// With more than one rank, some lists have owners for all tensors and some do not.
fn any_lists<O: Operands>(operands: &O) {
    let mut random = Random::new(11);
    let (mut accepted, mut refused) = (0, 0);
    for count in [1, 2, 3, 5, 8, 13, 40] {
        for bound in [4, 40, 400] {
            let lens: Vec<usize> = (0..count).map(|_| random.below(bound) as usize).collect();
            if owners(operands.comm().world_size(), &lens).is_ok() {
                accepted += 1
            } else {
                refused += 1
            }
            check(operands, Format::F32, &lens);
        }
    }
    assert!(
        accepted > 3 && (refused > 3 || operands.comm().world_size() == 1),
        "{accepted} accepted, {refused} refused"
    );
}
