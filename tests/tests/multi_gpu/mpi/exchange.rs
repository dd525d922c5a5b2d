//! Transfers between devices: any number at once, of any type and length, in any order in which ranks make them.

use gradsync::DType;
use gradsync::comm::Collectives;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::collectives::Grid;
use gradsync_tests::suite::data_movement;

use super::{Cases, LENS, SHORT};
use crate::placed::{Placed, RawBytes};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let how = cases.name("");
    data_movement::transfers(
        cases,
        Grid { how: &how, formats: &Format::ALL, ops: &[], lens: SHORT, shards: &[] },
        report,
    );
    // The data exceed all pinned memory together, in both directions.
    report.case(&cases.name("a ring of many pieces"), || data_movement::ring(cases, Format::F32, &LENS[5..]));
    report.case(&cases.name("all with all in many pieces"), || {
        data_movement::all_with_all(cases, Format::F32, &[2 * LENS[4]]);
    });
    for len in [33, LENS[4]] {
        report.case(&cases.name(&format!("ranks that wait for each other, {len}")), || crossing(cases, len));
        report.case(&cases.name(&format!("several at once, one after the other, {len}")), || one_by_one(cases, len));
    }
    report.case(&cases.name("bytes and integers at odd places"), || odd_places(cases));
}

fn neighbours(cases: &Cases<'_>) -> (usize, usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    ((rank + 1) % world_size, (rank + world_size - 1) % world_size)
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
    let message = |from: usize, to: usize| inputs[from].range(to * len..(to + 1) * len);
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
            unsafe { crate::transfers::exchange_raw(cases.comm, &send, &receive) }.unwrap();
            assert!(output.read(cases.comm) == bytes_of(last), "{len} bytes of {dtype} differ");
        }
    }
}
