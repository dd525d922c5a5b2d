//! Compiles Horovod's core, and `horovod.cc`, the rank program of `gradsync-bench` for it, with Horovod's own flags.
//!
//! Sources, include folders and flags follow Horovod's CMakeLists.txt for a build with MPI alone. No class of Horovod is replaced or
//! derived from: if a class overrode the virtual functions of its Adasum, the compiler could not inline the inner products.

use std::{
    env, fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context, Result, anyhow};
use sha2::{Digest, Sha256};

use crate::{
    process::{Cmd, root},
    toolchain::{hex, python},
};

/// The sources that Adasum needs. The entry points for frameworks (`operations.cc`) and the other operations are left out, because none of
/// these sources refers to them.
const SOURCES: [&str; 22] = [
    "common.cc",
    "controller.cc",
    "fusion_buffer_manager.cc",
    "group_table.cc",
    "half.cc",
    "logging.cc",
    "message.cc",
    "mpi/mpi_context.cc",
    "mpi/mpi_controller.cc",
    "ops/adasum/adasum_mpi.cc",
    "ops/adasum_mpi_operations.cc",
    "ops/collective_operations.cc",
    "optim/bayesian_optimization.cc",
    "optim/gaussian_process.cc",
    "parameter_manager.cc",
    "process_set.cc",
    "response_cache.cc",
    "stall_inspector.cc",
    "tensor_queue.cc",
    "thread_pool.cc",
    "timeline.cc",
    "utils/env_parser.cc",
];
/// Boost's libraries; each has an include folder of its own.
const BOOST: [&str; 13] = [
    "assert",
    "config",
    "core",
    "detail",
    "iterator",
    "lockfree",
    "mpl",
    "parameter",
    "predef",
    "preprocessor",
    "static_assert",
    "type_traits",
    "utility",
];
const INCLUDES: [&str; 4] = ["eigen", "flatbuffers/include", "HTTPRequest/include", "lbfgs/include"];
/// The flags of a RelWithDebInfo build, in which Horovod replaces -O2 by -O3, without debugging information and warnings.
const FLAGS: [&str; 7] =
    ["-O3", "-DNDEBUG", "-pthread", "-fPIC", "-ftree-vectorize", "-DEIGEN_MPL2_ONLY=1", "-DHAVE_MPI=1"];
/// Without these flags, Horovod's Adasum does not support f16.
const X86_FLAGS: [&str; 3] = ["-mf16c", "-mavx", "-mfma"];
const STANDARD: &str = "-std=c++14";
/// The standard for `horovod.cc`.
const OWN_STANDARD: &str = "-std=c++17";

/// The rank program, with its compiler and flags.
pub(super) struct Program {
    pub(super) path: PathBuf,
    /// The first line of the compiler's version message.
    pub(super) compiler: String,
    pub(super) flags: String,
}

/// One source with its object file.
struct Unit {
    command: Cmd,
    object: PathBuf,
}

/// Whether Horovod's Adasum supports f16 on this processor.
fn has_f16() -> bool {
    env::consts::ARCH == "x86_64"
}

/// Compiles the objects that are missing, and links the program.
pub(super) fn program(folder: &Path) -> Result<Program> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let version = Cmd::new("mpicxx").arg("--version").quiet().read()?;
    let compiler = version.lines().next().unwrap_or_default().to_owned();
    let common = python::horovod().join("horovod/common");
    let own = root().join("tests/bench/src/compare/horovod.cc");
    let sources = SOURCES.iter().map(|source| (common.join(source), STANDARD)).chain([(own, OWN_STANDARD)]);
    let units: Vec<Unit> =
        sources.map(|(source, standard)| unit(folder, &source, standard, &compiler)).collect::<Result<_>>()?;
    compile(&units)?;
    let path = folder.join("horovod");
    let objects = units.iter().map(|unit| &unit.object);
    Cmd::new("mpicxx").arg("-pthread").args(objects).arg("-o").arg(&path).run()?;
    Ok(Program { path, compiler, flags: [&[STANDARD], &flags()[..]].concat().join(" ") })
}

fn flags() -> Vec<&'static str> {
    let of_processor: &[&str] = if has_f16() { &X86_FLAGS } else { &[] };
    [&FLAGS, of_processor].concat()
}

/// The object's name is a hash of everything that determines it, except for headers, whose version is fixed.
fn unit(folder: &Path, source: &Path, standard: &str, compiler: &str) -> Result<Unit> {
    let text = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    let horovod = python::horovod();
    let third_party = horovod.join("third_party");
    let includes = [horovod.join("horovod/common")]
        .into_iter()
        .chain(BOOST.iter().map(|library| third_party.join("boost").join(library).join("include")))
        .chain(INCLUDES.iter().map(|folder| third_party.join(folder)));
    let includes = includes.flat_map(|folder| ["-isystem".into(), folder.into_os_string()]);
    let command = Cmd::new("mpicxx").arg(standard).args(flags()).args(includes).arg("-c").arg(source);
    let made_from = Sha256::new().chain_update(format!("{compiler}\n{command}\n")).chain_update(text).finalize();
    let stem = source.file_stem().context("a source without a name")?.to_string_lossy();
    let object = folder.join(format!("{stem}-{}.o", &hex(&made_from)[..16]));
    Ok(Unit { command, object })
}

/// Compiles as many objects at a time as there are processors.
fn compile(units: &[Unit]) -> Result<()> {
    let waiting = Mutex::new(units.iter().filter(|unit| !unit.object.exists()));
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(Unit { command, object }) = next() {
            // The object is renamed when it is complete, so that an existing object is always usable.
            let partial = object.with_extension("partial");
            command.clone().arg("-o").arg(&partial).run()?;
            fs::rename(&partial, object).with_context(|| format!("cannot make {}", object.display()))?;
        }
        Ok(())
    };
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().unwrap_or_else(|_| Err(anyhow!("a thread that waits for the compiler panicked")))
        })
    })
}
