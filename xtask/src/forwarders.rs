//! Checks that `host/libcuda.rs` forwards every function that `cust_raw` declares; otherwise programs that call other functions than
//! gradsync would not link.

use std::{collections::BTreeSet, fs, path::PathBuf};

use serde::Deserialize;

use crate::process::{Cmd, root};

/// The largest number of words of a forwarded call. Two words of a forwarder are reserved for the pointer and the flags beside an IPC
/// handle of eight; see `host/libcuda.rs`.
const LONGEST: usize = 14;
/// These two are written out, because they return a text even without a driver.
const WITH_TEXT: [&str; 2] = ["cuGetErrorName", "cuGetErrorString"];

#[test]
fn forwarders_cover_every_function_that_cust_declares() {
    let source = fs::read_to_string(root().join("host/libcuda.rs")).unwrap();
    let (spelled_out, list) = source.rsplit_once("forward! {\n").expect("a list of forwarders at the end");
    let listed: BTreeSet<_> = list.trim_end_matches("}\n").split_whitespace().collect();
    let text = fs::read_to_string(cust_raw_source()).unwrap();
    let declared = declarations(&text);
    assert!(declared.len() > 300, "found {} functions of the driver, which cannot be all", declared.len());

    let plain: BTreeSet<_> = declared.iter().filter(|function| !function.is_special()).map(|f| f.name).collect();
    assert_eq!(listed, plain);
    for function in declared.iter().filter(|function| function.is_special()) {
        let start = format!("forward! {{ {}(", function.name);
        let found = spelled_out.lines().find_map(|line| line.strip_prefix(&start)?.split_once(')'));
        let found = found.map(|(parameters, _)| types(parameters).map(is_float).collect::<Vec<_>>());
        let expected: Vec<_> = function.types.iter().copied().map(is_float).collect();
        assert_eq!(found, Some(expected), "{}: which arguments are floats", function.name);
    }
}

/// A driver function, as bindgen declares it in Rust.
struct Function<'a> {
    name: &'a str,
    types: Vec<&'a str>,
}

impl Function<'_> {
    fn is_special(&self) -> bool {
        self.types.iter().copied().any(is_float)
    }
}

fn is_float(ty: &str) -> bool {
    ["f32", "f64"].contains(&ty)
}

fn types(parameters: &str) -> impl Iterator<Item = &str> {
    parameters.split(',').filter_map(|parameter| Some(parameter.split_once(':')?.1.trim()))
}

/// The declarations of all functions except those in [`WITH_TEXT`], which do not return a code if there is no driver.
fn declarations(text: &str) -> Vec<Function<'_>> {
    // A `link_name` attribute would give a declaration a symbol other than its name.
    assert!(!text.contains("link_name"), "cust_raw renames functions, which forwarders must follow");
    let mut found = Vec::new();
    for declaration in text.split("pub fn ").skip(1).filter(|declaration| declaration.starts_with("cu")) {
        let (name, rest) = declaration.split_once('(').expect("a list of parameters");
        let (signature, _) = rest.split_once(';').expect("an end");
        let (parameters, result) = signature.rsplit_once(')').expect("an end of the list");
        assert_eq!(result.trim(), "-> CUresult", "forwarders return codes, and {name} does not");
        let types: Vec<_> = types(parameters).collect();
        assert!(types.len() <= LONGEST, "{name} takes {} arguments; raise the number of words", types.len());
        if !WITH_TEXT.contains(&name) {
            found.push(Function { name, types });
        }
    }
    found
}

/// The file in which `cust_raw` declares the driver's functions.
fn cust_raw_source() -> PathBuf {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        manifest_path: PathBuf,
    }
    let version = Cmd::cargo("-vV").quiet().read().unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("`cargo -vV` prints the host");
    // Without the filter, cargo would download the dependencies of every other platform.
    let text = Cmd::cargo("metadata")
        .args(["--format-version", "1", "--all-features", "--filter-platform", host])
        .quiet()
        .read()
        .unwrap();
    let metadata: Metadata = serde_json::from_str(&text).unwrap();
    let package = metadata.packages.into_iter().find(|package| package.name == "cust_raw");
    package.expect("a dependency called cust_raw").manifest_path.with_file_name("src").join("cuda.rs")
}
