//! Calls that a kernel refuses: typed errors that name both lengths, and no element written.

use gradsync::internal::kernels::cpu;
use gradsync::{DType, Error, Slice, SliceMut};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;

/// Asserts that the error is about lengths and that its text holds both.
#[track_caller]
fn assert_lengths<T: std::fmt::Debug>(what: &str, outcome: Result<T, Error>, lengths: [usize; 2]) {
    let error = outcome.expect_err(what);
    assert!(matches!(error, Error::LengthMismatch { .. }), "{what}: {error:?} is not about lengths");
    let text = error.to_string();
    for length in lengths {
        assert!(text.contains(&length.to_string()), "{what}: \"{text}\" does not name {length}");
    }
}

#[test]
fn cast_accumulate_scale_and_dots_of_different_lengths() {
    for format in Format::ALL {
        let (a, b) = (Array::unwritten(format, 117), Array::unwritten(format, 118));
        let mut dst = Array::unwritten(format, 117);
        assert_lengths("cast", cpu::cast(dst.slice_mut(), b.slice()), [117, 118]);
        assert_lengths("accumulate", cpu::accumulate(dst.slice_mut(), b.slice()), [117, 118]);
        assert_lengths("scale", cpu::scale(dst.slice_mut(), b.slice(), 2.0), [117, 118]);
        assert_eq!(dst, a, "an element was written");
        let whole = std::slice::from_ref(&(0..117));
        assert_lengths("dots", cpu::dots(a.slice(), b.slice(), whole), [117, 118]);
        assert_lengths("gram", cpu::gram(&[a.slice(), b.slice()], whole), [117, 118]);
        let outcome = cpu::combine(dst.slice_mut(), &[a.slice(), b.slice()], &[1.0, 1.0], whole);
        assert_lengths("combine", outcome, [117, 118]);
        assert_eq!(dst, a, "an element was written");
    }
}

#[test]
fn accumulate_and_cast_never_broadcast_a_length_of_one() {
    let one = Array::new(Format::F32, &[1.0]);
    let mut dst = Array::unwritten(Format::F32, 5);
    assert_lengths("accumulate", cpu::accumulate(dst.slice_mut(), one.slice()), [5, 1]);
    assert_lengths("cast", cpu::cast(dst.slice_mut(), one.slice()), [5, 1]);
}

#[test]
fn squared_norms_dots_and_gram_outside_the_vector() {
    let a = Array::unwritten(Format::F32, 100);
    let mut dst = Array::unwritten(Format::F32, 100);
    #[allow(clippy::reversed_empty_ranges, reason = "a caller can make one, and it must be an error and no panic")]
    for segment in [99..101, 101..101, 0..usize::MAX, 50..40] {
        let segments = [0..1, segment.clone()];
        assert!(cpu::squared_norms(a.slice(), &segments).is_err(), "squared_norms {segment:?}");
        assert!(cpu::dots(a.slice(), a.slice(), &segments).is_err(), "dots {segment:?}");
        assert!(cpu::gram(&[a.slice()], &segments).is_err(), "gram {segment:?}");
        assert!(cpu::combine(dst.slice_mut(), &[a.slice()], &[1.0, 1.0], &segments).is_err(), "combine {segment:?}");
        assert_eq!(dst, a, "combine wrote before it refused {segment:?}");
    }
}

#[test]
fn combine_with_a_wrong_number_of_weights() {
    let a = Array::unwritten(Format::F32, 10);
    let mut dst = Array::unwritten(Format::F32, 10);
    for weights in [&[][..], &[1.0], &[1.0; 3], &[1.0; 5]] {
        let outcome = cpu::combine(dst.slice_mut(), &[a.slice(), a.slice()], weights, &[0..5, 5..10]);
        assert!(outcome.is_err(), "{} weights for 2 segments × 2 vectors", weights.len());
    }
}

