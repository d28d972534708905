//! How loaded this program is, for the agent.

use std::io;

use margay_wire::LOAD_PERCENT_MAX;
use rustix::io::Errno;

use crate::agent::Agent;
use crate::error::Error;
use crate::target::ToTarget;
use crate::wire::{Kind, Request};

/// Says how much of its weight this process is to keep for a name, or a prefix of names, that it serves: `percent` is 0
/// to 100, and with 0 no new connection comes.
///
/// It holds until the next report of the name, and as long as this process and the agent live: say it again every few
/// seconds. It is cheap, and the agent tells others at most once in a second. Of several processes that serve the name
/// on this host the smallest report counts. A call that is cancelled ends all reports of this process until the next
/// one.
///
/// ```no_run
/// # async fn example() -> Result<(), margay_sdk::Error> {
/// margay_sdk::report_load("web.shop", 40).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Refused`] with `ENOENT` (this process does not serve the name), `EACCES` (no right to the name) or `ENOSPC`
/// (64 names are reported of already); [`Error::Io`] beyond 100 percent; [`Error::Name`]; [`Error::AgentDown`];
/// [`Error::Incompatible`], also where the agent is of an earlier release, which takes no reports.
pub async fn report_load(name: &(impl ToTarget + ?Sized), percent: u16) -> Result<(), Error> {
    Agent::shared().report_load(name, percent).await
}

impl Agent {
    /// As [`report_load`], by this agent: it holds as long as this, or a clone of this.
    ///
    /// # Errors
    /// As for [`report_load`].
    pub async fn report_load(&self, name: &(impl ToTarget + ?Sized), percent: u16) -> Result<(), Error> {
        if percent > LOAD_PERCENT_MAX {
            let text = format!("{percent} % of a weight cannot stay: 0 to {LOAD_PERCENT_MAX} can");
            return Err(Error::Io(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let prefix = name.to_target()?.prefix;
        let request = Request { prefix, port: percent, ..Request::new(Kind::Load) };
        match self.report("a report of load", &request).await {
            Ok(_) => Ok(()),
            // It does not know the question.
            Err(Error::Refused { errno, .. }) if errno == Errno::BADMSG.raw_os_error() => {
                Err(self.incompatible("it is of an earlier release, and takes no reports of load".to_owned()))
            }
            Err(error) => Err(error),
        }
    }
}
