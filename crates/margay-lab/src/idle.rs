//! Connections beside a scenario that only wait for their server ([`crate::traffic`]), and what became of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, ensure};

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
