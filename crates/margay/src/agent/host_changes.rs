//! What `up` has changed on this host stays so while the agent runs: what somebody takes away or alters is put back,
//! and said (decision 0047).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use margay_datapath::kernel::KernelCache;
use parking_lot::Mutex;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::Agent;
use crate::config::Config;
use crate::host::change::{Change, State};
use crate::host::netlink::{self, Netlink};
use crate::host::{self, HostError, judge, sysctl};

/// Parameters and files are changed without a word to anybody.
const ROUND: Duration = Duration::from_millis(250);
/// In so many rounds everything is looked at once: word may be lost.
const FULL_ROUNDS: u32 = 8;
/// Nobody tells that IPv6 is on again, and then everything of it is missing.
const NO_IPV6: &str = "net/ipv6/conf/all/disable_ipv6";
/// What somebody does in one go is one change.
const PAUSE: Duration = Duration::from_millis(20);
/// Whoever takes a change away so many times within this time wants it away.
const TIMES_MAX: usize = 10;
const WITHIN: Duration = Duration::from_secs(60);
/// After the kernel's word was lost.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What became of each change.
#[derive(Default)]
pub struct HostChanges(Mutex<HashMap<String, Record>>);

/// Of one change.
#[derive(Default)]
struct Record {
    /// When it was put back.
    times: VecDeque<Instant>,
    /// It is not put back any more.
    given_up: bool,
    /// The host refused it the last time.
    refused: Option<String>,
}

impl Record {
    /// Notes one more time, unless that is too often.
    fn admit(&mut self, now: Instant) -> bool {
        if self.given_up {
            return false;
        }
        self.times.retain(|time| now.duration_since(*time) < WITHIN);
        self.given_up = self.times.len() >= TIMES_MAX;
        if !self.given_up {
            self.times.push_back(now);
        }
        !self.given_up
    }

    /// It is there. Somebody else has put it there where this agent had stopped.
    fn is_there(&mut self) {
        if self.given_up {
            *self = Self::default();
        }
        self.refused = None;
    }
}

impl HostChanges {
    /// Changes that are not put back, and why.
    pub fn not_kept(&self) -> Vec<String> {
        let why = |(what, record): (&String, &Record)| match &record.refused {
            Some(refused) => Some(format!("{what}: this host refuses it: {refused}")),
            None if record.given_up => Some(format!(
                "{what}: another program has undone it {TIMES_MAX} times within {} s, so it is not put back any more",
                WITHIN.as_secs()
            )),
            None => None,
        };
        self.0.lock().iter().filter_map(why).collect()
    }

    /// Looks at `changes`, and puts back what is not there.
    async fn keep(&self, config: &Config, net: &Netlink, changes: &[Change]) {
        for change in changes {
            let what = change.to_string();
            let was = match change.state(net).await {
                Ok(State::Present) => {
                    if let Some(record) = self.0.lock().get_mut(&what) {
                        record.is_there();
                    }
                    continue;
                }
                Ok(State::Absent) => "gone".to_owned(),
                Ok(State::Differs(how)) => how,
                Err(error) => {
                    tracing::debug!(%error, "a change of `up` cannot be looked at");
                    continue;
                }
            };
            let (admitted, had_given_up) = {
                let mut records = self.0.lock();
                let record = records.entry(what.clone()).or_default();
                let had_given_up = record.given_up;
                (record.admit(Instant::now()), had_given_up)
            };
            if !admitted {
                if !had_given_up {
                    tracing::error!(
                        change = what,
                        was,
                        times = TIMES_MAX,
                        "another program undoes this again and again; the agent stops putting it back until it is \
                         there (`margay up` puts it there): find out which program it is"
                    );
                }
                continue;
            }
            let refused = host::put_back(config, net, change).await.err().map(|error| error.to_string());
            let mut records = self.0.lock();
            let record = records.entry(what.clone()).or_default();
            match &refused {
                None => tracing::warn!(change = what, was, "somebody has undone what `up` had changed; put back"),
                Some(error) if record.refused.is_none() => {
                    tracing::error!(change = what, was, error, "what `up` had changed cannot be put back");
                }
                Some(_) => {}
            }
            record.refused = refused;
        }
    }
}

