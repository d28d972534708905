//! Sockets that are bound to a card, by which nothing of Margay comes or goes: refused at once, with the reason.

use anyhow::{Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::Signal;

use super::programs::Kind;
use super::{PORT, Protocol, Stage, Way};
use crate::agent::{self, READY_LIMIT};
use crate::program::wait_for;
use crate::scenario::Findings;

const PORT_FIRST: u16 = 9000;

impl Stage<'_> {
    /// Servers are not registered, and whoever asks for them hears why.
    pub(super) fn refuse_servers(&self, findings: &mut Findings) -> Result<()> {
        let ways =
            [(Protocol::Tcp, "card"), (Protocol::Udp, "card"), (Protocol::Udp, "unicast"), (Protocol::Tcp, "late")];
        for ((protocol, way), port) in ways.into_iter().zip(PORT_FIRST..) {
            let service = format!("{way}-{}.shop", protocol.name());
            let addresses = [format!("{way}|0.0.0.0")];
            let program = self.start(Kind::Python, &addresses, protocol, port, (&service, &[]))?;
            if way == "late" {
                agent::await_instances(self.router, &service, 1)?;
                program.signal(Signal::SIGUSR1)?;
            }
            wait_for(&format!("the reason why {service} is not served"), READY_LIMIT, || {
                let list = agent::margay(self.server, ["service", "list"])?;
                let row = list.lines().find(|line| line.starts_with(&service)).unwrap_or_default();
                ensure!(
                    row.contains("bound to the interface eth0"),
                    "`margay service list` says {row:?}: {}",
                    program.log()
                );
                Ok(())
            })?;
            agent::await_instances(self.router, &service, 0)?;
            findings.figures.add("refused", 1.0);
        }
        Ok(())
    }

    /// Clients hear at once that the network is not reached.
    pub(super) fn refuse_clients(&self, findings: &mut Findings) -> Result<()> {
        let ways = [(Protocol::Tcp, "card"), (Protocol::Udp, "card"), (Protocol::Udp, "unicast")];
        for ((protocol, way), port) in ways.into_iter().zip(PORT_FIRST + 100..) {
            let service = format!("to-{way}-{}.shop", protocol.name());
            let any = Way::new("any", &["::"], [true, true]);
            let _program = self.serve(Kind::Python, &any, protocol, port, &service)?;
            let client = self.clients[0].0;
            let said = self.question(client, &service, protocol, way)?;
            let wanted = (Errno::ENETUNREACH as i32).to_string();
            let refused = said.lines().filter(|line| *line == wanted).count();
            ensure!(said.lines().count() == 2, "a client of {service} says {said}");
            findings.figures.add("refused", refused as f64);
            // The same without a card.
            let seen = self.ask(client, &service, protocol)?;
            ensure!(seen.len() == 2, "port {PORT} of {service} does not answer");
        }
        Ok(())
    }
}
