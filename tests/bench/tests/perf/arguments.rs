//! Invalid arguments, and features that this program or this machine lacks, end with a reason and an exit code, not with a panic.

use gradsync_tests::programs::Finished;

use crate::run::perf;

/// The command-line parser refuses the arguments.
#[track_caller]
fn misused(arguments: &[&str], words: &[&str]) {
    let finished = perf(arguments);
    assert_eq!(finished.code, Some(2), "{arguments:?}: {}", finished.stderr);
    finished.refused(&arguments.join(" "), words);
}

/// The command refuses the arguments.
#[track_caller]
fn failed(arguments: &[&str], words: &[&str]) {
    let finished = perf(arguments);
    assert_eq!(finished.code, Some(1), "{arguments:?}: {}", finished.stderr);
    finished.refused(&arguments.join(" "), words);
}

#[test]
fn deadline_ends_a_call_without_progress_by_its_name() {
    let arguments = ["all_reduce", "--transport", "local", "-g", "2", "-b", "64M", "-n", "2", "--deadline", "0.001"];
    failed(&arguments, &["all_reduce (sum) of 16777216 × f32 on 2 ranks", "no progress for 1ms", "--deadline"]);
}

#[test]
fn words_that_are_no_arguments() {
    misused(&[], &["OPERATION"]);
    misused(&["all_reduced"], &["all_reduced", "all_reduce", "adasum"]);
    misused(&["zero", "-b", "10X"], &["10X", "64M"]);
    misused(&["zero", "-d", "int8"], &["int8", "bf16"]);
    misused(&["cast", "-d", "f32:f8"], &["f8"]);
    misused(&["zero", "-n", "0"], &["--iters", "0"]);
    misused(&["zero", "-c", "2"], &["--check", "2"]);
    failed(&["zero", "--deadline", "0"], &["--deadline 0"]);
    misused(&["all_reduce", "-g", "0"], &["--ranks", "0"]);
    misused(&["all_reduce", "-o", "product"], &["product", "sum"]);
    misused(&["all_reduce", "--transport", "pigeon"], &["pigeon", "local"]);
    misused(&["zero", "-f", "2", "-i", "8"], &["--stepfactor", "--stepbytes"]);
    misused(&["zero", "--tensors", "resnet50"], &["--tensors"]);
    misused(&["--tensors", "alexnet"], &["alexnet", "resnet50", "bert-large"]);
    misused(&["zero", "--against-empty", "--no-baseline"], &["--against-empty", "--no-baseline"]);
    misused(&["zero", "-G", "2000"], &["--cudagraph", "2000"]);
    misused(&["adasum", "--layers", "0"], &["--layers", "`0`", "bert-large"]);
    misused(&["adasum", "--against-sum", "--no-baseline"], &["--against-sum", "--no-baseline"]);
}

/// Options that would have no effect are refused, and files that cannot be written.
#[test]
fn arguments_that_do_not_go_together() {
    failed(&["all_reduce", "--transport", "local", "--shared-buffers"], &["--shared-buffers", "mpi or process"]);
    misused(&["--tensors", "resnet50", "-b", "64K"], &["--tensors", "--minbytes"]);
    failed(&["zero", "-b", "1K", "--json", "/proc/x.json"], &["/proc/x.json"]);
}

#[test]
fn numbers_that_do_not_fit() {
    failed(&["zero", "-b", "2K", "-e", "1K"], &["-e 1024", "-b 2048"]);
    failed(&["zero", "-b", "1K", "-e", "2K", "-f", "1"], &["-f 1"]);
    failed(&["zero", "-b", "1K", "-e", "2K", "-f", "nan"], &["-f NaN"]);
    failed(&["zero", "-b", "1K", "-e", "2K", "-i", "0"], &["-i 0"]);
    failed(&["zero", "--limit", "-1"], &["--limit -1"]);
    failed(&["zero", "--limit", "0"], &["--limit 0"]);
    failed(&["all_reduce", "-d", "f32:bf16"], &["f32:bf16", "all_reduce", "cast, scale and accumulate"]);
    // The size is less than one element per rank.
    failed(
        &["all_gather", "--transport", "local", "-b", "8", "-g", "4"],
        &["nothing to measure", "8 bytes", "4 ranks"],
    );
    failed(
        &["ordered_all_reduce", "--transport", "local", "-b", "1K"],
        &["nccl carries ordered_all_reduce, not local"],
    );
    failed(
        &["all_reduce", "--backend", "cpu", "--transport", "mpi-device"],
        &["--transport mpi-device", "--backend cuda"],
    );
    failed(&["send_recv", "--transport", "local", "-b", "1K", "-g", "1"], &["send_recv", "two ranks"]);
    failed(
        &["adasum", "--transport", "local", "--algorithm", "tree", "-g", "3", "-b", "1K"],
        &["power of two", "3 ranks"],
    );
    let in_nodes = ["adasum", "--transport", "local", "-b", "1K", "--algorithm"];
    failed(&[&in_nodes[..], &["sum+tree", "-g", "6", "--ranks-per-node", "2"]].concat(), &["sum+tree", "not 3"]);
    failed(&[&in_nodes[..], &["gram+gram", "-g", "6"]].concat(), &["6 ranks", "nodes of 8", "--ranks-per-node"]);
    failed(&[&in_nodes[..], &["gram", "--ranks-per-node", "2"]].concat(), &["--ranks-per-node 2", "gram+gram"]);
    failed(&["zero", "--ranks-per-node", "4"], &["--ranks-per-node 4", "gram+gram"]);
    failed(&["zero", "--algorithm", "gram+gram", "--ranks-per-node", "4"], &["--ranks-per-node 4"]);
    failed(&["all_reduce", "--backend", "cpu", "--transport", "nccl"], &["--transport nccl", "--backend cuda"]);
    failed(&["zero", "--backend", "cpu", "-G", "20", "-b", "1K"], &["-G 20", "GPUs"]);
    failed(&["adasum", "--backend", "cpu", "--against-sum", "-b", "1K"], &["--against-sum", "GPUs"]);
    failed(&["zero", "--backend", "cpu", "--against-empty", "-b", "1K"], &["--against-empty", "GPUs"]);
}

#[test]
fn a_peer_that_is_not_here() {
    let mut command = std::process::Command::new(crate::run::BINARY);
    let finished = Finished::of(command.args(["compare", "gloo", "--quick"]).env("PYTHON", "/bin/false"));
    assert_eq!(finished.code, Some(1), "{}", finished.stderr);
    finished.refused("gloo", &["\"/bin/false\" has no PyTorch", "PYTHON"]);
}

/// This test's program is built without the required features, or its machine has no GPU.
#[test]
fn what_is_not_here() {
    let finished = perf(&["zero", "--backend", "cuda", "-b", "1K"]);
    if finished.code != Some(0) {
        assert_eq!(finished.code, Some(1), "{}", finished.stderr);
        let says_why = ["`cuda`", "no driver: "].iter().any(|words| finished.stderr.contains(words));
        assert!(says_why, "{}", finished.stderr);
    }
    for transport in ["mpi-device", "nccl", "peer"] {
        let finished = perf(&["all_reduce", "--transport", transport, "-b", "1K"]);
        assert_ne!(finished.code, Some(101), "{}", finished.stderr);
        assert!(finished.code == Some(0) || !finished.stderr.is_empty());
    }
}
