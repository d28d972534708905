//! The ways in which a program comes to serve a name, each with what must follow from it; and an agent that dies
//! meanwhile.

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use super::{Files, LIMIT, Stage};
use crate::agent;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::scenario::Findings;
use crate::server;

const PRIVATE: u16 = 8091;
const LOOPBACK: u16 = 8092;
const PASSED: u16 = 8093;
const BY_PROGRAM: u16 = 8094;
const BY_PORT: u16 = 8095;
const DATAGRAMS: u16 = 8096;
const SHORT_LIVED: u16 = 8097;
const ORDERED: u16 = 8098;

/// Tries all of them. What does not hold is said, and counted.
pub fn try_all(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let doors = Doors { alpha: stage.lab.host("alpha")?, client: stage.lab.host("client")?, stage };
    let mut count = 0.0;
    let mut door = |name: &str, result: Result<()>| {
        count += 1.0;
        if let Err(error) = result {
            findings.note(format!("{name}: {error:#}"));
            findings.figures.add("failed", 1.0);
        }
    };
    let private = doors.run("private.shop", PRIVATE, &["--private"], &[])?;
    door("a private port", doors.private());
    door("a socket on the loopback", doors.loopback());
    let passed = doors.passed()?;
    door("a socket that was passed", doors.answers("passed.shop"));
    door("datagrams", doors.datagrams());
    door("what cannot be started", doors.not_started());
    door("a name that is none", doors.bad_name());
    door("an order, which waits for a socket and follows it", doors.ordered());
    let short_lived = doors.run("short.shop", SHORT_LIVED, &[], &[])?;
    door("one that will not last", doors.answers("short.shop"));
    let kept = doors.while_the_agent_is_dead(&short_lived)?;
    for name in ["private.shop", "passed.shop", "program.shop", "port.shop"] {
        door(&format!("{name} after the agent's death"), doors.answers(name));
    }
    door("who died with the agent", doors.awaits("short.shop", 0));
    drop((private, passed, kept, short_lived));
    for name in ["private.shop", "passed.shop", "program.shop", "port.shop"] {
        door(&format!("{name} at the end"), doors.awaits(name, 0));
    }
    findings.set("doors", count);
    Ok(())
}

struct Doors<'a> {
    stage: &'a Stage<'a>,
    alpha: &'a Host,
    client: &'a Host,
}

