//! A graph owns the resources that its work uses: buffers and queues dropped before a launch keep their memory until the graph ends.

use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::internal::kernels::cpu::Coefficients;
use gradsync::internal::kernels::cuda::{self, SegmentWorkspace};
use gradsync::{DType, Error};

use crate::{download, queue, uniform, upload};

const LEN: usize = 1 << 20;

fn buffer(queue: &Queue, seed: u64) -> DeviceBuffer {
    upload(queue, uniform(DType::F32, LEN, seed).tensor(0).data(), 0)
}

fn numbers(buffer: &DeviceBuffer) -> Vec<f64> {
    download(buffer, 0).tensor(0).data().to_f64_vec()
}

/// A graph that clears a buffer, and the address of the buffer, which is dropped.
fn clearing(queue: &Queue) -> (Graph, u64) {
    let mut cleared = buffer(queue, 1);
    let address = cleared.as_slice().address();
    let graph = queue.capture(|| cuda::zero(cleared.as_mut_slice())).unwrap();
    drop(cleared);
    (graph, address)
}

#[test]
fn graph_keeps_the_memory_that_it_writes_to() {
    let queue = queue();
    let (graph, address) = clearing(&queue);
    let others: Vec<DeviceBuffer> = (0..4).map(|seed| buffer(&queue, 10 + seed)).collect();
    assert!(others.iter().all(|other| other.as_slice().address() != address), "the memory has a new owner");
    for _ in 0..3 {
        graph.launch().unwrap();
    }
    for (seed, other) in others.iter().enumerate() {
        let expected = uniform(DType::F32, LEN, 10 + seed as u64).tensor(0).data().to_f64_vec();
        assert!(numbers(other) == expected, "buffer {seed} was overwritten by a launch");
    }
}

#[test]
fn graph_gives_its_memory_back_when_it_is_dropped() {
    let queue = queue();
    let (graph, address) = clearing(&queue);
    let clone = queue.clone();
    drop(graph);
    assert_eq!(buffer(&clone, 2).as_slice().address(), address, "the next buffer of its size takes it over");
}

#[test]
fn graph_keeps_no_memory_allocated_after_the_recording() {
    let queue = queue();
    let (graph, _) = clearing(&queue);
    let later = buffer(&queue, 3);
    let address = later.as_slice().address();
    drop(later);
    assert_eq!(buffer(&queue, 4).as_slice().address(), address);
    graph.launch().unwrap();
    queue.synchronize().unwrap();
}

#[test]
fn graph_keeps_the_queues_and_the_memory_of_its_branches() {
    let (main, branch) = (queue(), queue());
    let mut cleared = buffer(&branch, 1);
    let address = cleared.as_slice().address();
    branch.synchronize().unwrap();
    // Kernels are loaded before the recording, as in a training loop.
    cuda::zero(cleared.as_mut_slice()).unwrap();
    let graph = main
        .capture(|| {
            branch.wait_for(&main.record()?)?;
            cuda::zero(cleared.as_mut_slice())?;
            Ok(main.wait_for(&branch.record()?)?)
        })
        .unwrap();
    drop(cleared);
    let other = buffer(&branch, 5);
    assert_ne!(other.as_slice().address(), address);
    graph.launch().unwrap();
    main.synchronize().unwrap();
    assert!(numbers(&other) == uniform(DType::F32, LEN, 5).tensor(0).data().to_f64_vec());
    drop((other, branch));
    graph.launch().unwrap();
    main.synchronize().unwrap();
}

#[test]
fn graph_launch_and_the_queues_of_its_branches_are_ordered() {
    let (main, branch) = (queue(), queue());
    let ones = DeviceBuffer::from_host(&branch, (&vec![1.0f32; LEN]).into()).unwrap();
    let mut sum = buffer(&branch, 1);
    cuda::zero(sum.as_mut_slice()).unwrap();
    cuda::accumulate(sum.as_mut_slice(), ones.as_slice()).unwrap();
    let graph = main
        .capture(|| {
            branch.wait_for(&main.record()?)?;
            cuda::zero(sum.as_mut_slice())?;
            Ok(main.wait_for(&branch.record()?)?)
        })
        .unwrap();
    for _ in 0..5 {
        for _ in 0..200 {
            cuda::accumulate(sum.as_mut_slice(), ones.as_slice()).unwrap();
        }
        graph.launch().unwrap();
        cuda::accumulate(sum.as_mut_slice(), ones.as_slice()).unwrap();
        assert!(
            numbers(&sum).iter().all(|&number| number == 1.0),
            "cleared after what was before, before what is after"
        );
    }
}

