//! Python's safetensors reads the program's output.

use std::process::Command;

use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use crate::files::{Ranks, load};
use crate::reduce::results::inputs;

/// Prints shapes, dtypes and, where numpy has the dtype, the bytes; for bf16, only shape and dtype are compared.
const SCRIPT: &str = r#"
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], framework="np") as file:
    for name in sorted(file.keys()):
        part = file.get_slice(name)
        dtype = part.get_dtype()
        data = "" if dtype == "BF16" else file.get_tensor(name).tobytes().hex()
        print("%s %s %s %s" % (name, dtype, "x".join(map(str, part.get_shape())), data))
"#;

#[test]
fn python_reads_the_same_tensors() {
    let path = std::env::var_os("GRADSYNC_PYTHONPATH");
    let path = path.expect("GRADSYNC_PYTHONPATH names a folder with Python's safetensors and numpy");
    let ranks = Ranks::new(&inputs(Kind::Random, &Format::ALL, 3));
    ranks.reduce(&["--op", "adasum"]).succeeded("adasum");
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", path).args(["-c", SCRIPT]).arg(ranks.output());
    let output = python.output().expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected: String = load(&ranks.output())
        .values()
        .map(|tensor| {
            let format = tensor.data.format();
            let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
            let bytes = if format == Format::BF16 { Vec::new() } else { tensor.data.to_bytes() };
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{} {} {} {hex}\n", tensor.name, format.name().to_uppercase(), shape.join("x"))
        })
        .collect();
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}
