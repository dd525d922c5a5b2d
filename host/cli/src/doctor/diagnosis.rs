//! The problems that the facts of all ranks imply. Pure: the result is the same on every rank.

use std::collections::BTreeMap;

use gradsync::internal::NETWORK_BYTES;
use serde::Serialize;

use super::clock::Offset;
use super::exchange::Exchange;
use super::facts::Facts;

/// A difference of clocks above this number of seconds puts the logs of two ranks into the wrong order.
const CLOCK: f64 = 0.5;
/// The needed number of descriptors: each rank has a connection to rank 0, and a quarter of rank 0's descriptors is for unauthenticated
/// connections. NCCL needs more than all of these.
const DESCRIPTORS: u64 = 1024;
/// The locked memory that RDMA needs for registration.
const LOCKED_BYTES: u64 = 1 << 30;
/// For one rank. gradsync itself needs little; a model that trains does not.
const MEMORY_BYTES: u64 = 512 << 20;
/// What containers give by default, which is too little for NCCL on several GPUs of one machine.
const SHARED_MEMORY_BYTES: u64 = 64 << 20;

/// A problem with its remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Problem {
    pub(super) problem: String,
    pub(super) remedy: String,
}

fn problem(problem: String, remedy: &str) -> Problem {
    Problem { problem, remedy: remedy.to_owned() }
}

/// All problems.
pub(super) fn problems(ranks: &[Facts], clocks: &[Offset], exchanges: &[Exchange]) -> Vec<Problem> {
    let mut found = Vec::new();
    type Value = fn(&Facts) -> String;
    let differing: [(&str, Value, &str); 5] = [
        ("versions of gradsync", |rank| rank.version.clone(), "build the program of all ranks with the same version"),
        ("features of the build", |rank| rank.features.join(", "), "start the same program on all machines"),
        (
            "versions of NCCL",
            |rank| rank.nccl.clone().unwrap_or("none".into()),
            "install the same NCCL on all machines, or name it by GRADSYNC_LIBNCCL",
        ),
        (
            "settings of NCCL_SOCKET_IFNAME",
            |rank| rank.interface.clone().unwrap_or("not set".into()),
            "set it to the same interfaces everywhere, or nowhere",
        ),
        (
            "networks for NCCL",
            |rank| {
                let uses = rank.nccl.is_none() || rank.has_infiniband && !rank.is_infiniband_disabled;
                if uses { "InfiniBand" } else { "sockets" }.into()
            },
            "load the driver of InfiniBand (/sys/class/infiniband) and set NCCL_IB_DISABLE alike on all machines, or NCCL_IB_DISABLE=1 everywhere",
        ),
    ];
    for (description, value, remedy) in differing {
        found.extend(difference(ranks, description, value, remedy));
    }
    positions(ranks, &mut found);
    machines(ranks, &mut found);
    gpus(ranks, &mut found);
    interfaces(ranks, &mut found);
    mpi(ranks, &mut found);
    for (rank, clock) in ranks.iter().zip(clocks) {
        if clock.seconds.abs() - clock.uncertainty > CLOCK {
            let text = format!(
                "the clock of rank {} ({}) differs from rank 0's by {:.1} s",
                rank.rank, rank.host, clock.seconds
            );
            found.push(problem(text, "synchronise the clocks of all machines, by chrony or another client of NTP"));
        }
    }
    limits(ranks, &mut found);
    exchange(ranks, exchanges, &mut found);
    found
}

