//! The form of rank 0's address: a name or an address of a machine, which is checked before anybody looks it up, because a look-up of
//! something else fails as slowly as one of a machine that is still starting.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The longest name, and the longest part between two dots (RFC 1035).
const LONGEST: (usize, usize) = (253, 63);

/// Returns the host as a look-up takes it: without white space around it, and an IPv6 address without its brackets.
///
/// # Errors
/// The reason why the text names no machine.
pub(in crate::bootstrap) fn host(text: &str) -> Result<String, &'static str> {
    let host = text.trim_ascii();
    if host.is_empty() {
        return Err("it must name the machine of rank 0");
    }
    if host.contains("://") {
        return Err("it must be a name or an address alone, without a scheme");
    }
    if host.contains(|character: char| character.is_whitespace() || character.is_control()) {
        return Err("no name or address of a machine contains white space");
    }
    if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return if is_ipv6(inner)? { Ok(inner.to_owned()) } else { Err("brackets enclose an IPv6 address") };
    }
    if is_ipv6(host)? {
        return Ok(host.to_owned());
    }
    if let Some((before, port)) = host.rsplit_once(':') {
        let is_host = !before.contains(':') || before.ends_with(']');
        let is_port = is_host && !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit());
        return Err(if is_port {
            "it must be a name or an address alone: the port is given by itself, as MASTER_PORT"
        } else {
            "only IPv6 addresses contain colons, and this is none"
        });
    }
    match host.parse::<Ipv4Addr>() {
        Ok(address) if address.is_multicast() || address.is_broadcast() => Err("it is an address of no single machine"),
        Ok(_) => Ok(host.to_owned()),
        Err(_) => name(host).map(|()| host.to_owned()),
    }
}

/// Whether this is an IPv6 address, perhaps with the interface of a link-local one behind `%`.
fn is_ipv6(text: &str) -> Result<bool, &'static str> {
    let (address, interface) = text.split_once('%').map_or((text, None), |(address, rest)| (address, Some(rest)));
    match address.parse::<Ipv6Addr>() {
        Ok(address) if address.is_multicast() => Err("it is an address of no single machine"),
        Ok(_) if interface == Some("") => Err("the interface is missing after `%`"),
        Ok(address) if address.is_unicast_link_local() && interface.is_none() => {
            Err("a link-local address needs the interface behind it, as in fe80::1%eth0")
        }
        Ok(_) => Ok(true),
        Err(_) => Ok(false),
    }
}

/// Checks that a text may be a name (RFC 1123; with underscores, which container networks use).
fn name(text: &str) -> Result<(), &'static str> {
    let whole = text.strip_suffix('.').unwrap_or(text);
    let is_part = |part: &str| {
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        !part.is_empty() && part.len() <= LONGEST.1 && part.bytes().all(is_known) && !part.starts_with('-')
    };
    if whole.len() > LONGEST.0 || !whole.split('.').all(is_part) {
        return Err("it is no name of a machine: names have letters, digits, `-`, `_` and single dots");
    }
    // The system takes fewer numbers for an abbreviated address. A container may have a long number as its name.
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let is_address = whole.rsplit('.').next().is_some_and(is_number);
    if is_address && (whole.contains('.') || whole.parse::<u32>().is_ok()) {
        return Err("an IPv4 address has four numbers from 0 to 255");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_takes_names_and_addresses_as_a_lookup_does() {
        for (text, expected) in [
            ("node-7", "node-7"),
            (" node_7.cluster.local.\n", "node_7.cluster.local."),
            ("10.0.0.5", "10.0.0.5"),
            ("0.0.0.0", "0.0.0.0"),
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("[fe80::1%eth0]", "fe80::1%eth0"),
            ("fe80::1%eth0", "fe80::1%eth0"),
            ("::ffff:10.0.0.5", "::ffff:10.0.0.5"),
            ("3com", "3com"),
            ("123456789012", "123456789012"),
        ] {
            assert_eq!(host(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn host_refuses_impossible_addresses_with_the_reason() {
        for (text, words) in [
            ("", "must name the machine"),
            (" \t", "must name the machine"),
            ("node 7", "white space"),
            ("node\u{a0}7", "white space"),
            ("tcp://node-7", "scheme"),
            ("node-7:29500", "MASTER_PORT"),
            ("10.0.0.5:29500", "MASTER_PORT"),
            ("[::1]:29500", "MASTER_PORT"),
            ("[node-7]", "brackets"),
            ("[::1", "colons"),
            ("::g", "colons"),
            ("node-7:", "colons"),
            ("fe80::1%", "interface"),
            ("fe80::1", "interface"),
            ("[febf::7]", "interface"),
            ("ff02::1", "no single machine"),
            ("224.0.0.1", "no single machine"),
            ("255.255.255.255", "no single machine"),
            ("10.0.0.256", "four numbers"),
            ("10.0.0", "four numbers"),
            ("29500", "four numbers"),
            ("node..7", "no name"),
            (".node", "no name"),
            ("-node", "no name"),
            ("${MASTER}", "no name"),
            ("node/7", "no name"),
            ("user@node", "no name"),
            (&"n".repeat(64), "no name"),
            (&["n"; 128].join("."), "no name"),
        ] {
            let reason = host(text).expect_err(text);
            assert!(reason.contains(words), "{text:?}: {reason}");
        }
    }
}
