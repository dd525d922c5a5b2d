//! all_gather_owned and reduce_scatter_owned, against section 1.2 of the specification, which defines windows.

use std::rc::Rc;

use gradsync::comm::{ReduceOp, Scaling};
use gradsync::driver::DeviceSliceMut;
use gradsync::ops::{all_gather_owned, all_gather_owned_into, reduce_scatter_owned, reduce_scatter_owned_into};
use gradsync::{Error, Result};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;

use super::{World, of_all, slices, slices_mut};
use crate::checks::{Checks, Expected, reduced};
use crate::placed::Placed;
use crate::report::Report;

/// The shapes of upstream's test: {2,3}, {5,17}, {512}, {7,13}, {256}.
const UPSTREAM: [usize; 5] = [6, 85, 512, 91, 256];

pub(super) fn run(world: &World<'_>, report: &mut Report) {
    report.case("upstream's tensors, owned", || {
        // The tensors have 950 elements together: one rank has a window of 960, two ranks have windows of 480, three of 320, and four of
        // 256. The third tensor fits only into the window of 960.
        assert_eq!(owners(world.size(), &UPSTREAM).is_ok(), world.size() == 1);
        [Format::F16, Format::F32, Format::F64].iter().for_each(|&format| check(world, format, &UPSTREAM));
    });
    report.case("upstream's tensors in every window", || {
        let lens = full_windows(world.size());
        let expected: Vec<usize> = (0..lens.len()).map(|index| index / 6).collect();
        assert_eq!(owners(world.size(), &lens), Ok(expected));
        Format::ALL.iter().for_each(|&format| check(world, format, &lens));
    });
    report.case("no tensors, and tensors without elements, owned", || {
        for lens in [&[][..], &[0], &[0, 0, 3, 0], &[1]] {
            check(world, Format::F32, lens);
        }
    });
    report.case("totals that are multiples of the block", || {
        let size = world.size();
        for lens in [vec![32; size], vec![32; 2 * size], vec![16; 4 * size - 1]] {
            check(world, Format::BF16, &lens);
        }
    });
    report.case("lists of any lengths, owned", || any_lists(world));
}

/// Lengths whose windows of 960 elements are full: each window holds upstream's tensors and one tensor of 10 elements. The last window
/// lacks this tensor, so the padding is 10 elements, below the limit of 32 P.
fn full_windows(world_size: usize) -> Vec<usize> {
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
/// The total gains `A − total mod A` elements with `A = 32 P`, and each rank has an equal window of the sum. Tensors lie back to back; the
/// rank whose window contains a tensor's start owns it, and the tensor must end in that window too.
fn owners(world_size: usize, lens: &[usize]) -> Result<Vec<usize>, usize> {
    let total: usize = lens.iter().sum();
    let block = 32 * world_size;
    let window = (total + block - total % block) / world_size;
    let mut begin = 0;
    let mut owners = Vec::new();
    for (index, &len) in lens.iter().enumerate() {
        let owner = begin / window;
        if begin + len > (owner + 1) * window {
            return Err(index);
        }
        owners.push(owner);
        begin += len;
    }
    Ok(owners)
}

/// Both operations on tensors of these lengths: they succeed if every tensor has an owner, and otherwise fail with an error that names the
/// tensor.
fn check(world: &World<'_>, format: Format, lens: &[usize]) {
    let owners = owners(world.size(), lens);
    check_gather(world, format, lens, &owners);
    for op in [ReduceOp::Sum, ReduceOp::Mean] {
        check_scatter(world, format, lens, &owners, op);
    }
}

type Operation<'a> = dyn Fn(&mut [DeviceSliceMut<'_>]) -> Result<()> + 'a;

