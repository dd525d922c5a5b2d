//! Host addresses: the addresses at which ranks of other machines may reach this one, the order in which to try another rank's addresses,
//! and name look-ups with a deadline.
//!
//! This module never connects to a rank, and trusts no address: the process that answers there has to prove that it belongs to the group.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use if_addrs::{IfAddr, IfOperStatus, Interface};

/// The most interface addresses to publish: machines that run many containers have hundreds.
const MOST_ADDRESSES: usize = 32;

/// How long rank 0 waits for the addresses of its own name. Other ranks can look the name up too, and rank 0's interfaces are known
/// without a look-up.
pub(super) const OWN_NAME_TIME: Duration = Duration::from_millis(500);

/// All addresses that may lead to this machine: loopback for ranks on it, which answers at once; the addresses of its host name; the
/// addresses of its interfaces; and the host name itself if it has no address that others could use, or none within `time`.
pub(super) fn own(port: u16, time: Duration) -> Vec<String> {
    let name = gethostname::gethostname().to_string_lossy().into_owned();
    let of_name: Vec<IpAddr> = match Names::default().resolve(&name, port, time) {
        Ok(addresses) => addresses.iter().map(SocketAddr::ip).filter(|ip| !ip.is_loopback()).collect(),
        Err(error) => {
            tracing::debug!(%error, name, "the own host name has no address");
            Vec::new()
        }
    };
    let of_interfaces = interfaces().into_iter().map(|interface| interface.ip()).take(MOST_ADDRESSES);
    let mut hosts = vec![Ipv4Addr::LOCALHOST.to_string()];
    let addresses = of_name.iter().copied().chain(of_interfaces).map(|ip| ip.to_string());
    for host in addresses.chain(of_name.is_empty().then_some(name)) {
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    hosts
}

/// Name look-ups with a deadline, which the system's own look-up does not have: a silent name server may take minutes.
///
/// Each look-up has a thread. One that exceeds its time is left to end when the system gives up; a second query of the same name waits
/// for the same look-up.
#[derive(Debug)]
pub(super) struct Names {
    look_up: fn(&str, u16) -> io::Result<Vec<SocketAddr>>,
    unanswered: HashMap<(String, u16), Receiver<io::Result<Vec<SocketAddr>>>>,
}

impl Default for Names {
    fn default() -> Self {
        let look_up = |host: &str, port| (host, port).to_socket_addrs().map(Iterator::collect);
        Names { look_up, unanswered: HashMap::new() }
    }
}

impl Names {
    /// Returns the addresses of a host, within `time`. A host that is an address already is not looked up.
    pub(super) fn resolve(&mut self, host: &str, port: u16, time: Duration) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = host.parse() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let question = (host.to_owned(), port);
        let answer = match self.unanswered.remove(&question) {
            Some(answer) => answer,
            None => self.ask(question.clone())?,
        };
        answer.recv_timeout(time).unwrap_or_else(|error| {
            if error == RecvTimeoutError::Timeout {
                self.unanswered.insert(question, answer);
            }
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer to the look-up of the name within {time:?}"),
            ))
        })
    }

    fn ask(&self, (host, port): (String, u16)) -> io::Result<Receiver<io::Result<Vec<SocketAddr>>>> {
        let ((sender, answer), look_up) = (channel(), self.look_up);
        // The receiver may be gone.
        let body = move || _ = sender.send(look_up(&host, port));
        thread::Builder::new()
            .name("gradsync-resolve".into())
            .spawn(body)
            .map_err(|error| io::Error::other(NoThread(error)))?;
        Ok(answer)
    }

    /// Makes look-ups for a test, with `look_up` as the system's look-up.
    #[cfg(test)]
    pub(super) fn with(look_up: fn(&str, u16) -> io::Result<Vec<SocketAddr>>) -> Self {
        Names { look_up, ..Names::default() }
    }
}

