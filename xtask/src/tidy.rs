//! The house rules, as ordinary tests: `cargo test -p xtask`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::process::{Cmd, root};

/// The folders of the repository that contain all members of the workspace.
const FOLDERS: [&str; 4] = ["host", "device", "xtask", "tests"];
const MEMBERS: [&str; 7] = ["host", "host/cli", "host/candle", "device", "xtask", "tests", "tests/bench"];
/// The largest number of lines of a file; a longer file has more than one subject. The target is about 400.
const LONGEST: usize = 600;

/// The layers of the library, from the lowest up: a module uses only modules before it in the list.
const ROOMS: [&str; 24] = [
    "dtype",   // the names of element types
    "loading", // shared libraries
    "sys",     // CUDA and NCCL as they are in C
    "nvtx",    // ranges for profilers
    "call",    // operations with their arguments, as ranks compare them
    "error",
    "engine",          // the matching of calls, as pure state
    "trace",           // the last calls of each rank, for finding out why a job hangs
    "slice",           // elements of the host's memory
    "plan",            // who holds and sends which elements, as pure functions
    "driver",          // devices, queues and device memory
    "memory",          // the host's memory and a GPU's as one type parameter
    "buffer",          // many tensors in one arena
    "kernels",         // arithmetic on one rank's memory
    "bootstrap",       // ranks find each other
    "comm",            // collectives and their transports
    "call_comparison", // ranks compare their calls
    "groups",          // communicators of parallel groups
    "ops",             // operations of a training loop
    "onnx",            // operators in ONNX Runtime's signatures
    "train",           // whole steps
    "prelude",         // the names of a first program
    "internal",        // hidden names for the other crates of the repository
    "docs",
];

/// Every source file of the repository, with its path relative to the root and its text.
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in FOLDERS {
        visit(&root().join(folder), &mut found);
    }
    assert!(found.len() > FOLDERS.len(), "found {} sources under {}", found.len(), root().display());
    found
}

