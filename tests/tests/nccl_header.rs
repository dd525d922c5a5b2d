//! Our declarations of NCCL's interface against NVIDIA's own header: the C compiler compares them, and reports differences.
//!
//! Every function is declared a second time, with the C types that our types stand for; compilers refuse a second declaration that differs.
//! Values, sizes and offsets are asserted. The test needs no NCCL library, no CUDA toolkit and no GPU.

#![forbid(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::process::Command;

use gradsync::DType;
use gradsync::internal::sys::nccl::{
    Comm, Config, DECLARATIONS, DataTypeCode, Declaration, RedOp, ResultCode, ScalarResidence, Stream, UNDEFINED,
    UniqueId, Version,
};

/// Stand-ins for the toolkit headers that `nccl.h` includes, with the declarations that C needs.
const TOOLKIT: [(&str, &str); 3] =
    [("cuda_runtime.h", "typedef struct CUstream_st *cudaStream_t;\n"), ("cuda_fp16.h", ""), ("cuda_bf16.h", "")];
const PROLOGUE: &str = "#include <stddef.h>\n#include <nccl.h>\n";

/// A type that crosses the interface: its names in Rust and in C, its size and its alignment.
type Known = (&'static str, &'static str, usize, usize);

macro_rules! known {
    ($($rust:ty => $c:literal),* $(,)?) => {
        [$((stringify!($rust), $c, size_of::<$rust>(), align_of::<$rust>())),*]
    };
}

const PASSED: [Known; 10] = known! {
    c_char => "char",
    c_int => "int",
    usize => "size_t",
    Comm => "ncclComm_t",
    DataTypeCode => "ncclDataType_t",
    RedOp => "ncclRedOp_t",
    ResultCode => "ncclResult_t",
    ScalarResidence => "ncclScalarResidence_t",
    Stream => "cudaStream_t",
    UniqueId => "ncclUniqueId",
};
/// Types that occur only behind a pointer.
const POINTED_AT: [(&str, &str); 2] = [("c_void", "void"), ("Config", "ncclConfig_t")];

const fn code(dtype: DType) -> c_int {
    dtype.nccl_code().expect("a type that NCCL has")
}

const CONSTANTS: [(&str, c_int); 11] = [
    ("ncclSuccess", ResultCode::SUCCESS.0),
    ("ncclInvalidArgument", ResultCode::INVALID_ARGUMENT.0),
    ("ncclInvalidUsage", ResultCode::INVALID_USAGE.0),
    ("ncclInProgress", ResultCode::IN_PROGRESS.0),
    ("ncclUint8", DataTypeCode::BYTES.0),
    ("ncclSum", RedOp::SUM.0),
    ("ncclMax", RedOp::MAX.0),
    ("ncclMin", RedOp::MIN.0),
    ("ncclAvg", RedOp::AVG.0),
    ("ncclScalarHostImmediate", ScalarResidence::HOST_IMMEDIATE.0),
    ("NCCL_CONFIG_UNDEF_INT", UNDEFINED),
];

/// The codes of the dtypes that NCCL reduces, from the table of dtypes.
const CODES: [(&str, DType); 10] = [
    ("ncclInt8", DType::I8),
    ("ncclUint8", DType::U8),
    ("ncclInt32", DType::I32),
    ("ncclUint32", DType::U32),
    ("ncclInt64", DType::I64),
    ("ncclUint64", DType::U64),
    ("ncclFloat16", DType::F16),
    ("ncclFloat32", DType::F32),
    ("ncclFloat64", DType::F64),
    ("ncclBfloat16", DType::BF16),
];

