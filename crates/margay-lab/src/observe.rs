//! What is seen from outside of Margay: packet counters of the kernel, memory and processor time of processes.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::agent;
use crate::host::Host;

const TABLE: &str = "inet lab_count";
/// `BPF_MAP_TYPE_HASH`.
const HASH_MAP: f64 = 1.0;
/// What the kernel adds to key and value of an entry that is not allocated beforehand: `struct htab_elem`, and a place
/// in its allocator's list.
const HASH_ENTRY_BYTES: f64 = 56.0;

/// Where a packet is counted.
#[derive(Clone, Copy, Debug)]
pub enum Passing {
    /// Received by the host.
    In,
    /// Sent by the host.
    Out,
}

/// Packets and bytes of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Count {
    /// Packets; a super-packet of an offload counts once.
    pub packets: f64,
    /// IP bytes.
    pub bytes: f64,
}

/// Starts to count on a host the packets that match an nft expression, under a name.
///
/// # Errors
///
/// `nft` refuses.
pub fn count(host: &Host, name: &str, passing: Passing, matching: &str) -> Result<()> {
    let (chain, hook) = match passing {
        // Right after connection tracking, so that an expression may ask for that, too.
        Passing::In => ("seen", "prerouting priority -150"),
        Passing::Out => ("sent", "postrouting priority 500"),
    };
    let script = format!(
        "add table {TABLE}; add chain {TABLE} {chain} {{ type filter hook {hook}; }}; add counter {TABLE} {name}; \
         add rule {TABLE} {chain} {matching} counter name {name}"
    );
    host.run(["nft", &script]).map(drop)
}

/// All counters of a host.
///
/// # Errors
///
/// `nft` refuses, or answers what cannot be read.
pub fn counts(host: &Host) -> Result<BTreeMap<String, Count>> {
    let text = host.run(["nft", "-j", "list", "counters", "table", "inet", "lab_count"])?;
    let answer: Value = serde_json::from_str(&text).context("nft did not answer with JSON")?;
    let entries = answer["nftables"].as_array().cloned().unwrap_or_default();
    let counters = entries.iter().filter_map(|entry| entry.get("counter"));
    Ok(counters
        .filter_map(|counter| {
            let count = Count { packets: counter["packets"].as_f64()?, bytes: counter["bytes"].as_f64()? };
            Some((counter["name"].as_str()?.to_owned(), count))
        })
        .collect())
}

/// The kernel's counters of a host's network namespace, by `nstat`.
///
/// # Errors
///
/// `nstat` refuses, or answers what cannot be read.
pub fn nstat(host: &Host) -> Result<BTreeMap<String, f64>> {
    let text = host.run(["nstat", "-a", "-z", "-s", "-j"])?;
    let answer: Value = serde_json::from_str(&text).context("nstat did not answer with JSON")?;
    let numbers = answer["kernel"].as_object().context("nstat has no counters")?;
    Ok(numbers.iter().filter_map(|(name, number)| Some((name.clone(), number.as_f64()?))).collect())
}

/// Where packets of a host have been dropped since its start, and how many: by its agent with the reason, at `sal0`, by
/// its UDP, and in the queues of the processors, which all hosts of the lab share. Only where there were any.
///
/// # Errors
///
/// As for [`nstat`]; or `ip` refuses, or the agent does not answer.
pub fn drops(host: &Host) -> Result<BTreeMap<String, f64>> {
    let mut all = agent::drops(host)?;
    let links: Value = serde_json::from_str(&host.run(["ip", "-j", "-s", "link", "show", "sal0"])?)?;
    for way in ["rx", "tx"] {
        all.insert(format!("sal0 {way}"), links[0]["stats64"][way]["dropped"].as_f64().unwrap_or_default());
    }
    let kernel = nstat(host)?;
    for name in ["UdpInErrors", "UdpRcvbufErrors", "UdpSndbufErrors", "UdpNoPorts", "IpInDiscards", "IpOutDiscards"] {
        all.insert(name.to_owned(), kernel.get(name).copied().unwrap_or_default());
    }
    all.insert("softnet".to_owned(), softnet_drops()?);
    all.retain(|_, packets| *packets > 0.0);
    Ok(all)
}

