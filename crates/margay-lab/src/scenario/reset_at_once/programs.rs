//! Packaged programs that wait for their server: psql in a query, redis-cli in BLPOP, ssh in a command, and a
//! WebSocket. On each host a server of each of them has a name of that host's own, so that a program's server is known.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::super::Findings;
use super::super::apps::{self, Stage};
use super::{HASTY, HUNG_LIMIT};
use crate::arrivals::now_ms;
use crate::host::Host;
use crate::moment::time_us;
use crate::observe;
use crate::program::{Program, tail, wait_for};

/// How long a session with any of them may take to begin.
const BEGIN_LIMIT: Duration = Duration::from_secs(30);

/// Servers, and how each is used: prints `begun` when the session waits, and ends as the program does. What waits ends
/// by itself in a minute.
const USES: [(&str, &str); 4] = [
    (
        "postgresql",
        r#"
            ask() { stdbuf -oL psql -h "$NAME" -p "$PORT" -U postgres -At "$@"; }
            until ask -c "select 1" > "$NAME.said" 2>&1; do grep -q "starting up" "$NAME.said"; sleep 0.1; done
            ask -c '\echo begun' -c "select pg_sleep(60)"
        "#,
    ),
    (
        "redis",
        r#"
            redis-cli -h "$NAME" -p "$PORT" BLPOP nothing 60 &
            until redis-cli -h "$NAME" -p "$PORT" CLIENT LIST | grep -q cmd=blpop; do sleep 0.05; done
            echo begun
            wait $!
        "#,
    ),
    (
        "openssh",
        r#"
            echo "[$NAME]:$PORT $(cut -d ' ' -f 1,2 "$SERVED/host_key.pub")" > "$NAME.known"
            ssh -F /dev/null -i "$SERVED/user_key" -o UserKnownHostsFile="$PWD/$NAME.known" \
                -o StrictHostKeyChecking=yes -p "$PORT" "root@$NAME" 'echo begun; exec sleep 60'
        "#,
    ),
    (
        "websocket",
        r#"
            /usr/bin/python3 - <<END
import asyncio, websockets
async def wait():
    async with websockets.connect("ws://$NAME:$PORT/", ping_interval=None) as socket:
        print("begun", flush=True)
        await socket.recv()
asyncio.run(wait())
END
        "#,
    ),
];

/// Says when the script has ended, and with which status.
const TELL_END: &str = "trap 'echo \"ended $? $EPOCHREALTIME\"' EXIT\n";

/// The programs that wait for the servers of one host.
pub struct Programs<'a> {
    server: &'a Host,
    /// The name of its servers.
    service: String,
    servers: Vec<Program>,
    waiting: Vec<(&'static str, Program)>,
}

/// How a program has ended.
#[derive(Debug, PartialEq)]
struct End {
    status: i32,
    at_ms: f64,
}

impl End {
    /// Reads what [`TELL_END`] has printed.
    fn read(log: &str) -> Option<Self> {
        let mut words = log.lines().find_map(|line| line.strip_prefix("ended "))?.split(' ');
        let status = words.next()?.parse().ok()?;
        Some(Self { status, at_ms: time_us(words.next()?)? as f64 / 1e3 })
    }
}

