//! What takes back the changes of `up` where Margay's own programs are gone: the commands of the book's page, made from
//! the changes themselves.

use std::net::IpAddr;

use super::change::{Change, MAIN_TABLE};
use super::plan::test::changes_of_all_hosts;
use super::{guard, resolv_conf, sysctl};

/// Where the journal is, unless the configuration says otherwise; compressed to one line for `grep`.
const JOURNAL: &str = "/var/lib/margay/host-changes.json";

/// The commands for every change that `up` makes on any host with the usual ranges and directories. Those about what is
/// not there fail, and do no harm.
pub fn script() -> String {
    let fixed = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    // The agent, and the DNS responder's keeper, with which the responder ends: what root runs in this network
    // namespace. Nothing is read that a user chooses: the path of a socket may be `/run/margay/pid=1`.
    let mut lines = fixed(&[
        "for p in $(find /proc -maxdepth 1 -uid 0 -name '[0-9]*'); do",
        "  case $(readlink $p/exe) in */margay|*/'margay (deleted)')",
        "    [ \"$(readlink $p/ns/net)\" = \"$(readlink /proc/self/ns/net)\" ] && kill -9 ${p#/proc/};;",
        "  esac",
        "done",
        "rm -rf /run/margay/bpf/*",
        "umount /run/margay/bpf",
        "umount /run/margay/cgroup",
    ]);
    for line in changes_of_all_hosts().iter().flat_map(commands) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.push(format!("rm -rf --one-file-system /run/margay {JOURNAL}"));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn commands(change: &Change) -> Vec<String> {
    match change {
        Change::Tun { interface } | Change::Veth { interface, .. } => vec![format!("ip link del {interface}")],
        Change::Rule { from, from_bits, to, source_port, table, .. } => {
            let bits = from_bits.map(|bits| format!("/{bits}")).unwrap_or_default();
            let from = from.map(|address| (address, format!(" from {address}{bits}")));
            let to = to.map(|block| (block.address, format!(" to {block}")));
            let is_v6 = from.iter().chain(&to).any(|(address, _): &(IpAddr, String)| address.is_ipv6());
            let about: String = from.into_iter().chain(to).map(|(_, words)| words).collect();
            let port = source_port.map(|port| format!(" sport {port}")).unwrap_or_default();
            let table = if *table == MAIN_TABLE { "main".to_owned() } else { table.to_string() };
            vec![format!("ip{} rule del{about}{port} lookup {table}", if is_v6 { " -6" } else { "" })]
        }
        Change::Forwarding { key, .. } => {
            vec![format!("{} && echo 0 > /proc/sys/{key}", noted("\"change\":\"forwarding\"[^}]*\"before\":\"0\""))]
        }
        Change::Guard { .. } => vec![format!("nft delete table {}", guard::TABLE)],
        Change::ReservedPort { port, .. } => {
            let list = format!("/proc/sys/{}", sysctl::RESERVED_PORTS);
            vec![format!("tr , '\\n' < {list} | grep -vx {port} | paste -sd, > {list}")]
        }
        Change::ResolvConf { path, .. } => {
            let (path, comment) = (path.display(), resolv_conf::COMMENT.split(';').next().unwrap_or_default());
            let asks = resolv_conf::ASKS;
            let words = format!("sed -e \"/^{comment}/,+1d\" -e 's/^{asks}//' {path}");
            vec![
                format!("{words} > /run/margay/resolv.conf && cat /run/margay/resolv.conf > {path}"),
                format!("{} && rm {path}", noted("\"before\":\"absent\"")),
                format!("link=$(grep -o '\"link\": *\"[^\"]*\"' {JOURNAL} | cut -d'\"' -f4)"),
                format!("[ -z \"$link\" ] || ln -sfn \"$link\" {path}"),
            ]
        }
        // They go with their interface.
        Change::Sizes { .. }
        | Change::Parameter { .. }
        | Change::Address { .. }
        | Change::Up { .. }
        | Change::Route { .. }
        | Change::Resolved { .. } => Vec::new(),
    }
}

/// Whether the journal says so.
fn noted(what: &str) -> String {
    format!("tr -d ' \\n' < {JOURNAL} | grep -q '{what}'")
}
