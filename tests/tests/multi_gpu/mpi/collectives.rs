//! all_gather, all_to_all and broadcast of arbitrary bits, which must stay unchanged, and operations without data.

use gradsync::comm::{Collectives, Ranks};
use gradsync_tests::array::Array;
use gradsync_tests::collectives::all_to_all_mixed;
use gradsync_tests::oracle::Format;

use super::{Cases, LENS, SHORT, concat, part};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for format in Format::ALL {
        // Each long length is tried with one format.
        let lens = |wanted: Format, longest: usize| {
            SHORT.iter().copied().chain((format == wanted).then_some(longest)).collect::<Vec<_>>()
        };
        let name = |what: &str| cases.name(&format!("{what} {}", format.name()));
        report.case(&name("all_gather"), || {
            lens(Format::F16, LENS[5] / 2).into_iter().for_each(|len| all_gather(cases, format, len));
        });
        report.case(&name("all_to_all"), || {
            lens(Format::F32, LENS[4] * 2).into_iter().for_each(|len| all_to_all(cases, format, len));
        });
        report.case(&name("broadcast"), || {
            for root in 0..cases.world_size() {
                let longest = if root == 0 { LENS[5] } else { LENS[4] };
                lens(Format::BF16, longest).into_iter().for_each(|len| broadcast(cases, format, len, root));
            }
        });
    }
    report.case(&cases.name("values that ranks agree on, or not"), || agreement(cases));
}

fn all_gather(cases: &Cases<'_>, format: Format, len: usize) {
    let rank = cases.rank();
    let inputs = cases.patterns(format, len);
    let expected = concat(&inputs);
    let (input, mut output) = (cases.placed(&inputs[rank]), cases.room(format, expected.len()));
    cases.comm.all_gather(input.slice(), output.slice_mut()).unwrap();
    cases.assert_holds(&format!("shards of {len}"), &output, &expected);
    cases.assert_holds(&format!("the input of {len}"), &input, &inputs[rank]);

    let mut data = cases.room(format, expected.len());
    data.slice_mut().range_mut(rank * len..(rank + 1) * len).copy_from_host(inputs[rank].slice()).unwrap();
    cases.comm.all_gather_in_place(data.slice_mut()).unwrap();
    cases.assert_holds(&format!("shards of {len}, in place"), &data, &expected);
}

fn all_to_all(cases: &Cases<'_>, format: Format, len: usize) {
    let rank = cases.rank();
    let inputs = cases.patterns(format, len * cases.world_size());
    let blocks: Vec<Array> = inputs.iter().map(|input| part(input, rank * len..(rank + 1) * len)).collect();
    let (input, mut output) = (cases.placed(&inputs[rank]), cases.room(format, inputs[rank].len()));
    cases.comm.all_to_all(input.slice(), output.slice_mut()).unwrap();
    cases.assert_holds(&format!("shards of {len}"), &output, &concat(&blocks));
    cases.assert_holds(&format!("the input of shards of {len}"), &input, &inputs[rank]);

    let mut data = cases.placed(&inputs[rank]);
    cases.comm.all_to_all_in_place(data.slice_mut()).unwrap();
    cases.assert_holds(&format!("shards of {len}, in place"), &data, &concat(&blocks));

    let mut data = cases.placed(&inputs[rank]);
    all_to_all_mixed(cases.comm, input.slice(), data.slice_mut());
    cases.assert_holds(&format!("shards of {len}, in place on every second rank"), &data, &concat(&blocks));
}

fn broadcast(cases: &Cases<'_>, format: Format, len: usize, root: usize) {
    let inputs = cases.patterns(format, len);
    let mut data = cases.placed(&inputs[cases.rank()]);
    cases.comm.broadcast(data.slice_mut(), root).unwrap();
    cases.assert_holds(&format!("{len} from rank {root}"), &data, &inputs[root]);
}

fn agreement(cases: &Cases<'_>) {
    let (comm, rank, world_size) = (cases.comm, cases.rank() as u64, cases.world_size());
    let words = comm.gather_words(&[rank, rank * rank + 5]).unwrap();
    assert_eq!(words, (0..world_size as u64).flat_map(|rank| [rank, rank * rank + 5]).collect::<Vec<_>>());
    comm.barrier().unwrap();
}
