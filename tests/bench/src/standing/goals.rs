//! The project's performance goals, and whether the figures of `perf` runs meet them.
//!
//! Figures without a goal are shown with their baseline only.

use serde_json::Value;

/// The ratio to the speed of the baseline on a GPU: the copy or the read-only sweep.
const MEMORY_RATIO: f64 = 0.97;
/// The ratio to the speed of the copy, for many tensors in one launch.
const TENSORS_RATIO: f64 = 0.9;
/// The ratio to the speed of the parallel copy, on the CPU.
const CPU_RATIO: f64 = 0.9;
/// The ratio to the speed of NCCL's sum: Adasum may take 1.05 times as long.
const PEER_RATIO: f64 = 1.0 / 1.05;
/// As [`PEER_RATIO`], for the tree.
const TREE_RATIO: f64 = 1.0 / 1.6;
/// As [`PEER_RATIO`], for Adasum over NCCL.
const NCCL_RATIO: f64 = 1.0 / 1.2;
/// The ratio to the speed of NCCL, for dtypes whose sums NCCL does not keep in f32.
const MIXED_RATIO: f64 = 1.0 / 1.1;
/// The ratio to the speed of a copy that moves as many bytes as ranks on one machine's memory must.
const LOCAL_RATIO: f64 = 0.6;
/// From this size on, memory bandwidth determines the time.
const LARGE_BYTES: u64 = 64 << 20;
/// Sizes of small vectors, with the goals in µs for Adasum by peer access.
const LATENCIES_US: [(u64, f64); 2] = [(64 << 10, 25.0), (1 << 20, 45.0)];
const LAUNCH_BYTES: u64 = 1 << 20;
const ABOVE_US: f64 = 1.0;
const LOAD_MS: f64 = 150.0;

/// A goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    Streams,
    Reads,
    Tensors,
    Peers,
    Latency,
    Tree,
    Nccl,
    Mixed,
    Cpu,
    Local,
    Launch,
    GraphLaunch,
    FirstUse,
    Right,
}

impl Goal {
    pub(super) const ALL: [Goal; 14] = [
        Goal::Streams,
        Goal::Reads,
        Goal::Tensors,
        Goal::Peers,
        Goal::Latency,
        Goal::Tree,
        Goal::Nccl,
        Goal::Mixed,
        Goal::Cpu,
        Goal::Local,
        Goal::Launch,
        Goal::GraphLaunch,
        Goal::FirstUse,
        Goal::Right,
    ];

    pub(super) fn title(self) -> String {
        let large = format!("from {} MiB on", LARGE_BYTES >> 20);
        match self {
            Goal::Streams => {
                format!("zero, cast, accumulate and combine at {MEMORY_RATIO} of the driver's copy or more, {large}")
            }
            Goal::Reads => {
                format!("dots and gram of 2, 4 and 8 vectors at {MEMORY_RATIO} of a read-only sweep or more, {large}")
            }
            Goal::Tensors => {
                format!("many tensors of their own on a GPU, in one launch, at {TENSORS_RATIO} of the copy or more")
            }
            Goal::Peers => {
                format!("Adasum by peer access in CUDA graphs at {PEER_RATIO:.2} of NCCL's sum or more, {large}")
            }
            Goal::Latency => {
                let most = LATENCIES_US.map(|(bytes, most)| format!("{most} µs at {} KiB", bytes >> 10)).join(", ");
                format!("the same of small vectors in at most {most}")
            }
            Goal::Tree => {
                format!(
                    "Adasum along the tree by peer access in CUDA graphs at {TREE_RATIO:.2} of NCCL's sum or more, {large}"
                )
            }
            Goal::Nccl => format!("Adasum over NCCL in CUDA graphs at {NCCL_RATIO:.2} of NCCL's sum or more, {large}"),
            Goal::Mixed => {
                format!(
                    "sums of 16-bit gradients in wider arithmetic at {MIXED_RATIO:.2} of NCCL's own or more, {large}"
                )
            }
            Goal::Cpu => {
                format!("cast and accumulate on the CPU at {CPU_RATIO} of a copy by all threads or more, {large}")
            }
            Goal::Local => {
                format!("Adasum of 8 threads at {LOCAL_RATIO} of a copy of what memory must move or more, {large}")
            }
            Goal::Launch => {
                format!("a launch on 1 MiB at most {ABOVE_US} µs above an empty kernel's time and the bytes'")
            }
            Goal::GraphLaunch => "the same in a CUDA graph".to_owned(),
            Goal::FirstUse => format!("first use of a kernel, its loading included, under {LOAD_MS} ms"),
            Goal::Right => "no wrong element".to_owned(),
        }
    }
}

