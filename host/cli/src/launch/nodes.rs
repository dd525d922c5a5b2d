//! The machines of a job: their launchers join a group of their own, in which they agree on the ranks' numbers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use gradsync::bootstrap::{Rendezvous, Secret};
use serde::{Deserialize, Serialize};

use super::Launch;
use super::environment::NodeRanks;
use super::machines::Machines;
use super::secret;
use super::signals::Listener;
use super::timing::AGREEMENT;

/// The address at which the launchers of several machines connect.
#[derive(Debug)]
struct Meeting {
    host: String,
    port: u16,
    secret: Secret,
}

/// The machines of a job.
#[derive(Debug)]
pub(super) struct Nodes {
    count: usize,
    own: usize,
    /// The host of rank 0, and its port, if the user has set them.
    master: Option<(String, u16)>,
    /// The address of the launchers' group, if there are several machines.
    meeting: Option<Meeting>,
}

/// The message that the launchers exchange before ranks start.
#[derive(Serialize, Deserialize)]
struct Hello {
    ranks: usize,
    /// From machine 0: the port of rank 0, and a nonce for the secret of this start.
    start: Option<(u16, [u8; 32])>,
}

impl Nodes {
    /// Checks the arguments.
    pub(super) fn of(launch: &Launch) -> Result<Self, String> {
        let (count, own) = (launch.nodes as usize, launch.node_rank as usize);
        if own >= count {
            return Err(format!("--node-rank {own} must be less than --nodes {count}"));
        }
        let master = launch.master.as_deref().map(address).transpose()?;
        let given = secret::given(launch.secret_file.as_deref())?;
        let meeting = match (count, &master, given) {
            (1, _, _) => None,
            (_, Some((host, port)), Some(secret)) => Some(Meeting { host: host.clone(), port: *port, secret }),
            (_, _, _) => {
                return Err("machines prove to each other that they know a secret: make one with `gradsync secret`, and give it to all of them in a \
                            file of mode 0600 (--secret-file) or in GRADSYNC_SECRET"
                    .into());
            }
        };
        Ok(Nodes { count, own, master, meeting })
    }

