//! all_gather, all_gather_in_place, all_to_all, broadcast and transfers between ranks, of arbitrary bits, which must stay unchanged.

use std::rc::Rc;

use gradsync::comm::{Collectives, CommError};
use gradsync::driver::DeviceSliceMut;
use gradsync::{Error, Result};
use gradsync_tests::array::Array;
use gradsync_tests::collectives::all_to_all_mixed;
use gradsync_tests::oracle::Format;

use super::{BEGINS, Cases, concat, part};
use crate::checks::{Checks, Expected};
use crate::placed::Placed;
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for &format in cases.formats {
        let name = format.name();
        report.case(&format!("all_gather {name}"), || all_gather(cases, format));
        report.case(&format!("all_to_all {name}"), || all_to_all(cases, format));
        report.case(&format!("broadcast {name}"), || broadcast(cases, format));
        report.case(&format!("exchange in a ring {name}"), || ring(cases, format));
        report.case(&format!("send and recv in pairs {name}"), || pairs(cases, format));
        report.case(&format!("exchange of all with all {name}"), || all_with_all(cases, format));
    }
    report.case("transfers to no peer", || no_peer(cases));
}

fn bits(array: Array) -> Rc<Expected> {
    Rc::new(Expected::Bits(array))
}

fn all_gather(cases: &Cases<'_>, format: Format) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let mut checks = Checks::new(comm);
    for &len in &cases.shards {
        let inputs = cases.patterns(format, len);
        let whole = concat(&inputs);
        let expected = bits(whole.clone());
        for begin in BEGINS {
            let input = Placed::new(queue, &inputs[rank], begin);
            let mut output = Placed::unwritten(queue, format, whole.len(), 1 - begin);
            comm.all_gather(input.slice(), output.slice_mut()).unwrap();
            checks.same(format!("shards of {len} from {begin} on"), output.read(comm), &expected);
            checks.own(format!("input of {len} from {begin} on"), input.read(comm), &bits(inputs[rank].clone()));

            let mut data = Placed::unwritten(queue, format, whole.len(), begin);
            data.slice_mut().range_mut(rank * len..(rank + 1) * len).copy_from_host(inputs[rank].slice()).unwrap();
            comm.all_gather_in_place(data.slice_mut()).unwrap();
            checks.same(format!("shards of {len} from {begin} on, in place"), data.read(comm), &expected);
        }
    }
    checks.finish();
}

fn all_to_all(cases: &Cases<'_>, format: Format) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let mut checks = Checks::new(comm);
    for &len in &cases.shards {
        let inputs = cases.patterns(format, len * cases.world_size());
        let blocks: Vec<Array> = inputs.iter().map(|input| part(input, rank * len..(rank + 1) * len)).collect();
        for begin in BEGINS {
            let input = Placed::new(queue, &inputs[rank], begin);
            let mut output = Placed::unwritten(queue, format, inputs[rank].len(), 1 - begin);
            comm.all_to_all(input.slice(), output.slice_mut()).unwrap();
            checks.own(format!("shards of {len} from {begin} on"), output.read(comm), &bits(concat(&blocks)));
            checks.own(format!("input of {len} from {begin} on"), input.read(comm), &bits(inputs[rank].clone()));

            let mut data = Placed::new(queue, &inputs[rank], begin);
            comm.all_to_all_in_place(data.slice_mut()).unwrap();
            checks.own(format!("shards of {len} from {begin} on, in place"), data.read(comm), &bits(concat(&blocks)));

            let mut data = Placed::new(queue, &inputs[rank], begin);
            all_to_all_mixed(comm, input.slice(), data.slice_mut());
            let what = format!("shards of {len} from {begin} on, in place on every second rank");
            checks.own(what, data.read(comm), &bits(concat(&blocks)));
        }
    }
    checks.finish();
}

fn broadcast(cases: &Cases<'_>, format: Format) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let mut checks = Checks::new(comm);
    for root in 0..cases.world_size() {
        for &len in &cases.lens {
            let inputs = cases.patterns(format, len);
            let begin = (root + len) % 2;
            let mut data = Placed::new(queue, &inputs[rank], begin);
            comm.broadcast(data.slice_mut(), root).unwrap();
            let label = format!("{len} elements from {begin} on, from rank {root}");
            checks.same(label, data.read(comm), &bits(inputs[root].clone()));
        }
    }
    checks.finish();
}