fn visit(folder: &Path, found: &mut Vec<(String, String)>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    for entry in entries {
        let path: PathBuf = entry.unwrap().path();
        if path.is_dir() {
            // Target folders exist if somebody built inside a member.
            if path.file_name().is_some_and(|name| name != "target") {
                visit(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let path = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
            found.push((path, text));
        }
    }
}

/// Fails with all violations, not only the first.
fn forbid(breaches: &[String], rule: &str) {
    assert!(breaches.is_empty(), "{rule}:\n  {}", breaches.join("\n  "));
}

fn lines_where(breach: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in sources() {
        let lines = text.lines().enumerate().filter(|(_, line)| breach(line));
        found.extend(lines.map(|(index, _)| format!("{path}:{}", index + 1)));
    }
    found
}

#[test]
fn every_file_opens_with_what_it_is_for() {
    let silent: Vec<_> = sources().into_iter().filter(|(_, text)| !text.starts_with("//! ")).collect();
    let silent: Vec<String> = silent.into_iter().map(|(path, _)| path).collect();
    forbid(&silent, "files must open with a `//!` header");
}

#[test]
fn no_trailing_whitespace_and_one_newline_at_the_end() {
    let mut breaches = lines_where(|line| line.ends_with([' ', '\t', '\r']));
    let ends_wrong = |text: &str| !text.ends_with('\n') || text.ends_with("\n\n");
    breaches.extend(sources().into_iter().filter(|(_, text)| ends_wrong(text)).map(|(path, _)| path));
    forbid(&breaches, "no trailing whitespace");
}

#[test]
fn nothing_is_left_open_or_ignored() {
    // The words are split, so that this file does not match itself.
    let words = [("to", "do!("), ("un", "implemented!("), ("#[ig", "nore"), ("FIX", "ME"), ("XX", "X:")];
    let words = words.map(|(head, tail)| format!("{head}{tail}"));
    let breaches = lines_where(|line| words.iter().any(|word| line.contains(word.as_str())));
    forbid(&breaches, "nothing is left open, and no test is ignored");
}

#[test]
fn files_stay_readable() {
    let mut long = Vec::new();
    for (path, text) in sources() {
        let lines = text.lines().count();
        if lines > LONGEST {
            long.push(format!("{path}: {lines} lines"));
        }
    }
    forbid(&long, &format!("files have at most {LONGEST} lines"));
}

/// The module of a source file of the library.
fn room(path: &str) -> Option<&str> {
    let inside = path.strip_prefix("host/src/")?;
    let room = inside.split('/').next()?.trim_end_matches(".rs");
    (room != "lib").then_some(room)
}

#[test]
fn rooms_of_the_library_use_only_rooms_below_them() {
    let floor = |room: &str| ROOMS.iter().position(|known| *known == room);
    let mut upward = Vec::new();
    for (path, text) in sources() {
        let Some(room) = room(&path) else { continue };
        let own = floor(room).unwrap_or_else(|| panic!("{path}: {room} is no room of the list"));
        for (index, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for (_, used) in code.match_indices("crate::").map(|(at, prefix)| code.split_at(at + prefix.len())) {
                let used: String =
                    used.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
                if floor(&used).is_some_and(|used| used > own) {
                    upward.push(format!("{path}:{}: {room} uses {used}", index + 1));
                }
            }
        }
    }
    forbid(&upward, "rooms depend downward only");
}

/// A list after `crate::` would hide modules from the test above.
#[test]
fn imports_name_one_room_each() {
    let list = ["crate::", "{"].concat();
    let is_code = |line: &str| line.split("//").next().unwrap_or_default().contains(&list);
    let breaches = lines_where(is_code).into_iter().filter(|place| place.starts_with("host/src/")).collect::<Vec<_>>();
    forbid(&breaches, "an import begins with one room");
}

#[test]
fn transports_use_nothing_of_each_other() {
    const TRANSPORTS: [&str; 3] = ["local", "mpi", "nccl"];
    /// This file chooses between two transports.
    const CHOICE: &str = "host/src/comm/mpi/device/connect.rs";
    let mut sideways = Vec::new();
    let mut seen = 0;
    for (path, text) in sources() {
        let own = path.strip_prefix("host/src/comm/").and_then(|inside| inside.split(['/', '.']).next());
        let Some(own) = own.filter(|own| TRANSPORTS.contains(own) && path != CHOICE) else { continue };
        seen += 1;
        for (index, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let used = TRANSPORTS.iter().find(|other| **other != own && code.contains(&format!("comm::{other}")));
            sideways.extend(used.map(|used| format!("{path}:{}: {own} uses {used}", index + 1)));
        }
    }
    assert!(seen > TRANSPORTS.len(), "found {seen} files of transports");
    forbid(&sideways, "transports use nothing of each other");
}

#[test]
fn files_of_the_bootstrap_use_each_other_one_way() {
    const FOLDER: &str = "host/src/bootstrap/";
    let mut left: Vec<(String, String)> = Vec::new();
    for (path, text) in sources() {
        let Some(name) = path.strip_prefix(FOLDER).and_then(|file| file.strip_suffix(".rs")) else { continue };
        // Tests may use any module.
        if name != "mod" && !name.ends_with("/tests") {
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
            left.push((name.to_owned(), code));
        }
    }
    assert!(left.len() > 1, "found {} files in {FOLDER}", left.len());
    loop {
        let names: Vec<String> = left.iter().map(|(name, _)| name.clone()).collect();
        let uses =
            |code: &str, name: &String| [":", ";"].iter().any(|end| code.contains(&format!("use super::{name}{end}")));
        left.retain(|(own, code)| names.iter().any(|name| name != own && uses(code, name)));
        if left.len() == names.len() {
            break;
        }
    }
    let circle: Vec<String> = left.into_iter().map(|(name, _)| name).collect();
    forbid(&circle, "these files of the bootstrap use each other in a circle, or use files that do");
}

#[test]
fn names_say_something() {
    let vague = ["base", "common", "util", "utils", "helpers", "misc"];
    let named = |path: &str| Path::new(path).file_stem().is_some_and(|stem| vague.iter().any(|name| stem == *name));
    let breaches: Vec<String> = sources().into_iter().map(|(path, _)| path).filter(|path| named(path)).collect();
    forbid(&breaches, "no file called base, common or util");
}

/// README is a visitor's first page; figures and caveats belong to the other pages.
#[test]
fn readme_is_short_and_names_every_page() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let lines = readme.lines().count();
    assert!(lines <= 130, "README.md has {lines} lines, more than 130");
    let wide =
        readme.lines().enumerate().filter(|(_, line)| line.chars().count() > 110).map(|(at, _)| (at + 1).to_string());
    forbid(&wide.collect::<Vec<_>>(), "lines of README.md have at most 110 characters");
    let pages: Vec<_> = fs::read_dir(root().join("host/docs")).unwrap().map(|page| page.unwrap().file_name()).collect();
    let pages = pages.iter().map(|page| page.to_string_lossy().into_owned());
    let modules = fs::read_to_string(root().join("host/src/docs.rs")).unwrap();
    let breaches: Vec<String> = pages
        .filter(|page| page.ends_with(".md"))
        .filter(|page| {
            !readme.contains(&format!("(host/docs/{page})")) || !modules.contains(&format!("/docs/{page}\""))
        })
        .collect();
    forbid(&breaches, "every page is linked from README.md and is a module of host/src/docs.rs");
}

/// A user looks up the name of a variant, or the text of a message, on the page of errors.
#[test]
fn every_public_error_is_on_the_page_of_errors() {
    let page = fs::read_to_string(root().join("host/docs/errors.md")).unwrap();
    let enums = [
        ("host/src/error/mod.rs", "Error"),
        ("host/src/error/mod.rs", "CommError"),
        ("host/src/error/bootstrap.rs", "BootstrapError"),
        ("host/src/error/mpi.rs", "MpiError"),
        ("host/src/sys/nccl.rs", "NcclError"),
        ("host/candle/src/error.rs", "gradsync_candle::Error"),
    ];
    let mut breaches = Vec::new();
    for (path, name) in enums {
        let text = fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        let head = format!("pub enum {} {{\n", name.rsplit("::").next().unwrap());
        let body = text.split_once(&head).and_then(|(_, rest)| rest.split_once("\n}")).expect("formatted code").0;
        let section = page.split_once(&format!("\n## `{name}`\n")).unwrap_or_else(|| panic!("no section of {name}")).1;
        let section = section.split("\n## ").next().unwrap();
        let indented = body.lines().filter_map(|line| line.strip_prefix("    "));
        let variants: Vec<&str> = indented
            .filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()))
            .filter_map(|line| line.split(|letter: char| !letter.is_alphanumeric()).next())
            .collect();
        assert!(variants.len() > 4, "{path}: only {variants:?} in {name}");
        let missing = variants.into_iter().filter(|variant| !section.contains(&format!("`{variant}`")));
        breaches.extend(missing.map(|variant| format!("{name}::{variant}")));
    }
    forbid(&breaches, "every variant of a public error is in its section of host/docs/errors.md");
}

