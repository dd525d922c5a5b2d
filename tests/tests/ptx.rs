//! The PTX in the crate, read as text: entry points, parameters and launch bounds match the host's table, loads are 16 bytes wide, and the
//! assembler may not fuse or flush any instruction. `cargo xtask ptxas` proves that it assembles.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use gradsync::DType;
use gradsync_device::abi::{self, EntryPoint};

const ARCHS: [&str; 2] = ["sm_75", "sm_80"];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../host/ptx")
}

/// Every entry point of an architecture's files: its name, and then family, parameter types and body.
fn entry_points(arch: &str) -> BTreeMap<String, (String, Vec<String>, String)> {
    let mut found = BTreeMap::new();
    for file in std::fs::read_dir(folder().join(arch)).expect("the folder of PTX is there") {
        let path = file.expect("a readable folder").path();
        let family = path.file_stem().expect("a named file").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).expect("a readable file");
        for entry in text.split(".visible .entry ").skip(1) {
            let (name, rest) = entry.split_once('(').expect("an entry has parameters");
            let (params, body) = rest.split_once(')').expect("parameters end");
            let types = params
                .split(',')
                .filter(|param| !param.trim().is_empty())
                .map(|param| param.split_whitespace().nth(1).expect("`.param` and a type").to_owned())
                .collect();
            assert!(found.insert(name.to_owned(), (family.clone(), types, body.to_owned())).is_none(), "{name} twice");
        }
    }
    found
}

#[test]
fn ptx_has_the_entry_points_of_the_table() {
    for arch in ARCHS {
        let found = entry_points(arch);
        let names: Vec<_> = found.keys().cloned().collect();
        let mut expected: Vec<_> = abi::entries().map(|entry| entry.name.to_owned()).collect();
        expected.sort();
        assert_eq!(names, expected, "{arch}");
        for EntryPoint { name, family, bounds, params } in abi::entries() {
            let (found_family, types, body) = &found[*name];
            assert_eq!(found_family, family, "{arch} {name}");
            let pragma = if bounds.unroll { "" } else { ".pragma \"nounroll\";\n" };
            let directives =
                format!("\n.maxntid {}, 1, 1\n.minnctapersm {}\n{pragma}{{", bounds.threads, bounds.blocks);
            assert!(body.starts_with(&directives), "{arch} {name} is not assembled for {bounds:?}");
            assert_eq!(types, &params.iter().map(|param| param.ptx()).collect::<Vec<_>>(), "{arch} {name}");
        }
    }
}

#[test]
fn manifest_lists_the_entry_points() {
    let text = std::fs::read_to_string(folder().join("manifest.json")).expect("the manifest is there");
    let manifest: serde_json::Value = serde_json::from_str(&text).expect("the manifest is JSON");
    let mut listed: Vec<_> = manifest["entries"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|entry| entry["name"].as_str().expect("a name"))
        .collect();
    listed.sort_unstable();
    let mut expected: Vec<_> = abi::entries().map(|entry| entry.name).collect();
    expected.sort_unstable();
    assert_eq!(listed, expected);
}

/// The dtypes in the name of an entry point, in order.
fn dtypes(name: &str) -> Vec<DType> {
    name.split('_').filter_map(|part| part.parse().ok()).collect()
}

