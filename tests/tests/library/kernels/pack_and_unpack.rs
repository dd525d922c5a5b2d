//! pack and unpack: many tensors to and from one arena, with a cast, and nothing written outside the tensors.

use gradsync::internal::kernels::cpu;
use gradsync::{Slice, SliceMut};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::assert_equal;

const LENS: [usize; 7] = [33, 0, 1, 4097, 256, 0, 31];
/// Odd offsets, with gaps, out of order.
const OFFSETS: [usize; 7] = [5000, 17, 3, 64, 4200, 6000, 5033];
const ARENA: usize = 6000;

fn inside(place: usize) -> bool {
    OFFSETS.iter().zip(LENS).any(|(&offset, len)| (offset..offset + len).contains(&place))
}

#[test]
fn pack_casts_and_writes_only_the_segments() {
    for to in Format::ALL {
        for shift in 0..4 {
            let sources: Vec<Array> = (0..LENS.len())
                .map(|i| {
                    let from = Format::ALL[(i + shift) % 4];
                    Array::new(from, &vector(from, LENS[i], i as u64))
                })
                .collect();
            let slices: Vec<Slice<'_>> = sources.iter().map(Array::slice).collect();
            let mut arena = Array::new(to, &vec![0.0; ARENA]);
            cpu::pack(arena.slice_mut(), &OFFSETS, &slices).unwrap();
            let got = arena.values();
            for (i, source) in sources.iter().enumerate() {
                let expected: Vec<f64> = source.values().into_iter().map(|value| to.round(value)).collect();
                let label = format!("pack, tensor {i} of {:?} into {to:?}", source.format());
                assert_equal(&label, &got[OFFSETS[i]..OFFSETS[i] + LENS[i]], &expected);
            }
            for (place, value) in got.iter().enumerate() {
                assert!(inside(place) || *value == 0.0, "pack into {to:?} wrote {value} to the gap at {place}");
            }
        }
    }
}

#[test]
fn unpack_is_the_way_back() {
    for from in Format::ALL {
        let arena = Array::new(from, &vector(from, ARENA, 99));
        for shift in 0..4 {
            let mut tensors: Vec<Array> =
                (0..LENS.len()).map(|i| Array::unwritten(Format::ALL[(i + shift) % 4], LENS[i])).collect();
            let mut destinations: Vec<SliceMut<'_>> = tensors.iter_mut().map(Array::slice_mut).collect();
            cpu::unpack(&mut destinations, arena.slice(), &OFFSETS).unwrap();
            drop(destinations);
            for (i, tensor) in tensors.iter().enumerate() {
                let to = tensor.format();
                let part = &arena.values()[OFFSETS[i]..OFFSETS[i] + LENS[i]];
                let expected: Vec<f64> = part.iter().map(|&value| to.round(value)).collect();
                assert_equal(&format!("unpack, tensor {i} of {from:?} into {to:?}"), &tensor.values(), &expected);
            }
        }
    }
}

#[test]
fn pack_refuses_a_tensor_past_the_end_and_writes_nothing() {
    let source = Array::new(Format::F32, &vector(Format::F32, 10, 1));
    for offset in [91, 100, 101, usize::MAX] {
        let mut arena = Array::unwritten(Format::F32, 100);
        assert!(cpu::pack(arena.slice_mut(), &[0, offset], &[source.slice(), source.slice()]).is_err(), "{offset}");
        assert_eq!(arena, Array::unwritten(Format::F32, 100), "pack at {offset} wrote before it failed");
        let mut tensor = Array::unwritten(Format::F32, 10);
        assert!(cpu::unpack(&mut [tensor.slice_mut()], arena.slice(), &[offset]).is_err(), "{offset}");
    }
    let mut arena = Array::unwritten(Format::F32, 100);
    assert!(cpu::pack(arena.slice_mut(), &[0, 50, 60], &[source.slice()]).is_err(), "three offsets, one tensor");
}

#[test]
fn pack_refuses_sources_that_overlap_in_the_arena() {
    let source = Array::new(Format::F32, &[1.0; 4]);
    let mut arena = Array::unwritten(Format::F32, 10);
    let error =
        cpu::pack(arena.slice_mut(), &[3, 0], &[source.slice(), source.slice()]).expect_err("3 is before 0 + 4");
    let text = error.to_string();
    assert!(text.contains("tensor 0") && text.contains("tensor 1") && text.contains('3'), "{text}");
    assert_eq!(arena, Array::unwritten(Format::F32, 10), "pack wrote before it failed");
    cpu::pack(arena.slice_mut(), &[4, 0], &[source.slice(), source.slice()]).expect("side by side");
}
