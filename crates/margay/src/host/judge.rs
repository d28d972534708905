//! What on this host judges packets by the interface that they come by: there, direct packets take the way by `sal0`
//! (decision 0040).
//!
//! By what a rule judges is not asked: each kind of expression would have to be known. A table counts whose chains
//! see arriving packets, if one of its rules may refuse some, or a chain drops what no rule takes. Chains that
//! translate addresses see a connection's first packet alone, and do not count.

use std::fmt;
use std::fs;
use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{AsyncSocket, AsyncSocketExt, Socket, SocketAddr, TokioSocket};

const FILTERS: &str = "/proc/sys/net/ipv4/conf";
/// Tables of the older packet filter, where it is in use.
const OLD_TABLES: [&str; 2] = ["/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"];

/// Who judges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judge {
    /// The strict reverse-path filter (RFC 3704 §2.2).
    ReversePath {
        /// `all`, or one of them.
        interface: String,
    },
    /// iptables, as it was before nftables.
    Tables {
        /// Which table.
        name: String,
    },
    /// nftables, or iptables on top of them.
    Chain {
        /// Of which table.
        table: String,
        /// Which.
        name: String,
    },
}

impl fmt::Display for Judge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReversePath { interface } => write!(f, "the strict reverse-path filter of {interface}"),
            Self::Tables { name } => write!(f, "the table {name} of iptables"),
            Self::Chain { table, name } => write!(f, "the chain {name} of the nftables table {table}"),
        }
    }
}

/// The first who is found; `None` where nobody judges, as far as can be seen.
///
/// # Errors
///
/// The packet filter cannot be looked at.
pub fn find() -> io::Result<Option<Judge>> {
    if let Some(found) = reverse_path().or_else(old_tables) {
        return Ok(Some(found));
    }
    for chain in dump(GET_CHAIN, NEW_CHAIN, 0, &[])?.iter().filter(|chain| sees_arrivals(chain)) {
        let table = chain.text(chain::TABLE);
        let drops = chain.number(chain::POLICY) == Some(NF_DROP);
        let name = [table.as_bytes(), &[0]].concat();
        // Only those of that table: chains call each other there.
        let has_say = || {
            let rules = dump(GET_RULE, NEW_RULE, chain.family, &attribute(rule::TABLE, &name))?;
            Ok(rules.iter().any(may_refuse)) as io::Result<bool>
        };
        if drops || (chain.number(chain::USE) != Some(0) && has_say()?) {
            return Ok(Some(Judge::Chain { table, name: chain.text(chain::NAME) }));
        }
    }
    Ok(None)
}

fn reverse_path() -> Option<Judge> {
    let interfaces = fs::read_dir(FILTERS).into_iter().flatten().flatten();
    let strict = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("rp_filter")).is_ok_and(|value| value.trim() == "1")
    };
    // What `default` says holds for interfaces that are yet to come.
    let named = interfaces.filter(strict).filter_map(|entry| entry.file_name().into_string().ok());
    named.filter(|name| name != "default").min().map(|interface| Judge::ReversePath { interface })
}

fn old_tables() -> Option<Judge> {
    let names = OLD_TABLES.iter().filter_map(|path| fs::read_to_string(path).ok()).collect::<Vec<_>>().concat();
    names.lines().find(|name| *name != "nat").map(|name| Judge::Tables { name: name.to_owned() })
}

/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// `NFNL_SUBSYS_NFTABLES`, in the upper half of a message's type.
const NFTABLES: u16 = 10 << 8;
const NEW_CHAIN: u16 = NFTABLES | 3;
const GET_CHAIN: u16 = NFTABLES | 4;
const NEW_RULE: u16 = NFTABLES | 6;
const GET_RULE: u16 = NFTABLES | 7;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const REQUEST_DUMP: u16 = 0x301;
const HEADER_LEN: usize = 16;
/// `struct nfgenmsg`.
const FAMILY_LEN: usize = 4;
const ATTRIBUTE_LEN: usize = 4;
/// Less its flags, `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const ATTRIBUTE_TYPE: u16 = 0x3fff;

/// `NFTA_CHAIN_…`.
mod chain {
    pub(super) const TABLE: u16 = 1;
    pub(super) const NAME: u16 = 3;
    pub(super) const HOOK: u16 = 4;
    pub(super) const POLICY: u16 = 5;
    pub(super) const USE: u16 = 6;
    pub(super) const TYPE: u16 = 7;
}

