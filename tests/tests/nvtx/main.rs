//! Ranges as a profiler sees them: a recording tool, compiled here, is loaded like Nsight's tool, and writes the ranges to a file.
//!
//! There is one test in a process of its own, as a program looks for a tool only once.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gradsync::TensorViewMut;
use gradsync::comm::Ranks;
use gradsync::nvtx;
use gradsync::onnx::{recv, recv_described, send};
use gradsync::ops::send_recv::{Bundle, Expected, Limits, SendRecv};
use gradsync_tests::programs::shared_library;
use gradsync_tests::ranks::on_ranks;

const RED: &str = "ffff0000";
const GREEN: &str = "ff00ff00";

fn compile(folder: &Path) -> PathBuf {
    let tool = folder.join("librecorder.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvtx/recorder.c");
    shared_library(&tool, &source, &[]);
    tool
}

/// The events of one thread: the name and the colour at the start of a range, and `None` at its end.
type Told = Vec<Option<(String, String)>>;

fn read(path: &Path) -> Vec<Told> {
    let mut threads: BTreeMap<u64, (usize, Told)> = BTreeMap::new();
    for line in fs::read_to_string(path).unwrap().lines() {
        let (thread, event) = line.split_once(' ').unwrap();
        let first = threads.len();
        let (_, told) = threads.entry(thread.parse().unwrap()).or_insert((first, Told::new()));
        match event.strip_prefix("push ") {
            Some(range) => {
                // The fields are version 3, the size of the structure, a colour in ARGB, and a message in ASCII.
                let range = range.strip_prefix("3 1 1 1 ").unwrap_or_else(|| panic!("{line}"));
                let (color, name) = range.split_once(' ').unwrap();
                told.push(Some((name.to_owned(), color.to_owned())));
            }
            None => {
                assert_eq!(event, "pop");
                told.push(None);
            }
        }
    }
    threads.into_values().map(|(_, told)| told).collect()
}

/// The events of ranges that each end before the next begins.
fn in_turn(names: &[&str], color: &str) -> Told {
    names.iter().flat_map(|name| [Some(((*name).to_owned(), color.to_owned())), None]).collect()
}

#[test]
fn nvtx_ranges_show_a_profiler_every_phase() {
    let folder = tempfile::tempdir().unwrap();
    let ranges = folder.path().join("ranges");
    let tool = compile(folder.path());
    // SAFETY: this is the only test of this process, and no other thread of it uses the environment.
    unsafe {
        std::env::set_var("RECORDED_RANGES", &ranges);
        std::env::set_var("NVTX_INJECTION64_PATH", &tool);
    }
    let taken = || {
        let told = read(&ranges);
        // The tool continues to write to the same file.
        fs::File::options().write(true).open(&ranges).unwrap().set_len(0).unwrap();
        told
    };

    // The transfers are between ranks 1 and 3, whose relative speed does not show in the ranges.
    on_ranks(4, |comm| {
        let values = [1.0f32, 2.0];
        let pair = || Bundle::new([&values[..1], &values[1..]]).unwrap();
        match comm.rank() {
            1 => {
                assert!(send(&SendRecv::new(&comm), true, 3, &pair()).unwrap().wait().unwrap());
                let _batch = nvtx::batch("7");
                assert!(send(&SendRecv::new(&comm), true, 3, &pair().described(5)).unwrap().wait().unwrap());
            }
            3 => {
                let (mut first, mut second) = ([0.0f32], [0.0f32]);
                let mut places = [TensorViewMut::from(&mut first[..]), TensorViewMut::from(&mut second[..])];
                assert!(recv(&SendRecv::new(&comm), true, 1, &mut places).unwrap().wait().unwrap());
                let received = {
                    let _batch = nvtx::batch(7);
                    recv_described(&SendRecv::new(&comm), true, 1, 5, &Limits::default()).unwrap()
                };
                assert_eq!((first, second, received.1.len()), ([1.0], [2.0], 2));
            }
            _ => {}
        }
    });
    let sender = ["SendMemcpy-3", "PreSend-3", "Send-3", "PostSend-3"];
    let receiver = ["PreRecv-1", "Recv-1", "RecvMemcpy-1", "PostRecv-1"];
    let twice = |names: [&str; 4], color| {
        let batch: Vec<String> = names.iter().map(|name| format!("Batch-7 {name}")).collect();
        let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
        in_turn(&[&names[..], &batch[..]].concat(), color)
    };
    let mut told = taken();
    told.sort_by_key(|told| told[0].clone().map(|(_, color)| color));
    assert_eq!(told, [twice(receiver, GREEN), twice(sender, RED)]);

    // Both directions run at once: ranges nest, with sends outside receives, and the batch is complete.
    let outcomes = on_ranks(2, |comm| {
        let (peer, values) = (1 - comm.rank(), [comm.rank() as u8; 3]);
        let expected = Expected::known([(gradsync::DType::U8, vec![3])]);
        SendRecv::new(&comm)
            .exchange(&[(peer, Bundle::new([&values[..]]).unwrap())], &[(peer, expected)])
            .unwrap()
            .1
            .len()
    });
    assert_eq!(outcomes, [1, 1]);
    let begin = |name: &str, peer: usize, color: &str| Some((format!("{name}-{peer}"), color.to_owned()));
    let both = |peer| {
        let both = |send, recv| [begin(send, peer, RED), begin(recv, peer, GREEN), None, None];
        let one = |name, color| [begin(name, peer, color), None];
        let mut told = one("SendMemcpy", RED).to_vec();
        told.extend(both("PreSend", "PreRecv"));
        told.extend(both("Send", "Recv"));
        told.extend(one("RecvMemcpy", GREEN));
        told.extend(both("PostSend", "PostRecv"));
        told
    };
    let mut told = taken();
    told.sort_by_key(|told| told[0].clone());
    assert_eq!(told, [both(0), both(1)]);
}
