//! The list of checks.

/// A check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// The first column of `margay check`.
    pub name: &'static str,
    /// What it looks at.
    pub looks_at: &'static str,
    /// Whether it belongs to the way to a peer; otherwise to this host.
    pub of_peer: bool,
}

const fn of_host(name: &'static str, looks_at: &'static str) -> Check {
    Check { name, looks_at, of_peer: false }
}

const fn of_peer(name: &'static str, looks_at: &'static str) -> Check {
    Check { name, looks_at, of_peer: true }
}

/// All of them, in the order in which they are made.
pub const ALL: &[Check] = &[
    of_host("kernel", "the version of the kernel"),
    of_host("host", "each change that `margay up` has made to this host, whether it is still in place"),
    of_host("disk", "whether the state directory and the runtime directory can be written"),
    of_host("datapath", "the agent's threads, the interface sal0 and the UDP port"),
    of_host("direct", "what keeps flows from going direct; whether virtual addresses are guarded"),
    of_host("dns", "a look-up of a name of the zone, as programs make it"),
    of_host("leases", "how many virtual IPv4 addresses are in use"),
    of_host("router", "each router of this host; on a router, what the kernel forwards"),
    of_host("etcd", "on a router of a cluster: etcd, and the other routers"),
    of_host("warrant", "when rights to sign or to answer, given by keys elsewhere, end"),
    of_host("sockets", "whether the kernel reports which programs listen"),
    of_host("datagrams", "whether each datagram of an unconnected socket is resolved"),
    of_host("service", "each service of this host: its socket, and what its routers say to its registration"),
    of_host("firewall", "what a packet filter of this host does to connections by name to its own services"),
    of_host("rule", "rules of this host that discard first packets"),
    of_host("resolver", "each resolver, asked for a name of its own; and what is written there"),
    of_host(
        "refused",
        "connections of programs of this host that failed within the last five minutes, by name and reason",
    ),
    of_peer("peer", "whether a host answers, also one that was never met"),
    of_peer("name", "what the router knows of the name"),
    of_peer("lookup", "a look-up of the name, as programs make it"),
    of_peer("trace", "the way of a first packet, hop by hop"),
    of_peer("instance", "each instance of the name"),
    of_peer("connect", "a connection to NAME:PORT, as programs make it"),
];

/// What the check of a name looks at.
pub fn looks_at(name: &str) -> &'static str {
    ALL.iter().find(|check| check.name == name).map_or("", |check| check.looks_at)
}

#[cfg(test)]
mod test {
    use super::*;

    const SOURCES: [&str; 8] = [
        include_str!("../check.rs"),
        include_str!("direct.rs"),
        include_str!("disk.rs"),
        include_str!("firewall.rs"),
        include_str!("peer.rs"),
        include_str!("refusal.rs"),
        include_str!("resolver.rs"),
        include_str!("service.rs"),
    ];

    #[test]
    fn every_check_that_is_made_is_on_the_list_and_no_other_is() {
        let made = |source: &'static str| {
            source.split(".say(\"").skip(1).filter_map(|rest| rest.split_once('"')).map(|(name, _)| name)
        };
        let mut made: Vec<&str> = SOURCES.into_iter().flat_map(made).collect();
        made.sort_unstable();
        made.dedup();
        let mut listed: Vec<&str> = ALL.iter().map(|check| check.name).collect();
        listed.sort_unstable();
        assert_eq!(made, listed);
    }
}
