//! A rendezvous relayed by MPI, which already connects the ranks: it broadcasts rank 0's invitation, which has the addresses where rank 0
//! listens and a fresh secret. Any process with the invitation can join.
//!
//! Ranks trust no address of an invitation: the process that answers there has to prove that it knows the secret.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use if_addrs::{IfAddr, IfOperStatus, Interface};
use serde::{Deserialize, Serialize};

use super::admission::Applicant;
use super::client::{self, Invitation};
use super::frame::decode;
use super::member::Member;
use super::secret::Secret;
use super::server::{self, Service};
use crate::error::BootstrapError;
use crate::trace::{RankKind, Recorder};

/// The most interface addresses in an invitation: machines that run many containers have hundreds.
const MOST_ADDRESSES: usize = 32;

#[derive(Serialize, Deserialize)]
struct Content {
    hosts: Vec<String>,
    port: u16,
    secret: [u8; 32],
}

/// Rank 0 with its listener, before the join.
#[derive(Debug)]
pub(crate) struct Host {
    listener: TcpListener,
    port: u16,
    secret: Secret,
}

impl Host {
    /// Listens on a free port of all interfaces.
    pub(crate) fn open() -> Result<Self, BootstrapError> {
        let listener = server::listen(None, 0)?;
        Ok(Host { port: server::port(&listener)?, listener, secret: Secret::random()? })
    }

    /// The invitation, which the other ranks pass to [`accept`].
    pub(crate) fn invitation(&self) -> Vec<u8> {
        let content = Content { hosts: own_hosts(), port: self.port, secret: *self.secret.bytes() };
        postcard::to_stdvec(&content).expect("plain data")
    }

    /// Joins as rank 0, and waits until all ranks have joined.
    pub(crate) fn join(self, world_size: usize, deadline: Duration) -> Result<Member, BootstrapError> {
        let applicant = applicant(0, world_size, deadline);
        let service = Service::new(None, self.secret, "the address that rank 0 sent by MPI".into());
        applicant.joining(|| server::join(self.listener, service, &applicant))
    }
}

/// Joins the group of rank 0's `invitation`.
pub(crate) fn accept(
    invitation: &[u8],
    rank: usize,
    world_size: usize,
    deadline: Duration,
) -> Result<Member, BootstrapError> {
    let read = || -> io::Result<Invitation> {
        let Content { hosts, port, secret } = decode(invitation)?;
        Ok(Invitation { hosts: nearest_first(hosts), ports: vec![port], secret: Secret::from_bytes(secret) })
    };
    let address = "the place that rank 0 named".into();
    let invitation =
        read().map_err(|error| BootstrapError::Unreachable { address, deadline, reason: error.to_string() })?;
    // An address of rank 0, such as loopback, may belong to another machine when seen from here.
    let is_final = |error: &BootstrapError| {
        !matches!(
            error,
            BootstrapError::Unreachable { .. }
                | BootstrapError::WrongSecret { .. }
                | BootstrapError::VersionMismatch { .. }
        )
    };
    let applicant = applicant(rank, world_size, deadline);
    applicant.joining(|| client::join(&applicant, &invitation, is_final))
}

fn applicant(rank: usize, world_size: usize, deadline: Duration) -> Applicant {
    let recorder = Recorder::always(RankKind::Processes, "channel", rank, world_size);
    Applicant { rank, world_size, generation: 0, deadline, end: Instant::now().checked_add(deadline), recorder }
}

/// All hosts that may lead to this machine: loopback for ranks on it, which answers at once; its name; and the addresses of its interfaces.
fn own_hosts() -> Vec<String> {
    let name = gethostname::gethostname().to_string_lossy().into_owned();
    let of_interfaces = interfaces().into_iter().map(|interface| interface.ip().to_string()).take(MOST_ADDRESSES);
    [Ipv4Addr::LOCALHOST.to_string(), name].into_iter().chain(of_interfaces).collect()
}

/// Sorts `hosts` by distance: loopback addresses first, then addresses in a network of this machine, then the rest, because a connection
/// to an address without a route takes long to fail.
fn nearest_first(mut hosts: Vec<String>) -> Vec<String> {
    let networks: Vec<IfAddr> = interfaces().into_iter().map(|interface| interface.addr).collect();
    hosts.sort_by_key(|host| match host.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => 0,
        Ok(ip) if networks.iter().any(|network| is_in(network, ip)) => 1,
        _ => 2,
    });
    hosts
}

/// The network interfaces by which other machines could reach this one.
fn interfaces() -> Vec<Interface> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_else(|error| {
        tracing::debug!(%error, "the system does not tell its network interfaces");
        Vec::new()
    });
    let is_down = |status: &IfOperStatus| {
        matches!(status, IfOperStatus::Down | IfOperStatus::NotPresent | IfOperStatus::LowerLayerDown)
    };
    let leads_here = |interface: &Interface| {
        !interface.is_loopback() && !interface.is_link_local() && !is_down(&interface.oper_status)
    };
    interfaces.into_iter().filter(leads_here).collect()
}

fn is_in(network: &IfAddr, ip: IpAddr) -> bool {
    match (network, ip) {
        (IfAddr::V4(own), IpAddr::V4(ip)) => {
            own.ip.to_bits() & own.netmask.to_bits() == ip.to_bits() & own.netmask.to_bits()
        }
        (IfAddr::V6(own), IpAddr::V6(ip)) => {
            own.ip.to_bits() & own.netmask.to_bits() == ip.to_bits() & own.netmask.to_bits()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_hosts_lead_here_with_loopback_first() {
        let host = Host::open().unwrap();
        let hosts = own_hosts();
        assert_eq!(hosts[0], "127.0.0.1");
        let of_interfaces: Vec<IpAddr> = interfaces().iter().map(Interface::ip).collect();
        for ip in of_interfaces.iter().take(MOST_ADDRESSES) {
            assert_eq!(hosts.iter().filter(|host| **host == ip.to_string()).count(), 1, "{ip} in {hosts:?}");
            if ip.is_ipv4() {
                let address = (*ip, host.port);
                std::net::TcpStream::connect(address).unwrap_or_else(|error| panic!("{address:?}: {error}"));
            }
        }
    }

    #[test]
    fn nearest_first_keeps_the_order_of_the_rest() {
        let mut hosts: Vec<String> = ["a.name", "203.0.113.7", "127.0.0.1", "2001:db8::7"].map(String::from).to_vec();
        assert_eq!(nearest_first(hosts.clone()), ["127.0.0.1", "a.name", "203.0.113.7", "2001:db8::7"]);
        for interface in interfaces() {
            hosts.push(interface.ip().to_string());
            assert_eq!(nearest_first(hosts.clone())[..2], ["127.0.0.1", hosts[4].as_str()]);
            hosts.pop();
        }
    }

    #[test]
    fn is_in_takes_the_network_of_a_mask() {
        let (ip, netmask) = (Ipv4Addr::new(10, 77, 4, 1), Ipv4Addr::new(255, 255, 252, 0));
        let network = IfAddr::V4(if_addrs::Ifv4Addr { ip, netmask, prefixlen: 22, broadcast: None });
        for (other, is_near) in [("10.77.7.254", true), ("10.77.8.1", false), ("::ffff:10.77.4.2", false)] {
            assert_eq!(is_in(&network, other.parse().unwrap()), is_near, "{other}");
        }
    }
}
