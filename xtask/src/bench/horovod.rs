//! Horovod's core and `gradsync-bench`'s rank program of it, `horovod.cc`, compiled with Horovod's own flags.
//!
//! Sources, include folders and flags are those of Horovod's CMakeLists.txt where there is MPI and nothing else. Nothing of Horovod is replaced
//! or derived from: a class that overrode the virtual functions of its Adasum would keep the compiler from inlining the products.

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
    process::{Cmd, root, target},
    toolchain::{hex, python},
};

/// What stands around Adasum, without what frameworks call (`operations.cc`) and the other operations: none of these refers to them.
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
/// Boost's libraries, each of which has an include folder of its own.
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
/// Those of a build of type RelWithDebInfo, in which Horovod replaces -O2 by -O3; without debugging information and warnings.
const FLAGS: [&str; 7] =
    ["-O3", "-DNDEBUG", "-pthread", "-fPIC", "-ftree-vectorize", "-DEIGEN_MPL2_ONLY=1", "-DHAVE_MPI=1"];
/// Without them Horovod's Adasum has no f16.
const X86_FLAGS: [&str; 3] = ["-mf16c", "-mavx", "-mfma"];
const STANDARD: &str = "-std=c++14";
/// Of our own file.
const OWN_STANDARD: &str = "-std=c++17";

/// The rank program, and what it was made with.
pub(super) struct Program {
    pub(super) path: PathBuf,
    /// The first line of what the compiler says of its version.
    pub(super) compiler: String,
    pub(super) flags: String,
}

/// One source, and the object that it becomes.
struct Unit {
    command: Cmd,
    object: PathBuf,
}

/// Does Horovod have an Adasum for f16 on this processor?
pub(super) fn has_f16() -> bool {
    env::consts::ARCH == "x86_64"
}

/// Compiles what has not been compiled already, and links.
pub(super) fn program() -> Result<Program> {
    let folder = target("horovod");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let version = Cmd::new("mpicxx").arg("--version").quiet().read()?;
    let compiler = version.lines().next().unwrap_or_default().to_owned();
    let common = python::horovod().join("horovod/common");
    let own = root().join("tests/bench/src/horovod/horovod.cc");
    let sources = SOURCES.iter().map(|source| (common.join(source), STANDARD)).chain([(own, OWN_STANDARD)]);
    let units: Vec<Unit> =
        sources.map(|(source, standard)| unit(&folder, &source, standard, &compiler)).collect::<Result<_>>()?;
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

/// The object is named after all that it is made from but headers, whose version is fixed.
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

/// As many at a time as there are processors.
fn compile(units: &[Unit]) -> Result<()> {
    let waiting = Mutex::new(units.iter().filter(|unit| !unit.object.exists()));
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(Unit { command, object }) = next() {
            // An object that is there is whole.
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
