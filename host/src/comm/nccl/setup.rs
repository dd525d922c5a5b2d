//! The set-up of an NCCL communicator: ranks compare their settings over the control channel, and only then call NCCL, on a separate
//! thread, because that call returns when all ranks have made it, or never.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::NcclOptions;
use super::companions::{Companions, Handle};
use super::low_latency::measured_limits;
use super::primitive::Refused;
use super::session::Neighbours;
use crate::bootstrap::Member;
use crate::driver::{Device, DeviceAttribute, Queue, Sharers, process_number};
use crate::error::{CommError, Error, Operation, Result};
use crate::kernels::cuda::PacketLimits;
use crate::sys::nccl::{Comm, Config, Nccl, NcclError, ResultCode, UNDEFINED, UniqueId, Version};

const OPERATION: &str = "nccl communicator";
/// The variable without which NCCL refuses several ranks on one GPU.
const SHARED_GPU_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// The first version of NCCL that accepts several ranks on one GPU.
const SHARED_GPU_SINCE: Version = Version::new(2, 30);
/// The variable that overrides NCCL's identity of the machine.
const HOST_VARIABLE: &str = "NCCL_HOSTID";

/// The message that each rank sends to the others before NCCL is called.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Hello {
    /// The reason why this rank cannot take part, if it cannot.
    failure: Option<String>,
    version: i32,
    device: [u8; 16],
    /// The major number of the GPU's compute capability.
    generation: i32,
    /// The rank's process, by a number that is unique in the world.
    process: [u8; 16],
    /// The rank's machine.
    host: String,
    has_checks: bool,
    /// Whether several ranks may use one GPU, and whether NCCL has been told so.
    shared_gpu: [bool; 2],
    /// The fewest and the most thread blocks.
    ctas: [Option<u32>; 2],
    /// The largest sum that this crate's kernels compute, and the largest in one shot, in bytes.
    low_latency: [Option<usize>; 2],
    /// NCCL's unique id, from rank 0.
    unique_id: Vec<u8>,
}

/// One rank's part of a communicator, and the properties that the ranks have told each other.
pub(super) struct Connected {
    pub(super) nccl: &'static Nccl,
    pub(super) handle: Comm,
    pub(super) companions: Arc<Companions>,
    pub(super) neighbours: Neighbours,
    /// The sizes of sums by this crate's kernels.
    pub(super) limits: PacketLimits,
}

/// Makes this rank's communicator. `parent` describes the sharing of the GPU in the communicator that it was split from.
pub(super) fn connect(member: &Member, queue: &Queue, options: &NcclOptions, parent: Sharers) -> Result<Connected> {
    let prepared = prepare(member, queue, options);
    let nothing = Hello {
        process: process_number(),
        host: host(),
        has_checks: options.checks,
        shared_gpu: [options.shared_gpu, is_on(std::env::var(SHARED_GPU_VARIABLE).ok().as_deref())],
        ctas: [options.min_ctas, options.max_ctas],
        low_latency: [options.low_latency_bytes, options.one_shot_bytes],
        ..Hello::default()
    };
    let hello = match &prepared {
        Ok(PreparedRank { nccl, device, generation, unique_id }) => Hello {
            version: nccl.version().0,
            device: *device,
            generation: *generation,
            unique_id: unique_id.clone(),
            ..nothing
        },
        Err(error) => Hello { failure: Some(error.to_string()), ..nothing },
    };
    let hellos = exchange(member, &hello, options.deadline)?;
    let PreparedRank { nccl, .. } = prepared?;
    check(&hellos)?;
    tracing::debug!(rank = member.rank(), world_size = member.world_size(), "ranks agree, calling NCCL");
    let neighbours = neighbours(&hellos, member.rank(), parent);

    let id = unique_id(&hellos[0].unique_id, member)?;
    let outcome = init(nccl, member, queue, options, id);
    // No rank continues before all ranks have a communicator.
    let done = Hello { failure: outcome.as_ref().err().map(ToString::to_string), ..hello };
    let answers = exchange(member, &done, options.deadline);
    let handle = outcome?;
    let all = answers.and_then(|answers| first_failure(&answers));
    if let Err(error) = all {
        // SAFETY: the communicator was made just now, and is not in use.
        unsafe { (nccl.functions.ncclCommAbort)(handle.0) };
        return Err(error);
    }
    let in_process = hellos.iter().filter(|other| other.process == hellos[member.rank()].process).count();
    let companions = Companions::of(&hellos[0].unique_id, in_process);
    Ok(Connected { nccl, handle: handle.0, companions, neighbours, limits: limits(&hellos) })
}