/// Overlapping or descending segments would be written twice, or in a race.
#[test]
fn squared_norms_dots_and_gram_of_segments_out_of_order() {
    let a = Array::unwritten(Format::F32, 100);
    let mut dst = Array::unwritten(Format::F32, 100);
    for segments in [[0..50, 49..60], [50..60, 0..10], [0..10, 0..10]] {
        for (name, outcome) in [
            ("squared_norms", cpu::squared_norms(a.slice(), &segments).map(drop)),
            ("dots", cpu::dots(a.slice(), a.slice(), &segments).map(drop)),
            ("gram", cpu::gram(&[a.slice()], &segments).map(drop)),
            ("combine", cpu::combine(dst.slice_mut(), &[a.slice()], &[1.0, 1.0], &segments)),
        ] {
            let text = outcome.expect_err(name).to_string();
            assert!(text.contains(name), "{name} {segments:?}: \"{text}\" names another operation");
            assert!(text.contains(&format!("{:?}", segments[1])), "{name}: \"{text}\" does not name {:?}", segments[1]);
        }
        assert_eq!(dst, a, "combine wrote before it refused {segments:?}");
    }
}

#[test]
fn gram_and_combine_of_no_vectors() {
    let mut dst = Array::unwritten(Format::F32, 10);
    assert!(cpu::gram(&[], &[0..0, 0..0]).is_err());
    assert!(cpu::combine(dst.slice_mut(), &[], &[], std::slice::from_ref(&(0..10))).is_err());
}

/// Integers, and numbers that are not aligned: both can be sent, and nothing can be computed with them.
#[test]
fn kernels_refuse_elements_that_are_only_moved() {
    let (integers, numbers) = ([7i32; 4], [0.5f32; 5]);
    let bytes = Slice::from(&numbers).as_bytes();
    let unaligned = Slice::of_bytes(DType::F32, &bytes[1..17]);
    let whole = std::slice::from_ref(&(0..4));
    let refused = |what: &str, outcome: Result<(), Error>, word: &str| {
        let error = outcome.expect_err(what);
        assert!(matches!(error, Error::InvalidArgument { .. }), "{what}: {error:?}");
        assert!(error.to_string().contains(word), "{what}: {error} does not name \"{word}\"");
    };
    for (source, word) in [(Slice::from(&integers), "elements of i32"), (unaligned, "not aligned to 4 bytes")] {
        let mut written = [0.25f32; 8];
        refused("cast", cpu::cast(SliceMut::from(&mut written[..4]), source), word);
        refused("accumulate", cpu::accumulate(SliceMut::from(&mut written[..4]), source), word);
        refused("scale", cpu::scale(SliceMut::from(&mut written[..4]), source, 2.0), word);
        refused("squared_norms", cpu::squared_norms(source, whole).map(drop), word);
        refused("gram", cpu::gram(&[source, source], whole).map(drop), word);
        refused("combine", cpu::combine(SliceMut::from(&mut written[..4]), &[source], &[1.0], whole), word);
        // The first tensor would fit.
        let sources = [Slice::from(&numbers[..4]), source];
        refused("pack", cpu::pack(SliceMut::from(&mut written), &[0, 4], &sources), word);
        let (first, second) = written.split_at_mut(4);
        refused("cast_all", cpu::cast_all(&mut [first.into(), second.into()], &sources), word);
        assert_eq!(written, [0.25; 8], "an element was written");
    }
    let mut integers = [7i32; 4];
    refused("cast", cpu::cast((&mut integers).into(), Slice::from(&numbers[..4])), "elements of i32");
    assert_eq!(integers, [7; 4]);
    assert!(cpu::all_finite(Slice::from(&integers)));
    assert_eq!((unaligned.typed::<f32>(), unaligned.to_vec::<f32>().unwrap().len()), (None, 4));
}

/// No elements may have any address.
#[test]
fn slice_of_no_elements_is_aligned_everywhere() {
    let bytes = [0u8; 9];
    let mut written = bytes;
    for begin in 0..9 {
        let none = Slice::of_bytes(DType::F64, &bytes[begin..begin]);
        let place = SliceMut::of_bytes(DType::F64, &mut written[begin..begin]);
        assert_eq!(none.typed::<f64>(), Some(&[][..]));
        cpu::accumulate(place, none).unwrap();
        assert!(cpu::all_finite(none));
    }
}