/// Every rank sends to the next rank, and receives from the previous one.
fn ring(cases: &Cases<'_>, format: Format) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let mut checks = Checks::new(comm);
    for &len in cases.lens.iter().filter(|_| world_size > 1) {
        let inputs = cases.patterns(format, len);
        for begin in BEGINS {
            let input = Placed::new(queue, &inputs[rank], begin);
            let mut output = Placed::unwritten(queue, format, len, 1 - begin);
            crate::transfers::exchange(comm, vec![(next, input.slice())], vec![(previous, output.slice_mut())])
                .unwrap();
            checks.own(format!("{len} elements from {begin} on"), output.read(comm), &bits(inputs[previous].clone()));
        }
    }
    checks.finish();
}

/// Ranks 2k and 2k + 1 send to each other in turn; an unpaired last rank does nothing.
fn pairs(cases: &Cases<'_>, format: Format) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let peer = rank ^ 1;
    let mut checks = Checks::new(comm);
    for &len in cases.lens.iter().filter(|_| peer < cases.world_size()) {
        let inputs = cases.patterns(format, len);
        let begin = len % 2;
        let input = Placed::new(queue, &inputs[rank], begin);
        let mut output = Placed::unwritten(queue, format, len, begin);
        if rank < peer {
            comm.send(input.slice(), peer).unwrap();
            comm.recv(output.slice_mut(), peer).unwrap();
        } else {
            comm.recv(output.slice_mut(), peer).unwrap();
            comm.send(input.slice(), peer).unwrap();
        }
        checks.own(format!("{len} elements from {begin} on"), output.read(comm), &bits(inputs[peer].clone()));
    }
    checks.finish();
}

/// Each rank sends a different payload, of a different length, to each other rank.
fn all_with_all(cases: &Cases<'_>, format: Format) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    let peers = || (0..world_size).filter(|&peer| peer != rank);
    let mut checks = Checks::new(comm);
    for &longest in &cases.lens {
        let message = |from: usize, to: usize| {
            let len = longest.saturating_sub(5 * from + to);
            part(&cases.patterns(format, longest + to)[from], 0..len)
        };
        let inputs: Vec<Placed> = peers().map(|peer| Placed::new(queue, &message(rank, peer), peer % 2)).collect();
        let mut outputs: Vec<Placed> = peers()
            .map(|peer| Placed::unwritten(queue, format, message(peer, rank).len(), (peer + longest) % 2))
            .collect();
        let sends = peers().zip(inputs.iter().map(Placed::slice)).collect();
        let receives: Vec<(usize, DeviceSliceMut<'_>)> =
            peers().zip(outputs.iter_mut().map(Placed::slice_mut)).collect();
        crate::transfers::exchange(comm, sends, receives).unwrap();
        for (peer, output) in peers().zip(&outputs) {
            let label = format!("up to {longest} elements from rank {peer}");
            checks.own(label, output.read(comm), &bits(message(peer, rank)));
        }
    }
    checks.finish();
}

/// An invalid peer is refused at once, and the next call works.
fn no_peer(cases: &Cases<'_>) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    let inputs = cases.patterns(Format::F32, 33);
    let mut data = Placed::new(queue, &inputs[rank], 0);
    let refused = |outcome: Result<()>, wanted: usize| match outcome {
        Err(Error::Comm(CommError::InvalidPeer { peer, rank: own, world_size: world, .. })) => {
            assert_eq!((peer, own, world), (wanted, rank, world_size));
        }
        other => panic!("a transfer between rank {rank} and rank {wanted} gave {other:?}"),
    };
    refused(comm.send(data.slice(), rank), rank);
    refused(comm.recv(data.slice_mut(), world_size), world_size);
    let mut checks = Checks::new(comm);
    comm.broadcast(data.slice_mut(), world_size - 1).unwrap();
    checks.same("a broadcast afterwards", data.read(comm), &bits(inputs[world_size - 1].clone()));
    checks.finish();
}