/// The identity of this machine: NCCL's override if it is set, so that NCCL and this crate distinguish the same machines.
fn host() -> String {
    let named = std::env::var_os(HOST_VARIABLE).filter(|name| !name.is_empty());
    let named = named.map(|name| name.to_string_lossy().into_owned());
    // The boot id is preferred to the host name: containers on one machine have different names and reach each other's memory, and a
    // kernel has one boot id from its start to its end.
    let booted = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned());
    named.or_else(booted).unwrap_or_else(|| gethostname::gethostname().to_string_lossy().into_owned())
}

/// Whether a numeric variable of NCCL is set and not 0.
pub(super) fn is_on(variable: Option<&str>) -> bool {
    variable.is_some_and(|value| value.trim().parse::<i64>().is_ok_and(|value| value != 0))
}

/// Whether a numeric variable of NCCL is set to 0.
pub(super) fn is_off(variable: Option<&str>) -> bool {
    variable.is_some_and(|value| value.trim().parse::<i64>().is_ok_and(|value| value == 0))
}

fn neighbours(hellos: &[Hello], rank: usize, parent: Sharers) -> Neighbours {
    let of_gpu: Vec<&Hello> = hellos.iter().filter(|other| other.device == hellos[rank].device).collect();
    let is_first = |index: &usize| of_gpu[..*index].iter().all(|other| other.process != of_gpu[*index].process);
    let processes = (0..of_gpu.len()).filter(is_first).count();
    let has_companion = |rank: usize| hellos[..rank].iter().any(|other| other.process == hellos[rank].process);
    Neighbours {
        ranks_on_device: of_gpu.len(),
        sharers: Sharers { ranks: of_gpu.len(), processes }.and_of_parent(parent),
        on_one_host: hellos.iter().all(|other| other.host == hellos[0].host),
        share_process: (1..hellos.len()).any(has_companion),
    }
}

/// The sizes of sums by this crate's kernels: the smallest that suit the GPU of some rank.
fn limits(hellos: &[Hello]) -> PacketLimits {
    let of = |hello: &Hello| measured_limits(hello.generation, hellos.len());
    let least = hellos.iter().map(of).reduce(PacketLimits::min).expect("at least this rank");
    let [most_bytes, one_shot_bytes] = hellos[0].low_latency;
    least.or_given(most_bytes, one_shot_bytes)
}

/// The part of a rank in the set-up that may fail on this rank alone.
struct PreparedRank {
    nccl: &'static Nccl,
    device: [u8; 16],
    generation: i32,
    unique_id: Vec<u8>,
}

fn prepare(member: &Member, queue: &Queue, options: &NcclOptions) -> Result<PreparedRank> {
    if let Some(reason) = options.invalid_reason() {
        return Err(Error::InvalidArgument { operation: OPERATION, reason });
    }
    let nccl = Nccl::get()?;
    let device = queue.device_uuid()?;
    let generation = Device::new(queue.ordinal())?.attribute(DeviceAttribute::ComputeCapabilityMajor)?;
    let mut id = UniqueId([0; 128]);
    if member.rank() == 0 {
        queue.make_current()?;
        // SAFETY: writes one identifier.
        let code = unsafe { (nccl.functions.ncclGetUniqueId)(&mut id) };
        if code != ResultCode::SUCCESS {
            return Err(refused(nccl, member, Refused { call: "ncclGetUniqueId", code }).into());
        }
    }
    Ok(PreparedRank { nccl, device, generation, unique_id: id.0.iter().map(|&byte| byte as u8).collect() })
}

fn exchange(member: &Member, hello: &Hello, deadline: Duration) -> Result<Vec<Hello>> {
    let bytes = postcard::to_stdvec(hello).expect("plain data");
    let all = member.all_gather(&bytes, deadline)?;
    let read = |(rank, bytes): (usize, Vec<u8>)| {
        postcard::from_bytes(&bytes).map_err(|error| {
            let reason = format!("its message cannot be read, perhaps as it has another version of gradsync: {error}");
            CommError::Transport { operation: Operation::SetUp, rank, reason }.into()
        })
    };
    all.into_iter().enumerate().map(read).collect()
}