/// Ranks of one machine that do not share memory. MPI's ranks of several machines never do.
fn exchange(ranks: &[Facts], exchanges: &[Exchange], found: &mut Vec<Problem>) {
    for (rank, exchange) in ranks.iter().zip(exchanges) {
        if let Exchange::Failed(reason) = exchange {
            let text =
                format!("rank {} of {} does not reach the other ranks of its machine: {reason}", rank.rank, rank.host);
            found.push(problem(text, "let the ranks of a machine connect to each other, by Unix sockets or by TCP"));
        }
    }
    let machines = by(ranks, |rank| rank.machine.clone());
    let is_one_machine = machines.len() == 1;
    for of in machines.into_values() {
        let uses = |way: Exchange| of.iter().any(|&rank| exchanges[rank] == way);
        let way = match () {
            () if uses(Exchange::Sockets) => "sockets",
            () if uses(Exchange::Mpi) && is_one_machine => "MPI's messages",
            () => continue,
        };
        if of.iter().any(|&rank| ranks[rank].uses_messages_only) {
            continue;
        }
        let namespace = |rank: usize| &ranks[rank].pid_namespace;
        let remedy = if of.iter().any(|&rank| namespace(rank) != namespace(of[0])) {
            "nothing needs it, but shared memory is faster: give the containers one PID namespace (docker run --pid=host or --pid=container:NAME; \
             Kubernetes: shareProcessNamespace: true)"
        } else {
            "nothing needs it, but shared memory is faster: run all ranks as one user, and let them open each other's /proc/PID/fd; \
             GRADSYNC_LOG=info tells what the system refuses"
        };
        let host = &ranks[of[0]].host;
        found.push(problem(
            format!("{} of {host} exchange host memory by {way}: they cannot open each other's memory", listed(&of)),
            remedy,
        ));
    }
}

/// Groups the ranks by a value.
fn by<K: Ord>(ranks: &[Facts], key: impl Fn(&Facts) -> K) -> BTreeMap<K, Vec<usize>> {
    let mut found: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    ranks.iter().for_each(|rank| found.entry(key(rank)).or_default().push(rank.rank));
    found
}

