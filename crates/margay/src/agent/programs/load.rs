//! Programs that say themselves how much of their weight is to stay: `docs/book/programming.md`.

use std::sync::Arc;
use std::time::Duration;

use margay_core::name::Name;
use margay_wire::LOAD_PERCENT_MAX;
use nix::errno::Errno;
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};

use super::message::{Kind, Reply, Request};
use super::request::{No, prefix, written};
use super::rights::Caller;
use crate::agent::Agent;
use crate::agent::health::processes::{self, Process};
use crate::agent::health::reports::{NAMES_OF_REPORTER_MAX, Reporter};

/// A program may report as soon as it listens. The agent hears of its socket by an event of the kernel, some
/// milliseconds later, or more where the host is busy: a report waits for that so long.
const HEARD_OF: Duration = Duration::from_millis(500);
/// From one look for the socket to the next.
const LOOK: Duration = Duration::from_millis(10);

/// What a program reports by one connection: it holds as long as this lives.
pub struct Reporting {
    agent: Arc<Agent>,
    /// `None`: it has reported nothing yet.
    reporter: Option<Reporter>,
}

impl Reporting {
    /// Nothing is reported yet.
    pub fn new(agent: &Arc<Agent>) -> Self {
        Self { agent: Arc::clone(agent), reporter: None }
    }

    /// Takes a report.
    pub async fn answer(&mut self, caller: &Caller, request: &Request) -> Reply {
        let reply = self.report(caller, request).await;
        reply.unwrap_or_else(|(errno, text)| Reply::refused(Kind::Load as u8, errno, text))
    }

    async fn report(&mut self, caller: &Caller, request: &Request) -> Result<Reply, No> {
        let percent = percent(request)?;
        let agent = &self.agent;
        let prefix = prefix(request)?;
        let name = written(agent, &prefix)?;
        let denied = |text| (Errno::EACCES, text);
        agent.connections.programs.rights.read().check(caller, &prefix, name.written()).map_err(denied)?;
        let pid = caller.pid;
        if !serves_soon(agent, &name, caller.process).await {
            let text = format!(
                "{name} is not served by this process, pid {pid}; report the load from the process that listens, or \
                 from one that was started for the name, while it listens"
            );
            return Err((Errno::ENOENT, text));
        }
        let reporter = *self.reporter.get_or_insert_with(|| agent.publishing.health.reporter());
        if !agent.publishing.health.report_load(reporter, &name, percent) {
            let text = format!("this program reports of {NAMES_OF_REPORTER_MAX} names already, and these are the most");
            return Err((Errno::ENOSPC, text));
        }
        tracing::trace!(%name, percent, pid, "a program reports its load");
        let mut reply = Reply::done(Kind::Load);
        (reply.id, reply.bits, reply.port) = (prefix.id, prefix.bits, request.port);
        Ok(reply)
    }
}

impl Drop for Reporting {
    fn drop(&mut self) {
        if let Some(reporter) = self.reporter {
            self.agent.publishing.health.forget(reporter);
        }
    }
}

/// Whether a process serves a name, or does within [`HEARD_OF`].
async fn serves_soon(agent: &Agent, name: &Name, process: Option<Process>) -> bool {
    let Some(process) = process else { return false };
    let end = Instant::now() + HEARD_OF;
    loop {
        if block_in_place(|| processes::serves(agent, name, process)) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        sleep(LOOK).await;
    }
}

fn percent(request: &Request) -> Result<u32, No> {
    if request.port > LOAD_PERCENT_MAX {
        let text = format!("{} % of a weight cannot stay: 0 to {LOAD_PERCENT_MAX} can", request.port);
        return Err((Errno::EINVAL, text));
    }
    Ok(request.port.into())
}

#[cfg(test)]
mod test {
    use margay_wire::ProgramRequestRepr;

    use super::*;

    #[test]
    fn all_to_nothing_of_a_weight_stays() {
        let asked = |port: u16| {
            let repr = ProgramRequestRepr { port, ..ProgramRequestRepr::new(Kind::Load) };
            percent(&Request::parse(&repr.emit()).expect("a request"))
        };
        assert_eq!((asked(0), asked(100)), (Ok(0), Ok(100)));
        let (errno, text) = asked(101).expect_err("refused");
        assert_eq!((errno, text.as_str()), (Errno::EINVAL, "101 % of a weight cannot stay: 0 to 100 can"));
    }
}
