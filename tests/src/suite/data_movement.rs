//! all_gather, all_to_all, broadcast and transfers between ranks, of arbitrary bits, which must stay unchanged, in any memory.

use gradsync::comm::{Collectives, CommError};
use gradsync::memory::Memory;
use gradsync::{Error, Result};

use super::Report;
use super::checks::{Checks, Expected};
use super::collectives::{BEGINS, Grid, pattern, patterns};
use super::operands::Operands;
use crate::array::Array;
use crate::oracle::Format;

/// All cases.
pub fn run<O: Operands>(operands: &O, grid: Grid<'_>, report: &mut impl Report) {
    collectives(operands, grid, report);
    transfers(operands, grid, report);
}

/// all_gather, all_to_all and broadcast.
pub fn collectives<O: Operands>(operands: &O, grid: Grid<'_>, report: &mut impl Report) {
    for &format in grid.formats {
        let mut case =
            |what: &str, body: &dyn Fn()| report.case(&format!("{what} {}{}", format.name(), grid.how), body);
        case("all_gather", &|| all_gather(operands, format, grid.shards));
        case("all_to_all", &|| all_to_all(operands, format, grid.shards));
        case("broadcast", &|| broadcast(operands, format, grid.lens));
    }
}

/// Transfers between ranks.
pub fn transfers<O: Operands>(operands: &O, grid: Grid<'_>, report: &mut impl Report) {
    for &format in grid.formats {
        let mut case =
            |what: &str, body: &dyn Fn()| report.case(&format!("{what} {}{}", format.name(), grid.how), body);
        case("exchange in a ring", &|| ring(operands, format, grid.lens));
        case("send and recv in pairs", &|| pairs(operands, format, grid.lens));
        case("exchange of all with all", &|| all_with_all(operands, format, grid.lens));
    }
    report.case(&format!("transfers to no peer{}", grid.how), || no_peer(operands));
}

/// An all-to-all in place on ranks of even numbers, from `input` to `data` on the others. `data` holds the input already.
///
/// # Panics
/// If the call fails.
pub fn all_to_all_mixed<'a, M: Memory>(
    comm: &(impl Collectives<M> + ?Sized),
    input: impl Into<M::Slice<'a>>,
    data: impl Into<M::SliceMut<'a>>,
) {
    let moved = match comm.rank() % 2 {
        0 => comm.all_to_all_in_place(data),
        _ => comm.all_to_all(input, data),
    };
    moved.unwrap();
}

fn all_gather<O: Operands>(operands: &O, format: Format, shards: &[usize]) {
    let (comm, rank) = (operands.comm(), operands.comm().rank());
    let mut checks = Checks::new(comm);
    for &len in shards {
        let inputs = patterns(format, comm.world_size(), len);
        let whole = Array::concat(&inputs);
        let (expected, own) = (Expected::bits(whole.clone()), Expected::bits(inputs[rank].clone()));
        for begin in BEGINS {
            let (input, mut output) =
                (operands.place(&inputs[rank], begin), operands.room(format, whole.len(), 1 - begin));
            comm.all_gather(O::slice(&input), O::slice_mut(&mut output)).unwrap();
            checks.same(format!("shards of {len} from {begin} on"), operands.read(&output), &expected);
            checks.own(format!("the input of {len} from {begin} on"), operands.read(&input), &own);

            let mut shards: Vec<Array> = inputs.iter().map(|_| Array::unwritten(format, len)).collect();
            shards[rank] = inputs[rank].clone();
            let mut data = operands.place(&Array::concat(&shards), begin);
            comm.all_gather_in_place(O::slice_mut(&mut data)).unwrap();
            checks.same(format!("shards of {len} from {begin} on, in place"), operands.read(&data), &expected);
        }
    }
    checks.finish();
}

