//! The order between graphs and the queues that they use, and the resources that graphs keep.

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::internal::kernels::cuda::{self, SegmentWorkspace};

use crate::{after, lines, queue, say};

fn buffer(queue: &Queue) -> DeviceBuffer {
    DeviceBuffer::zeroed(queue, DType::F32, 1000).unwrap()
}

/// A graph of the first queue with a branch in the second.
fn with_branch(main: &Queue, branch: &Queue) -> Graph {
    let mut data = buffer(branch);
    cuda::zero(data.as_mut_slice()).unwrap();
    let record = || {
        branch.wait_for(&main.record()?)?;
        cuda::zero(data.as_mut_slice())?;
        // The branch joins twice, as any work may join a queue again.
        branch.wait_for(&main.record()?)?;
        Ok(main.wait_for(&branch.record()?)?)
    };
    main.capture(record).unwrap()
}

#[test]
fn case_of_a_branch() {
    let (Some(main), Some(branch), Some(other)) = (queue(), queue(), queue()) else { return };
    let early = other.record().unwrap();
    let graph = main.capture(|| {
        // A queue that waits for an earlier event during a recording takes no part in the recording.
        Queue::new(0)?.wait_for(&early)?;
        Ok(())
    });
    say("without a branch");
    graph.unwrap().launch().unwrap();
    say("a recording with a branch");
    let graph = with_branch(&main, &branch);
    say("with a branch");
    graph.launch().unwrap();
    say("the branch is dropped");
    drop(branch);
    say("launched again");
    graph.launch().unwrap();
    say("the graph is dropped");
    drop(graph);
    say("the end");
}

#[test]
fn graph_launch_is_ordered_with_the_queues_of_its_branches() {
    let lines = lines("graph_resources::case_of_a_branch");
    assert_eq!(after(&lines, "without a branch"), ["graph 1 is launched by stream 1", "graph 1 ends"]);
    let launch = ["stream 1 waits for stream 2", "graph 2 is launched by stream 1", "stream 2 waits for stream 1"];
    assert_eq!(after(&lines, "with a branch"), launch);
    assert!(after(&lines, "the branch is dropped").is_empty(), "{lines:?}");
    assert_eq!(after(&lines, "launched again"), launch);
    assert_eq!(after(&lines, "the graph is dropped"), ["graph 2 ends", "stream 2 ends"]);
}

#[test]
fn case_of_a_nested_launch() {
    let (Some(main), Some(branch), Some(apart)) = (queue(), queue(), queue()) else { return };
    let graph = with_branch(&main, &branch);
    let refuse = || {
        let error = graph.launch().expect_err("work is being recorded");
        assert_eq!(error.code, 900, "{error}");
        assert!(error.text.contains("records no launches"), "{error}");
    };
    say("in a recording of its queue");
    let own = main.capture(|| {
        refuse();
        Ok(())
    });
    say("in a recording of its branch");
    let of_branch = apart.capture(|| {
        branch.wait_for(&apart.record()?)?;
        refuse();
        Ok(apart.wait_for(&branch.record()?)?)
    });
    say("after them");
    graph.launch().unwrap();
    say("the end");
    drop(own.and(of_branch).expect("a refusal spoils nothing"));
}

#[test]
fn graph_launch_is_refused_while_a_queue_of_it_is_recorded() {
    let lines = lines("graph_resources::case_of_a_nested_launch");
    assert!(after(&lines, "in a recording of its queue").is_empty(), "{lines:?}");
    let of_branch = after(&lines, "in a recording of its branch");
    assert_eq!(of_branch, ["stream 2 waits for stream 3, recorded", "stream 3 waits for stream 2, recorded"]);
    let launch = ["stream 1 waits for stream 2", "graph 1 is launched by stream 1", "stream 2 waits for stream 1"];
    assert_eq!(after(&lines, "after them"), launch);
}

