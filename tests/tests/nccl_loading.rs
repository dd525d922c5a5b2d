//! Finding and loading NCCL, with libraries made here that have its functions' names: no GPU and no NCCL is needed.
//!
//! Each case is a process of its own, running this program again, as the environment determines the library to load.

use std::fs;
use std::path::{Path, PathBuf};

use gradsync::internal::sys::nccl::{DECLARATIONS, Nccl, NcclError, ResultCode, VARIABLE};
use gradsync_tests::programs::{printed_by, shared_library};
use serde_json::{Value, json};

const SEARCH_PATH: &str = "LD_LIBRARY_PATH";
/// The functions that a library may lack.
const OPTIONAL: [&str; 3] = ["ncclCommRegister", "ncclCommDeregister", "ncclCommShrink"];
/// A result code that no version of NCCL defines.
const UNKNOWN_CODE: ResultCode = ResultCode(99);

/// Opens the library that the environment of this process names, and prints the outcome. The other tests run this one in child processes.
#[test]
fn report() {
    let found = match Nccl::open() {
        Ok(nccl) => json!({
            "library": nccl.library(),
            "version": nccl.version().to_string(),
            "missing": {
                "ncclCommRegister": reason(nccl.ncclCommRegister()),
                "ncclCommDeregister": reason(nccl.ncclCommDeregister()),
                "ncclCommShrink": reason(nccl.ncclCommShrink()),
            },
            // SAFETY: NCCL refuses a null pointer by a result code.
            "refusal": unsafe { (nccl.functions.ncclGetVersion)(std::ptr::null_mut()) }.0,
            "text": nccl.error_string(UNKNOWN_CODE),
            // SAFETY: NCCL accepts a null pointer in place of a communicator.
            "last": unsafe { nccl.last_error(std::ptr::null_mut()) },
        }),
        Err(error) => json!({ "kind": kind(&error), "error": error.to_string() }),
    };
    println!("\n{found}");

    let kept = Nccl::get().map(Nccl::version);
    assert_eq!(kept, Nccl::open().map(|nccl| nccl.version()));
    assert_eq!(kept, Nccl::get().map(Nccl::version));
}

fn reason<T>(function: Result<T, NcclError>) -> Option<String> {
    function.err().map(|error| error.to_string())
}

fn kind(error: &NcclError) -> &'static str {
    match error {
        NcclError::NotFound { .. } => "not found",
        NcclError::MissingSymbol { .. } => "missing symbol",
        NcclError::TooOld { .. } => "too old",
        _ => "another",
    }
}

/// The output of [`report`] in a process with this library named and this folder to search, each if given.
fn reported(named: Option<&Path>, search: Option<&Path>) -> Value {
    let printed = printed_by("report", |command| {
        command.env_remove(VARIABLE).env_remove(SEARCH_PATH);
        command.envs(named.map(|path| (VARIABLE, path))).envs(search.map(|path| (SEARCH_PATH, path)));
    });
    let line = printed.lines().find(|line| line.starts_with('{'));
    let line = line.unwrap_or_else(|| panic!("no report in {printed}"));
    serde_json::from_str(line).expect("the report is JSON")
}

/// Asserts that the report is an error of this kind, and returns its text.
#[track_caller]
fn error<'a>(report: &'a Value, kind: &str) -> &'a str {
    assert_eq!(report["kind"], kind, "{report}");
    report["error"].as_str().expect("a text")
}