/// Puts back what `up` has made and is gone, and says each; what does not matter much may be refused.
///
/// # Errors
///
/// The host was never prepared, or refuses a change.
pub async fn restore_all(config: &Config, mut say: impl FnMut(&str)) -> Result<(), HostError> {
    let net = Netlink::connect().map_err(|error| HostError::Look { what: "interfaces", error })?;
    for change in host::made(config).await? {
        if change.state(&net).await.is_ok_and(|state| state != State::Present) {
            match host::put_back(config, &net, &change).await {
                Err(error) if !change.is_optional() => return Err(error),
                Err(error) => say(&format!("warning: {error}")),
                Ok(()) => say(&change.to_string()),
            }
        }
    }
    Ok(())
}

/// Goes on until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    loop {
        if let Err(error) = follow_kernel(&agent).await {
            tracing::warn!(%error, "this host's rules and routes are not watched for a moment");
        }
        sleep(TRY_AGAIN).await;
    }
}

async fn follow_kernel(agent: &Agent) -> io::Result<()> {
    let net = Netlink::connect()?.with_namespace(agent.names.dns.as_ref().and_then(|dns| dns.namespace()));
    let mut told = netlink::changes_of_own(host::TABLE, agent.config().ranges())?;
    let mut filter = judge::Changes::open();
    let mut rounds = interval(ROUND);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut changes = Vec::new();
    let mut round = 0_u32;
    let mut no_ipv6 = None;
    loop {
        let heard = tokio::select! {
            _ = rounds.tick() => {
                round = round.wrapping_add(1);
                let before = std::mem::replace(&mut no_ipv6, sysctl::read(NO_IPV6).ok().flatten());
                round % FULL_ROUNDS == 1 || before != no_ipv6
            }
            word = told.next() => match word { Some(()) => true, None => return Ok(()) },
            () = super::way::heard(&mut filter) => true,
        };
        if heard {
            sleep(PAUSE).await;
            while let Some(Some(())) = told.next().now_or_never() {}
            match host::made(&agent.config()).await {
                Ok(made) => {
                    changes = made;
                    // What leads to the responder is of use where there is one.
                    if agent.names.dns.is_some() {
                        changes.extend(host::agents_own(&agent.config()).await.unwrap_or_default());
                    }
                }
                Err(error) => tracing::debug!(%error, "what `up` has changed cannot be read"),
            }
            agent.kernel.network.host_changes.keep(&agent.config(), &net, &changes).await;
        } else {
            let taken_off =
                tokio::task::block_in_place(|| agent.kernel.direct.with_cache(KernelCache::reattach)).unwrap_or(0);
            if taken_off > 0 {
                tracing::warn!(taken_off, "somebody has taken eBPF programs off interfaces of this host; put back");
            }
            let silent: Vec<_> = changes.iter().filter(|change| change.is_silent()).cloned().collect();
            agent.kernel.network.host_changes.keep(&agent.config(), &net, &silent).await;
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn whoever_undoes_a_change_again_and_again_is_let_be_until_it_is_back() {
        let mut record = Record::default();
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        for n in 0..TIMES_MAX as u64 {
            assert!(record.admit(at(n)), "{n}");
        }
        assert!(!record.admit(at(30)) && !record.admit(at(600)), "it has stopped");
        record.is_there();
        assert!(record.admit(at(601)), "somebody has put it back");
    }

    #[test]
    fn a_change_that_is_undone_now_and_then_is_put_back_for_ever() {
        let mut record = Record::default();
        let start = Instant::now();
        for n in 0..100 {
            assert!(record.admit(start + WITHIN / 5 * n));
        }
        assert!(record.times.len() <= TIMES_MAX);
    }
}