fn listed(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

fn difference(ranks: &[Facts], description: &str, value: fn(&Facts) -> String, remedy: &str) -> Option<Problem> {
    let values = by(ranks, value);
    let quoted: Vec<String> = values.iter().map(|(value, ranks)| format!("{value} ({})", listed(ranks))).collect();
    (values.len() > 1).then(|| problem(format!("ranks have different {description}: {}", quoted.join("; ")), remedy))
}

/// Checks the positions of ranks on their machines.
fn positions(ranks: &[Facts], found: &mut Vec<Problem>) {
    for ((host, local_rank), of) in by(ranks, |rank| (rank.host.clone(), rank.local_rank)) {
        if of.len() > 1 && local_rank.is_some() {
            let text = format!("{} of {host} have the same local rank {}", listed(&of), local_rank.unwrap_or_default());
            found.push(problem(
                text,
                "unset LOCAL_RANK and other variables of a launcher that did not start these ranks",
            ));
        }
    }
    for (host, of) in by(ranks, |rank| rank.host.clone()) {
        let told = ranks.iter().find(|rank| rank.host == host).and_then(|rank| rank.local_world_size);
        if let Some(told) = told.filter(|told| *told != of.len()) {
            let text = format!("{host} has {} ranks, and its launcher says {told}", of.len());
            found.push(problem(
                text,
                "machines need different names; several launchers on one machine share its cores and GPUs",
            ));
        }
        let of_host = || ranks.iter().filter(|rank| rank.host == host);
        let (threads, cores) =
            (of_host().map(|rank| rank.threads).sum::<usize>(), of_host().map(|rank| rank.cores).max());
        let cores = cores.unwrap_or(1);
        if of.len() > 1 && threads > cores.max(of.len()) {
            let text = format!("the {} ranks of {host} use {threads} threads on {cores} cores", of.len());
            found.push(problem(text, "set RAYON_NUM_THREADS to cores / ranks; gradsync launch does"));
        }
    }
}

/// Ranks of several machines that neither NCCL nor MPI connects: processes by themselves carry small data between machines.
fn machines(ranks: &[Facts], found: &mut Vec<Problem>) {
    let machines = by(ranks, |rank| rank.machine.clone());
    let is_connected = |rank: &Facts| rank.uses_mpi || rank.gpu().is_some() && rank.nccl.is_some();
    if machines.len() == 1 || ranks.iter().all(is_connected) {
        return;
    }
    let text = format!(
        "the ranks are on {} machines, with neither MPI nor NCCL: a call between machines may have {} bytes, and gradients have more",
        machines.len(),
        NETWORK_BYTES
    );
    let remedy = "metrics and settings need nothing else; for gradients on CPUs, build the program with the feature `mpi` and start it with mpiexec, \
                  as the page on deployment has it under \"Several CPU machines\"";
    found.push(problem(text, remedy));
}

fn gpus(ranks: &[Facts], found: &mut Vec<Problem>) {
    let with_gpus: Vec<Facts> = ranks.iter().filter(|rank| !rank.gpus.is_empty()).cloned().collect();
    let position = |rank: &Facts| (rank.host.clone(), rank.gpu().map(str::to_owned), rank.gpu_identifier.clone());
    for ((host, gpu, _), of) in by(&with_gpus, position) {
        match gpu {
            Some(gpu) if of.len() > 1 => {
                let remedy = "give each rank a GPU of its own: a LOCAL_RANK from its launcher, or CUDA_VISIBLE_DEVICES";
                found.push(problem(format!("{} share GPU {gpu} of {host}", listed(&of)), remedy));
            }
            None => {
                let remedy = "start no more ranks than GPUs; for a job on CPUs, set CUDA_VISIBLE_DEVICES to nothing";
                found.push(problem(format!("there is no GPU on {host} for {}", listed(&of)), remedy));
            }
            Some(_) => {}
        }
    }
    for (host, of) in by(&with_gpus, |rank| rank.host.clone()) {
        let first = with_gpus.iter().find(|rank| rank.rank == of[0]);
        let pairs = first.map_or(&[][..], |rank| &rank.unreachable_gpus[..]);
        if let (true, Some((device, peer))) = (of.len() > 1, pairs.first()) {
            let text =
                format!("GPU {device} of {host} cannot reach the memory of GPU {peer} (of {} such pairs)", pairs.len());
            let remedy = "nothing needs it, but kernels that read peers' memory are not used: look at `nvidia-smi topo -p2p r`, and at the IOMMU and ACS \
                          settings of the machine";
            found.push(problem(text, remedy));
        }
    }
    let has_cuda = |rank: &&Facts| rank.features.iter().any(|feature| feature == "cuda");
    let without: Vec<usize> =
        with_gpus.iter().filter(has_cuda).filter(|rank| rank.nccl.is_none()).map(|rank| rank.rank).collect();
    if !without.is_empty() {
        let remedy = "install NCCL (libnccl.so.2), or name its library by GRADSYNC_LIBNCCL; `gradsync info` tells where it was looked for";
        found.push(problem(format!("{} find no NCCL", listed(&without)), remedy));
    }
}

/// Whether NCCL finds the interfaces that `NCCL_SOCKET_IFNAME` names.
fn interfaces(ranks: &[Facts], found: &mut Vec<Problem>) {
    for rank in ranks {
        let Some(chosen) = rank.interface.as_deref().filter(|_| rank.nccl.is_some()) else { continue };
        if !rank.interfaces.iter().any(|interface| is_chosen(interface, chosen)) {
            let text = format!(
                "NCCL_SOCKET_IFNAME={chosen} of rank {} fits no interface of {}: {}",
                rank.rank,
                rank.host,
                rank.interfaces.join(", ")
            );
            found.push(problem(text, "name an interface of every machine (`ip link`), or unset it"));
        }
    }
}

/// Whether NCCL may use an interface: prefixes of names, after `=` whole names, after `^` those that it must not use.
/// <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname>
fn is_chosen(interface: &str, chosen: &str) -> bool {
    let (is_excluded, chosen) = chosen.strip_prefix('^').map_or((false, chosen), |rest| (true, rest));
    let (is_whole, chosen) = chosen.strip_prefix('=').map_or((false, chosen), |rest| (true, rest));
    let fits = |name: &str| if is_whole { interface == name } else { interface.starts_with(name) };
    chosen.split(',').any(fits) != is_excluded
}

/// Ranks that MPI connects and whose library is another flavour of MPI than their launcher would each be rank 0 of 1.
fn mpi(ranks: &[Facts], found: &mut Vec<Problem>) {
    let differs = |rank: &&Facts| match (&rank.mpi, &rank.mpi_launcher) {
        (Some(library), Some(launcher)) if rank.uses_mpi => library.contains("Open MPI") != (launcher == "Open MPI"),
        _ => false,
    };
    if let Some(rank) = ranks.iter().find(differs) {
        let (library, launcher) = (rank.mpi.clone().unwrap_or_default(), rank.mpi_launcher.clone().unwrap_or_default());
        let text = format!("rank {} was started by {launcher}, and its MPI library is {library}", rank.rank);
        found.push(problem(text, "use the mpirun that belongs to the library: `which -a mpirun`"));
    }
}

fn limits(ranks: &[Facts], found: &mut Vec<Problem>) {
    for (host, of) in by(ranks, |rank| rank.host.clone()) {
        let memory = ranks.iter().find(|rank| rank.rank == of[0]).and_then(|rank| rank.memory_bytes);
        let need = MEMORY_BYTES * of.len() as u64;
        if let Some(memory) = memory.filter(|memory| *memory < need) {
            let text = format!("the {} ranks of {host} may use {memory} bytes of memory, less than {need}", of.len());
            found.push(problem(
                text,
                "start fewer ranks there, or raise the limit of the container or job: docker run --memory, srun --mem",
            ));
        }
    }
    let mut few =
        |what: &str, need: u64, value: fn(&Facts) -> Option<u64>, concerns: &dyn Fn(&Facts) -> bool, remedy: &str| {
            let is_few = |rank: &&Facts| concerns(rank) && value(rank).is_some_and(|value| value < need);
            let of: Vec<&Facts> = ranks.iter().filter(is_few).collect();
            if let Some(first) = of.first() {
                let numbers: Vec<usize> = of.iter().map(|rank| rank.rank).collect();
                let value = value(first).unwrap_or_default();
                let text = format!("{} of {} have {value} {what}, less than {need}", listed(&numbers), first.host);
                found.push(problem(text, remedy));
            }
        };
    let need = DESCRIPTORS.max(8 * ranks.len() as u64);
    few(
        "descriptors",
        need,
        |rank| rank.descriptors,
        &|_| true,
        "raise `ulimit -n`, or LimitNOFILE of the service that starts the ranks",
    );
    let remedy =
        "raise `ulimit -l` to unlimited for RDMA: in /etc/security/limits.conf, or docker run --ulimit memlock=-1";
    few("bytes of locked memory", LOCKED_BYTES, |rank| rank.locked_bytes, &|rank| rank.has_infiniband, remedy);
    let has_peers = |rank: &Facts| rank.gpus.len() > 1 && rank.nccl.is_some();
    let remedy = "NCCL meets there: docker run --shm-size=1g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm";
    few("bytes of /dev/shm", SHARED_MEMORY_BYTES + 1, |rank| rank.shared_memory_bytes, &has_peers, remedy);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(rank: usize) -> Facts {
        Facts {
            rank,
            world_size: 2,
            local_rank: Some(rank),
            local_world_size: Some(2),
            host: "node".into(),
            machine: "boot".into(),
            pid_namespace: Some("pid:[1]".into()),
            uses_messages_only: false,
            device: rank,
            pid: 1,
            version: "1".into(),
            features: vec!["cuda".into()],
            address: None,
            gpus: vec!["0".into(), "1".into()],
            gpu_identifier: None,
            unreachable_gpus: Vec::new(),
            nccl: Some("2.28".into()),
            mpi: Some("Open MPI v4".into()),
            uses_mpi: false,
            mpi_launcher: None,
            interface: None,
            interfaces: vec!["eth0".into(), "lo".into()],
            has_infiniband: true,
            is_infiniband_disabled: false,
            cores: 8,
            threads: 4,
            descriptors: Some(4096),
            locked_bytes: None,
            memory_bytes: Some(1 << 34),
            shared_memory_bytes: Some(1 << 30),
        }
    }

    fn of(change: impl Fn(&mut Facts), offset: f64) -> Vec<Problem> {
        let mut ranks = [facts(0), facts(1)];
        change(&mut ranks[1]);
        let clock = |seconds| Offset { seconds, uncertainty: 0.001 };
        problems(&ranks, &[clock(0.0), clock(offset)], &[Exchange::Memory, Exchange::Memory])
    }

    #[test]
    fn is_chosen_takes_interfaces_as_nccl_does() {
        let chosen = ["eth", "=eth0", "=ib0,eth0", "^lo", "^=eth"];
        assert!(chosen.iter().all(|chosen| is_chosen("eth0", chosen)));
        assert!(["ib", "=eth", "^eth", "^=eth0", "^lo,eth"].iter().all(|chosen| !is_chosen("eth0", chosen)));
    }

    #[test]
    fn problems_name_the_rank_and_the_value_of_each_fact() {
        assert_eq!(of(|_| {}, 0.2), []);
        type Change = fn(&mut Facts);
        let cases: [(Change, f64, &str); 15] = [
            (|rank| rank.version = "2".into(), 0.0, "1 (rank 0); 2 (rank 1)"),
            (|rank| rank.features.clear(), 0.0, "features of the build"),
            (|rank| rank.nccl = Some("2.18".into()), 0.0, "2.18 (rank 1)"),
            (|rank| rank.interface = Some("eth0".into()), 0.0, "eth0 (rank 1); not set (rank 0)"),
            (|rank| rank.is_infiniband_disabled = true, 0.0, "sockets (rank 1)"),
            (|rank| rank.has_infiniband = false, 0.0, "networks for NCCL"),
            (|rank| rank.threads = 8, 0.0, "use 12 threads on 8 cores"),
            (|rank| rank.gpus = vec!["1".into(), "0".into()], 0.0, "ranks 0, 1 share GPU 0 of node"),
            (|rank| rank.gpus.truncate(1), 0.0, "no GPU on node for rank 1"),
            (
                |rank| (rank.mpi_launcher, rank.uses_mpi) = (Some("MPICH or Intel MPI".into()), true),
                0.0,
                "its MPI library is Open MPI v4",
            ),
            (|rank| rank.descriptors = Some(256), 0.0, "rank 1 of node have 256 descriptors, less than 1024"),
            (|rank| rank.locked_bytes = Some(65536), 0.0, "65536 bytes of locked memory"),
            (|rank| rank.shared_memory_bytes = Some(64 << 20), 0.0, "67108864 bytes of /dev/shm"),
            (
                |rank| (rank.machine, rank.gpus) = ("another".into(), Vec::new()),
                0.0,
                "on 2 machines, with neither MPI nor NCCL: a call between machines may have 1048576 bytes",
            ),
            (|_| {}, -3.0, "the clock of rank 1 (node) differs from rank 0's by -3.0 s"),
        ];
        for (change, offset, words) in cases {
            let found = of(change, offset);
            assert!(found.len() == 1 && found[0].problem.contains(words), "{words}: {found:?}");
        }
        // A launcher of MPI that only starts the ranks may be of another MPI than the one that the machine happens to have.
        assert_eq!(of(|rank| rank.mpi_launcher = Some("MPICH or Intel MPI".into()), 0.0), []);
        let same = [Offset { seconds: 0.0, uncertainty: 0.0 }; 2];
        let on_two_machines = |change: fn(&mut Facts)| {
            let mut ranks = [0, 1].map(|rank| Facts { machine: format!("{rank}"), ..facts(rank) });
            ranks.iter_mut().for_each(change);
            problems(&ranks, &same, &[Exchange::Alone, Exchange::Alone])
        };
        assert_eq!(on_two_machines(|_| {}), []);
        assert_eq!(on_two_machines(|rank| (rank.gpus, rank.nccl, rank.uses_mpi) = (Vec::new(), None, true)), []);
        let few = [0, 1].map(|rank| Facts { memory_bytes: Some(1 << 29), ..facts(rank) });
        let found = problems(&few, &same, &[Exchange::Memory, Exchange::Memory]);
        assert!(found[0].problem.contains("may use 536870912 bytes of memory, less than 1073741824"), "{found:?}");
        let unknown = of(|rank| rank.interface = Some("ib".into()), 0.0);
        assert!(
            unknown.iter().any(|found| found.problem.contains("=ib of rank 1 fits no interface of node: eth0, lo"))
        );
        // Tasks of a scheduler that see one GPU each are on different ones, although each has the number 0.
        let one = [0, 1].map(|rank| Facts {
            gpus: vec!["0".into()],
            device: 0,
            gpu_identifier: Some(rank.to_string()),
            ..facts(rank)
        });
        assert_eq!(problems(&one, &same, &[Exchange::Memory, Exchange::Memory]), []);
        // Two ranks with one number are on one GPU as well.
        assert_eq!(of(|rank| (rank.local_rank, rank.device) = (Some(0), 0), 0.0).len(), 2);
    }

    #[test]
    fn problems_of_exchanges_say_what_would_share_memory() {
        let clocks = [Offset { seconds: 0.0, uncertainty: 0.0 }; 2];
        let exchange_by = |way: Exchange, change: fn(&mut Facts)| {
            let mut ranks = [facts(0), facts(1)];
            change(&mut ranks[1]);
            problems(&ranks, &clocks, &[way.clone(), way])
        };
        let by_sockets = |change| exchange_by(Exchange::Sockets, change);
        let found = by_sockets(|rank| rank.pid_namespace = Some("pid:[2]".into()));
        assert!(found.len() == 1 && found[0].problem.starts_with("ranks 0, 1 of node exchange"), "{found:?}");
        assert!(found[0].remedy.contains("shareProcessNamespace"), "{found:?}");
        assert!(by_sockets(|_| {})[0].remedy.contains("one user"));
        assert!(by_sockets(|_| {})[0].problem.contains("exchange host memory by sockets"));
        assert_eq!(by_sockets(|rank| rank.uses_messages_only = true), []);
        let by_mpi = exchange_by(Exchange::Mpi, |_| {});
        assert!(
            by_mpi.len() == 1 && by_mpi[0].problem.contains("exchange host memory by MPI's messages"),
            "{by_mpi:?}"
        );
        // MPI's ranks of several machines share no memory, and nothing is wrong with that.
        let of_two_machines = [0, 1, 2].map(|rank| Facts {
            machine: if rank == 2 { "another".into() } else { "boot".into() },
            host: if rank == 2 { "other".into() } else { "node".into() },
            gpus: Vec::new(),
            local_world_size: None,
            uses_mpi: true,
            ..facts(rank)
        });
        let exchanges = [Exchange::Mpi, Exchange::Mpi, Exchange::Alone];
        assert_eq!(problems(&of_two_machines, &[clocks[0]; 3], &exchanges), []);
        let failed = Exchange::Failed("no route".into());
        let found = problems(&[facts(0), facts(1)], &clocks, &[failed, Exchange::Memory]);
        assert!(
            found.len() == 1 && found[0].problem.contains("rank 0 of node") && found[0].problem.contains("no route")
        );
    }
}