/// Compiles a library that claims to be NCCL of this version, with the functions that `has` selects.
fn library(folder: &Path, name: &str, version: &str, has: impl Fn(&str) -> bool) -> PathBuf {
    let unknown = UNKNOWN_CODE.0;
    let mut source = String::new();
    for function in DECLARATIONS.iter().map(|declaration| declaration.name).filter(|function| has(function)) {
        source += &match function {
            "ncclGetVersion" => {
                format!("int {function}(int *to) {{ if (!to) return {unknown}; *to = {version}; return 0; }}\n")
            }
            "ncclGetErrorString" => {
                format!("const char *{function}(int code) {{ return code == {unknown} ? \"news \" : \"\"; }}\n")
            }
            "ncclGetLastError" => format!("const char *{function}(void *comm) {{ return comm; }}\n"),
            // The function is never called here.
            _ => format!("int {function}(void) {{ return 0; }}\n"),
        };
    }
    let (path, c) = (folder.join(name), folder.join(name).with_extension("c"));
    fs::write(&c, source).expect("a writable folder");
    shared_library(&path, &c, &[]);
    path
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

#[test]
fn open_lists_every_name_where_there_is_no_library() {
    let report = reported(None, None);
    if report["kind"] == "not found" {
        let text = error(&report, "not found");
        assert!(text.starts_with("NCCL was not found; tried libnccl.so.2 ("), "{text}");
        assert!(text.contains("), libnccl.so (") && text.contains("No such file"), "{text}");
        assert!(text.ends_with("; the variable GRADSYNC_LIBNCCL names another"), "{text}");
    } else {
        // This machine has a library: the report names the file that was opened, or the file that was refused.
        assert!(report.to_string().contains("libnccl.so"), "{report}");
    }
}

#[test]
fn open_lists_files_that_are_no_libraries() {
    let folder = folder();
    for name in ["libnccl.so.2", "libnccl.so"] {
        fs::write(folder.path().join(name), "not a library").expect("a writable folder");
    }
    // The folder is searched before the system's folders, whatever they hold; the loader's reasons name the files in it.
    let report = reported(None, Some(folder.path()));
    let text = error(&report, "not found");
    let (first, second) = text.split_once("), libnccl.so (").expect("both names");
    assert!(first.starts_with("NCCL was not found; tried libnccl.so.2 ("), "{text}");
    let path = folder.path().display().to_string();
    assert!([first, second].iter().all(|part| part.contains(&path)), "{text}");
}

#[test]
fn open_finds_the_versioned_name_first() {
    let folder = folder();
    library(folder.path(), "libnccl.so.2", "22809", |_| true);
    library(folder.path(), "libnccl.so", "22707", |_| true);
    let report = reported(None, Some(folder.path()));
    assert_eq!((&report["library"], &report["version"]), (&json!("libnccl.so.2"), &json!("2.28.9")));
    // An empty variable counts as unset.
    assert_eq!(reported(Some("".as_ref()), Some(folder.path())), report);
}

#[test]
fn open_tries_the_named_library_alone() {
    let folder = folder();
    library(folder.path(), "libnccl.so.2", "22809", |_| true);
    let named = folder.path().join("elsewhere.so");
    let shown = named.display();

    let report = reported(Some(&named), Some(folder.path()));
    let text = error(&report, "not found");
    assert!(text.starts_with(&format!("NCCL was not found; tried {shown} (")), "{text}");
    assert!(text.contains("No such file") && !text.contains("libnccl.so"), "{text}");

    fs::write(&named, "not a library").expect("a writable folder");
    let report = reported(Some(&named), Some(folder.path()));
    let text = error(&report, "not found");
    assert!(text.starts_with(&format!("NCCL was not found; tried {shown} (")), "{text}");
    assert!(!text.contains("No such file") && !text.contains("libnccl.so"), "{text}");
}

#[test]
fn open_calls_an_old_library_old_whatever_it_lacks() {
    let folder = folder();
    for (version, shown) in [("21701", "2.17.1"), ("2804", "2.8.4")] {
        let path = library(folder.path(), "old.so", version, |name| name == "ncclGetVersion");
        let report = reported(Some(&path), None);
        let expected = format!("NCCL: {} is version {shown}, and 2.18.1 or later is needed", path.display());
        assert_eq!(error(&report, "too old"), expected);
    }
}

#[test]
fn open_names_a_missing_function() {
    let folder = folder();
    for lacks in ["ncclAllReduce", "ncclGetVersion", "ncclRecv"] {
        let path = library(folder.path(), "incomplete.so", "22809", |name| name != lacks);
        let report = reported(Some(&path), None);
        assert_eq!(error(&report, "missing symbol"), format!("NCCL: {} has no function {lacks}", path.display()));
    }
}

#[test]
fn open_takes_a_library_without_later_functions() {
    let folder = folder();
    let path = library(folder.path(), "lowest.so", "21801", |name| !OPTIONAL.contains(&name));
    let report = reported(Some(&path), None);
    assert_eq!((&report["library"], &report["version"]), (&json!(path), &json!("2.18.1")));
    let needs = |name: &str, version: &str| format!("NCCL: {name} needs version {version}, and this is 2.18.1");
    let expected = json!({
        "ncclCommRegister": needs("ncclCommRegister", "2.19.1"),
        "ncclCommDeregister": needs("ncclCommDeregister", "2.19.1"),
        "ncclCommShrink": needs("ncclCommShrink", "2.27.1"),
    });
    assert_eq!(report["missing"], expected);
}

#[test]
fn open_finds_later_functions() {
    let folder = folder();
    let path = library(folder.path(), "later.so", "22703", |name| name != "ncclCommRegister");
    let missing = &reported(Some(&path), None)["missing"];
    assert_eq!((&missing["ncclCommShrink"], &missing["ncclCommDeregister"]), (&Value::Null, &Value::Null));
    assert!(missing["ncclCommRegister"].is_string(), "each is looked up on its own: {missing}");
}

#[test]
fn nccl_passes_result_codes_of_later_versions_on() {
    let folder = folder();
    let path = library(folder.path(), "news.so", "30000", |_| true);
    let report = reported(Some(&path), None);
    assert_eq!(report["refusal"], UNKNOWN_CODE.0);
    assert_eq!(report["text"], "news", "the library's words, without the space behind them");
    assert_eq!(report["last"], "", "a null pointer is no text");
    assert_eq!(report["version"], "3.0.0");
}