/// Packets that found the queue of their processor full, of all processors, since the machine's start.
fn softnet_drops() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/net/softnet_stat").context("cannot read /proc/net/softnet_stat")?;
    let dropped = text.lines().filter_map(|line| u32::from_str_radix(line.split_whitespace().nth(1)?, 16).ok());
    Ok(dropped.map(f64::from).sum())
}

/// Connections that the host's TCP reset or that were reset under it, since its start.
///
/// # Errors
///
/// As for [`nstat`].
pub fn tcp_resets(host: &Host) -> Result<f64> {
    let numbers = nstat(host)?;
    let of = |name: &str| numbers.get(name).copied().unwrap_or_default();
    Ok(of("TcpEstabResets") + of("TcpOutRsts"))
}

/// Resident memory of a process in bytes.
///
/// # Errors
///
/// There is no such process.
pub fn resident_bytes(pid: u32) -> Result<f64> {
    status_bytes(pid, "VmRSS:")
}

/// Whether a process is root's, or has a capability.
///
/// # Errors
///
/// There is no such process.
pub fn is_privileged(pid: u32) -> Result<bool> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let is_root = line("Uid:").split_whitespace().any(|uid| uid == "0");
    Ok(is_root || line("CapPrm:").trim().bytes().any(|digit| digit != b'0'))
}

/// What a process has allocated and written to, in bytes: not the pages of its program, of which the kernel maps more
/// around each that is run.
///
/// # Errors
///
/// There is no such process.
pub fn allocated_bytes(pid: u32) -> Result<f64> {
    status_bytes(pid, "RssAnon:")
}

fn status_bytes(pid: u32, field: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).with_context(|| format!("no process {pid}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("the process has no memory")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().with_context(|| format!("unreadable {field}"))?;
    Ok(kib * 1024.0)
}

/// A map of eBPF, as the kernel describes a process's descriptor of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BpfMap {
    /// Memory that the kernel charges for it, in bytes. It grows and shrinks with the entries of a hash that is not
    /// allocated beforehand.
    pub bytes: f64,
    /// What one entry of a hash takes; none for maps of other kinds.
    pub entry_bytes: Option<f64>,
    /// Bytes of a key and of a value: they say which map it is, as its name is not told.
    pub sizes: (u32, u32),
}

/// The eBPF maps of a process by their number, from its descriptors (`/proc/PID/fdinfo`).
///
/// # Errors
///
/// There is no such process.
pub fn bpf_maps(pid: u32) -> Result<BTreeMap<u32, BpfMap>> {
    let dir = format!("/proc/{pid}/fdinfo");
    let mut maps = BTreeMap::new();
    for entry in std::fs::read_dir(&dir).with_context(|| format!("no process {pid}"))? {
        // A descriptor may be closed while we look.
        let text = std::fs::read_to_string(entry?.path()).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim().parse::<f64>().ok())
        };
        if let (Some(id), Some(bytes)) = (field("map_id"), field("memlock")) {
            let padded = |name: &str| (field(name).unwrap_or_default() / 8.0).ceil() * 8.0;
            let entry_bytes = HASH_ENTRY_BYTES + padded("key_size") + padded("value_size");
            let is_hash = field("map_type") == Some(HASH_MAP);
            let size = |name: &str| field(name).unwrap_or_default() as u32;
            let sizes = (size("key_size"), size("value_size"));
            maps.insert(id as u32, BpfMap { bytes, entry_bytes: is_hash.then_some(entry_bytes), sizes });
        }
    }
    Ok(maps)
}

/// Memory of all eBPF maps of a process in bytes.
///
/// # Errors
///
/// As for [`bpf_maps`].
pub fn bpf_bytes(pid: u32) -> Result<f64> {
    Ok(bpf_maps(pid)?.values().map(|map| map.bytes).sum())
}