#[test]
fn graph_launch_in_a_recording_is_refused_and_spoils_nothing() {
    let queue = queue();
    let (inner, _) = clearing(&queue);
    let mut data = buffer(&queue, 3);
    let outer = queue
        .capture(|| {
            let refusal = inner.launch().unwrap_err();
            assert_eq!(refusal.code, 900, "{refusal}");
            cuda::zero(data.as_mut_slice())
        })
        .unwrap();
    assert!(numbers(&data) == uniform(DType::F32, LEN, 3).tensor(0).data().to_f64_vec(), "nothing has run");
    inner.launch().unwrap();
    outer.launch().unwrap();
    assert!(numbers(&data).iter().all(|&number| number == 0.0));
}

#[test]
fn graph_sums_the_recorded_vectors() {
    let queue = queue();
    let vectors =
        [1.0f32, 2.0, 4.0, 8.0].map(|number| DeviceBuffer::from_host(&queue, (&vec![number; LEN]).into()).unwrap());
    let pairs = [[0, 1], [2, 3]].map(|pair| pair.map(|index: usize| vectors[index].as_slice()));
    let mut layers = SegmentWorkspace::new(&queue, LEN, &[0..LEN], 2).unwrap();
    layers.write_coefficients(&Coefficients { weights: vec![1.0; 2], cancelled: vec![false] }).unwrap();
    let mut sums = [buffer(&queue, 5), buffer(&queue, 6)];
    layers.combine(sums[0].as_mut_slice(), &pairs[0]).unwrap();
    let graph = queue.capture(|| layers.combine(sums[0].as_mut_slice(), &pairs[0])).unwrap();
    layers.combine(sums[1].as_mut_slice(), &pairs[1]).unwrap();
    cuda::zero(sums[0].as_mut_slice()).unwrap();
    graph.launch().unwrap();
    for (sum, expected) in sums.iter().zip([3.0, 12.0]) {
        assert!(numbers(sum).iter().all(|&number| number == expected), "not {expected}");
    }
}

#[test]
fn capture_refuses_copies_of_host_memory() {
    let queue = queue();
    let mut data = buffer(&queue, 6);
    let mut host = vec![7.0f32; LEN];
    let mut refusals = Vec::new();
    // The closure returns no error although calls were refused: the refused work must not be in the recording.
    let graph = queue.capture(|| {
        refusals.push(data.as_slice().copy_to_host((&mut host[..]).into()).unwrap_err());
        refusals.push(data.as_mut_slice().copy_from_host((&host[..]).into()).unwrap_err());
        cuda::zero(data.as_mut_slice())
    });
    for refusal in &refusals {
        assert!(matches!(refusal, Error::Cuda(error) if error.code == 900), "{refusal}");
    }
    let graph = graph.unwrap();
    graph.launch().unwrap();
    queue.synchronize().unwrap();
    assert!(host.iter().all(|&number| number == 7.0), "a launch wrote to the host's memory");
    assert!(numbers(&data).iter().all(|&number| number == 0.0));
}

#[test]
fn capture_ends_when_its_body_panics() {
    let queue = queue();
    let mut data = buffer(&queue, 8);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        queue.capture(|| {
            cuda::zero(data.as_mut_slice())?;
            panic!("in the middle of a recording")
        })
    }));
    assert!(panicked.is_err());
    assert!(numbers(&data) == uniform(DType::F32, LEN, 8).tensor(0).data().to_f64_vec(), "nothing of it has run");
    cuda::zero(data.as_mut_slice()).unwrap();
    assert!(numbers(&data).iter().all(|&number| number == 0.0), "the queue goes on");
}