impl<'a> Programs<'a> {
    /// Starts servers on hosts, and a client of each of them. Returns when all sessions wait, in the order of the
    /// hosts.
    ///
    /// # Errors
    ///
    /// A server does not serve, or a session does not begin in time; the message has what was printed.
    pub fn start(dir: &Path, servers: &[&'a Host], client: &Host) -> Result<Vec<Self>> {
        // A database takes a second to be made.
        thread::scope(|scope| {
            let starting: Vec<_> =
                servers.iter().map(|server| scope.spawn(|| Self::start_at(dir, server, client))).collect();
            starting
                .into_iter()
                .map(|one| one.join().map_err(|_| anyhow::anyhow!("a thread that starts programs has panicked"))?)
                .collect()
        })
    }

    fn start_at(dir: &Path, server: &'a Host, client: &Host) -> Result<Self> {
        let own_dir = dir.join(format!("programs-{}", server.name()));
        std::fs::create_dir_all(&own_dir).with_context(|| format!("cannot make {}", own_dir.display()))?;
        let stage = Stage::new(&own_dir, server, client)?;
        let service = format!("{}.shop", server.name());
        let mut servers = Vec::new();
        let mut waiting = Vec::new();
        for (name, script) in USES {
            let app = apps::find(name)?;
            servers.push(apps::serve_as(&stage, app, &service, &HASTY)?);
            let mut program = apps::use_as(&stage, app, &service, &format!("{TELL_END}{script}"))?;
            wait_for(&format!("a session of {name} with {}", server.name()), BEGIN_LIMIT, || {
                ensure!(program.ended()?.is_none(), "it has ended: {}", tail(&program.log()));
                ensure!(program.log().lines().any(|line| line == "begun"), "it has not: {}", tail(&program.log()));
                Ok(())
            })?;
            waiting.push((name, program));
        }
        Ok(Self { server, service, servers, waiting })
    }

    /// The name of the servers.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// Processes that serve the sessions. PostgreSQL's own parent is none of them: it cleans up after the others.
    ///
    /// # Errors
    ///
    /// The host is gone, or a session has no process.
    pub fn serving(&self) -> Result<Vec<String>> {
        let found = observe::processes(self.server, |words| {
            let is_session = |title: &str| words[0].starts_with(title);
            is_session("postgres: postgres postgres")
                || is_session("sshd: ")
                || is_session("sshd-session: ")
                || words[0].contains("redis-server")
                || words.iter().any(|word| word.ends_with("websocket_server.py"))
        })?;
        ensure!(found.len() >= USES.len(), "{} serves {} sessions by {found:?}", self.server.name(), USES.len());
        Ok(found.iter().map(u32::to_string).collect())
    }

    /// Waits for the end of all programs, and gives how much later than `from_ms`, as [`now_ms`] has it, each has ended
    /// with an error. Adds to `hung`, to `early` (ended before), and to `programs_without_error`.
    pub fn await_errors(&self, what: &str, from_ms: f64, findings: &mut Findings) -> Vec<f64> {
        // Those that hang are counted.
        let _ = wait_for("the end of programs", HUNG_LIMIT, || {
            let ended = self.waiting.iter().filter(|(_, program)| End::read(&program.log()).is_some()).count();
            ensure!(ended == self.waiting.len(), "{ended} have ended");
            Ok(())
        });
        let mut errors_ms = Vec::new();
        let mut said = Vec::new();
        for (name, program) in &self.waiting {
            let Some(end) = End::read(&program.log()) else {
                findings.figures.add("hung", 1.0);
                findings.note(format!("{what}: {name} waits still after {:.0} ms", now_ms() - from_ms));
                continue;
            };
            let after_ms = end.at_ms - from_ms;
            findings.figures.add("programs", 1.0);
            findings.figures.add("early", f64::from(u8::from(after_ms < 0.0)));
            findings.figures.add("programs_without_error", f64::from(u8::from(end.status == 0)));
            said.push(format!("{name} {after_ms:.0} ms (status {})", end.status));
            errors_ms.push(after_ms);
        }
        findings.note(format!("{what}: {}", said.join(", ")));
        errors_ms
    }

    /// Ends the servers in order: what PostgreSQL shares between its processes goes with it.
    pub fn finish(mut self) {
        for server in &mut self.servers {
            // One that is gone already is what we want.
            let _ = server.signal(Signal::SIGINT);
            server.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::End;

    #[test]
    fn the_end_of_a_program_is_read() {
        let end = End { status: 2, at_ms: 1_795_282_713_500.25 };
        assert_eq!(End::read("begun\nFATAL: lost\nended 2 1795282713.500250\n"), Some(end));
        assert_eq!(End::read("begun\n"), None);
        assert_eq!(End::read("ended 2 \n"), None);
    }
}
