//! Connections beside a scenario that only wait for their server ([`crate::traffic`]), and what became of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::host::Host;
use crate::program::wait_for;
use crate::series::Series;
use crate::traffic::Idle;

const LIMIT: Duration = Duration::from_secs(20);

/// Opens so many to a server that greets with its name. Returns when all are open.
///
/// # Errors
///
/// One of them fails, or they are not open in time.
pub fn open(client: &Host, to: &str, port: u16, count: usize) -> Result<Series<Idle>> {
    let words = ["idle", to, &port.to_string(), "--count", &count.to_string()].map(str::to_owned);
    let idle: Series<Idle> = Series::start(client, &words)?;
    wait_for("idle connections", LIMIT, || {
        let failed = lost(&idle);
        ensure!(failed.is_empty(), "some have failed: {failed:?}");
        let open = idle.lines().len();
        ensure!(open == count, "{open} are open");
        Ok(())
    })?;
    Ok(idle)
}

/// Opens so many, until some are to each of these servers: what the client's kernel opens by a grant goes to one server
/// for a second.
///
/// # Errors
///
/// As of [`open`]; and each time all were to some of the servers.
pub fn open_at_each(client: &Host, to: &str, port: u16, count: usize, servers: &[&Host]) -> Result<Series<Idle>> {
    wait_for("idle connections to each server", LIMIT, || {
        let idle = open(client, to, port, count)?;
        let missed = servers.iter().find(|server| standing(&idle, server).is_empty());
        let Some(missed) = missed else { return Ok(idle) };
        idle.finish(LIMIT)?;
        bail!("none is to {}", missed.name())
    })
}

/// Those that have ended.
pub fn lost(idle: &Series<Idle>) -> BTreeMap<usize, Idle> {
    let ended = idle.lines().into_iter().filter(|one| one.lost_ms.is_some());
    ended.map(|one| (one.number, one)).collect()
}

/// Those that stand at a server.
pub fn standing(idle: &Series<Idle>, server: &Host) -> BTreeSet<usize> {
    let lost = lost(idle);
    let open = idle.lines().into_iter().filter(|one| one.server == server.name() && !lost.contains_key(&one.number));
    open.map(|one| one.number).collect()
}
