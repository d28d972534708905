//! `apps`: applications as Debian packages them, unmodified: each is served on one host and used from another by the
//! service's name, which its client looks up as any other. What came through is compared, not only how it ended.

mod table;
mod web;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::program::{Program, output_within, tail, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::noise;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "apps",
    summary: "applications as packaged, unmodified, used by the service's name, each verified by what came through",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 3] =
    [bound("apps_total", AtLeast(16.0)), bound("failed", Exactly(0.0)), bound("lines_changed", Exactly(0.0))];

const SERVE_LIMIT: Duration = Duration::from_secs(30);
const USE_LIMIT: Duration = Duration::from_secs(90);
const PAYLOAD_BYTES: usize = 3_000_000;
/// Where Debian's own programs are: others of the same name may come first in somebody's path.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// An application. Its scripts run in directories of their own and find in their environment: `NAME` and `PORT` of the
/// service, `WORD` (a word of this run), `PAYLOAD` (a file), `SERVED` (the server's directory) and `SCRIPTS` (ours, for
/// what has a library and no program).
pub struct App {
    /// Its name, and that of its service.
    pub name: &'static str,
    /// Debian packages of its server and its client.
    pub packages: &'static [&'static str],
    /// Where it listens; the first is `PORT`.
    pub ports: &'static [u16],
    /// The protocols of the first.
    pub protocols: &'static [&'static str],
    /// Script that becomes the server.
    pub serve: &'static str,
    /// Script that uses it.
    pub client: &'static str,
    /// What that must print, each of it; `WORD` stands for the run's word.
    pub prints: &'static [&'static str],
}

/// All applications.
fn all() -> impl Iterator<Item = &'static App> {
    table::APPS.iter().chain(web::APPS)
}

/// Files of [`App`]'s `SCRIPTS`.
const SCRIPTS: [(&str, &str); 5] = [
    ("nginx.sh", include_str!("nginx.sh")),
    ("grpc_server.py", include_str!("grpc_server.py")),
    ("grpc_client.py", include_str!("grpc_client.py")),
    ("websocket_server.py", include_str!("websocket_server.py")),
    ("websocket_client.py", include_str!("websocket_client.py")),
];

/// The lab, and what all applications use.
pub(super) struct Stage<'a> {
    server: &'a Host,
    client: &'a Host,
    payload: PathBuf,
    scripts: PathBuf,
    word: String,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build("apps", site::BOTH, &["server", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    let stage = Stage::new(dir, lab.host("server")?, lab.host("client")?)?;
    for figure in ["apps_ok", "apps_missing", "failed", "lines_changed"] {
        findings.set(figure, 0.0);
    }
    findings.set("apps_total", all().count() as f64);
    for app in all() {
        match installed(app)? {
            Err(missing) => miss(app, &missing, findings),
            Ok(versions) => attempt(&stage, app, &versions, findings),
        }
    }
    Ok(())
}

/// Figures are about all of them; tests take those that are there.
fn miss(app: &App, missing: &str, findings: &mut Findings) {
    findings.note(format!("{}: {missing} is not installed; `scripts/setup apps` does that", app.name));
    findings.figures.add("apps_missing", 1.0);
    if is_long() {
        findings.figures.add("failed", 1.0);
    }
}

fn attempt(stage: &Stage, app: &App, versions: &str, findings: &mut Findings) {
    pair::attempt_part(app.name, findings, |findings| {
        let changed = lines_changed(app)?;
        findings.figures.add("lines_changed", changed);
        perform(stage, app)?;
        findings.figures.add("apps_ok", 1.0);
        progress(&format!("{}: ok ({versions})", app.name));
        Ok(())
    });
}

/// The versions of an application's packages; or the first that is not installed.
fn installed(app: &App) -> Result<std::result::Result<String, String>> {
    let mut versions = Vec::new();
    for package in app.packages {
        let output = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Abbrev}${Version}", package]).output();
        // Where there is no dpkg, there are no packages of Debian.
        let said = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        match said.strip_prefix("ii ") {
            Some(version) => versions.push(format!("{package} {version}")),
            None => return Ok(Err((*package).to_owned())),
        }
    }
    Ok(Ok(versions.join(", ")))
}

