//! The act of one connection to many servers: a memcached joins and another one dies under load.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::{quote, say};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::scenario::ensemble::{await_members, await_out};
use crate::scenario::site;
use crate::series::Series;
use crate::server::await_listener;
use crate::traffic::Cached;

const ENSEMBLE: &str = "cache.shop";
const MEMBERS: &str = "cache-members.shop";
const HOSTS: [&str; 4] = ["m1", "m2", "m3", "m4"];
/// Of these, the last joins under load.
const FIRST: usize = 3;
/// Which of them dies.
const DIES: usize = 1;
const PORT: &str = "11211";
/// Answers between two steps.
const ANSWERS: u64 = 1000;
const LIMIT: Duration = Duration::from_secs(20);

/// One connection of a client, and what it has heard.
struct Load {
    series: Series<Cached>,
    counted: u64,
}

impl Load {
    /// Waits for some answers, and says how many there were.
    fn go_on(&mut self, what: &str) -> Result<()> {
        let before = self.counted;
        wait_for("answers", LIMIT, || {
            self.counted = self.series.lines().iter().map(|slot| slot.answered).sum();
            let count = self.counted - before;
            ensure!(count >= ANSWERS, "there are {count}");
            Ok(())
        })?;
        say(&format!("    {:>6} answers {what}", self.counted - before))
    }
}

/// Does it, on hosts of its own. Gives whether all went well.
pub fn share_a_cache(dir: &Path) -> Result<bool> {
    say("One connection to many servers, on six hosts of their own:
                                         ┌══ member ── memcached   m1
  any client ── framer ══════ switch ════┼══ member ── memcached   m2
             client              box     └══ member ── memcached   m3
")?;
    let names = [&HOSTS[..], &["box", "client"]].concat();
    let lab = site::build("demo-cache", site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let switch = lab.host("box")?;
    let client = lab.host("client")?;
    say(&format!("On m1, m2, m3:   memcached;  margay ensemble member {MEMBERS}"))?;
    let mut members = Vec::new();
    for name in &HOSTS[..FIRST] {
        members.push(start_member(lab.host(name)?)?);
    }
    say(&format!("On box:          margay ensemble serve {ENSEMBLE} --members {MEMBERS}"))?;
    let _switch = switch.spawn("switch", ["margay", "ensemble", "serve", ENSEMBLE, "--members", MEMBERS])?;
    await_members(switch, ENSEMBLE, FIRST)?;
    say(&format!("On client:       margay ensemble framer memcached --service {ENSEMBLE}\n"))?;
    let mut framer = client.spawn("framer", ["margay", "ensemble", "framer", "memcached", "--service", ENSEMBLE])?;
    await_listener(client, &mut framer, PORT)?;

    say("One connection sets, gets and counts all the time, and checks each answer:")?;
    let words = ["cache-checked".to_owned(), format!("127.0.0.1:{PORT}"), "--count=1".to_owned()];
    let mut load = Load { series: Series::start(client, &words)?, counted: 0 };
    load.go_on("of three servers")?;

    members.push(start_member(lab.host(HOSTS[FIRST])?)?);
    await_members(switch, ENSEMBLE, HOSTS.len())?;
    load.go_on(&format!("since {} has joined", HOSTS[FIRST]))?;

    members[DIES].iter_mut().try_for_each(|program| program.signal(Signal::SIGKILL))?;
    await_out(switch, ENSEMBLE, HOSTS[DIES])?;
    load.go_on(&format!("since memcached and framer of {} were killed with -9\n", HOSTS[DIES]))?;
    quote(&agent::margay(switch, ["ensemble", "show", ENSEMBLE])?)?;
    judge(&load.series.finish(LIMIT)?)
}

/// A memcached, and its framer.
fn start_member(host: &Host) -> Result<[Program; 2]> {
    let words = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", PORT, "-t", "1", "-m", "64"];
    let mut memcached = host.spawn("memcached", words)?;
    await_listener(host, &mut memcached, PORT)?;
    Ok([memcached, host.spawn("member", ["margay", "ensemble", "member", MEMBERS])?])
}

fn judge(slots: &[Cached]) -> Result<bool> {
    let sum = |of: fn(&Cached) -> u64| slots.iter().map(of).sum::<u64>();
    let bad = [
        ("wrong", sum(|slot| slot.wrong)),
        ("done twice", sum(|slot| slot.duplicated)),
        ("never answered", sum(|slot| slot.lost)),
        ("refused though they change nothing", sum(|slot| slot.refused_safe)),
    ];
    let closed = sum(|slot| slot.closed);
    let refused = sum(|slot| slot.refused_unsafe);
    let longest_ms = slots.iter().flat_map(|slot| &slot.slow).map(|slow| slow.took_ms).fold(0.0, f64::max);
    let bad_words: Vec<String> = bad.iter().map(|(what, count)| format!("{count} {what}")).collect();
    say(&format!("    of {} answers: {}", sum(|slot| slot.answered), bad_words.join(", ")))?;
    say(&format!(
        "    the connection {}; changes under way at {} when it died, which were refused: {refused}; the longest wait \
         for an answer: {longest_ms:.0} ms\n",
        if closed == 0 { "lives" } else { "has ENDED" },
        HOSTS[DIES]
    ))?;
    let first = slots.iter().flat_map(|slot| &slot.errors).next();
    first.map_or(Ok(()), |error| say(&format!("    {error}\n")))?;
    slots.first().context("nothing was asked")?;
    Ok(closed == 0 && bad.iter().all(|(_, count)| *count == 0))
}
