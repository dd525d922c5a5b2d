//! A graph owns what its work uses: dropping buffers and queues before a launch gives their memory to nobody else.

use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::kernels::cuda;
use gradsync::{DType, Error};

use crate::{download, queue, uniform, upload};

const LEN: usize = 1 << 20;

fn buffer(queue: &Queue, seed: u64) -> DeviceBuffer {
    upload(queue, uniform(DType::F32, LEN, seed).tensor(0).data(), 0)
}

fn numbers(buffer: &DeviceBuffer) -> Vec<f64> {
    download(buffer, 0).tensor(0).data().to_f64_vec()
}

/// A graph that clears a buffer, which is dropped, and where the buffer was.
fn clearing(queue: &Queue) -> (Graph, u64) {
    let mut cleared = buffer(queue, 1);
    let address = cleared.as_slice().address();
    let graph = queue.capture(|| cuda::zero(cleared.as_mut_slice())).unwrap();
    drop(cleared);
    (graph, address)
}

#[test]
fn memory_that_a_graph_writes_to_is_nobody_elses() {
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
fn memory_comes_back_when_the_graph_is_gone() {
    let queue = queue();
    let (graph, address) = clearing(&queue);
    let clone = queue.clone();
    drop(graph);
    assert_eq!(buffer(&clone, 2).as_slice().address(), address, "the next buffer of its size takes it over");
}

#[test]
fn what_is_allocated_after_a_recording_is_not_kept() {
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
fn a_graph_keeps_the_queues_and_the_memory_of_its_branches() {
    let (main, branch) = (queue(), queue());
    let mut cleared = buffer(&branch, 1);
    let address = cleared.as_slice().address();
    branch.synchronize().unwrap();
    // Kernels are loaded before, as in a training loop.
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
fn copies_of_the_hosts_memory_are_refused_before_they_are_recorded() {
    let queue = queue();
    let mut data = buffer(&queue, 6);
    let mut host = vec![7.0f32; LEN];
    let mut refusals = Vec::new();
    // The closure passes no refusal on: what was refused must not be in the recording.
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
fn a_recording_that_panics_ends() {
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
