//! Transfers between devices: any number at once, of any type and length, in any order in which ranks make them.

use gradsync::comm::{Collectives, CommError};
use gradsync::driver::DeviceSliceMut;
use gradsync::memory::RawSlice;
use gradsync::{DType, Error};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;

use super::{Cases, LENS, SHORT, part, raw};
use crate::placed::{Placed, RawBytes};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for format in Format::ALL {
        let name = |what: &str| cases.name(&format!("{what} {}", format.name()));
        report.case(&name("a ring at once"), || SHORT.iter().for_each(|&len| ring(cases, format, len)));
        report.case(&name("all with all"), || SHORT.iter().for_each(|&len| all_with_all(cases, format, len)));
        report.case(&name("send and recv in turn"), || SHORT.iter().for_each(|&len| pairs(cases, format, len)));
    }
    // The data exceed all pinned memory together, in both directions.
    report.case(&cases.name("a ring of many pieces"), || ring(cases, Format::F32, LENS[5]));
    report.case(&cases.name("all with all in many pieces"), || all_with_all(cases, Format::F32, 2 * LENS[4]));
    for len in [33, LENS[4]] {
        report.case(&cases.name(&format!("ranks that wait for each other, {len}")), || crossing(cases, len));
        report.case(&cases.name(&format!("several at once, one after the other, {len}")), || one_by_one(cases, len));
    }
    report.case(&cases.name("bytes and integers at odd places"), || odd_places(cases));
    report.case(&cases.name("nothing, and no peers"), || no_peers(cases));
}

fn neighbours(cases: &Cases<'_>) -> (usize, usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    ((rank + 1) % world_size, (rank + world_size - 1) % world_size)
}

fn ring(cases: &Cases<'_>, format: Format, len: usize) {
    let (next, last) = neighbours(cases);
    let inputs = cases.patterns(format, len);
    let (input, mut output) = (cases.placed(&inputs[cases.rank()]), cases.room(format, len));
    crate::transfers::exchange(cases.comm, vec![(next, input.slice())], vec![(last, output.slice_mut())]).unwrap();
    cases.assert_holds(&format!("{len} elements"), &output, &inputs[last]);
    cases.assert_holds(&format!("the input of {len}"), &input, &inputs[cases.rank()]);
}

/// Each rank sends two different payloads, of different lengths, to each other rank.
fn all_with_all(cases: &Cases<'_>, format: Format, longest: usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let message = |from: usize, to: usize, number: usize| {
        let all = cases.patterns(format, longest + to + number);
        let len = longest.saturating_sub(5 * from + to + number);
        part(&all[from], 0..len)
    };
    let peers = || (0..world_size).filter(|&peer| peer != rank);
    // Sends are ordered by peer and then by number, receives by number and then by peer.
    let sends: Vec<(usize, Placed)> = peers()
        .flat_map(|peer| [0, 1].map(|number| (peer, number)))
        .map(|(peer, number)| (peer, cases.placed(&message(rank, peer, number))))
        .collect();
    let expected: Vec<(usize, Array)> = [0, 1]
        .into_iter()
        .flat_map(|number| peers().map(move |peer| (peer, number)))
        .map(|(peer, number)| (peer, message(peer, rank, number)))
        .collect();
    let mut rooms: Vec<Placed> = expected.iter().map(|(_, array)| cases.room(format, array.len())).collect();
    let receives: Vec<(usize, DeviceSliceMut<'_>)> =
        expected.iter().map(|(peer, _)| *peer).zip(rooms.iter_mut().map(Placed::slice_mut)).collect();
    crate::transfers::exchange(cases.comm, sends.iter().map(|(peer, data)| (*peer, data.slice())).collect(), receives)
        .unwrap();
    for ((peer, array), room) in expected.iter().zip(&rooms) {
        cases.assert_holds(&format!("{} elements from rank {peer}", array.len()), room, array);
    }
}

/// Ranks 2k and 2k + 1 send to each other in turn; an unpaired last rank does nothing.
fn pairs(cases: &Cases<'_>, format: Format, len: usize) {
    let (rank, peer) = (cases.rank(), cases.rank() ^ 1);
    if peer >= cases.world_size() {
        return;
    }
    let inputs = cases.patterns(format, len);
    let (input, mut output) = (cases.placed(&inputs[rank]), cases.room(format, len));
    if rank < peer {
        cases.comm.send(input.slice(), peer).unwrap();
        cases.comm.recv(output.slice_mut(), peer).unwrap();
    } else {
        cases.comm.recv(output.slice_mut(), peer).unwrap();
        cases.comm.send(input.slice(), peer).unwrap();
    }
    cases.assert_holds(&format!("{len} elements"), &output, &inputs[peer]);
}

