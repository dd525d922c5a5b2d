//! A program built with the feature `cuda`, started on any machine: without a driver it must start and name the missing part, and with a
//! driver it must find it. The GPU tier tests the kernels.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::{Command, Output};

use gradsync_tests::programs::built;

fn program() -> PathBuf {
    built("gradsync-cli", "--bin", "gradsync", &["--features", "cuda"])
}

fn run(program: &PathBuf, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().expect("the program starts without a CUDA driver")
}

#[test]
fn info_of_a_cuda_program_names_what_is_missing() {
    let program = program();
    let info = run(&program, &["info", "--json"]);
    assert!(info.status.success(), "{}", String::from_utf8_lossy(&info.stderr));
    let found: serde_json::Value = serde_json::from_slice(&info.stdout).expect("info prints JSON");
    let features = found["features"].as_array().expect("a list");
    assert!(features.iter().any(|feature| feature == "cuda"), "{found}");
    let has_driver = found["driver"]["found"].as_bool().expect("a flag");
    if !has_driver {
        let tried = found["driver"]["tried"].to_string();
        assert!(tried.contains("libcuda.so.1"), "{tried}");
        assert!(found["gpus_missing"].as_str().expect("a reason").contains("code 100"), "{found}");
    }

    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let bytes: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensor = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2], &bytes).expect("a tensor");
    safetensors::serialize_to_file([("x", tensor)], None, &input).expect("a writable folder");
    let arguments = ["reduce", "--op", "sum", "--backend", "cuda", "--output"].map(str::to_owned);
    let paths = [&output, &input, &input].map(|path| path.to_string_lossy().into_owned());
    let reduced = Command::new(&program).args(arguments).args(paths).output().expect("the program starts");
    let message = String::from_utf8_lossy(&reduced.stderr);
    if has_driver {
        assert!(reduced.status.success(), "{message}");
    } else {
        assert_eq!(reduced.status.code(), Some(1), "{message}");
        assert!(message.contains("--backend cuda") && message.contains("code 100"), "{message}");
        assert!(!output.exists(), "a failed reduction left a file");
    }
}