/// The registry resolves relative links against the folder of the crate, so the packages' README has the links of README.md in full.
#[test]
fn readme_of_the_packages_has_whole_links() {
    const REPOSITORY: &str = "https://github.com/gradsync/gradsync";
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let whole = |line: &str| {
        let kind = if line.starts_with("![") { "raw" } else { "blob" };
        format!("{}\n", line.replace("](host/", &format!("]({REPOSITORY}/{kind}/main/host/")))
    };
    let expected: String = read("README.md").lines().map(whole).collect();
    assert!(
        read("host/README.md") == expected,
        r"host/README.md is not README.md with whole links; write it by: \
          sed -e 's#^\(!.*\](\)host/#\1{REPOSITORY}/raw/main/host/#' -e 's#](host/#]({REPOSITORY}/blob/main/host/#g' \
          README.md > host/README.md"
    );
}

/// Tests compile and run the example; README shows the same lines.
#[test]
fn readme_has_the_first_example() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (readme, example) = (read("README.md"), read("host/candle/examples/first.rs"));
    let (_, program) = example.split_once("\n\n").expect("a header");
    assert!(
        readme.contains(&format!("```rust,ignore\n{program}```")),
        "README.md and host/candle/examples/first.rs differ"
    );
}

/// Projects that depend on the crate copy these lines from the page.
#[test]
fn deployment_has_the_configuration_for_the_abi_of_mpi() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (page, file) = (read("host/docs/deployment.md"), read("host/mpi-abi.toml"));
    let lines = &file[file.find("[env]\n").expect("a table of variables")..];
    assert!(page.contains(&format!("```toml\n{lines}```")), "host/docs/deployment.md and host/mpi-abi.toml differ");
}