/// Rank 0 sends and receives at once; every other rank receives before it sends.
fn crossing(cases: &Cases<'_>, len: usize) {
    let (next, last) = neighbours(cases);
    let inputs = cases.patterns(Format::F64, len);
    let (input, mut output) = (cases.placed(&inputs[cases.rank()]), cases.room(Format::F64, len));
    if cases.rank() == 0 {
        crate::transfers::exchange(cases.comm, vec![(next, input.slice())], vec![(last, output.slice_mut())]).unwrap();
    } else {
        cases.comm.recv(output.slice_mut(), last).unwrap();
        cases.comm.send(input.slice(), next).unwrap();
    }
    cases.assert_holds(&format!("{len} elements"), &output, &inputs[last]);
}

/// Rank 0 makes one call with all transfers; the others make one call per transfer, rank by rank.
fn one_by_one(cases: &Cases<'_>, len: usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let inputs = cases.patterns(Format::F32, len * world_size);
    let message = |from: usize, to: usize| part(&inputs[from], to * len..(to + 1) * len);
    if rank == 0 {
        let sends: Vec<(usize, Placed)> = (1..world_size).map(|peer| (peer, cases.placed(&message(0, peer)))).collect();
        let mut rooms: Vec<Placed> = (1..world_size).map(|_| cases.room(Format::F32, len)).collect();
        let receives = (1..world_size).zip(rooms.iter_mut().map(Placed::slice_mut)).collect();
        crate::transfers::exchange(
            cases.comm,
            sends.iter().map(|(peer, data)| (*peer, data.slice())).collect(),
            receives,
        )
        .unwrap();
        for (peer, room) in (1..world_size).zip(&rooms) {
            cases.assert_holds(&format!("from rank {peer}"), room, &message(peer, 0));
        }
    } else {
        let (input, mut room) = (cases.placed(&message(rank, 0)), cases.room(Format::F32, len));
        // The ranks call one after another, so that later ranks find rank 0 inside its call.
        if rank > 1 {
            cases.comm.recv(cases.room(Format::F32, 1).slice_mut(), rank - 1).unwrap();
        }
        cases.comm.send(input.slice(), 0).unwrap();
        cases.comm.recv(room.slice_mut(), 0).unwrap();
        if rank + 1 < world_size {
            cases.comm.send(cases.room(Format::F32, 1).slice(), rank + 1).unwrap();
        }
        cases.assert_holds("from rank 0", &room, &message(0, rank));
    }
}

/// Raw memory of every type, and bytes at any address.
fn odd_places(cases: &Cases<'_>) {
    let (queue, (next, last)) = (&cases.context.queue, neighbours(cases));
    let bytes = |rank: usize, len: usize| -> Vec<u8> {
        let mut random = Random::new((len * 8 + rank) as u64);
        (0..len).map(|_| random.bits() as u8).collect()
    };
    for dtype in DType::ALL {
        for len in [0, 1, 1237, 5 << 20] {
            let bytes_of = |rank: usize| bytes(rank, len / dtype.size_bytes() * dtype.size_bytes());
            let begin = if dtype.size_bytes() == 1 { 3 } else { dtype.size_bytes() };
            let input = RawBytes::new(queue, &bytes_of(cases.rank()), begin);
            let output = RawBytes::unwritten(queue, bytes_of(last).len(), 2 * begin);
            let (send, receive) = ([(next, input.elements(dtype))], [(last, output.elements(dtype))]);
            // SAFETY: the memory lives until it has been read, and nothing else uses it.
            unsafe { crate::transfers::exchange_raw(cases.comm, queue, &send, &receive) }.unwrap();
            assert!(output.read(cases.comm) == bytes_of(last), "{len} bytes of {dtype} differ");
        }
    }
}

/// An invalid peer is refused at once, and the next call works.
fn no_peers(cases: &Cases<'_>) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    crate::transfers::exchange(comm, Vec::new(), Vec::new()).unwrap();
    let inputs = cases.patterns(Format::F32, 33);
    let mut data = cases.placed(&inputs[rank]);
    let (own, none): (RawSlice, [(usize, RawSlice); 0]) = (raw(&data), []);
    for peer in [rank, world_size, usize::MAX] {
        // SAFETY: The memory is valid, and none of these transfers starts.
        let outcomes = unsafe {
            [
                crate::transfers::exchange_raw(comm, queue, &[(peer, own)], &none),
                crate::transfers::exchange_raw(comm, queue, &none, &[(peer, own)]),
            ]
        };
        for outcome in outcomes {
            let is_named =
                matches!(&outcome, Err(Error::Comm(CommError::InvalidPeer { peer: named, .. })) if *named == peer);
            assert!(is_named, "{outcome:?}");
        }
    }
    comm.broadcast(data.slice_mut(), world_size - 1).unwrap();
    cases.assert_holds("a broadcast afterwards", &data, &inputs[world_size - 1]);
}