/// Files of an application's packages, and of those that they name as needed, that are not as Debian made them.
/// Configuration is everybody's own.
fn lines_changed(app: &App) -> Result<f64> {
    let mut packages: Vec<String> = app.packages.iter().map(|package| (*package).to_owned()).collect();
    // The program itself may lie in a package that is named for its version.
    let output = Command::new("dpkg-query").args(["-W", "-f", "${Depends},"]).args(app.packages).output()?;
    packages.extend(needed(&String::from_utf8_lossy(&output.stdout)));
    let output = Command::new("dpkg").arg("--verify").args(&packages).output().context("cannot run dpkg")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let changed: Vec<&str> = said.lines().filter(|line| is_changed(line)).collect();
    if !changed.is_empty() {
        progress(&format!("{}: changed: {changed:?}", app.name));
    }
    Ok(changed.len() as f64)
}

/// The first choice of each dependency, without its version.
fn needed(depends: &str) -> impl Iterator<Item = String> {
    let names = depends.split(',').filter_map(|one| one.split_whitespace().next());
    names.map(|name| name.split(':').next().unwrap_or_default().to_owned())
}

/// `??5?????? c /path`: the sum is another; `c` marks configuration. What is missing (documents, mostly) is not
/// changed.
fn is_changed(line: &str) -> bool {
    line.chars().nth(2) == Some('5') && !line.contains(" c /")
}

/// The application of this name.
///
/// # Errors
///
/// There is none.
pub(super) fn find(name: &str) -> Result<&'static App> {
    all().find(|app| app.name == name).with_context(|| format!("there is no application \"{name}\""))
}

/// Starts an application's server and publishes each of its ports.
///
/// # Errors
///
/// The server ends, listens at none of its ports in time, or is not registered.
pub(super) fn serve(stage: &Stage, app: &App) -> Result<Program> {
    serve_as(stage, app, &app.service(), &[])
}

/// As [`serve`], by another name than its own, published with these options.
///
/// # Errors
///
/// As for [`serve`].
pub(super) fn serve_as(stage: &Stage, app: &App, service: &str, options: &[&str]) -> Result<Program> {
    let mut server = Program::start(stage.script(app, stage.server, app.serve)?, &stage.log(app, stage.server))?;
    await_ports(stage.server, app, &mut server)?;
    for port in app.ports {
        agent::publish(stage.server, service, &format!("0.0.0.0:{port}"), options)?;
    }
    Ok(server)
}

/// Starts a script of the client's that uses an application by another name than its own.
///
/// # Errors
///
/// It cannot be started.
pub(super) fn use_as(stage: &Stage, app: &App, service: &str, script: &str) -> Result<Program> {
    let mut command = stage.script(app, stage.client, script)?;
    command.env("NAME", format!("{service}.sal.internal"));
    Program::start(command, &stage.client.dir.join(format!("app-{}-{service}.log", app.name)))
}

fn perform(stage: &Stage, app: &App) -> Result<()> {
    let service = app.service();
    let _server = serve(stage, app)?;
    let opened = || agent::metric(stage.client, "margay_messages_sent_total{kind=\"syn\"}");
    let opened_before = opened()?;
    let used = output_within(&mut stage.script(app, stage.client, app.client)?, USE_LIMIT);
    agent::withdraw(stage.server, &service)?;
    // The command line is the whole script.
    let Ok(used) = used else { bail!("it did not end within {USE_LIMIT:?}") };
    let (printed, said) = (String::from_utf8_lossy(&used.stdout), String::from_utf8_lossy(&used.stderr));
    fs::write(stage.log(app, stage.client), format!("{printed}\n{said}"))?;
    if !used.status.success() {
        bail!("{}: {} {}", used.status, tail(&said), tail(&printed));
    }
    for wanted in app.prints.iter().map(|wanted| wanted.replace("WORD", &stage.word)) {
        if !printed.contains(&wanted) {
            bail!("it did not print {wanted:?}, but {}", tail(&printed));
        }
    }
    if opened()? == opened_before {
        bail!("it opened no flow: what it used was not the service");
    }
    Ok(())
}