/// `NFTA_RULE_…`, `NFTA_EXPR_…`, and what of the expressions decides.
mod rule {
    pub(super) const TABLE: u16 = 1;
    pub(super) const EXPRESSIONS: u16 = 4;
    pub(super) const NAME: u16 = 1;
    pub(super) const DATA: u16 = 2;
    /// `NFTA_IMMEDIATE_DATA`, in it `NFTA_DATA_VERDICT`, in it `NFTA_VERDICT_CODE`.
    pub(super) const IMMEDIATE_DATA: u16 = 2;
    pub(super) const VERDICT: u16 = 2;
    pub(super) const CODE: u16 = 1;
    /// `NFTA_LOOKUP_DREG`; zero is the register of the verdict.
    pub(super) const TARGET: u16 = 3;
    /// Those that refuse nothing by themselves.
    pub(super) const HARMLESS: [&str; 24] = [
        "bitwise",
        "byteorder",
        "cmp",
        "connlimit",
        "counter",
        "ct",
        "exthdr",
        "fib",
        "hash",
        "inner",
        "last",
        "limit",
        "log",
        "match",
        "meta",
        "notrack",
        "numgen",
        "osf",
        "payload",
        "quota",
        "range",
        "rt",
        "socket",
        "xfrm",
    ];
}

/// `NFTA_HOOK_HOOKNUM`.
const HOOK_NUMBER: u16 = 1;
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
/// `NFT_RETURN`, the least of those that go on somewhere: down from -1.
const NFT_RETURN: i32 = -5;
const NF_INET_PRE_ROUTING: u32 = 0;
const NF_INET_LOCAL_IN: u32 = 1;
const NF_INET_INGRESS: u32 = 5;
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_NETDEV: u8 = 5;
const NFPROTO_IPV6: u8 = 10;

/// A chain or a rule: its family, and its attributes.
struct Object {
    family: u8,
    attributes: Vec<u8>,
}

impl Object {
    fn text(&self, which: u16) -> String {
        let bytes = find_in(&self.attributes, which).unwrap_or_default();
        String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
    }

    fn number(&self, which: u16) -> Option<u32> {
        number_in(&self.attributes, which)
    }
}

/// Whether arriving packets pass a chain.
fn sees_arrivals(chain: &Object) -> bool {
    // Without a place in the packets' way it is called by others alone.
    let hook = find_in(&chain.attributes, chain::HOOK).and_then(|hook| number_in(hook, HOOK_NUMBER));
    let is_arrival = match chain.family {
        NFPROTO_INET | NFPROTO_IPV4 | NFPROTO_IPV6 => {
            matches!(hook, Some(NF_INET_PRE_ROUTING | NF_INET_LOCAL_IN | NF_INET_INGRESS))
        }
        NFPROTO_NETDEV => hook == Some(0),
        _ => false,
    };
    is_arrival && chain.text(chain::TYPE) != "nat"
}

/// Whether a rule may refuse a packet.
fn may_refuse(rule: &Object) -> bool {
    let expressions = find_in(&rule.attributes, rule::EXPRESSIONS).unwrap_or_default();
    attributes(expressions).any(|(_, expression)| {
        let name = find_in(expression, rule::NAME).unwrap_or_default();
        let data = find_in(expression, rule::DATA).unwrap_or_default();
        match String::from_utf8_lossy(name).trim_end_matches('\0') {
            "immediate" => refuses(data),
            "lookup" => number_in(data, rule::TARGET) == Some(0),
            name => !rule::HARMLESS.contains(&name),
        }
    })
}

/// Whether a verdict lets nothing go on; what loads a value is none.
fn refuses(immediate: &[u8]) -> bool {
    let verdict = find_in(immediate, rule::IMMEDIATE_DATA).and_then(|data| find_in(data, rule::VERDICT));
    let code = verdict.and_then(|verdict| number_in(verdict, rule::CODE));
    code.is_some_and(|code| code != NF_ACCEPT && !(NFT_RETURN..0).contains(&code.cast_signed()))
}

/// All chains or rules of nftables; none where the kernel has no nftables. `filter`: attributes.
fn dump(ask: u16, answer: u16, family: u8, filter: &[u8]) -> io::Result<Vec<Object>> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    let len = u32::try_from(HEADER_LEN + FAMILY_LEN + filter.len()).unwrap_or_default();
    let mut request = len.to_ne_bytes().to_vec();
    request.extend(ask.to_ne_bytes());
    request.extend(REQUEST_DUMP.to_ne_bytes());
    // Number and port of the request; then the family, version 0, no resource.
    request.extend([0; 8]);
    request.extend([family, 0, 0, 0]);
    request.extend(filter);
    socket.send_to(&request, &SocketAddr::new(0, 0), 0)?;
    let mut found = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        for (kind, payload) in messages(&datagram) {
            match kind {
                NLMSG_DONE => return Ok(found),
                // It has no nftables, or has them as a module that nobody needed yet; or the table has just gone.
                NLMSG_ERROR => return Ok(Vec::new()),
                _ if kind == answer => found.extend(
                    payload
                        .split_at_checked(FAMILY_LEN)
                        .map(|(head, rest)| Object { family: head[0], attributes: rest.to_vec() }),
                ),
                _ => {}
            }
        }
    }
}

