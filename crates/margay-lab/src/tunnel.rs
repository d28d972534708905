//! A tunnel in user space that is not Margay's, to compare with: wireguard-go between two hosts.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::Host;
use crate::program::{Program, wait_for};

const DEVICE: &str = "wg0";
const PORT: &str = "51820";
/// What wireguard-go takes for itself on a link of 1500 bytes.
const MTU: &str = "1420";
const READY_LIMIT: Duration = Duration::from_secs(5);

/// One end.
struct End {
    program: Program,
    public_key: String,
}

/// A tunnel between two hosts. Dropping it ends it.
pub struct Tunnel {
    /// The address of the second host inside.
    pub address: String,
    /// What wireguard-go says of itself.
    pub version: String,
    _ends: [Program; 2],
}

impl Tunnel {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// wireguard-go or wg is not installed, or does not start.
    pub fn start(first: &Host, second: &Host) -> Result<Self> {
        let version = first.run(["wireguard-go", "--version"]).context(
            "there is no wireguard-go to compare with; `scripts/setup` installs it, and `wg` of the package \
             wireguard-tools",
        )?;
        let version = version.lines().next().unwrap_or_default().to_owned();
        let hosts = [first, second];
        let ends = [start_end(first, "10.99.0.1/24")?, start_end(second, "10.99.0.2/24")?];
        for (at, host) in hosts.into_iter().enumerate() {
            let other = hosts[1 - at].plan.address().context("a host without an address")?;
            let (key, endpoint) = (&ends[1 - at].public_key, format!("{other}:{PORT}"));
            host.run(["wg", "set", DEVICE, "peer", key, "endpoint", &endpoint, "allowed-ips", "10.99.0.0/24"])?;
        }
        let [one, other] = ends;
        Ok(Self { address: "10.99.0.2".to_owned(), version, _ends: [one.program, other.program] })
    }
}

fn start_end(host: &Host, address: &str) -> Result<End> {
    host.run(["mkdir", "-p", "/run/wireguard"])?;
    let mut command = host.command(["wireguard-go", "-f", DEVICE]);
    // It warns of the kernel's own, which not every kernel has.
    command.env("WG_PROCESS_FOREGROUND", "1").env("LOG_LEVEL", "error");
    let program = Program::start(command, &host.dir.join("wireguard-go.log"))?;
    wait_for("the tunnel's device", READY_LIMIT, || match host.run(["wg", "show", DEVICE]) {
        Ok(_) => Ok(()),
        Err(error) => bail!("{error}: {}", program.log()),
    })?;
    host.shell(&format!("umask 077 && wg genkey > {DEVICE}.key"))?;
    host.run(["wg", "set", DEVICE, "listen-port", PORT, "private-key", &format!("{DEVICE}.key")])?;
    let public_key = host.shell(&format!("wg pubkey < {DEVICE}.key"))?.trim().to_owned();
    host.run(["ip", "address", "add", address, "dev", DEVICE])?;
    host.run(["ip", "link", "set", DEVICE, "mtu", MTU, "up"])?;
    Ok(End { program, public_key })
}