#[test]
fn ptx_of_streaming_kernels_moves_16_bytes_at_once() {
    const LOAD: &str = "ld.global.v4.b32";
    const STORE: &str = "st.global.v4.b32";
    for arch in ARCHS {
        for (name, (family, _, body)) in entry_points(arch) {
            let dtypes = dtypes(&name);
            let (reads, writes) = match family.as_str() {
                "zero" | "zero_segments" => (false, true),
                // The sum is read and written; the wider operand is accessed in 16 bytes at once, and the other in as many elements.
                "accumulate" | "accumulate_segments" => (true, dtypes[0].size_bytes() >= dtypes[1].size_bytes()),
                // Four elements at a time leave registers for more threads.
                "combine" if dtypes.iter().all(|dtype| dtype.size_bytes() == 2) => {
                    assert!(body.contains("ld.global.v2.b32"), "{arch} {name} has no 8-byte load");
                    continue;
                }
                "cast" | "cast_segments" | "scale" | "combine" => {
                    let (from, to) = (dtypes[0].size_bytes(), dtypes[1].size_bytes());
                    (from >= to, to >= from)
                }
                // Sums over eight vectors pass the data through shared memory.
                "gram" if arch == "sm_80" && name.ends_with("_p8") => {
                    assert!(
                        body.contains("cp.async.cg.shared.global"),
                        "{arch} {name} copies nothing to shared memory"
                    );
                    assert!(body.contains("ld.shared.v4.b32"), "{arch} {name} reads no 16 bytes of shared memory");
                    continue;
                }
                // With eight vectors of 16-bit elements, 8 bytes of each vector fill the registers.
                "gram_cross" if dtypes[0].size_bytes() == 2 => {
                    assert!(body.contains("ld.global.v2.b32"), "{arch} {name} has no 8-byte load");
                    continue;
                }
                "dots" | "gram" | "gram_cross" | "norms" | "squared_norms" | "all_finite" | "sweep" => (true, false),
                "sgd" | "sgd_deltas" | "adamw" | "adamw_deltas" => (true, true),
                // Packets are written and read at once, with an order that holds on every GPU; elements move 16 bytes at once too.
                "one_shot" | "packet_adasum" | "two_shot" => {
                    for packet in ["ld.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v2.b64"] {
                        assert!(body.contains(packet), "{arch} {name} has no {packet}");
                    }
                    for at_once in [LOAD, STORE] {
                        assert!(body.contains(at_once), "{arch} {name} has no {at_once}");
                    }
                    assert!(!body.contains("fence"), "{arch} {name} has a fence, which packets do without");
                    // The counters are written at the end: a compiler that takes them for constant would remove that.
                    let (_, end) = body.rsplit_once("bar.sync").expect("a barrier at the end");
                    assert!(end.matches("st.global.b32").count() >= 2, "{arch} {name} does not count its calls");
                    continue;
                }
                // The sending part moves 16 bytes in five unrolled places; the part that multiplies and writes does so too, once for each
                // vector of its width.
                "peer_adasum" | "peer_reduce" => {
                    let width: usize = name[name.len() - 1..].parse().expect("a width");
                    let is_short = family != "peer_reduce" && width == 8 && dtypes[0].size_bytes() == 2;
                    let (load, store) = if is_short { ("ld.global.v2.b32", "st.global.v2.b32") } else { (LOAD, STORE) };
                    let sent = if is_short { 0 } else { 5 };
                    for what in [load, store] {
                        let found = body.matches(what).count();
                        assert!(found >= sent + width, "{arch} {name} has {found} of {what}");
                    }
                    continue;
                }
                // One thread handles one element or one layer, so these kernels are never the bottleneck.
                "advance_step" | "tree_dots" | "tree_combine" | "coefficients" | "combine_pair" | "fold_sums"
                | "peer_barrier" | "empty" => {
                    continue;
                }
                other => panic!("{arch}: family {other} is not known to this test"),
            };
            assert!(!reads || body.contains(LOAD), "{arch} {name} has no {LOAD}");
            assert!(!writes || body.contains(STORE), "{arch} {name} has no {STORE}");
        }
    }
}

#[test]
fn ptx_rounds_as_written() {
    for arch in ARCHS {
        for (name, (_, _, body)) in entry_points(arch) {
            for line in body.lines().map(str::trim) {
                let what = format!("{arch} {name}: {line}");
                // Without `.rn`, the assembler may fuse a multiplication into an addition.
                for operation in ["add", "sub", "mul"] {
                    for kind in [".f32", ".f64"] {
                        assert!(!line.starts_with(&format!("{operation}{kind}")), "{what} may be fused");
                    }
                }
                assert!(!line.contains(".ftz"), "{what} flushes subnormals");
                assert!(!line.contains(".approx"), "{what} approximates");
                assert!(!line.starts_with("call"), "{what} calls");
                assert!(!line.starts_with("trap"), "{what}: a panic was compiled in");
                assert!(!line.starts_with(".local"), "{what} needs local memory");
            }
        }
    }
}
