//! systemd-resolved: a routing domain on `sal0`. Names of the zone go to the agent, all others stay where they went.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Output};

use nix::net::if_::if_nametoindex;

use super::change::State;
use super::resolv_conf;

const STUB: &str = "127.0.0.53";

/// Whether programs of this host ask systemd-resolved.
pub fn is_used(resolv_conf: &Path) -> bool {
    let asks_stub = resolv_conf::look(resolv_conf)
        .is_ok_and(|present| resolv_conf::servers(&present.effective).iter().any(|server| server == STUB));
    asks_stub && Path::new("/run/systemd/resolve").is_dir()
}

fn resolvectl(args: &[&str]) -> io::Result<Output> {
    let output = Command::new("resolvectl").args(args).output().map_err(|error| {
        io::Error::new(error.kind(), format!("resolvectl cannot be run ({error}); it comes with systemd-resolved"))
    })?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("resolvectl {}: {said}", args.join(" "))))
}

/// Whether the domain is there.
pub fn state(interface: &str, server: IpAddr, zone: &str) -> io::Result<State> {
    let Ok(domains) = resolvectl(&["domain", interface]) else { return Ok(State::Absent) };
    let servers = resolvectl(&["dns", interface])?;
    let has = |output: &Output, word: &str| {
        String::from_utf8_lossy(&output.stdout).split_ascii_whitespace().any(|found| found == word)
    };
    let present = has(&domains, &format!("~{zone}")) && has(&servers, &server.to_string());
    Ok(if present { State::Present } else { State::Absent })
}

/// Sets the domain.
pub fn apply(interface: &str, server: IpAddr, zone: &str) -> io::Result<()> {
    resolvectl(&["dns", interface, &server.to_string()])?;
    resolvectl(&["domain", interface, &format!("~{zone}")])?;
    // Nothing else shall ever be asked there.
    resolvectl(&["default-route", interface, "false"])?;
    Ok(())
}

/// Takes it away.
pub fn undo(interface: &str) -> io::Result<()> {
    if if_nametoindex(interface).is_err() {
        return Ok(());
    }
    resolvectl(&["revert", interface]).map(|_| ())
}