fn all_to_all<O: Operands>(operands: &O, format: Format, shards: &[usize]) {
    let (comm, rank) = (operands.comm(), operands.comm().rank());
    let mut checks = Checks::new(comm);
    for &len in shards {
        let inputs = patterns(format, comm.world_size(), len * comm.world_size());
        let blocks: Vec<Array> = inputs.iter().map(|input| input.range(rank * len..(rank + 1) * len)).collect();
        let (expected, own) = (Expected::bits(Array::concat(&blocks)), Expected::bits(inputs[rank].clone()));
        for begin in BEGINS {
            let what = format!("shards of {len} from {begin} on");
            let (input, mut output) =
                (operands.place(&inputs[rank], begin), operands.room(format, inputs[rank].len(), 1 - begin));
            comm.all_to_all(O::slice(&input), O::slice_mut(&mut output)).unwrap();
            checks.own(what.clone(), operands.read(&output), &expected);
            checks.own(format!("the input with {what}"), operands.read(&input), &own);

            let mut data = operands.place(&inputs[rank], begin);
            comm.all_to_all_in_place(O::slice_mut(&mut data)).unwrap();
            checks.own(format!("{what}, in place"), operands.read(&data), &expected);

            let mut data = operands.place(&inputs[rank], begin);
            all_to_all_mixed(comm, O::slice(&input), O::slice_mut(&mut data));
            checks.own(format!("{what}, in place on every second rank"), operands.read(&data), &expected);
        }
    }
    checks.finish();
}

fn broadcast<O: Operands>(operands: &O, format: Format, lens: &[usize]) {
    let comm = operands.comm();
    let mut checks = Checks::new(comm);
    for root in 0..comm.world_size() {
        for &len in lens {
            let inputs = patterns(format, comm.world_size(), len);
            let begin = (root + len) % 2;
            let mut data = operands.place(&inputs[comm.rank()], begin);
            comm.broadcast(O::slice_mut(&mut data), root).unwrap();
            let label = format!("{len} elements from {begin} on, from rank {root}");
            checks.same(label, operands.read(&data), &Expected::bits(inputs[root].clone()));
        }
    }
    checks.finish();
}

/// Every rank sends to the next rank, and receives from the previous one.
///
/// # Panics
/// If a result is wrong.
pub fn ring<O: Operands>(operands: &O, format: Format, lens: &[usize]) {
    let (comm, rank, world_size) = (operands.comm(), operands.comm().rank(), operands.comm().world_size());
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let mut checks = Checks::new(comm);
    for &len in lens.iter().filter(|_| world_size > 1) {
        let inputs = patterns(format, world_size, len);
        for begin in BEGINS {
            let (input, mut output) = (operands.place(&inputs[rank], begin), operands.room(format, len, 1 - begin));
            let sends = [(next, O::slice(&input))];
            comm.exchange(&sends, &mut [(previous, O::slice_mut(&mut output))]).unwrap();
            let expected = Expected::bits(inputs[previous].clone());
            checks.own(format!("{len} elements from {begin} on"), operands.read(&output), &expected);
            let own = Expected::bits(inputs[rank].clone());
            checks.own(format!("the input of {len} from {begin} on"), operands.read(&input), &own);
        }
    }
    checks.finish();
}

/// Ranks 2k and 2k + 1 send to each other in turn; an unpaired last rank does nothing.
fn pairs<O: Operands>(operands: &O, format: Format, lens: &[usize]) {
    let (comm, rank) = (operands.comm(), operands.comm().rank());
    let peer = rank ^ 1;
    let mut checks = Checks::new(comm);
    for &len in lens.iter().filter(|_| peer < comm.world_size()) {
        let inputs = patterns(format, comm.world_size(), len);
        let begin = len % 2;
        let (input, mut output) = (operands.place(&inputs[rank], begin), operands.room(format, len, begin));
        if rank < peer {
            comm.send(O::slice(&input), peer).unwrap();
            comm.recv(O::slice_mut(&mut output), peer).unwrap();
        } else {
            comm.recv(O::slice_mut(&mut output), peer).unwrap();
            comm.send(O::slice(&input), peer).unwrap();
        }
        let expected = Expected::bits(inputs[peer].clone());
        checks.own(format!("{len} elements from {begin} on"), operands.read(&output), &expected);
    }
    checks.finish();
}