/// The error of a look-up that was not begun.
#[derive(Debug, thiserror::Error)]
#[error("no thread for a look-up: {0}")]
struct NoThread(io::Error);

/// Whether [`Names::resolve`] has failed because the system refused this process a thread.
pub(super) fn is_lack_of_threads(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<NoThread>())
}

/// Sorts `hosts` by distance: loopback addresses first, then addresses in a network of this machine, then the rest, because a connection
/// to an address without a route takes long to fail.
pub(super) fn nearest_first(hosts: &[String]) -> Vec<&str> {
    let networks: Vec<IfAddr> = interfaces().into_iter().map(|interface| interface.addr).collect();
    let distance = |host: &&str| match host.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => 0,
        Ok(ip) if networks.iter().any(|network| is_in(network, ip)) => 1,
        _ => 2,
    };
    let mut hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    hosts.sort_by_key(distance);
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
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;

    #[test]
    fn every_address_leads_here_and_loopback_comes_first() {
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let hosts = own(port, Duration::from_secs(60));
        assert_eq!(hosts[0], "127.0.0.1");
        let of_interfaces: Vec<IpAddr> = interfaces().iter().map(Interface::ip).collect();
        for ip in of_interfaces.iter().take(MOST_ADDRESSES) {
            assert_eq!(hosts.iter().filter(|host| **host == ip.to_string()).count(), 1, "{ip} in {hosts:?}");
            if ip.is_ipv4() {
                std::net::TcpStream::connect((*ip, port)).unwrap_or_else(|error| panic!("{ip}: {error}"));
            }
        }
    }

    #[test]
    fn a_name_that_nobody_answers_for_takes_its_time_and_no_more() {
        static LOOKED_UP: AtomicUsize = AtomicUsize::new(0);
        let mut names = Names::with(|host, port| {
            LOOKED_UP.fetch_add(1, Ordering::Relaxed);
            if host == "slow" {
                thread::sleep(Duration::from_millis(600));
            }
            Ok(vec![(Ipv4Addr::LOCALHOST, port).into()])
        });
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 7));
        let start = Instant::now();
        for _ in 0..2 {
            let error = names.resolve("slow", 7, Duration::from_millis(50)).unwrap_err();
            assert!(error.to_string().contains("within 50ms"), "{error}");
        }
        assert_eq!(names.resolve("quick", 7, Duration::from_secs(60)).unwrap(), [address]);
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        assert_eq!(names.resolve("slow", 7, Duration::from_secs(60)).unwrap(), [address]);
        assert_eq!(names.resolve("127.0.0.1", 7, Duration::ZERO).unwrap(), [address]);
        assert_eq!(LOOKED_UP.load(Ordering::Relaxed), 2, "once for each name");
    }

    #[test]
    fn what_is_near_is_tried_first_and_the_rest_in_its_order() {
        let mut hosts: Vec<String> = ["a.name", "203.0.113.7", "127.0.0.1", "2001:db8::7"].map(String::from).to_vec();
        assert_eq!(nearest_first(&hosts), ["127.0.0.1", "a.name", "203.0.113.7", "2001:db8::7"]);
        for interface in interfaces() {
            hosts.push(interface.ip().to_string());
            assert_eq!(nearest_first(&hosts)[..2], ["127.0.0.1", hosts[4].as_str()]);
            hosts.pop();
        }
    }

    #[test]
    fn a_network_is_what_its_mask_says() {
        let (ip, netmask) = (Ipv4Addr::new(10, 77, 4, 1), Ipv4Addr::new(255, 255, 252, 0));
        let network = IfAddr::V4(if_addrs::Ifv4Addr { ip, netmask, prefixlen: 22, broadcast: None });
        for (other, is_near) in [("10.77.7.254", true), ("10.77.8.1", false), ("::ffff:10.77.4.2", false)] {
            assert_eq!(is_in(&network, other.parse().unwrap()), is_near, "{other}");
        }
    }
}