    /// Agrees on the numbers of the ranks of one start. With several machines, their launchers stay in touch while the ranks run.
    pub(super) fn meet(
        &self,
        launch: &Launch,
        generation: u32,
        events: &Listener,
    ) -> Result<(NodeRanks, Option<Arc<Machines>>), String> {
        let ranks = launch.ranks as usize;
        let node = |address, port, secret, nonce: [u8; 32]| NodeRanks {
            node: (self.own, self.count),
            first_rank: 0,
            local_world_size: ranks,
            world_size: ranks,
            address,
            port,
            secret,
            generation,
            restarts: launch.restarts,
            deadlines: [("GRADSYNC_JOIN_DEADLINE", launch.join_deadline), ("GRADSYNC_DEADLINE", launch.deadline)],
            job: nonce[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
        };
        let Some(Meeting { host, port, secret }) = &self.meeting else {
            let secret = Secret::generate().map_err(|error| error.to_string())?;
            let (address, port) = match &self.master {
                Some((host, port)) => (host.clone(), launch.rank_port.unwrap_or(*port)),
                None => {
                    let (address, port) = free_on_loopback()?;
                    (address.to_string(), launch.rank_port.unwrap_or(port))
                }
            };
            return Ok((node(address, port, secret, nonce()?), None));
        };
        let mut rendezvous =
            Rendezvous::tcp(host.clone(), *port, secret.clone()).with_generation(u64::from(generation));
        if let Some(seconds) = launch.join_deadline {
            rendezvous = rendezvous.with_deadline(Duration::from_secs_f64(seconds));
        }
        let (own, count) = (self.own, self.count);
        let member =
            events.run(move || rendezvous.join(own, count)).map_err(|error| of_machines(own, &error.to_string()))?;
        let hello = Hello { ranks, start: (own == 0).then(|| start(launch)).transpose()? };
        let bytes = postcard::to_stdvec(&hello).map_err(|error| error.to_string())?;
        let (member, all) = events.run(move || {
            let all = member.all_gather(&bytes, AGREEMENT);
            (member, all)
        });
        let all = all.map_err(|error| error.to_string())?;
        let all = all.iter().map(|bytes| postcard::from_bytes(bytes)).collect::<Result<Vec<Hello>, _>>();
        let all = all.map_err(|error| format!("a machine has another version of this program: {error}"))?;
        let Some((rank_port, nonce)) = all[0].start else {
            return Err("machine 0 has another version of this program".into());
        };
        let node = NodeRanks {
            first_rank: all[..own].iter().map(|hello| hello.ranks).sum(),
            world_size: all.iter().map(|hello| hello.ranks).sum(),
            ..node(host.clone(), rank_port, secret.derived(&nonce), nonce)
        };
        let machines = events.run(move || Machines::new(member)).map_err(|error| error.to_string())?;
        Ok((node, Some(Arc::new(machines))))
    }
}

/// The error of a join of launchers, each of which is the rank of a machine in their group: in words that cannot be taken for ranks of the job.
fn of_machines(own: usize, error: &str) -> String {
    let word = |word| match word {
        "rank" => "machine",
        "ranks" => "machines",
        other => other,
    };
    let words: Vec<&str> = error.split(' ').map(word).collect();
    format!("machine {own}: {}", words.join(" ").replace("a world size of", "--nodes"))
}

fn start(launch: &Launch) -> Result<(u16, [u8; 32]), String> {
    let port = launch.rank_port.map_or_else(|| free_port(Ipv4Addr::UNSPECIFIED.into()), Ok)?;
    Ok((port, nonce()?))
}

fn nonce() -> Result<[u8; 32], String> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| format!("no random bytes: {error}"))?;
    Ok(nonce)
}

/// A loopback address of this machine, which may have IPv6 alone, and a port there on which no process listens now.
fn free_on_loopback() -> Result<(IpAddr, u16), String> {
    let on = |address: IpAddr| free_port(address).map(|port| (address, port));
    on(Ipv4Addr::LOCALHOST.into()).or_else(|first| {
        on(Ipv6Addr::LOCALHOST.into()).map_err(|second| format!("no loopback address: {first}; {second}"))
    })
}

/// A port on which no process listens now.
fn free_port(address: IpAddr) -> Result<u16, String> {
    let listener = TcpListener::bind((address, 0)).map_err(|error| format!("no free port at {address}: {error}"))?;
    Ok(listener.local_addr().map_err(|error| error.to_string())?.port())
}

/// Splits `HOST:PORT`; an IPv6 address is in brackets.
fn address(text: &str) -> Result<(String, u16), String> {
    let refusal = || format!("--master {text}: it must be HOST:PORT, with a port from 1 to 65535");
    let (host, port) = text.rsplit_once(':').ok_or_else(refusal)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(refusal)?;
    if host.is_empty() { Err(refusal()) } else { Ok((host.to_owned(), port)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_machines_words_errors_of_launchers() {
        let missing = of_machines(0, "ranks [1, 3] did not join within 6s");
        assert_eq!(missing, "machine 0: machines [1, 3] did not join within 6s");
        let unlike = of_machines(1, "rank 0 was told a world size of 2, rank 1 one of 3");
        assert_eq!(unlike, "machine 1: machine 0 was told --nodes 2, machine 1 one of 3");
    }

    #[test]
    fn address_of_a_master_is_a_host_and_a_port() {
        assert_eq!(address("node-0:29500"), Ok(("node-0".into(), 29500)));
        assert_eq!(address("[fe80::1]:7"), Ok(("fe80::1".into(), 7)));
        for wrong in ["node-0", "node-0:", ":5", "node-0:0", "node-0:65536"] {
            assert!(address(wrong).unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
