//! A name that one host alone serves, asked of routers that cannot hear each other.

use anyhow::{Result, bail};

use super::stage::{LIMIT, ROUTERS, Stage};
use super::{NEW_PORT, Run};
use crate::agent;
use crate::program::wait_for;
use crate::scenario::Findings;

const NAME: &str = "alone.shop";

impl Run<'_> {
    /// Whom a router that can ask nobody hears alone gets no name for itself; who is heard by the others does, and
    /// keeps it.
    pub(super) fn give_once(&mut self, findings: &mut Findings) -> Result<()> {
        let stage = self.stage;
        self.mark("r1 and web1 are apart from etcd and the other routers");
        stage.cut(&["r1"], &["r2", "r3", "e1", "e2", "e3", "web2", "web3"])?;
        stage.cut(&["web1"], &["r2", "r3"])?;
        self.last(findings)?;
        stage.await_etcd("r1", false)?;
        for host in ["web1", "web2"] {
            let listen = format!("0.0.0.0:{NEW_PORT}");
            agent::margay(stage.host(host)?, ["service", "publish", NAME, "--listen", &listen, "--exclusive"])?;
        }
        for router in &ROUTERS[1..] {
            await_holder(stage, router, "web2")?;
        }
        await_refusal(stage, "web1", "the cluster's store cannot be asked")?;
        self.mark("it is mended");
        stage.mend()?;
        stage.await_homes()?;
        await_refusal(stage, "web1", "which one host alone may serve")?;
        ROUTERS.iter().try_for_each(|router| await_holder(stage, router, "web2"))?;
        agent::withdraw(stage.host("web2")?, NAME)?;
        ROUTERS.iter().try_for_each(|router| await_holder(stage, router, "web1"))?;
        agent::withdraw(stage.host("web1")?, NAME)
    }
}

fn await_holder(stage: &Stage, router: &str, holder: &str) -> Result<()> {
    wait_for(&format!("{holder} alone at {router}"), LIMIT, || match stage.listed(router, NAME)? {
        found if found == [holder] => Ok(()),
        found => bail!("it lists {found:?}"),
    })
}

fn await_refusal(stage: &Stage, host: &str, why: &str) -> Result<()> {
    wait_for(&format!("{host} hears: {why}"), LIMIT, || {
        let list: serde_json::Value =
            serde_json::from_str(&agent::margay(stage.host(host)?, ["service", "list", "--json"])?)?;
        let all = list["services"].as_array().cloned().unwrap_or_default();
        let said: Vec<String> =
            all.iter().filter(|one| one["name"] == NAME).map(|one| one["registrations"].to_string()).collect();
        if said.iter().any(|said| said.contains(why)) { Ok(()) } else { bail!("{said:?}") }
    })
}
