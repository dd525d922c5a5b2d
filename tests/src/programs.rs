//! Programs that tests start: the C compiler, for libraries that stand in for others, and the test program itself, for cases that need a
//! process of their own. Never anything of gradsync's.

use std::path::Path;
use std::process::Command;

/// Makes a shared library of a C source; `arguments` are the compiler's, on top of its strictness.
///
/// # Panics
/// If there is no C compiler, or it has anything to say.
pub fn shared_library(library: &Path, source: &Path, arguments: &[String]) {
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"])
        .args(arguments)
        .arg("-o")
        .args([library, source])
        .output()
        .unwrap_or_else(|error| panic!("`cc`, a C compiler, is needed: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// What a test of this program prints in a process of its own, whose environment `prepare` sets.
///
/// # Panics
/// If the test fails there.
pub fn printed_by(test: &str, prepare: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args([test, "--exact", "--nocapture"]);
    prepare(&mut command);
    let output = command.output().expect("this program starts");
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{errors}");
    printed.into_owned()
}
