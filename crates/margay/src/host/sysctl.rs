//! Kernel parameters, by their path under `/proc/sys`: `net/ipv4/ip_local_reserved_ports`.

use std::fs;
use std::io;
use std::path::PathBuf;

/// Ports that the kernel does not give out by itself.
pub const RESERVED_PORTS: &str = "net/ipv4/ip_local_reserved_ports";

fn path(key: &str) -> PathBuf {
    PathBuf::from("/proc/sys").join(key)
}

/// The value, without the line end; `None` when this kernel has no such parameter.
pub fn read(key: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(path(key)) {
        Ok(text) => Ok(Some(text.trim_end_matches('\n').to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sets it.
pub fn write(key: &str, value: &str) -> io::Result<()> {
    // An empty write changes nothing; a bare line end empties a list.
    fs::write(path(key), format!("{value}\n"))
}

/// Whether a list like `1000-2000,54324` has the port.
pub fn has_port(list: &str, port: u16) -> bool {
    list.split(',').any(|item| match item.trim().split_once('-') {
        Some((low, high)) => {
            low.parse::<u16>().is_ok_and(|low| low <= port) && high.parse::<u16>().is_ok_and(|high| port <= high)
        }
        None => item.trim().parse() == Ok(port),
    })
}

/// The list with the port.
pub fn with_port(list: &str, port: u16) -> String {
    if list.is_empty() { port.to_string() } else { format!("{list},{port}") }
}

/// The list without the port; ranges around it are cut in two.
pub fn without_port(list: &str, port: u16) -> String {
    let items = list.split(',').map(str::trim).filter(|item| !item.is_empty());
    let mut kept: Vec<String> = Vec::new();
    for item in items {
        let (low, high) = item.split_once('-').unwrap_or((item, item));
        match (low.parse::<u16>(), high.parse::<u16>()) {
            (Ok(low), Ok(high)) if low <= port && port <= high => {
                kept.extend(range(low, port.checked_sub(1).filter(|end| *end >= low)));
                kept.extend(
                    port.checked_add(1).filter(|start| *start <= high).and_then(|start| range(start, Some(high))),
                );
            }
            _ => kept.push(item.to_owned()),
        }
    }
    kept.join(",")
}

fn range(low: u16, high: Option<u16>) -> Option<String> {
    let high = high?;
    Some(if low == high { low.to_string() } else { format!("{low}-{high}") })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn lists_of_ports() {
        assert!(has_port("54324", 54324) && has_port("1,54000-55000", 54324));
        assert!(!has_port("", 54324) && !has_port("5432,54325-54330", 54324));
        assert_eq!(with_port("", 54324), "54324");
        assert_eq!(with_port("80,90-95", 54324), "80,90-95,54324");
        assert_eq!(without_port("54324", 54324), "");
        assert_eq!(without_port("80,54324,60000", 54324), "80,60000");
        assert_eq!(without_port("54323-54325", 54324), "54323,54325");
        assert_eq!(without_port("54320-54324", 54324), "54320-54323");
        assert_eq!(without_port("1-65535", 65535), "1-65534");
    }
}
