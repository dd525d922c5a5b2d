//! Clones of a queue on several threads: a recording begins and ends between calls, never in the middle of one.

use std::thread;
use std::time::Duration;

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::internal::kernels::cuda;

use crate::{after, lines_with, queue, say};

/// Longer than a call needs until it asks whether its queue is recorded, and shorter than the driver takes to answer.
const DURING_THE_ANSWER: Duration = Duration::from_millis(80);
const PAUSES: &[(&str, &str)] = &[("DRIVER_PAUSES", "1")];

/// Runs a call while another thread begins a recording of a clone of its queue.
fn beside_a_recording(queue: &Queue, call: impl FnOnce()) {
    let clone = queue.clone();
    thread::scope(|scope| {
        let recorder = scope.spawn(move || {
            thread::sleep(DURING_THE_ANSWER);
            let graph = clone.capture(|| {
                say("recorded");
                thread::sleep(4 * DURING_THE_ANSWER);
                Ok(())
            });
            drop(graph.expect("the call spoils no recording"));
        });
        call();
        recorder.join().expect("no panic");
    });
}

#[test]
fn case_of_copies() {
    let Some(queue) = queue() else { return };
    let mut data = DeviceBuffer::zeroed(&queue, DType::F32, 1000).unwrap();
    let mut host = vec![1.0f32; 1000];
    beside_a_recording(&queue, || data.as_slice().copy_to_host((&mut host[..]).into()).expect("not recorded"));
    assert_eq!(host, [0.0; 1000]);
    beside_a_recording(&queue, || data.as_mut_slice().copy_from_host((&host[..]).into()).expect("not recorded"));
    beside_a_recording(&queue, || drop(DeviceBuffer::zeroed(&queue, DType::F32, 10).expect("not recorded")));
    say("the end");
}

#[test]
fn capture_never_begins_during_a_copy_or_an_allocation() {
    after(&lines_with("queue_clones::case_of_copies", PAUSES), "the end");
}

#[test]
fn case_of_a_table() {
    let Some(queue) = queue() else { return };
    let mut data = DeviceBuffer::zeroed(&queue, DType::F32, 1000).unwrap();
    let mut zero = || cuda::zero_all(&mut [data.as_mut_slice().range_mut(0..7)]).unwrap();
    zero();
    say("begin");
    // The table is not kept by the recording, so the kernel that reads it must not be part of it.
    beside_a_recording(&queue, zero);
    say("the end");
}

#[test]
fn capture_never_begins_between_a_table_and_its_kernel() {
    let lines = lines_with("queue_clones::case_of_a_table", PAUSES);
    assert_eq!(after(&lines, "begin"), ["kernel on stream 1"], "{lines:?}");
}

#[test]
fn case_of_a_graph() {
    let Some(queue) = queue() else { return };
    let graph = queue.capture(|| Ok(())).unwrap();
    say("begin");
    beside_a_recording(&queue, || graph.launch().expect("not recorded"));
    say("the end");
}

#[test]
fn capture_never_begins_during_a_launch() {
    let lines = lines_with("queue_clones::case_of_a_graph", PAUSES);
    assert_eq!(after(&lines, "begin"), ["graph 1 is launched by stream 1"], "{lines:?}");
}

#[test]
fn case_of_a_branch() {
    let (Some(main), Some(branch)) = (queue(), queue()) else { return };
    let mut data = DeviceBuffer::zeroed(&branch, DType::F32, 1000).unwrap();
    let mut zero = || cuda::zero_all(&mut [data.as_mut_slice().range_mut(0..7)]).unwrap();
    zero();
    let clone = branch.clone();
    say("begin");
    thread::scope(|scope| {
        let recorder = scope.spawn(move || {
            let graph = main.capture(|| {
                // By now the other thread has asked whether the branch is recorded, and waits for the answer.
                thread::sleep(DURING_THE_ANSWER);
                clone.wait_for(&main.record()?)?;
                Ok(main.wait_for(&clone.record()?)?)
            });
            drop(graph.expect("a recording with a branch"));
        });
        // A recording begins with one question.
        thread::sleep(Duration::from_millis(200));
        zero();
        recorder.join().expect("no panic");
    });
    say("the end");
}

#[test]
fn record_takes_no_queue_during_a_call() {
    let lines = lines_with("queue_clones::case_of_a_branch", PAUSES);
    let kernels: Vec<_> = after(&lines, "begin").into_iter().filter(|line| line.starts_with("kernel")).collect();
    assert_eq!(kernels, ["kernel on stream 2"], "{lines:?}");
}

#[test]
fn case_of_a_recording_inside_a_recording() {
    let Some(queue) = queue() else { return };
    let outer = queue.capture(|| {
        let error = queue.capture(|| Ok(())).expect_err("the queue is being recorded");
        assert!(error.to_string().contains("code 9"), "{error}");
        Ok(())
    });
    drop(outer);
    say("the end");
}

#[test]
fn capture_inside_another_waits_for_nobody() {
    after(&lines_with("queue_clones::case_of_a_recording_inside_a_recording", &[]), "the end");
}