/// Type and payload of each message of a datagram.
fn messages(mut datagram: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let Some(head) = datagram.get(..HEADER_LEN) {
        let len = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let Some(payload) = datagram.get(HEADER_LEN..len) else { break };
        found.push((u16::from_ne_bytes([head[4], head[5]]), payload));
        datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Type and value of each attribute.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let head = bytes.get(..ATTRIBUTE_LEN)?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = bytes.get(ATTRIBUTE_LEN..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([head[2], head[3]]) & ATTRIBUTE_TYPE, value))
    })
}

fn find_in(bytes: &[u8], which: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == which).map(|(_, value)| value)
}

fn number_in(bytes: &[u8], which: u16) -> Option<u32> {
    Some(u32::from_be_bytes(find_in(bytes, which)?.try_into().ok()?))
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(ATTRIBUTE_LEN + value.len()).unwrap_or_default();
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Hears of changes of nftables.
pub struct Changes(TokioSocket);

impl Changes {
    /// Needs a tokio runtime.
    ///
    /// # Errors
    ///
    /// The kernel has no netfilter, or this user may not hear of it.
    pub fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_mut().add_membership(GROUP)?;
        Ok(Self(socket))
    }

    /// Waits for one. Where many come at once some are lost, which is a change, too.
    pub async fn next(&mut self) {
        // An error says that messages were lost.
        let _ = self.0.recv_from_full().await;
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const NESTED: u16 = 0x8000;

    fn chain(family: u8, hook: u32, kind: &str) -> Object {
        let hook = attribute(HOOK_NUMBER, &hook.to_be_bytes());
        let parts = [attribute(chain::HOOK | NESTED, &hook), attribute(chain::TYPE, format!("{kind}\0").as_bytes())];
        Object { family, attributes: parts.concat() }
    }

    #[test]
    fn chains_that_arriving_packets_pass() {
        for (family, hook) in [(1, 0), (2, 1), (10, 0), (1, 5), (5, 0)] {
            assert!(sees_arrivals(&chain(family, hook, "filter")), "{family} {hook}");
        }
        for (chain, why) in [
            (chain(1, 2, "filter"), "of what is forwarded"),
            (chain(1, 3, "filter"), "of what leaves"),
            (chain(2, 0, "nat"), "of a connection's first packet"),
            (chain(7, 0, "filter"), "of bridges"),
            (Object { family: 1, attributes: Vec::new() }, "only called"),
        ] {
            assert!(!sees_arrivals(&chain), "{why}");
        }
    }

    /// An expression of a rule.
    fn expression(name: &str, data: &[u8]) -> Vec<u8> {
        let name = attribute(rule::NAME, format!("{name}\0").as_bytes());
        attribute(1 | NESTED, &[name, attribute(rule::DATA | NESTED, data)].concat())
    }

    fn verdict(code: i32) -> Vec<u8> {
        let code = attribute(rule::CODE, &code.to_be_bytes());
        let data = attribute(rule::VERDICT | NESTED, &code);
        let register = attribute(1, &[0; 4]);
        expression("immediate", &[register, attribute(rule::IMMEDIATE_DATA | NESTED, &data)].concat())
    }

    #[test]
    fn rules_that_may_refuse() {
        let of = |expressions: &[Vec<u8>]| {
            let list = attribute(rule::EXPRESSIONS | NESTED, &expressions.concat());
            may_refuse(&Object { family: 1, attributes: list })
        };
        let (fib, counter) = (expression("fib", &[]), expression("counter", &[]));
        let lookup = |target: u32| expression("lookup", &attribute(rule::TARGET, &target.to_be_bytes()));
        let value = expression("immediate", &attribute(rule::IMMEDIATE_DATA | NESTED, &attribute(1, &[0; 4])));
        for expressions in [&[fib.clone(), verdict(0)][..], &[expression("reject", &[])], &[lookup(0)], &[verdict(3)]] {
            assert!(of(expressions));
        }
        for expressions in [
            &[fib, counter.clone(), verdict(1)][..],
            &[counter, verdict(-3)],
            &[lookup(1)],
            &[verdict(-5)],
            &[value],
            &[],
        ] {
            assert!(!of(expressions));
        }
    }

    #[test]
    fn what_is_cut_short_is_not_read() {
        let whole = attribute(chain::TABLE, b"fw\0");
        for len in 0..whole.len() {
            assert!(attributes(&whole[..len]).count() <= 1);
        }
        let message = [20_u32.to_ne_bytes().as_slice(), &NEW_CHAIN.to_ne_bytes(), &[0; 10], &[1, 0, 0, 0]].concat();
        assert_eq!(messages(&message), [(NEW_CHAIN, &[1, 0, 0, 0][..])]);
        assert_eq!(messages(&message[..19]), []);
        let endless = [0_u32.to_ne_bytes().as_slice(), &[0; 12]].concat();
        assert_eq!(messages(&endless), []);
    }

    #[tokio::test]
    async fn this_host_can_be_asked() {
        find().expect("an answer, were it that there is none");
        Changes::open().expect("a socket");
    }
}