impl App {
    fn service(&self) -> String {
        format!("{}.shop", self.name)
    }
}

impl<'a> Stage<'a> {
    /// Writes the payload and the scripts into the lab's directory.
    ///
    /// # Errors
    ///
    /// They cannot be written.
    pub(super) fn new(dir: &Path, server: &'a Host, client: &'a Host) -> Result<Self> {
        let (payload, scripts) = (dir.join("payload"), dir.join("scripts"));
        fs::write(&payload, noise(PAYLOAD_BYTES, 1)).context("cannot write the payload")?;
        fs::create_dir_all(&scripts)?;
        for (name, text) in SCRIPTS {
            fs::write(scripts.join(name), text).with_context(|| format!("cannot write {name}"))?;
        }
        let random = fs::read_to_string("/proc/sys/kernel/random/uuid").context("no randomness")?;
        let word = format!("word{}", random.get(..8).context("no randomness")?);
        Ok(Self { server, client, payload, scripts, word })
    }

    /// The directory in which an application's scripts run on a host.
    pub(super) fn dir(app: &App, host: &Host) -> PathBuf {
        host.dir.join("apps").join(app.name)
    }

    fn log(&self, app: &App, host: &Host) -> PathBuf {
        host.dir.join(format!("app-{}.log", app.name))
    }

    fn script(&self, app: &App, host: &Host, script: &str) -> Result<Command> {
        let dir = Self::dir(app, host);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        // Whoever enters a host's mounts stands at their root.
        let script = format!("cd \"$HOME\"\n{script}");
        let mut command = host.command(["bash", "-euo", "pipefail", "-c", &script]);
        command
            .env("PATH", PATH)
            .env("HOME", &dir)
            .env("NAME", format!("{}.sal.internal", app.service()))
            .env("PORT", app.ports.first().context("no port")?.to_string())
            .env("WORD", &self.word)
            .env("PAYLOAD", &self.payload)
            .env("SERVED", Self::dir(app, self.server))
            .env("SCRIPTS", &self.scripts);
        Ok(command)
    }
}

/// Waits until it listens at its first port, by all protocols.
fn await_ports(host: &Host, app: &App, server: &mut Program) -> Result<()> {
    let filter = format!("sport = :{}", app.ports.first().context("no port")?);
    wait_for("its listeners", SERVE_LIMIT, || {
        if server.ended()?.is_some() {
            bail!("the server has ended: {}", tail(&server.log()));
        }
        for protocol in app.protocols {
            let option = if *protocol == "udp" { "-Hlnu" } else { "-Hlnt" };
            if host.run(["ss", option, &filter])?.trim().is_empty() {
                bail!("nobody listens by {protocol}: {}", tail(&server.log()));
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{all, is_changed, needed};

    #[test]
    fn what_dpkg_says_is_understood() {
        assert!(is_changed("??5??????   /usr/bin/iperf"));
        assert!(
            !is_changed("??5?????? c /etc/nginx/nginx.conf") && !is_changed("missing     /usr/share/doc/git/README")
        );
        let names: Vec<String> = needed("libc6 (>= 2.34), python3:any (<< 3.12) | other,,").collect();
        assert_eq!(names, ["libc6", "python3"]);
    }

    #[test]
    fn names_and_ports_are_used_once_and_the_set_up_knows_every_package() {
        let setup = include_str!("../../../../../scripts/setup");
        let words: BTreeSet<&str> = setup.split_whitespace().collect();
        let (mut names, mut ports) = (BTreeSet::new(), BTreeSet::new());
        for app in all() {
            assert!(names.insert(app.name), "{} is there twice", app.name);
            assert!(app.ports.iter().all(|port| ports.insert(port)), "{} shares a port", app.name);
            assert!(!app.prints.is_empty(), "{} is verified by nothing", app.name);
            let unknown: Vec<_> = app.packages.iter().filter(|package| !words.contains(**package)).collect();
            assert!(unknown.is_empty(), "scripts/setup does not install {unknown:?}");
        }
    }
}