/// A measured figure that has a goal.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) goal: Goal,
    pub(super) what: String,
    pub(super) shown: String,
    /// The distance to the goal, above zero if the goal is missed; it ranks the figures of a goal.
    pub(super) missed_by: f64,
}

impl Figure {
    pub(super) fn is_met(&self) -> bool {
        self.missed_by <= 0.0
    }
}

/// The figure of a row of `measurements`; `part` is the part of the standing set.
pub(super) fn of_row(part: &str, row: &Value, graph_calls: u64) -> Option<Figure> {
    let bytes = row["size_bytes"].as_u64()?;
    let types = (text(row, "dtype"), text(row, "from_dtype"));
    let is_16_bits = ["f16", "bf16"].contains(&types.0);
    let types = if types.0 == types.1 { types.0.to_owned() } else { format!("{}:{}", types.0, types.1) };
    let what = format!("{} {types} of {}, {:.3} MiB", text(row, "operation"), row["ranks"], mebibytes(row));
    let over = text(row, "transport");

    let is_by_peers = (text(row, "operation"), over, text(row, "redop")) == ("adasum", "peer", "gram");
    if let (true, 1.., Some(&(_, most))) =
        (is_by_peers, graph_calls, LATENCIES_US.iter().find(|(size, _)| *size == bytes))
    {
        let time = row["in_place"]["time_us"].as_f64()?;
        return Some(Figure { goal: Goal::Latency, what, shown: format!("{time:.1} µs"), missed_by: time - most });
    }

    let ratio = row["baseline"]["ratio"].as_f64()?;
    let is_large = bytes >= LARGE_BYTES;
    let is_many = part.ends_with("resnet50") || part.ends_with("bert-large");
    let (goal, wanted) = match (text(row, "backend"), text(row, "operation"), graph_calls) {
        ("cuda", "zero" | "cast" | "accumulate", 0) if is_many => (Goal::Tensors, TENSORS_RATIO),
        ("cuda", "zero" | "cast" | "accumulate" | "combine", 0) if is_large => (Goal::Streams, MEMORY_RATIO),
        ("cuda", "dots", 0) if is_large => (Goal::Reads, MEMORY_RATIO),
        ("cuda", "gram", 0) if is_large && [2, 4, 8].iter().any(|n| row["ranks"] == *n) => (Goal::Reads, MEMORY_RATIO),
        ("cuda", "adasum", 1..) if is_large => match (over, text(row, "redop")) {
            ("peer", "tree") => (Goal::Tree, TREE_RATIO),
            ("peer", _) => (Goal::Peers, PEER_RATIO),
            ("nccl", "gram") => (Goal::Nccl, NCCL_RATIO),
            _ => return None,
        },
        ("cuda", "all_reduce", 0) if is_large && is_16_bits && over == "peer" => (Goal::Mixed, MIXED_RATIO),
        ("cpu", "adasum", 0) if is_large && over == "local" && row["ranks"] == 8 && row["redop"] == "gram" => {
            (Goal::Local, LOCAL_RATIO)
        }
        ("cpu", "cast" | "accumulate", 0) if is_large && !is_many => (Goal::Cpu, CPU_RATIO),
        _ => return None,
    };
    Some(Figure { goal, what, shown: format!("{ratio:.3}"), missed_by: wanted - ratio })
}