/// Returns the failure of the first rank that cannot take part, if any.
fn first_failure(hellos: &[Hello]) -> Result<()> {
    let first = hellos.iter().enumerate().find_map(|(rank, hello)| Some((rank, hello.failure.clone()?)));
    first
        .map_or(Ok(()), |(rank, reason)| Err(CommError::Transport { operation: Operation::SetUp, rank, reason }.into()))
}

/// Refuses settings with which NCCL would fail or hang.
fn check(hellos: &[Hello]) -> Result<()> {
    first_failure(hellos)?;
    let refuse = |reason: String| Err(Error::InvalidArgument { operation: OPERATION, reason });
    for (rank, hello) in hellos.iter().enumerate() {
        if hello.version != hellos[0].version {
            let (first, other) = (hellos[0].version, hello.version);
            return refuse(format!("rank 0 has NCCL's version {first}, rank {rank} has {other}"));
        }
        if hello.has_checks != hellos[0].has_checks {
            let (first, other) = (hellos[0].has_checks, hello.has_checks);
            return refuse(format!("rank 0 has {first} as checks, rank {rank} has {other}"));
        }
        if hello.ctas != hellos[0].ctas {
            let [first, other] = [hellos[0].ctas, hello.ctas].map(|[min, max]| format!("({min:?}, {max:?})"));
            return refuse(format!("rank 0 has {first} as min_ctas and max_ctas, rank {rank} has {other}"));
        }
        if hello.low_latency != hellos[0].low_latency {
            let [first, other] =
                [hellos[0].low_latency, hello.low_latency].map(|[most, one_shot]| format!("({most:?}, {one_shot:?})"));
            return refuse(format!(
                "rank 0 has {first} as low_latency_bytes and one_shot_bytes, rank {rank} has {other}"
            ));
        }
        if hello.shared_gpu[0] != hellos[0].shared_gpu[0] {
            let (first, other) = (hellos[0].shared_gpu[0], hello.shared_gpu[0]);
            return refuse(format!("rank 0 has {first} as shared_gpu, rank {rank} has {other}"));
        }
    }
    // This follows the checks of common settings, so that every rank of a group gets the same error for the same mistake.
    for (rank, hello) in hellos.iter().enumerate() {
        if let Some(other) = hellos[..rank].iter().position(|other| other.device == hello.device)
            && let Some(lacking) = lacking_for_one_gpu([other, rank].map(|rank| (rank, &hellos[rank])))
        {
            return refuse(format!(
                "ranks {other} and {rank} are on the same GPU; each needs one of its own, or all of them the option \
                 NcclOptions::shared_gpu, the variable {SHARED_GPU_VARIABLE}=1 from before the process starts, and NCCL \
                 {SHARED_GPU_SINCE} or later: {lacking}"
            ));
        }
    }
    Ok(())
}

/// The missing requirement of two ranks on one GPU, if any.
fn lacking_for_one_gpu(ranks: [(usize, &Hello); 2]) -> Option<String> {
    let version = Version(ranks[0].1.version);
    if version < SHARED_GPU_SINCE {
        return Some(format!("NCCL is {version}"));
    }
    let (allowed, told) = (|hello: &Hello| hello.shared_gpu[0], |hello: &Hello| hello.shared_gpu[1]);
    if ranks.iter().any(|(_, hello)| !allowed(hello)) {
        return Some(format!("the option is not set, and NCCL is {version}"));
    }
    let untold = ranks.iter().find(|(_, hello)| !told(hello));
    untold.map(|(rank, _)| format!("the variable is not set on rank {rank}, and NCCL is {version}"))
}

fn unique_id(bytes: &[u8], member: &Member) -> Result<UniqueId> {
    let bytes: [u8; 128] = bytes.try_into().map_err(|_| {
        let reason = format!("rank 0 sent {} bytes in place of 128 to rank {}", bytes.len(), member.rank());
        CommError::Transport { operation: Operation::SetUp, rank: 0, reason }
    })?;
    Ok(UniqueId(bytes.map(|byte| byte as _)))
}