/// Each rank sends two different payloads, of different lengths, to each other rank in one call.
///
/// # Panics
/// If a result is wrong.
pub fn all_with_all<O: Operands>(operands: &O, format: Format, lens: &[usize]) {
    let (comm, rank, world_size) = (operands.comm(), operands.comm().rank(), operands.comm().world_size());
    let peers = || (0..world_size).filter(|&peer| peer != rank);
    let mut checks = Checks::new(comm);
    for &longest in lens {
        let message = |from: usize, to: usize, number: usize| {
            let len = longest.saturating_sub(5 * from + to + number);
            pattern(format, from, longest + to + number).range(0..len)
        };
        // Sends are ordered by peer and then by number, receives by number and then by peer.
        let sends: Vec<(usize, O::Placed)> = peers()
            .flat_map(|peer| [0, 1].map(|number| (peer, operands.place(&message(rank, peer, number), peer % 2))))
            .collect();
        let expected: Vec<(usize, Array)> = [0, 1]
            .into_iter()
            .flat_map(|number| peers().map(move |peer| (peer, message(peer, rank, number))))
            .collect();
        let room = |(peer, array): &(usize, Array)| operands.room(format, array.len(), (peer + longest) % 2);
        let mut rooms: Vec<O::Placed> = expected.iter().map(room).collect();
        let sends: Vec<_> = sends.iter().map(|(peer, data)| (*peer, O::slice(data))).collect();
        let mut receives: Vec<_> =
            expected.iter().zip(&mut rooms).map(|((peer, _), room)| (*peer, O::slice_mut(room))).collect();
        comm.exchange(&sends, &mut receives).unwrap();
        drop(receives);
        for ((peer, array), room) in expected.into_iter().zip(&rooms) {
            let label = format!("{} elements from rank {peer}", array.len());
            checks.own(label, operands.read(room), &Expected::bits(array));
        }
    }
    checks.finish();
}

/// An invalid peer is refused at once, with the valid transfers of the same call, and the next call works.
fn no_peer<O: Operands>(operands: &O) {
    let (comm, rank, world_size) = (operands.comm(), operands.comm().rank(), operands.comm().world_size());
    comm.exchange(&[], &mut []).unwrap();
    let inputs = patterns(Format::F32, world_size, 33);
    let (sent, mut data) = (operands.place(&inputs[rank], 0), operands.place(&inputs[rank], 1));
    let refused = |outcome: Result<()>, wanted: usize| match outcome {
        Err(Error::Comm(CommError::InvalidPeer { peer, rank: own, world_size: world, .. })) => {
            assert_eq!((peer, own, world), (wanted, rank, world_size));
        }
        other => panic!("a transfer between rank {rank} and rank {wanted} gave {other:?}"),
    };
    let other = (rank + 1) % world_size;
    for peer in [rank, world_size, usize::MAX] {
        refused(comm.send(O::slice(&sent), peer), peer);
        refused(comm.recv(O::slice_mut(&mut data), peer), peer);
        if world_size > 1 {
            let valid = || (other, O::slice(&sent));
            refused(comm.exchange(&[valid(), (peer, O::slice(&sent))], &mut []), peer);
            refused(comm.exchange(&[valid()], &mut [(peer, O::slice_mut(&mut data))]), peer);
        }
    }
    let mut checks = Checks::new(comm);
    comm.broadcast(O::slice_mut(&mut data), world_size - 1).unwrap();
    checks.same("a broadcast afterwards", operands.read(&data), &Expected::bits(inputs[world_size - 1].clone()));
    checks.finish();
}