/// The figures of a row of `launches`.
pub(super) fn of_launch(row: &Value) -> Vec<Figure> {
    let what = format!(
        "{} {}:{}, {:.3} MiB",
        text(row, "operation"),
        text(row, "dtype"),
        text(row, "from_dtype"),
        mebibytes(row)
    );
    let mut figures = Vec::new();
    for (goal, side) in [(Goal::Launch, "plain"), (Goal::GraphLaunch, "graph")] {
        if let (Some(above), true) = (row[side]["above_us"].as_f64(), row["size_bytes"] == LAUNCH_BYTES) {
            let (what, shown) = (what.clone(), format!("{above:.2} µs"));
            figures.push(Figure { goal, what, shown, missed_by: above - ABOVE_US });
        }
    }
    figures.extend(row["first_call_ms"].as_f64().map(|time| first_use(what, time)));
    figures
}

fn first_use(what: String, time: f64) -> Figure {
    Figure { goal: Goal::FirstUse, what, shown: format!("{time:.1} ms"), missed_by: time - LOAD_MS }
}

/// All figures of a document; `part` is the part of the standing set.
pub(super) fn of_document(part: &str, json: &Value) -> Vec<Figure> {
    let rows = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let mut figures = Vec::new();
    let graph_calls = json["graph_calls"].as_u64().unwrap_or(0);
    figures.extend(rows(&json["measurements"]).iter().filter_map(|row| of_row(part, row, graph_calls)));
    figures.extend(rows(&json["launches"]["rows"]).iter().flat_map(of_launch));
    let first = &json["machine"]["first_use"]["kernel_ms"];
    figures.extend(first.as_f64().map(|time| first_use(format!("the first kernel of {part}"), time)));
    let loads = rows(&json["loads"]);
    let loads = loads.iter().filter_map(|load| Some((text(load, "kernel"), load["load_ms"].as_f64()?)));
    let slowest = loads.max_by(|(_, a), (_, b)| a.total_cmp(b));
    figures.extend(slowest.map(|(kernel, time)| first_use(format!("loading {kernel} in {part}"), time)));
    figures.extend(json["wrong"].as_f64().map(|wrong| Figure {
        goal: Goal::Right,
        what: part.to_owned(),
        shown: format!("{wrong} wrong"),
        missed_by: wrong,
    }));
    figures
}

fn text<'a>(row: &'a Value, field: &str) -> &'a str {
    row[field].as_str().unwrap_or("?")
}