impl Doors<'_> {
    fn files(&self) -> &Files {
        self.stage.files
    }

    /// The server of a few lines, on a port, under `margay run`.
    fn run(&self, service: &str, port: u16, options: &[&str], more: &[&str]) -> Result<Program> {
        let offer = format!("{service}:80");
        let mut argv: Vec<String> = ["margay", "run", "--service", &offer].map(str::to_owned).into();
        argv.extend(options.iter().map(|word| (*word).to_owned()));
        argv.push("--".to_owned());
        argv.extend(self.files().script(self.alpha, port, more));
        self.alpha.spawn(service, argv)
    }

    fn answers(&self, service: &str) -> Result<()> {
        let url = format!("http://{service}.sal.internal/host");
        wait_for(&format!("an answer of {service}"), LIMIT, || {
            let answer = server::fetch_text(self.client, &url)?;
            ensure!(answer == "alpha", "the answer was {answer:?}");
            Ok(())
        })
    }

    fn awaits(&self, service: &str, count: usize) -> Result<()> {
        agent::await_instances(self.stage.lab.host("router")?, service, count)
    }

    fn private(&self) -> Result<()> {
        self.answers("private.shop")?;
        let address = self.alpha.plan.address().context("alpha has no address")?;
        match server::fetch_text(self.client, &format!("http://{address}:{PRIVATE}/host")) {
            Ok(answer) => bail!("the network reached it: {answer:?}"),
            Err(_) => Ok(()),
        }
    }

    fn loopback(&self) -> Result<()> {
        let on_loopback = ["--on", "127.0.0.1"];
        let unnamed = self.run("silent.shop", LOOPBACK + 100, &[], &on_loopback)?;
        wait_for("why it is not served", LIMIT, || {
            let list: serde_json::Value =
                serde_json::from_str(&agent::margay(self.alpha, ["service", "list", "--json"])?)?;
            let text = list["waiting"].to_string();
            ensure!(text.contains("silent.shop") && text.contains("say who may connect"), "{text}");
            Ok(())
        })?;
        drop(unnamed);
        let _named = self.run("loop.shop", LOOPBACK, &["--allow", "authority"], &on_loopback)?;
        self.answers("loop.shop")
    }

    /// As systemd does it: the socket listens before there is a program for it.
    fn passed(&self) -> Result<Program> {
        let server = self.files().script(self.alpha, PASSED, &["--fd"]).join("', '");
        let starter = format!(
            "import os, socket; s = socket.create_server(('0.0.0.0', {PASSED})); os.set_inheritable(s.fileno(), True)\n\
             os.execvp('margay', ['margay', 'run', '--service', 'passed.shop:80', '--', '{server}', str(s.fileno())])"
        );
        self.alpha.spawn("passed", ["python3", "-c", &starter])
    }

    fn datagrams(&self) -> Result<()> {
        let echo = self.alpha.words_of_traffic(&["echo", "--listen", &format!("0.0.0.0:{DATAGRAMS}")])?;
        let offer = format!("echo.shop:7:{DATAGRAMS}");
        let argv = ["margay", "run", "--service", &offer, "--"].map(str::to_owned).into_iter();
        let _echo = self.alpha.spawn("echo", argv.chain(echo))?;
        self.awaits("echo.shop", 1)?;
        for options in [&["--count", "5"][..], &["--count", "5", "--udp", "--resend-ms", "500"]] {
            let outcome = server::attempt(self.client, "echo.shop.sal.internal", 7, options)?;
            ensure!(outcome.failed() == 0, "{options:?}: {:?}", outcome.errors);
        }
        Ok(())
    }

    fn not_started(&self) -> Result<()> {
        let output = self.alpha.output(["margay", "run", "--service", "none.shop", "--", "/nowhere/program"])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(127) && said.contains("/nowhere/program"), "{}: {said}", output.status);
        Ok(())
    }

    fn bad_name(&self) -> Result<()> {
        for (offer, word) in [("none..shop", "none..shop"), ("none.shop:70000", "70000"), ("none.shop:1:2:3", "LISTEN")]
        {
            let output = self.alpha.output(["margay", "run", "--service", offer, "--", "true"])?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(!output.status.success() && said.contains(word), "{offer}: {}: {said}", output.status);
        }
        Ok(())
    }

    fn ordered(&self) -> Result<()> {
        let listen = format!("0.0.0.0:{ORDERED}");
        agent::margay(self.alpha, ["service", "publish", "order.shop:80", "--listen", &listen])?;
        let state = || Ok(agent::show(self.alpha, "order.shop")?["service"]["state"].to_string());
        let before: Result<String> = state();
        let before = before?;
        ensure!(before.contains("waiting"), "with nothing that listens, its state was {before}");
        for _ in 0..2 {
            let program = self.alpha.spawn("ordered", self.files().script(self.alpha, ORDERED, &[]))?;
            self.answers("order.shop")?;
            program.signal(Signal::SIGKILL)?;
            self.awaits("order.shop", 0)?;
        }
        agent::withdraw(self.alpha, "order.shop")
    }

    /// The agent dies, and with it, unheard, a program; others begin to listen, which rules of its configuration are
    /// about.
    fn while_the_agent_is_dead(&self, short_lived: &Program) -> Result<[Program; 2]> {
        let python = self.alpha.run(["python3", "-c", "import os, sys; print(os.path.realpath(sys.executable))"])?;
        self.alpha.shell(&format!(
            "printf '[[service]]\\nname = \"program.shop\"\\nexecutable = \"{}\"\\nlisten_port = {BY_PROGRAM}\\nport = \
             80\\n\
             [[service]]\\nname = \"port.shop\"\\nlisten_port = {BY_PORT}\\nport = 80\\n' >> /etc/margay/margay.toml",
            python.trim()
        ))?;
        agent::kill(self.alpha)?;
        short_lived.signal(Signal::SIGKILL)?;
        let start = |port| self.alpha.spawn(&format!("plain-{port}"), self.files().script(self.alpha, port, &[]));
        let programs = [start(BY_PROGRAM)?, start(BY_PORT)?];
        for port in [BY_PROGRAM, BY_PORT] {
            super::moment(&format!("a listener on port {port}"), || {
                super::listeners(self.alpha.holder_pid(), port).map(|found| found == 1)
            })?;
        }
        agent::start_again(self.alpha)?;
        Ok(programs)
    }
}