/// Runs an operation on this rank's tensors. Returns them, or nothing where the operation is refused, as it must be, for the tensor without
/// an owner.
fn run_on(
    world: &World<'_>,
    format: Format,
    tensors: &[Vec<f64>],
    owners: &Result<Vec<usize>, usize>,
    (name, operation): (&str, &Operation<'_>),
) -> Option<Vec<Placed>> {
    let mut placed = world.place(format, tensors);
    match (operation(&mut slices_mut(&mut placed)), owners) {
        (Ok(()), Ok(_)) => Some(placed),
        (Err(Error::InvalidArgument { operation, reason }), Err(straddler)) => {
            assert_eq!(operation, name);
            assert!(reason.contains(&format!("tensor {straddler} ")), "{reason} does not name tensor {straddler}");
            // Nothing was communicated, and nothing was written.
            for (tensor, before) in placed.iter().zip(tensors) {
                assert_eq!(tensor.read(world.comm), Array::new(format, before));
            }
            None
        }
        (outcome, owners) => panic!("{name} gave {outcome:?} where the owners are {owners:?}"),
    }
}

/// Outputs in which an unwritten element is recognisable.
fn unwritten(world: &World<'_>, format: Format, lens: &[usize]) -> Vec<Placed> {
    lens.iter().map(|&len| Placed::unwritten(&world.context.queue, format, len, 1)).collect()
}

/// Asserts that the inputs are unchanged.
fn assert_same(world: &World<'_>, format: Format, inputs: &[Placed], before: &[Vec<f64>]) {
    for (input, before) in inputs.iter().zip(before) {
        assert_eq!(input.read(world.comm), Array::new(format, before), "an input");
    }
}

fn check_gather(world: &World<'_>, format: Format, lens: &[usize], owners: &Result<Vec<usize>, usize>) {
    let ranks = world.tensors(format, lens, 6);
    let run = |tensors: &mut [DeviceSliceMut<'_>]| all_gather_owned(world.comm, tensors);
    let operation: (&str, &Operation<'_>) = ("all_gather_owned", &run);
    let mut checks = Checks::new(world.comm);
    if let (Some(placed), Ok(owners)) = (run_on(world, format, &ranks[world.rank()], owners, operation), owners) {
        for (index, (tensor, &owner)) in placed.iter().zip(owners).enumerate() {
            let expected = Rc::new(Expected::Bits(Array::new(format, &ranks[owner][index])));
            let label = format!("tensor {index} of {lens:?}, gathered from rank {owner}");
            checks.same(label, tensor.read(world.comm), &expected);
        }
        let inputs = world.place(format, &ranks[world.rank()]);
        let mut outputs = unwritten(world, format, lens);
        all_gather_owned_into(world.comm, &slices(&inputs), &mut slices_mut(&mut outputs)).unwrap();
        for (index, (tensor, &owner)) in outputs.iter().zip(owners).enumerate() {
            let expected = Rc::new(Expected::Bits(Array::new(format, &ranks[owner][index])));
            checks.same(format!("output {index} of {lens:?}"), tensor.read(world.comm), &expected);
        }
        assert_same(world, format, &inputs, &ranks[world.rank()]);
    }
    checks.finish();
}

fn check_scatter(world: &World<'_>, format: Format, lens: &[usize], owners: &Result<Vec<usize>, usize>, op: ReduceOp) {
    let ranks = world.tensors(format, lens, 7);
    let run = |tensors: &mut [DeviceSliceMut<'_>]| reduce_scatter_owned(world.comm, tensors, op);
    let operation: (&str, &Operation<'_>) = ("reduce_scatter_owned", &run);
    let mut checks = Checks::new(world.comm);
    let own = &ranks[world.rank()];
    if let (Some(placed), Ok(owners)) = (run_on(world, format, own, owners, operation), owners) {
        for (index, (tensor, &owner)) in placed.iter().zip(owners).enumerate() {
            let expected = if owner == world.rank() {
                reduced(op, format, Scaling::NONE, &of_all(&ranks, index))
            } else {
                Rc::new(Expected::Bits(Array::new(format, &own[index])))
            };
            let label = format!("tensor {index} of {lens:?}, {op} for rank {owner}");
            checks.own(label, tensor.read(world.comm), &expected);
        }
        let inputs = world.place(format, own);
        let mut outputs = unwritten(world, format, lens);
        reduce_scatter_owned_into(world.comm, &slices(&inputs), &mut slices_mut(&mut outputs), op).unwrap();
        for (index, (tensor, &owner)) in outputs.iter().zip(owners).enumerate() {
            let expected = if owner == world.rank() {
                reduced(op, format, Scaling::NONE, &of_all(&ranks, index))
            } else {
                Rc::new(Expected::Bits(Array::unwritten(format, lens[index])))
            };
            checks.own(format!("output {index} of {lens:?}, {op}"), tensor.read(world.comm), &expected);
        }
        assert_same(world, format, &inputs, own);
    }
    checks.finish();
}

/// With more than one rank, some lists have owners for all tensors and some do not.
fn any_lists(world: &World<'_>) {
    let mut random = Random::new(11);
    let (mut accepted, mut refused) = (0, 0);
    for count in [1, 2, 3, 5, 8, 13, 40] {
        for bound in [4, 40, 400] {
            let lens: Vec<usize> = (0..count).map(|_| random.below(bound) as usize).collect();
            if owners(world.size(), &lens).is_ok() {
                accepted += 1
            } else {
                refused += 1
            }
            check(world, Format::F32, &lens);
        }
    }
    assert!(accepted > 3 && (refused > 3 || world.size() == 1), "{accepted} accepted, {refused} refused");
}
