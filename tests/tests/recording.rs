//! How graphs are ordered with the queues that they work in, and what they keep, with a driver made here that runs nothing: no GPU is needed.
//!
//! Each case is a process of its own, this program again, whose driver is named by the variable that the forwarders of `host/libcuda.rs` heed. The
//! driver prints what it is given, and follows the rules of recordings: which streams an event takes into one, and what spoils one. Whether graphs
//! compute what they should is the GPU tier's to tell.

use std::fs;

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::kernels::cuda;
use gradsync_tests::programs::{printed_by, shared_library};

const DRIVER: &str = "GRADSYNC_LIBCUDA";

/// Prints a line between those of the driver.
fn say(what: &str) {
    println!("\ndriver: -- {what}");
}

/// A queue of the driver that the environment names; none where that is not this file's.
fn queue() -> Option<Queue> {
    std::env::var_os(DRIVER)?;
    Some(Queue::new(0).expect("the driver of this file"))
}

fn buffer(queue: &Queue) -> DeviceBuffer {
    DeviceBuffer::zeroed(queue, DType::F32, 1000).unwrap()
}

/// A driver that takes everything, and says so.
const SOURCE: &str = r#"
    #include <stdio.h>
    #include <stdlib.h>
    #define SAY(...) do { printf("\ndriver: " __VA_ARGS__); printf("\n"); fflush(stdout); } while (0)

    typedef struct { int number; unsigned long capture; } Stream;
    typedef struct { unsigned long capture; int stream; } Event;
    typedef struct { int number; } Graph;
    static Stream *streams[100];
    static int stream_count, graph_count;
    static unsigned long captures, address = 1 << 20;
    static int spoiled;
    static void *current;

    int cuInit(unsigned flags) { return flags; }
    int cuGetErrorName(int error, const char **to) { *to = 0; return error ? 1 : 1; }
    int cuGetErrorString(int error, const char **to) { *to = 0; return error ? 1 : 1; }
    int cuDriverGetVersion(int *to) { *to = 12090; return 0; }
    int cuDeviceGetCount(int *to) { *to = 1; return 0; }
    int cuDeviceGet(int *to, int ordinal) { *to = ordinal; return 0; }
    int cuDeviceGetAttribute(int *to, int attribute) { *to = attribute == 75 ? 8 : 0; return 0; }
    int cuDevicePrimaryCtxRetain(void **to) { *to = &streams; return 0; }
    int cuDevicePrimaryCtxRelease_v2(void) { return 0; }
    int cuCtxSetCurrent(void *context) { current = context; return 0; }
    int cuCtxGetCurrent(void **to) { *to = current; return 0; }

    int cuModuleLoadDataEx(void **to) { *to = to; return 0; }
    int cuModuleGetFunction(void **to) { *to = to; return 0; }
    int cuModuleUnload(void) { return 0; }
    int cuMemAlloc_v2(unsigned long *to, unsigned long bytes) { *to = address; address += (bytes + 4095) / 4096 * 4096; return 0; }
    int cuMemFree_v2(void) { return 0; }
    int cuMemAllocHost_v2(void **to, unsigned long bytes) { *to = malloc(bytes); return 0; }
    int cuMemFreeHost(void *memory) { free(memory); return 0; }
    int cuMemcpyHtoDAsync_v2(unsigned long to) { SAY("upload to %lu", to); return 0; }
    int cuMemsetD8Async(void) { return 0; }

    int cuStreamCreateWithPriority(Stream **to) {
        Stream *made = calloc(1, sizeof *made);
        made->number = ++stream_count;
        *to = streams[made->number] = made;
        return 0;
    }
    int cuStreamDestroy_v2(Stream *stream) { SAY("stream %d ends", stream->number); return 0; }
    int cuStreamSynchronize(Stream *stream) {
        if (stream->capture) { spoiled = 1; return 900; }
        return 0;
    }
    int cuStreamBeginCapture_v2(Stream *stream) { stream->capture = ++captures; spoiled = 0; return 0; }
    int cuStreamGetCaptureInfo_v2(Stream *stream, unsigned *status, unsigned long *id) {
        *status = !stream->capture ? 0 : spoiled ? 2 : 1;
        if (*status == 1) *id = stream->capture;
        return 0;
    }
    int cuStreamEndCapture(Stream *stream, Graph **to) {
        unsigned long ended = stream->capture;
        for (int each = 1; each <= stream_count; each++) if (streams[each]->capture == ended) streams[each]->capture = 0;
        *to = 0;
        if (spoiled) return 901;
        *to = calloc(1, sizeof **to);
        return 0;
    }
    int cuGraphInstantiateWithFlags(Graph **to) {
        *to = calloc(1, sizeof **to);
        (*to)->number = ++graph_count;
        return 0;
    }
    int cuGraphDestroy(Graph *graph) { free(graph); return 0; }
    int cuGraphExecDestroy(Graph *graph) { SAY("graph %d ends", graph->number); return 0; }
    int cuGraphLaunch(Graph *graph, Stream *stream) {
        SAY("graph %d is %s by stream %d", graph->number, stream->capture ? "recorded" : "launched", stream->number);
        return 0;
    }

    int cuEventCreate(Event **to) { *to = calloc(1, sizeof **to); return 0; }
    int cuEventDestroy_v2(Event *event) { free(event); return 0; }
    int cuEventRecord(Event *event, Stream *stream) {
        event->capture = stream->capture;
        event->stream = stream->number;
        return 0;
    }
    int cuEventQuery(Event *event) {
        if (event->capture) { spoiled = 1; return 907; }
        return 0;
    }
    int cuEventSynchronize(Event *event) { return cuEventQuery(event); }
    int cuStreamWaitEvent(Stream *stream, Event *event) {
        if (stream->capture && stream->capture != event->capture) { spoiled = 1; return event->capture ? 903 : 905; }
        stream->capture = event->capture;
        SAY("stream %d waits for stream %d%s", stream->number, event->stream, event->capture ? ", recorded" : "");
        return 0;
    }
    static int launched(Stream *stream) { SAY("kernel on stream %d%s", stream->number, stream->capture ? ", recorded" : ""); return 0; }
    int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned s, Stream *stream) {
        (void)f; (void)x; (void)y; (void)z; (void)a; (void)b; (void)c; (void)s;
        return launched(stream);
    }
    int cuGetProcAddress(const char *name, void **to) { (void)name; *to = 0; return 0; }
