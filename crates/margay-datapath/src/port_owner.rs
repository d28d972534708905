//! Who holds a UDP port: for the error that says so.

use std::fs;
use std::path::Path;

/// The process that has the UDP port open in this network namespace, as "pid 12 (name)"; "another process" when it
/// cannot be found.
pub fn holder(port: u16) -> String {
    // The thread's own namespace, which need not be the process's.
    ["/proc/thread-self/net/udp6", "/proc/thread-self/net/udp"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .find_map(|table| inode_of(&table, port))
        .and_then(|inode| process_of(&inode))
        .unwrap_or_else(|| "another process".to_owned())
}

/// The inode column of the first socket with that local port.
fn inode_of(table: &str, port: u16) -> Option<String> {
    let wanted = format!(":{port:04X}");
    table.lines().skip(1).find_map(|line| {
        let mut columns = line.split_ascii_whitespace();
        let local = columns.nth(1)?;
        local.ends_with(&wanted).then(|| columns.nth(7).map(str::to_owned))?
    })
}

fn process_of(inode: &str) -> Option<String> {
    let wanted = format!("socket:[{inode}]");
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let name = process.file_name();
        let pid: u32 = name.to_str()?.parse().ok()?;
        let holds = |link: &Path| fs::read_link(link).is_ok_and(|to| to.as_os_str() == wanted.as_str());
        let descriptors = fs::read_dir(process.path().join("fd")).ok()?;
        descriptors.flatten().any(|descriptor| holds(&descriptor.path())).then(|| {
            let command = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            format!("pid {pid} ({})", command.trim())
        })
    })
}

#[cfg(test)]
mod test {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn finds_ourselves() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let port = socket.local_addr().expect("bound").port();
        assert!(holder(port).starts_with(&format!("pid {} (", std::process::id())));
    }

    #[test]
    fn literal_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n \
                     12: 00000000:D434 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0";
        assert_eq!(inode_of(table, 54324), Some("4711".to_owned()));
        assert_eq!(inode_of(table, 54325), None);
    }
}
