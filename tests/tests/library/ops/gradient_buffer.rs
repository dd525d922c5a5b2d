//! The layout of a gradient buffer: alignment, padding, shards, names, and gaps that are zero and stay zero.

use gradsync::internal::plan::chunks::chunk_len;
use gradsync::{GradientBuffer, TensorView};
use gradsync_tests::array::{dtype, patterns_of, values_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use proptest::prelude::*;

fn buffer(format: Format, world_size: usize, shapes: &[Vec<usize>]) -> GradientBuffer {
    let tensors = shapes.iter().enumerate().map(|(i, shape)| (format!("layer.{i}"), shape.clone()));
    GradientBuffer::new(dtype(format), world_size, tensors).unwrap()
}

fn check_layout(format: Format, world_size: usize, shapes: &[Vec<usize>]) {
    let what = format!("{format:?}, {world_size} ranks, {shapes:?}");
    let buffer = buffer(format, world_size, shapes);
    let size = format.size_bytes();
    assert_eq!(buffer.dtype(), dtype(format));
    assert_eq!(buffer.world_size(), world_size);
    assert_eq!(buffer.tensor_count(), shapes.len());
    assert_eq!(buffer.segments().len(), shapes.len());
    assert_eq!(buffer.as_slice().len(), buffer.len(), "{what}");
    assert_eq!(buffer.shard_len() * world_size, buffer.len(), "{what}: shards cover the buffer");
    assert_eq!(buffer.shard_len() * size % 16, 0, "{what}: shards are not 16-byte multiples");
    // The only wasted space is for alignment, and for chunks that no shard boundary may cut.
    let chunk = |len: usize| chunk_len(len).min(len.next_power_of_two()) * size;
    let longest = shapes.iter().map(|shape| chunk(shape.iter().product())).max().unwrap_or(0).max(256);
    let mut end = 0;
    for (i, (segment, shape)) in buffer.segments().iter().zip(shapes).enumerate() {
        assert_eq!(segment.len(), shape.iter().product::<usize>(), "{what}: tensor {i}");
        assert_eq!(segment.start * size % 256, 0, "{what}: tensor {i} starts at byte {}", segment.start * size);
        assert!(segment.start >= end, "{what}: tensor {i} overlaps the one before");
        let is_cut = |edge: usize| {
            segment.start < edge && edge < segment.end && (edge - segment.start) * size % chunk(segment.len()) != 0
        };
        assert!(
            !(1..world_size).any(|rank| is_cut(rank * buffer.shard_len())),
            "{what}: a shard cuts a chunk of tensor {i}"
        );
        let most = longest.min(chunk_len(segment.len()) * size);
        assert!(
            (segment.start - end) * size < 256.max(most),
            "{what}: a gap of {} before tensor {i}",
            segment.start - end
        );
        end = segment.end;
        assert_eq!(buffer.name(i), format!("layer.{i}"));
        assert_eq!(buffer.shape(i), &shape[..]);
        assert_eq!(buffer.index_of(&format!("layer.{i}")), Some(i));
    }
    assert_eq!(buffer.index_of("no such tensor"), None);
    assert!(end <= buffer.len(), "{what}");
    assert!((buffer.len() - end) * size < longest * world_size, "{what}: {} elements of tail", buffer.len() - end);
    assert!(patterns_of(buffer.as_slice()).iter().all(|&bits| bits == 0), "{what}: a new buffer is not zero");
}

#[test]
fn layouts_of_many_shapes() {
    let shapes = [vec![], vec![0], vec![1], vec![2, 0, 3], vec![63], vec![64], vec![65], vec![7, 13], vec![1024, 3]];
    for format in Format::ALL {
        for world_size in [1, 2, 3, 4, 5, 7, 8, 16, 64] {
            check_layout(format, world_size, &shapes);
            check_layout(format, world_size, &[]);
            check_layout(format, world_size, &[vec![0]]);
            for len in [1, 63, 64, 65, 950, 1024] {
                check_layout(format, world_size, &[vec![len]]);
            }
        }
    }
}

#[test]
fn memory_is_aligned_for_wide_loads() {
    for format in Format::ALL {
        let buffer = buffer(format, 3, &[vec![5], vec![7]]);
        assert_eq!(buffer.as_slice().as_bytes().as_ptr() as usize % 16, 0, "{format:?}");
    }
}

#[test]
fn a_tensor_is_its_segment() {
    for format in Format::ALL {
        let mut buffer = buffer(format, 4, &[vec![3, 5], vec![], vec![100]]);
        let segments = buffer.segments().to_vec();
        for (i, segment) in segments.iter().enumerate() {
            let values = vector(format, segment.len(), i as u64);
            write(buffer.as_mut_slice(), segment.start, &values);
        }
        for (i, segment) in segments.iter().enumerate() {
            let mut copy = gradsync_tests::array::Array::unwritten(format, segment.len());
            let tensor: TensorView<'_> = buffer.tensor(i);
            let shape = buffer.shape(i).to_vec();
            let target = gradsync::TensorViewMut::new(copy.slice_mut(), &shape).unwrap();
            gradsync::ops::overwrite(target, tensor).unwrap();
            assert_eq!(copy.values(), vector(format, segment.len(), i as u64), "{format:?}, tensor {i}");
        }
        gradsync::ops::zero_gradient(buffer.tensor_mut(0)).unwrap();
        let all = values_of(buffer.as_slice());
        assert!(all[segments[0].clone()].iter().all(|&x| x == 0.0));
        assert_eq!(all[segments[2].clone()], vector(format, 100, 2)[..], "{format:?}: a neighbour changed");
        let inside = |place: usize| segments.iter().any(|segment| segment.contains(&place));
        assert!(all.iter().enumerate().all(|(place, &x)| inside(place) || x == 0.0), "{format:?}: a gap is not zero");
    }
}

#[test]
fn refusals() {
    let new = |world_size: usize, tensors: Vec<(&'static str, Vec<usize>)>| {
        GradientBuffer::new(gradsync::DType::F32, world_size, tensors)
    };
    assert!(new(0, vec![("a", vec![1])]).is_err(), "no ranks");
    let error = new(2, vec![("w", vec![1]), ("b", vec![2]), ("w", vec![3])]).expect_err("one name twice");
    assert!(error.to_string().contains('w'), "\"{error}\" does not name the tensor");
    assert!(new(2, vec![("a", vec![usize::MAX, 2])]).is_err(), "a shape whose product overflows");
    assert!(new(2, vec![("a", vec![usize::MAX / 4])]).is_err(), "more bytes than the address space has");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_layout(
        shapes in proptest::collection::vec(proptest::collection::vec(0_usize..40, 0..3), 0..12),
        world_size in 1_usize..70,
        format in 0_usize..4,
    ) {
        check_layout(Format::ALL[format], world_size, &shapes);
    }
}