/// Compiles `source` after `nccl.h`; an error is the compiler's output.
fn compile(source: &str) -> Result<(), String> {
    let include = std::env::var_os("GRADSYNC_NCCL_INCLUDE").expect("GRADSYNC_NCCL_INCLUDE names a folder with nccl.h");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("check.c");
    for (name, text) in TOOLKIT {
        fs::write(folder.path().join(name), text).expect("a writable folder");
    }
    fs::write(&path, format!("{PROLOGUE}{source}")).expect("a writable folder");
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-isystem"])
        .arg(folder.path())
        .arg("-isystem")
        .arg(include)
        .arg(path)
        .env("LC_ALL", "C")
        .output()
        .expect("a C compiler");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[track_caller]
fn accepted(source: &str) {
    if let Err(words) = compile(source) {
        panic!("{words}\nin\n{PROLOGUE}{source}");
    }
}

#[track_caller]
fn refused(source: &str, about: &str) {
    let words = compile(source).expect_err("the compiler accepts what is wrong");
    assert!(words.contains(about), "nothing of {about} in {words}");
}

/// The C type that one of our types stands for.
fn c_type(rust: &str) -> Result<String, String> {
    if let Some(target) = rust.strip_prefix("*const ") {
        return Ok(format!("{} const *", c_type(target)?));
    }
    if let Some(target) = rust.strip_prefix("*mut ") {
        return Ok(format!("{} *", c_type(target)?));
    }
    let mut names = PASSED.iter().map(|&(rust, c, ..)| (rust, c)).chain(POINTED_AT);
    let found = names.find(|(name, _)| *name == rust);
    found.map(|(_, c)| c.into()).ok_or_else(|| format!("no C type is known for {rust}"))
}

/// C code that declares the functions again. It refers to each function first, because a declaration alone may introduce a new one.
fn declared_again(declarations: &[Declaration]) -> Result<String, String> {
    let mut source = String::new();
    for Declaration { name, parameters, result } in declarations {
        let types: Vec<String> = parameters.iter().map(|rust| c_type(rust)).collect::<Result<_, _>>()?;
        let types = if types.is_empty() { "void".into() } else { types.join(", ") };
        writeln!(source, "_Static_assert(sizeof(&{name}) != 0, \"{name}\");").expect("memory");
        writeln!(source, "{} {name}({types});", c_type(result)?).expect("memory");
    }
    Ok(source)
}

fn asserted<'a>(equations: impl IntoIterator<Item = (&'a str, i128)>) -> String {
    // The message must not contain quotation marks, which would end it.
    let line = |(left, right)| format!("_Static_assert({left} == {right}, \"{left} is not {right}\");\n");
    equations.into_iter().map(line).collect()
}

fn declaration(name: &str) -> Declaration {
    *DECLARATIONS.iter().find(|declaration| declaration.name == name).expect("a function of this name")
}

#[test]
fn functions_are_declared_as_in_the_header() {
    assert!(DECLARATIONS.len() > 20, "only {} declarations", DECLARATIONS.len());
    accepted(&declared_again(DECLARATIONS).expect("every type is known"));
}

#[test]
fn a_wrong_declaration_is_refused() {
    // The wrong declarations: integers of another size; two enumerations, which are the same integer type; one parameter less; another
    // result.
    let wrong: [(&str, &[&str], &str); 4] = [
        ("ncclSend", &["*const c_void", "DataTypeCode", "usize", "c_int", "Comm", "Stream"], "ResultCode"),
        (
            "ncclAllReduce",
            &["*const c_void", "*mut c_void", "usize", "RedOp", "DataTypeCode", "Comm", "Stream"],
            "ResultCode",
        ),
        ("ncclCommSplit", &["Comm", "c_int", "c_int", "*mut Comm"], "ResultCode"),
        ("ncclGetLastError", &["Comm"], "ResultCode"),
    ];
    for (name, parameters, result) in wrong {
        assert!((parameters, result) != (declaration(name).parameters, declaration(name).result), "{name} is right");
        refused(&declared_again(&[Declaration { name, parameters, result }]).expect("every type is known"), name);
    }
}

#[test]
fn a_function_that_the_header_lacks_is_refused() {
    let unknown = Declaration { name: "ncclAllReduceTwice", ..declaration("ncclAllReduce") };
    refused(&declared_again(&[unknown]).expect("every type is known"), "ncclAllReduceTwice");
}

#[test]
fn a_type_without_a_counterpart_is_named() {
    let strange = Declaration { name: "ncclSend", parameters: &["Comm", "*const Window"], result: "ResultCode" };
    let message = declared_again(&[strange]).expect_err("no such type");
    assert_eq!(message, "no C type is known for Window");
}

#[test]
fn constants_have_the_headers_values() {
    accepted(&asserted(CONSTANTS.map(|(name, value)| (name, value.into()))));
    accepted(&asserted(CODES.map(|(name, dtype)| (name, code(dtype).into()))));
    for dtype in DType::ALL {
        assert_eq!(dtype.nccl_code().is_some(), CODES.iter().any(|(_, known)| *known == dtype), "{dtype}");
    }
    refused(&asserted([("ncclMax", RedOp::MIN.0.into())]), "ncclMax is not 3");
}