"#;

/// The lines of a case in a process with the driver.
fn lines(case: &str) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (library, source) = (folder.path().join("driver.so"), folder.path().join("driver.c"));
    fs::write(&source, SOURCE).expect("a writable folder");
    shared_library(&library, &source, &[]);
    let printed = printed_by(case, |command| {
        command.env(DRIVER, &library);
    });
    printed.lines().filter_map(|line| line.strip_prefix("driver: ")).map(str::to_owned).collect()
}

/// The lines from what was [said](say) up to what is said next.
fn after<'a>(lines: &'a [String], what: &str) -> Vec<&'a str> {
    let begin = lines.iter().position(|line| line.strip_prefix("-- ") == Some(what)).expect("said");
    lines[begin + 1..].iter().map(String::as_str).take_while(|line| !line.starts_with("-- ")).collect()
}

/// A graph of the first queue with a branch in the second.
fn with_branch(main: &Queue, branch: &Queue) -> gradsync::driver::Graph {
    let mut data = buffer(branch);
    cuda::zero(data.as_mut_slice()).unwrap();
    let record = || {
        branch.wait_for(&main.record()?)?;
        cuda::zero(data.as_mut_slice())?;
        // Twice, as any work may join a queue again.
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
        // A queue that waits for something else while work is recorded has no part in the recording.
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
fn a_launch_is_ordered_with_the_queues_of_its_branches() {
    let lines = lines("case_of_a_branch");
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
    let inner = with_branch(&main, &branch);
    say("inside a recording");
    let outer = main.capture(|| Ok(inner.launch()?)).unwrap();
    say("the inner one is dropped");
    drop((inner, branch));
    say("the outer one");
    outer.launch().unwrap();
    say("the outer one is dropped");
    drop(outer);
    let branch = queue().expect("as above");
    let inner = with_branch(&main, &branch);
    say("with the branch in the recording");
    let outer = main.capture(|| {
        branch.wait_for(&main.record()?)?;
        Ok(inner.launch()?)
    });
    say("the branch of another recording");
    let refused = apart.capture(|| {
        branch.wait_for(&apart.record()?)?;
        let error = inner.launch().expect_err("its branch is being recorded");
        assert_eq!(error.code, 900, "{error}");
        assert!(error.text.contains("another queue"), "{error}");
        Ok(apart.wait_for(&branch.record()?)?)
    });
    say("the end");
    drop((outer.unwrap(), refused.expect("a refusal spoils nothing"), inner));
}

#[test]
fn a_recording_keeps_the_graphs_that_are_launched_in_it() {
    let lines = lines("case_of_a_nested_launch");
    assert_eq!(after(&lines, "inside a recording"), ["graph 1 is recorded by stream 1"]);
    assert_eq!(after(&lines, "the inner one is dropped"), ["graph 1 ends"], "the queue of its branch stays");
    let launch = ["stream 1 waits for stream 2", "graph 2 is launched by stream 1", "stream 2 waits for stream 1"];
    assert_eq!(after(&lines, "the outer one"), launch);
    let ended = after(&lines, "the outer one is dropped");
    assert_eq!(ended[..2], ["graph 2 ends", "stream 2 ends"], "{ended:?}");
    let nested = after(&lines, "with the branch in the recording");
    let expected = [
        "stream 4 waits for stream 1, recorded",
        "stream 1 waits for stream 4, recorded",
        "graph 3 is recorded by stream 1",
        "stream 4 waits for stream 1, recorded",
        "stream 1 waits for stream 4, recorded",
    ];
    assert_eq!(nested, expected);
    let refused = after(&lines, "the branch of another recording");
    assert!(!refused.iter().any(|line| line.contains("graph")), "{refused:?}");
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
fn a_branch_may_begin_on_another_thread() {
    let launch = ["stream 1 waits for stream 2", "graph 1 is launched by stream 1", "stream 2 waits for stream 1"];
    assert_eq!(after(&lines("case_of_threads"), "launch"), launch);
}

#[test]
fn case_of_tables() {
    let Some(queue) = queue() else { return };
    let mut data = buffer(&queue);
    // Each length is a table of its own.
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
fn a_table_stays_as_long_as_the_graph_that_reads_it() {
    let lines = lines("case_of_tables");
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