#[test]
fn both_licences_are_here() {
    for (file, words) in [("LICENSE-MIT", "Permission is hereby granted"), ("LICENSE-APACHE", "Apache License")] {
        let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(text.contains(words), "{file} does not look like that licence");
    }
}

#[test]
fn xtask_depends_on_no_crate_of_the_workspace() {
    let manifest = fs::read_to_string(root().join("xtask/Cargo.toml")).unwrap();
    let dependencies = manifest.lines().filter(|line| line.starts_with("gradsync") || line.contains("path ="));
    assert_eq!(dependencies.count(), 0, "xtask builds the workspace's crates, and must work while they do not compile");
}

/// A project that adds the library must not get many dependencies, archived ones, one in two versions, or some that only its programs need.
#[test]
fn the_library_has_few_dependencies() {
    let tree = |features: &[&str]| {
        let arguments = ["--package", "gradsync", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"];
        Cmd::cargo("tree").args(arguments).args(features).quiet().read().unwrap()
    };
    let of_programs = ["clap", "indicatif", "plotters", "safetensors", "tempfile", "tracing-subscriber"];
    let depends = |tree: &str, name: &str| tree.lines().any(|line| line.split(' ').next() == Some(name));
    let plain = tree(&[]);
    assert!(depends(&plain, "rayon"), "no tree of dependencies: {plain}");
    let breaches: Vec<String> =
        of_programs.into_iter().filter(|name| depends(&plain, name)).map(str::to_owned).collect();
    forbid(&breaches, "gradsync depends on nothing that only its programs need");
    assert!(plain == tree(&["--no-default-features"]), "no feature of gradsync is on by default");
    let all = tree(&["--all-features"]);
    assert!(!depends(&all, "clap"), "no feature of gradsync is for programs: {all}");
    assert!(!depends(&all, "paste"), "`paste` is archived: {all}");

    // Each line is `name v1.2.3`, and `(*)` behind it where the crate stands in another line too.
    let versions = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let crates: BTreeSet<String> = plain.lines().map(versions).collect();
    assert!(crates.len() <= 90, "the default build compiles {} crates", crates.len());
    let names: Vec<&str> = crates.iter().filter_map(|line| line.split(' ').next()).collect();
    let twice: Vec<&str> = names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    // Procedural macros change over to version 3 of it one after another.
    assert_eq!(twice, ["syn"], "crates of the default build in several versions");
}

#[test]
fn members_take_versions_and_lints_from_the_workspace() {
    let mut breaches = Vec::new();
    for member in MEMBERS {
        let manifest = fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
        let mut section = "";
        for line in manifest.lines() {
            if line.starts_with('[') {
                section = line;
            } else if section.ends_with("dependencies]") && line.contains('=') && !line.contains("workspace") {
                breaches.push(format!("{member}/Cargo.toml: {line}"));
            }
        }
        if !manifest.contains("[lints") {
            breaches.push(format!("{member}/Cargo.toml has no lints"));
        }
    }
    forbid(&breaches, "versions are chosen in the root manifest, and every member is linted");
}