#[test]
fn every_constant_that_claims_a_name_of_the_header_is_compared() {
    let source = include_str!("../../host/src/sys/nccl.rs");
    let mut documentation = None;
    let mut claimed = Vec::new();
    for line in source.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("/// ") {
            documentation = documentation.or(Some(text));
            continue;
        }
        let name = documentation.take().and_then(|text| text.strip_prefix('`')?.split('`').next());
        if line.starts_with("pub const ") {
            claimed.extend(name.filter(|name| name.to_lowercase().starts_with("nccl")));
        }
    }
    assert_eq!(claimed, CONSTANTS.map(|(name, _)| name));
}

#[test]
fn types_have_the_headers_sizes() {
    let sizes = PASSED.map(|(_, c, size, alignment)| {
        asserted([(&*format!("sizeof({c})"), size as i128), (&*format!("_Alignof({c})"), alignment as i128)])
    });
    accepted(&sizes.concat());
    accepted(&asserted([("NCCL_UNIQUE_ID_BYTES", size_of::<UniqueId>() as i128)]));
}

/// Each field's name in C, its offset and its size. The code compiles only if the list is complete.
macro_rules! fields {
    ($($field:ident => $c:literal),* $(,)?) => {{
        let Config { $($field: _),* } = Config::default();
        fn size<T>(_: impl Fn(Config) -> T) -> usize {
            size_of::<T>()
        }
        [$(($c, offset_of!(Config, $field), size(|config| config.$field))),*]
    }};
}

#[test]
fn the_configuration_begins_like_the_headers() {
    let fields = fields! {
        size => "size",
        magic => "magic",
        version => "version",
        blocking => "blocking",
        cga_cluster_size => "cgaClusterSize",
        min_ctas => "minCTAs",
        max_ctas => "maxCTAs",
        net_name => "netName",
        split_share => "splitShare",
    };
    for (name, offset, size) in fields {
        accepted(&asserted([
            (&*format!("offsetof(ncclConfig_t, {name})"), offset as i128),
            (&*format!("sizeof(((ncclConfig_t *)0)->{name})"), size as i128),
        ]));
    }
    // The header's structure may have more fields, but not fewer.
    accepted(&asserted([
        ("_Alignof(ncclConfig_t)", align_of::<Config>() as i128),
        (&*format!("(sizeof(ncclConfig_t) >= {})", size_of::<Config>()), 1),
    ]));
}

#[test]
fn the_configuration_starts_with_the_headers_values() {
    let Config { size, magic, version, blocking, cga_cluster_size, min_ctas, max_ctas, net_name, split_share } =
        Config::default();
    assert_eq!((size, version), (size_of::<Config>(), 21801), "those of the version that has these fields");
    // The numbers are positions in the header's list; its first value is the structure's size and its third the version, which differ here.
    let values = [
        (1, i128::from(magic)),
        (3, blocking.into()),
        (4, cga_cluster_size.into()),
        (5, min_ctas.into()),
        (6, max_ctas.into()),
        (7, net_name.addr() as i128),
        (8, split_share.into()),
    ];
    let mut source = String::new();
    for (index, value) in values {
        let before: String = (0..index).map(|earlier| format!("v{earlier}, ")).collect();
        writeln!(source, "#define PICK_{index}({before}picked, ...) picked").expect("memory");
        writeln!(source, "#define VALUE_{index}(...) PICK_{index}(__VA_ARGS__)").expect("memory");
        let pointer = if index == 7 { "(void *)" } else { "" };
        writeln!(
            source,
            "_Static_assert(VALUE_{index}(NCCL_CONFIG_INITIALIZER) == {pointer}{value}, \"value {index}\");"
        )
        .expect("memory");
    }
    accepted(&source);
}

#[test]
fn versions_are_coded_like_the_headers() {
    accepted(&asserted([
        ("NCCL_VERSION(2, 18, 1)", Version::LOWEST.0.into()),
        ("NCCL_VERSION(2, 27, 1)", Version::new(2, 27).0.into()),
        ("NCCL_VERSION(3, 0, 1)", Version::new(3, 0).0.into()),
        ("NCCL_VERSION(2, 8, 4)", 2804),
    ]));
    assert_eq!(Version::LOWEST.to_string(), "2.18.1");
    assert_eq!(Version(23102).to_string(), "2.31.2");
    assert_eq!(Version(2804).to_string(), "2.8.4", "up to 2.8, versions had a code of their own");
}