fn mebibytes(row: &Value) -> f64 {
    row["size_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(operation: &str, ranks: usize, size: u64, ratio: f64) -> Value {
        json!({"operation": operation, "backend": "cuda", "ranks": ranks, "dtype": "f32", "from_dtype": "f32",
               "transport": "peer", "size_bytes": size, "baseline": {"ratio": ratio}})
    }

    #[test]
    fn rows_are_held_to_their_goals() {
        let goal = |part: &str, row: Value, graph_calls| {
            of_row(part, &row, graph_calls).map(|figure| (figure.goal, figure.is_met()))
        };
        assert_eq!(goal("cuda-kernels", row("gram", 8, 1 << 30, 0.98), 0), Some((Goal::Reads, true)));
        assert_eq!(goal("cuda-kernels", row("dots", 2, 1 << 26, 0.96), 0), Some((Goal::Reads, false)));
        assert_eq!(goal("cuda-pairs", row("cast", 1, 1 << 30, 0.96), 0), Some((Goal::Streams, false)));
        assert_eq!(goal("cuda-bert-large", row("cast", 1, 1 << 30, 0.96), 0), Some((Goal::Tensors, true)));
        assert_eq!(goal("cuda-resnet50", row("accumulate", 1, 1 << 20, 0.89), 0), Some((Goal::Tensors, false)));
        assert_eq!(goal("peer-graph", row("adasum", 4, 1 << 28, 0.953), 10), Some((Goal::Peers, true)));
        let mut tree = row("adasum", 4, 1 << 28, 0.62);
        tree["redop"] = "tree".into();
        assert_eq!(goal("peer-graph", tree, 10), Some((Goal::Tree, false)));
        let mut on_cpu = row("cast", 1, 1 << 26, 0.89);
        on_cpu["backend"] = "cpu".into();
        assert_eq!(goal("cpu-pairs", on_cpu, 0), Some((Goal::Cpu, false)));
        let over = |transport: &str, dtype: &str, row: Value| {
            let mut row = row;
            (row["transport"], row["dtype"], row["redop"]) = (transport.into(), dtype.into(), "gram".into());
            row
        };
        let small = |bytes: u64, time: f64| {
            let mut row = over("peer", "f32", row("adasum", 4, bytes, 0.5));
            row["in_place"] = json!({"time_us": time});
            row
        };
        assert_eq!(goal("peer-graph", small(64 << 10, 24.9), 10), Some((Goal::Latency, true)));
        assert_eq!(goal("peer-graph", small(1 << 20, 45.1), 10), Some((Goal::Latency, false)));
        let by_nccl = || over("nccl", "f32", row("adasum", 4, 1 << 28, 0.83));
        assert_eq!(goal("nccl-graph", by_nccl(), 10), Some((Goal::Nccl, false)));
        assert_eq!(goal("nccl-adasum", by_nccl(), 0), None);
        let sum = |dtype: &str| over("peer", dtype, row("all_reduce", 4, 1 << 28, 0.92));
        assert_eq!((goal("peer", sum("bf16"), 0), goal("peer", sum("f32"), 0)), (Some((Goal::Mixed, true)), None));
        let on_cpu = |transport: &str, ratio: f64| {
            let mut row = over(transport, "f32", row("adasum", 8, 1 << 26, ratio));
            row["backend"] = "cpu".into();
            row
        };
        assert_eq!(goal("local-adasum", on_cpu("local", 0.59), 0), Some((Goal::Local, false)));
        assert_eq!(goal("mpi", on_cpu("mpi", 0.5), 0), None, "beside a sum, there is none");
        // The size is too small, the vectors are too many, the calls are recorded, or the baseline is another.
        assert_eq!(goal("cuda-kernels", row("gram", 8, 1 << 20, 0.5), 0), None);
        assert_eq!(goal("cuda-wide", row("gram", 16, 1 << 30, 0.5), 0), None);
        assert_eq!(goal("cuda-graph", row("cast", 1, 1 << 30, 0.5), 20), None);
        assert_eq!(goal("peer-adasum", row("adasum", 4, 1 << 28, 90.0), 0), None);
    }

    #[test]
    fn documents_give_their_figures() {
        let launch = json!({"operation": "cast", "dtype": "f32", "from_dtype": "f32", "size_bytes": 1 << 20, "first_call_ms": 200.0,
                            "plain": {"above_us": 0.4}, "graph": {"above_us": 1.4}});
        let document = json!({"graph_calls": 0, "wrong": 0, "measurements": [row("dots", 2, 1 << 30, 0.99)],
                              "launches": {"rows": [launch]}, "machine": {"first_use": {"kernel_ms": 12.0}},
                              "loads": [{"kernel": "zero", "load_ms": 9.0}, {"kernel": "dots_f32", "load_ms": 151.0}]});
        let figures = of_document("cuda", &document);
        let met: Vec<_> = figures.iter().map(|figure| (figure.goal, figure.is_met())).collect();
        let wanted = [
            (Goal::Reads, true),
            (Goal::Launch, true),
            (Goal::GraphLaunch, false),
            (Goal::FirstUse, false),
            (Goal::FirstUse, true),
            (Goal::FirstUse, false),
            (Goal::Right, true),
        ];
        assert_eq!(met, wanted, "{figures:?}");
        let recorded = json!({"graph_calls": 20, "measurements": [row("dots", 2, 1 << 30, 0.5)]});
        assert_eq!(of_document("cuda", &recorded), []);
    }
}