/// Starts to count, on a host, TCP resets between its programs and the virtual interface, in either direction. What is
/// direct passes there, too; connections that are none of Margay's flows do not. A reset counts that comes to a socket
/// which lives, and one that a program's own TCP says of such a socket (these alone have ACK: RFC 9293 §3.10.7.1). A
/// late segment of a connection that is over is answered by a reset as well, to a socket in TIME-WAIT; and what is
/// reset for a new connection of the same ports (decision 0049) is in TIME-WAIT, too. No program has either any more.
///
/// # Errors
///
/// `nft` refuses.
pub fn count_virtual_resets(host: &Host) -> Result<()> {
    // What is rewritten in place at a card comes by that card.
    for to in ["ip daddr 198.18.0.1", "ip6 daddr fd5a:4c00::1"] {
        // The socket is one that has an address of its own: no listener.
        let matching = format!("{to} tcp flags & rst == rst socket wildcard 0");
        count(host, "resets_in", Passing::In, &matching)?;
    }
    count(host, "resets_out", Passing::Out, "oifname sal0 tcp flags & (rst | ack) == (rst | ack)")
}

/// What [`count_virtual_resets`] has counted on these hosts: all together, and who sent how many.
///
/// # Errors
///
/// As for [`counts`].
pub fn virtual_resets(hosts: &[&Host]) -> Result<(f64, String)> {
    let (mut sum, mut said) = (0.0, Vec::new());
    for host in hosts {
        let counts = counts(host)?;
        let of = |name: &str| counts.get(name).copied().unwrap_or_default().packets;
        let (received, sent) = (of("resets_in"), of("resets_out"));
        sum += received + sent;
        let reasons = if received + sent > 0.0 { removals(host) } else { String::new() };
        said.push(format!("{}: programs were sent {received}, and sent {sent}{reasons}", host.name()));
    }
    Ok((sum, said.join("; ")))
}

/// Why flows of a host have ended, as its agent has counted; empty where none runs.
fn removals(host: &Host) -> String {
    let Ok(metrics) = agent::margay(host, ["status", "--metrics"]) else { return String::new() };
    let counted = metrics.lines().filter_map(|line| line.strip_prefix("margay_flows_removed_total{reason="));
    let ends: Vec<&str> = counted.filter(|line| !line.ends_with(" 0")).collect();
    format!(" (flows that ended: {})", ends.join(", "))
}

/// Processor time that a process has used, in seconds; user and system.
///
/// # Errors
///
/// There is no such process.
pub fn processor_seconds(pid: u32) -> Result<f64> {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("no process {pid}"))?;
    let rest = stat.rsplit_once(')').context("unreadable stat")?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or_default();
    Ok((ticks(11) + ticks(12)) / TICKS_PER_SECOND)
}

/// Busy processor time of the whole machine in seconds, soft interrupts included.
///
/// # Errors
///
/// `/proc/stat` cannot be read.
pub fn machine_busy_seconds() -> Result<f64> {
    busy_seconds("cpu")
}

/// The same of one processor, by its number.
///
/// # Errors
///
/// `/proc/stat` cannot be read, or has no such processor.
pub fn processor_busy_seconds(processor: usize) -> Result<f64> {
    busy_seconds(&format!("cpu{processor}"))
}

fn busy_seconds(line_name: &str) -> Result<f64> {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let words = stat.lines().map(|line| line.split_whitespace()).find_map(|mut words| {
        let is_meant = words.next() == Some(line_name);
        is_meant.then_some(words)
    });
    let words = words.with_context(|| format!("/proc/stat has no {line_name}"))?;
    let ticks: Vec<f64> = words.filter_map(|field| field.parse().ok()).collect();
    // Fields 3 and 4 are idle and waiting for a disk.
    Ok(ticks.iter().take(8).sum::<f64>() / TICKS_PER_SECOND
        - (ticks.get(3).copied().unwrap_or_default() + ticks.get(4).copied().unwrap_or_default()) / TICKS_PER_SECOND)
}

/// Processes in a host's network namespace whose command line satisfies `wanted`.
///
/// # Errors
///
/// The host is gone.
pub fn processes(host: &Host, wanted: impl Fn(&[String]) -> bool) -> Result<Vec<u32>> {
    let namespace = |pid: &str| std::fs::read_link(Path::new("/proc").join(pid).join("ns/net"));
    let ours = namespace(&host.holder_pid().to_string()).context("the host is gone")?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(text) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else { continue };
        // A process may end while we look.
        if !namespace(text).is_ok_and(|theirs| theirs == ours) {
            continue;
        }
        let line = std::fs::read(format!("/proc/{text}/cmdline")).unwrap_or_default();
        let words: Vec<String> = line
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        if !words.is_empty() && wanted(&words) {
            found.push(text.parse()?);
        }
    }
    Ok(found)
}