fn refused(nccl: &Nccl, member: &Member, Refused { call, code }: Refused) -> NcclError {
    NcclError::Failed {
        call,
        code: code.0,
        text: nccl.error_string(code),
        // SAFETY: the call names no communicator.
        last_error: unsafe { nccl.last_error(ptr::null_mut()) },
        rank: member.rank(),
        world_size: member.world_size(),
    }
}

/// Runs NCCL's own set-up, until it is complete, a rank is gone or the deadline has passed.
fn init(nccl: &'static Nccl, member: &Member, queue: &Queue, options: &NcclOptions, id: UniqueId) -> Result<Handle> {
    let (sender, receiver) = channel();
    let is_given_up = Arc::new(AtomicBool::new(false));
    let (rank, world_size) = (member.rank() as c_int, member.world_size() as c_int);
    let worker = {
        let (queue, options, is_given_up) = (queue.clone(), options.clone(), is_given_up.clone());
        move || {
            let outcome = call_init(nccl, &queue, (rank, world_size), id, &options, &is_given_up);
            if let Err(unsent) = sender.send(outcome) {
                // The waiting thread has given up.
                if let Ok(handle) = unsent.0 {
                    // SAFETY: the communicator was made just now, and is not in use.
                    unsafe { (nccl.functions.ncclCommAbort)(handle.0) };
                }
            }
        }
    };
    let started = std::thread::Builder::new().name("gradsync-nccl-init".into()).spawn(worker);
    started.map_err(|error| Error::InvalidArgument { operation: OPERATION, reason: format!("no thread: {error}") })?;

    let begun = Instant::now();
    loop {
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(outcome) => return outcome.map_err(|failed| refused(nccl, member, failed).into()),
            Err(RecvTimeoutError::Disconnected) => {
                let reason = "the thread that called NCCL panicked".into();
                return Err(CommError::Transport { operation: Operation::SetUp, rank: member.rank(), reason }.into());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let failure = member.failure();
        if failure.is_none() && begun.elapsed() < options.deadline {
            continue;
        }
        is_given_up.store(true, Ordering::Release);
        let (operation, deadline) = (Operation::SetUp, options.deadline);
        let late = || CommError::Timeout { operation, missing: Vec::new(), deadline };
        return Err(failure.unwrap_or_else(late).into());
    }
}

/// The configuration that is passed to NCCL.
fn config(options: &NcclOptions) -> Config {
    let count = |ctas: Option<u32>| ctas.and_then(|ctas| c_int::try_from(ctas).ok()).unwrap_or(UNDEFINED);
    // NCCL takes an unset maximum for less than any minimum, and refuses (NVIDIA/nccl#2256); a maximum beyond its limit is lowered.
    let max_ctas = options.max_ctas.or(options.min_ctas.map(|_| i32::MAX.unsigned_abs()));
    Config {
        blocking: c_int::from(options.blocking),
        min_ctas: count(options.min_ctas),
        max_ctas: count(max_ctas),
        ..Config::default()
    }
}

fn call_init(
    nccl: &Nccl,
    queue: &Queue,
    (rank, world_size): (c_int, c_int),
    id: UniqueId,
    options: &NcclOptions,
    is_given_up: &AtomicBool,
) -> Result<Handle, Refused> {
    if queue.make_current().is_err() {
        return Err(Refused { call: "cuCtxSetCurrent", code: ResultCode::INVALID_USAGE });
    }
    let (mut config, mut comm) = (config(options), ptr::null_mut());
    // SAFETY: every pointer is to a local of the right type; the device's context is current.
    let mut code = unsafe { (nccl.functions.ncclCommInitRankConfig)(&mut comm, world_size, id, rank, &mut config) };
    let mut call = "ncclCommInitRankConfig";
    while code == ResultCode::IN_PROGRESS && !is_given_up.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
        call = "ncclCommGetAsyncError";
        // SAFETY: the communicator is live.
        let asked = unsafe { (nccl.functions.ncclCommGetAsyncError)(comm, &mut code) };
        if asked != ResultCode::SUCCESS {
            code = asked;
        }
    }
    if code == ResultCode::SUCCESS {
        return Ok(Handle(comm));
    }
    if !comm.is_null() {
        // SAFETY: no other thread knows the communicator.
        unsafe { (nccl.functions.ncclCommAbort)(comm) };
    }
    Err(Refused { call, code })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes the message of a rank with this GPU, on this machine, with NCCL 2.32.
    fn hello(device: u8, host: &str, shared_gpu: [bool; 2]) -> Hello {
        let version = Version::new(2, 32).0;
        Hello { version, device: [device; 16], host: host.into(), shared_gpu, ..Hello::default() }
    }

    #[track_caller]
    fn refusal(hellos: &[Hello]) -> String {
        match check(hellos) {
            Err(Error::InvalidArgument { reason, .. }) => reason,
            other => panic!("in place of a refusal: {other:?}"),
        }
    }

    #[test]
    fn check_of_one_gpu_needs_option_variable_and_version() {
        let all = |shared_gpu| [1, 2, 1].map(|device| hello(device, "a", shared_gpu));
        let what_it_takes = "ranks 0 and 2 are on the same GPU; each needs one of its own, or all of them the option \
                             NcclOptions::shared_gpu, the variable NCCL_MULTI_RANK_GPU_ENABLE=1 from before the process starts, \
                             and NCCL 2.30.1 or later: ";
        for shared_gpu in [[false, false], [false, true]] {
            let expected = format!("{what_it_takes}the option is not set, and NCCL is 2.32.1");
            assert_eq!(refusal(&all(shared_gpu)), expected);
        }
        let mut hellos = all([true, true]);
        check(&hellos).unwrap();
        hellos[1].shared_gpu[1] = false;
        // The rank has its own GPU.
        check(&hellos).unwrap();
        hellos[2].shared_gpu[1] = false;
        let expected = format!("{what_it_takes}the variable is not set on rank 2, and NCCL is 2.32.1");
        assert_eq!(refusal(&hellos), expected);
        let mut hellos = all([true, true]);
        hellos.iter_mut().for_each(|hello| hello.version = 22907);
        assert_eq!(refusal(&hellos), format!("{what_it_takes}NCCL is 2.29.7"));
        hellos.iter_mut().for_each(|hello| hello.version = 23003);
        check(&hellos).unwrap();
    }

    #[test]
    fn check_wants_one_answer_to_whether_gpus_are_shared() {
        let mut hellos = [1, 2, 3].map(|device| hello(device, "a", [false, true]));
        check(&hellos).unwrap();
        hellos[2].shared_gpu[0] = true;
        assert_eq!(refusal(&hellos), "rank 0 has false as shared_gpu, rank 2 has true");
    }

    #[test]
    fn neighbours_are_on_one_gpu_or_on_one_machine() {
        let here = |hellos: &[Hello], rank| {
            let Neighbours { ranks_on_device, on_one_host, .. } = neighbours(hellos, rank, Sharers::ONE);
            (ranks_on_device, on_one_host)
        };
        let hellos = [(1, "a"), (1, "a"), (2, "a")].map(|(device, host)| hello(device, host, [true; 2]));
        assert_eq!([0, 1, 2].map(|rank| here(&hellos, rank)), [(2, true), (2, true), (1, true)]);
        let mut apart = hellos.clone();
        apart.iter_mut().enumerate().for_each(|(rank, hello)| hello.process = [rank as u8; 16]);
        let of = |hellos: &[Hello], rank| neighbours(hellos, rank, Sharers::ONE);
        assert!(!of(&apart, 0).share_process);
        assert_eq!([&hellos, &apart].map(|hellos| of(hellos, 0).sharers.processes), [1, 2]);
        // If a communicator is split into parts with one rank each on a GPU, the ranks still share it.
        let world = of(&apart, 0).sharers;
        let part = neighbours(&[apart[0].clone(), apart[2].clone()], 0, world);
        assert_eq!((part.ranks_on_device, part.sharers), (1, world));
        apart[2].process = apart[1].process;
        assert!((0..3).all(|rank| of(&apart, rank).share_process));
        // Ranks that only claim to be on several machines have the same GPUs.
        let hellos = [(1, "a"), (1, "b")].map(|(device, host)| hello(device, host, [true; 2]));
        assert_eq!([0, 1].map(|rank| here(&hellos, rank)), [(2, false), (2, false)]);
    }

    #[test]
    fn is_on_reads_a_variable_as_nccl_does() {
        assert_eq!(
            [Some("1"), Some(" 2"), Some("0"), Some("yes"), Some(""), None].map(is_on),
            [true, true, false, false, false, false]
        );
        assert!(!host().is_empty() && host() == host());
    }
}