#[test]
fn case_of_threads() {
    let (Some(main), Some(branch)) = (queue(), queue()) else { return };
    let mut data = buffer(&branch);
    cuda::zero(data.as_mut_slice()).unwrap();
    let begun = &|| branch.wait_for(&main.record()?);
    let graph = main.capture(|| {
        // Another thread may add to a recording.
        std::thread::scope(|scope| scope.spawn(begun).join().expect("no panic"))?;
        cuda::zero(data.as_mut_slice())?;
        Ok(main.wait_for(&branch.record()?)?)
    });
    let graph = graph.unwrap();
    say("launch");
    graph.launch().unwrap();
    say("the end");
}

#[test]
fn record_may_begin_a_branch_on_another_thread() {
    let launch = ["stream 1 waits for stream 2", "graph 1 is launched by stream 1", "stream 2 waits for stream 1"];
    assert_eq!(after(&lines("graph_resources::case_of_threads"), "launch"), launch);
}

#[test]
fn case_of_tables() {
    let Some(queue) = queue() else { return };
    let mut data = buffer(&queue);
    // Each length needs a table of its own.
    let mut zero = |len: usize| cuda::zero_all(&mut [data.as_mut_slice().range_mut(0..len)]);
    say("recorded");
    zero(1).unwrap();
    let refused = queue.capture(|| zero(2)).expect_err("a table that is not on the device");
    assert!(refused.to_string().contains("code 900"), "{refused}");
    let graph = queue.capture(|| zero(1)).unwrap();
    say("with the graph");
    (3..300).for_each(|len| zero(len).unwrap());
    graph.launch().unwrap();
    drop(graph);
    say("without the graph");
    (300..303).for_each(|len| zero(len).unwrap());
    say("the end");
}

#[test]
fn graph_keeps_the_tables_that_it_reads() {
    let lines = lines("graph_resources::case_of_tables");
    let uploads =
        |of: &str| -> Vec<&str> { after(&lines, of).into_iter().filter(|line| line.starts_with("upload")).collect() };
    let [table] = uploads("recorded")[..] else { panic!("{lines:?}") };
    let others = uploads("with the graph");
    assert!(others.len() == 297 && !others.contains(&table), "the table was overwritten: {others:?}");
    assert!(others[..100].iter().any(|other| others[100..].contains(other)), "the memory of old tables is used again");
    assert!(uploads("without the graph").contains(&table), "the memory never comes back: {lines:?}");
    let kernels: Vec<_> = after(&lines, "recorded").into_iter().filter(|line| line.starts_with("kernel")).collect();
    assert_eq!(kernels, ["kernel on stream 1", "kernel on stream 1, recorded"]);
}

#[test]
fn case_of_addresses() {
    let Some(queue) = queue() else { return };
    let mut layers = SegmentWorkspace::new(&queue, 1000, &[0..1000], 2).unwrap();
    let (vectors, mut sum) = ([0; 4].map(|_| buffer(&queue)), buffer(&queue));
    let pairs = [[0, 1], [2, 3]].map(|pair| pair.map(|index: usize| vectors[index].as_slice()));
    let mut combine = |pair: usize| layers.combine(sum.as_mut_slice(), &pairs[pair]);
    say("recorded");
    combine(0).unwrap();
    let graph = queue.capture(|| combine(0)).unwrap();
    say("other vectors");
    combine(1).unwrap();
    graph.launch().unwrap();
    say("the end");
}

#[test]
fn graph_keeps_the_addresses_of_recorded_vectors() {
    let lines = lines("graph_resources::case_of_addresses");
    let [recorded, "kernel on stream 1", "kernel on stream 1, recorded"] = after(&lines, "recorded")[..] else {
        panic!("{lines:?}")
    };
    let [others, "kernel on stream 1", _] = after(&lines, "other vectors")[..] else { panic!("{lines:?}") };
    assert!(recorded.starts_with("upload") && others.starts_with("upload") && recorded != others, "{lines:?}");
}
