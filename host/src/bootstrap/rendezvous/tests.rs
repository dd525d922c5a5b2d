//! Rendezvous by the variables of launchers: torchrun, whose agent listens at `MASTER_PORT`, and launchers that give rank 0 another
//! `MASTER_ADDR` than the other ranks.

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

use super::*;

const PLENTY: Duration = Duration::from_secs(60);

/// The variables that torchrun 2.11 sets, for a rank of one machine.
fn torchrun(rank: usize, world_size: usize, master_port: u16, run_id: &str) -> Launch {
    let variables = |name: &str| {
        let text = match name {
            "RANK" | "LOCAL_RANK" | "ROLE_RANK" => rank.to_string(),
            "WORLD_SIZE" | "LOCAL_WORLD_SIZE" | "ROLE_WORLD_SIZE" => world_size.to_string(),
            "GROUP_RANK" | "TORCHELASTIC_RESTART_COUNT" => "0".into(),
            "GROUP_WORLD_SIZE" | "OMP_NUM_THREADS" | "TORCH_NCCL_ASYNC_ERROR_HANDLING" => "1".into(),
            "MASTER_ADDR" => "127.0.0.1".into(),
            "MASTER_PORT" => master_port.to_string(),
            "TORCHELASTIC_RUN_ID" => run_id.into(),
            "TORCHELASTIC_USE_AGENT_STORE" => "True".into(),
            _ => return None,
        };
        Some(text)
    };
    Launch::from_variables(variables).unwrap()
}

fn secret() -> Secret {
    Secret::from_bytes([7; 32])
}

fn of_launch(launch: &Launch) -> Rendezvous {
    Rendezvous::at_master(launch.master.clone().unwrap(), launch, secret(), None).with_deadline(PLENTY)
}

fn address(rendezvous: &Rendezvous) -> &Address {
    let Way::Tcp(address) = &rendezvous.way else { panic!("{rendezvous:?}") };
    address
}

/// Joins as all ranks, each on a thread, and lets them exchange a word.
fn meet(rendezvous: impl Fn(usize) -> Rendezvous + Sync, world_size: usize, word: &str) {
    thread::scope(|scope| {
        for rank in 0..world_size {
            let rendezvous = rendezvous(rank);
            scope.spawn(move || {
                let member = rendezvous.join(rank, world_size).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                let words = member.all_gather(word.as_bytes(), PLENTY).unwrap();
                assert!(words.iter().all(|other| other == word.as_bytes()), "{word} met others");
            });
        }
    });
}

/// A program that listens at a port of loopback and treats every connection in some way, as long as the test runs.
fn foreign(port: u16, treat: fn(TcpStream) -> Option<TcpStream>) -> Option<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut held = Vec::new();
        listener.incoming().flatten().for_each(|connection| held.extend(treat(connection)));
    });
    Some(port)
}

#[test]
fn torchruns_agent_and_other_programs_at_the_ports_do_not_keep_ranks_apart() {
    let agent = foreign(0, Some).expect("a free port");
    let ports = torchrun(0, 3, agent, "job").torchrun.unwrap().ports(agent);
    // Where the test cannot listen, another program does.
    foreign(ports[0], Some);
    foreign(ports[1], |mut connection| {
        connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").ok().map(|()| connection)
    });
    foreign(ports[2], |_| None);
    meet(|rank| of_launch(&torchrun(rank, 3, agent, "job")), 3, "torchrun");
}

#[test]
fn jobs_of_torchrun_with_one_secret_do_not_mix_at_one_port() {
    let jobs = ["first", "second"].map(|run_id| of_launch(&torchrun(0, 2, 29_500, run_id)));
    assert_ne!(address(&jobs[0]).secret.bytes(), address(&jobs[1]).secret.bytes());
    assert_ne!(address(&jobs[0]).ports, address(&jobs[1]).ports);
    let ports = address(&jobs[0]).ports.clone();
    let at_the_same = |job: &Rendezvous| {
        let address = Address { ports: ports.clone(), ..address(job).clone() };
        Rendezvous { way: Way::Tcp(address), ..job.clone() }
    };
    thread::scope(|scope| {
        for (job, word) in jobs.iter().zip(["first", "second"]) {
            scope.spawn(move || meet(|_| at_the_same(job), 2, word));
        }
    });
}

#[test]
fn a_start_of_torchrun_is_a_generation_on_one_machine_only() {
    let of = |nodes: &str, restarts: &str| {
        let variables = |name: &str| {
            let text = match name {
                "RANK" => "0",
                "WORLD_SIZE" => "2",
                "MASTER_ADDR" => "node-0",
                "MASTER_PORT" => "29500",
                "TORCHELASTIC_RUN_ID" => "none",
                "TORCHELASTIC_RESTART_COUNT" => restarts,
                "GROUP_WORLD_SIZE" => nodes,
                _ => return None,
            };
            Some(text.to_owned())
        };
        Launch::from_variables(variables)
    };
    let generation = |nodes: &str| of_launch(&of(nodes, "3").unwrap()).generation;
    assert_eq!((generation("1"), generation("2")), (3, 0), "agents of several machines count separately");
    let launch = of("1", "3").unwrap();
    let given = Rendezvous::at_master(launch.master.clone().unwrap(), &launch, secret(), Some(5));
    assert_eq!(given.generation, 5);
    let error = of("1", "x").unwrap_err().to_string();
    assert!(error.contains("TORCHELASTIC_RESTART_COUNT"), "{error}");
}

#[test]
fn the_ports_of_torchrun_are_the_documented_ones() {
    for (port, run_id) in [(29_500, "none"), (20_000, "job"), (41_234, "")] {
        let ports = torchrun(0, 2, port, run_id).torchrun.unwrap().ports(port);
        assert_eq!(ports, torchrun(1, 2, port, run_id).torchrun.unwrap().ports(port));
        let distinct: std::collections::HashSet<u16> = ports.iter().copied().collect();
        assert_eq!((ports.len(), distinct.len()), (8, 8), "{ports:?}");
        assert!(ports.iter().all(|other| (20_000..28_000).contains(other) && *other != port), "{ports:?}");
    }
}

/// Kubeflow gives rank 0 `localhost`, and the other ranks the name of a service.
#[test]
fn rank_0_at_localhost_is_found_by_another_name_unless_all_ranks_are_known_to_be_local() {
    let launch = |rank: usize, master: &str, port: u16, local: Option<usize>| {
        let variables = |name: &str| match name {
            "RANK" => Some(rank.to_string()),
            "WORLD_SIZE" => Some("2".into()),
            "LOCAL_WORLD_SIZE" => local.map(|size| size.to_string()),
            "MASTER_ADDR" => Some(master.into()),
            "MASTER_PORT" => Some(port.to_string()),
            _ => None,
        };
        Launch::from_variables(variables).unwrap()
    };
    let free = || TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    for local in [None, Some(1)] {
        let port = free();
        meet(|rank| of_launch(&launch(rank, ["localhost", "127.0.0.2"][rank], port, local)), 2, "Kubeflow");
    }
    let rendezvous = of_launch(&launch(0, "localhost", free(), Some(2)));
    assert!(address(&rendezvous).may_confine);
    let port = address(&rendezvous).ports[0];
    let rank_0 = thread::spawn(move || rendezvous.with_deadline(Duration::from_secs(1)).join(0, 2));
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(!rank_0.is_finished(), "nobody listened");
    }
    assert!(TcpStream::connect(("127.0.0.2", port)).is_err(), "others than local ranks can come");
    assert!(rank_0.join().unwrap().is_err());
}
