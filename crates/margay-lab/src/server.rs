//! Real servers and clients: nginx, curl, and our own echo server.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::host::Host;
use crate::program::{Program, output_within, wait_for};
pub use crate::traffic::{Connects, Outcome, RoundTrips};

const START_LIMIT: Duration = Duration::from_secs(10);
const LOGS_LIMIT: Duration = Duration::from_secs(10);
const ATTEMPTS_LIMIT: Duration = Duration::from_secs(90);

/// How fast a web server answers.
#[derive(Clone, Copy, Debug)]
enum Pace {
    Free,
    /// Of all that it serves together; what comes beyond waits.
    RequestsPerS(u32),
    /// Of each connection.
    BytesPerS(u32),
}

/// A web server that runs, with its files and its access log.
pub struct Nginx {
    /// The one process.
    pub program: Program,
    /// Where its files are.
    pub root: PathBuf,
    access_log: PathBuf,
}

impl Nginx {
    /// Starts nginx on a host with one process, on these addresses (`0.0.0.0:80`, `[::]:80`). The file `/host` has the
    /// host's name. Returns when it listens.
    ///
    /// # Errors
    ///
    /// nginx is not installed, or does not listen in time.
    pub fn start(host: &Host, listen: &[&str]) -> Result<Self> {
        Self::start_as(host, listen, Pace::Free)
    }

    /// As [`start`](Self::start), for a server that answers so many requests per second and no more: what comes beyond
    /// waits.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_limited(host: &Host, listen: &[&str], requests_per_s: u32) -> Result<Self> {
        Self::start_as(host, listen, Pace::RequestsPerS(requests_per_s))
    }

    /// As [`start`](Self::start), for a server that sends so many bytes per second on each connection and no more.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_slow(host: &Host, listen: &[&str], bytes_per_s: u32) -> Result<Self> {
        Self::start_as(host, listen, Pace::BytesPerS(bytes_per_s))
    }

    fn start_as(host: &Host, listen: &[&str], pace: Pace) -> Result<Self> {
        let dir = host.dir.join("nginx");
        let root = dir.join("files");
        fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
        fs::write(root.join("host"), format!("{}\n", host.name()))?;
        let access_log = dir.join("access.log");
        let config = dir.join("nginx.conf");
        fs::write(&config, nginx_config(&dir, &root, &access_log, listen, pace)?)?;
        let argv = ["nginx", "-e", "stderr", "-c"].map(Path::new);
        let mut program = host.spawn("nginx", argv.into_iter().chain([config.as_path()]))?;
        for address in listen {
            let port = address.rsplit(':').next().context("an address without a port")?.to_owned();
            await_listener(host, &mut program, &port)?;
        }
        Ok(Self { program, root, access_log })
    }

    /// Puts a file into the server's root.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub fn put(&self, name: &str, content: &[u8]) -> Result<()> {
        fs::write(self.root.join(name), content).with_context(|| format!("cannot write {name}"))
    }

    /// All requests so far that have ended, by nginx's own log.
    pub fn requests(&self) -> Vec<Logged> {
        let log = fs::read_to_string(&self.access_log).unwrap_or_default();
        // The last line may be half written.
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().filter_map(Logged::read).collect()
    }

    /// How often `/path` was fetched completely, by nginx's own log. A fetch that a client has seen the end of may not
    /// be there yet: nginx writes its line after the last byte. [`served`] waits for it.
    fn logged(&self, path: &str) -> usize {
        let wanted = format!("GET /{path} 200");
        fs::read_to_string(&self.access_log).unwrap_or_default().lines().filter(|line| line.contains(&wanted)).count()
    }
}

/// A request as a web server's log has it; one that was cut is there, too.
#[derive(Clone, Debug, PartialEq)]
pub struct Logged {
    /// What stood behind the question mark; `-` where nothing did.
    pub arguments: String,
    /// When its first byte had come, in milliseconds since 1970.
    pub begun_ms: f64,
    /// When the server was done with it.
    pub ended_ms: f64,
    /// Bytes of the file that the kernel has taken.
    pub sent_bytes: u64,
}

impl Logged {
    /// Reads a line of the log; none where it is not whole yet.
    fn read(line: &str) -> Option<Self> {
        let mut words = line.split(' ').skip(5);
        let sent_bytes = words.next()?.parse().ok()?;
        let ended_s: f64 = words.next()?.parse().ok()?;
        let took_s: f64 = words.next()?.parse().ok()?;
        let arguments = words.next()?.to_owned();
        Some(Self { arguments, begun_ms: (ended_s - took_s) * 1e3, ended_ms: ended_s * 1e3, sent_bytes })
    }
}

/// How often each of these servers has served `/path`, when clients have fetched it from them so many times.
///
/// # Errors
///
/// Their logs have fewer.
pub fn served(servers: &[Nginx], path: &str, fetched: usize) -> Result<Vec<usize>> {
    wait_for(&format!("what was fetched of /{path}"), LOGS_LIMIT, || {
        let logged: Vec<usize> = servers.iter().map(|server| server.logged(path)).collect();
        ensure!(logged.iter().sum::<usize>() >= fetched, "{fetched} fetched, {logged:?} served by the servers' logs");
        Ok(logged)
    })
}

fn nginx_config(dir: &Path, root: &Path, access_log: &Path, listen: &[&str], pace: Pace) -> Result<String> {
    let dir = dir.display();
    let mut text =
        // The one user that every user namespace has; nginx would give its directories to `nobody`.
        format!("user root root;\ndaemon off;\nmaster_process off;\npid {dir}/nginx.pid;\nevents {{ \
            worker_connections 4096; }}\n");
    text.push_str("http {\n  sendfile on;\n  default_type application/octet-stream;\n  keepalive_timeout 30;\n");
    // One line per finished request, written at once: who asked, for what, what became of it, when, and how long it
    // took. [`Logged`] reads it.
    writeln!(
        text,
        "  log_format plain '$remote_addr $remote_port $request_method $uri $status $body_bytes_sent $msec \
         $request_time $args';"
    )?;
    writeln!(text, "  access_log {} plain;", access_log.display())?;
    for temporary in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        writeln!(text, "  {temporary}_temp_path {dir}/{temporary};")?;
    }
    match pace {
        Pace::Free => {}
        // One queue for all that asks, whoever it is.
        Pace::RequestsPerS(rate) => {
            writeln!(text, "  limit_req_zone $server_port zone=all:1m rate={rate}r/s;")?;
            writeln!(text, "  limit_req zone=all burst=4096;")?;
        }
        Pace::BytesPerS(rate) => writeln!(text, "  limit_rate {rate};")?,
    }
    text.push_str("  server {\n");
    for address in listen {
        let only = if address.starts_with('[') { " ipv6only=on" } else { "" };
        writeln!(text, "    listen {address}{only};")?;
    }
    writeln!(text, "    root {};\n  }}\n}}", root.display())?;
    Ok(text)
}

/// Waits until a server listens on a TCP port.
///
/// # Errors
///
/// It ends before, or does not listen in time.
pub fn await_listener(host: &Host, program: &mut Program, port: &str) -> Result<()> {
    let filter = format!("sport = :{port}");
    wait_for(&format!("a listener on port {port} of {}", host.name()), START_LIMIT, || {
        if program.ended()?.is_some() {
            bail!("the server has ended: {}", program.log());
        }
        if host.run(["ss", "-Hltn", &filter])?.trim().is_empty() { bail!("nobody listens") } else { Ok(()) }
    })
}

/// Starts an echo server on a host, TCP and UDP. Returns when it listens.
///
/// # Errors
///
/// It does not listen in time.
pub fn echo(host: &Host, listen: &[SocketAddr]) -> Result<Program> {
    echo_with(host, listen, &[])
}

/// As [`echo`], on one address; each new connection is sent the host's name as a line, before anything else.
///
/// # Errors
///
/// As for [`echo`].
pub fn greeter(host: &Host, listen: SocketAddr) -> Result<Program> {
    echo_with(host, &[listen], &["--greeting", &format!("{}\n", host.name())])
}

/// As [`echo`], on one address, with the options of the traffic program that say when connections are taken.
///
/// # Errors
///
/// As for [`echo`].
pub fn echo_late(host: &Host, listen: SocketAddr, options: &[&str]) -> Result<Program> {
    echo_with(host, &[listen], options)
}

fn echo_with(host: &Host, listen: &[SocketAddr], options: &[&str]) -> Result<Program> {
    let mut command = host.traffic(["echo"].iter().chain(options))?;
    for address in listen {
        command.arg("--listen").arg(address.to_string());
    }
    let name: Vec<_> = listen.iter().map(SocketAddr::to_string).collect();
    let mut program = Program::start(command, &host.dir.join(format!("echo-{}.log", name.join("-"))))?;
    wait_for(&format!("the echo server on {}", host.name()), START_LIMIT, || {
        if program.ended()?.is_some() {
            bail!("the server has ended: {}", program.log());
        }
        if program.log().contains("ready") { Ok(()) } else { bail!("it is not ready") }
    })?;
    Ok(program)
}

/// Runs attempts of [`crate::traffic`] from a host: connections (or, with `--udp`, datagrams) to an echo server.
///
/// # Errors
///
/// They cannot be made at all. A failed attempt is not an error.
pub fn attempt(host: &Host, to: &str, port: u16, options: &[&str]) -> Result<Outcome> {
    let port = port.to_string();
    let mut command = host.traffic(["attempt", to, &port].iter().chain(options))?;
    outcome(output_within(&mut command, ATTEMPTS_LIMIT)?)
}

/// Measures round trips of one byte on one connection to the echo server at port 7 (with `--udp`, datagrams).
///
/// # Errors
///
/// One of them fails.
pub fn round_trips(host: &Host, to: &str, count: usize, options: &[&str]) -> Result<RoundTrips> {
    let count = count.to_string();
    let mut command = host.traffic(["pingpong", to, "7", "--count", &count].iter().chain(options))?;
    let output = output_within(&mut command, ATTEMPTS_LIMIT)?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("no round trips to {to}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Sets up and closes connections to the echo server at port 7, so many at once.
///
/// # Errors
///
/// They cannot be made at all. A failed connection is not an error.
pub fn connects(host: &Host, to: &str, count: usize, parallel: usize) -> Result<Connects> {
    let (count, parallel) = (count.to_string(), parallel.to_string());
    let mut command = host.traffic(["connects", to, "7", "--count", &count, "--parallel", &parallel])?;
    let output = output_within(&mut command, ATTEMPTS_LIMIT)?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("no connections to {to}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Reads what a program of attempts printed.
///
/// # Errors
///
/// It printed no outcome.
pub fn outcome(output: Output) -> Result<Outcome> {
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("no outcome: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// One fetch by curl.
#[derive(Clone, Debug, Default)]
pub struct Fetch {
    /// curl's exit status; 7 is "connection refused", 28 is a time-out.
    pub status: i32,
    /// SHA-256 of what came.
    pub sha256: String,
    /// What curl said about an error.
    pub error: String,
    /// How long it took, by curl's clock.
    pub took_ms: f64,
}

impl Fetch {
    /// Whether exactly the expected bytes came.
    pub fn is(&self, sha256: &str) -> bool {
        self.status == 0 && self.sha256 == sha256
    }
}

/// Fetches an address with curl, hashed by sha256sum.
///
/// # Errors
///
/// curl cannot be run at all. A failed fetch is not an error.
pub fn fetch(host: &Host, options: &[&str], url: &str) -> Result<Fetch> {
    const SCRIPT: &str = r#"set -o pipefail
        curl -sS --fail --max-time 30 -w '%{stderr}%{time_total}\n' "$@" | sha256sum | cut -d ' ' -f 1"#;
    let argv = ["bash", "-c", SCRIPT, "fetch"].into_iter().chain(options.iter().copied()).chain([url]);
    let output = host.output(argv)?;
    let said = String::from_utf8_lossy(&output.stderr);
    let seconds = said.lines().last().and_then(|line| line.trim().parse::<f64>().ok());
    Ok(Fetch {
        status: output.status.code().context("curl was ended by a signal")?,
        sha256: String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        error: said.lines().next().unwrap_or_default().to_owned(),
        took_ms: seconds.unwrap_or_default() * 1e3,
    })
}

/// Fetches a short text with curl.
///
/// # Errors
///
/// The fetch fails.
pub fn fetch_text(host: &Host, url: &str) -> Result<String> {
    Ok(host.run(["curl", "-sS", "--fail", "--max-time", "30", url])?.trim().to_owned())
}

/// SHA-256 of bytes, by sha256sum.
///
/// # Errors
///
/// sha256sum cannot be run.
pub fn sha256(host: &Host, path: &Path) -> Result<String> {
    let text = host.run([Path::new("sha256sum"), path])?;
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

/// Bytes that do not repeat and cannot be compressed.
pub fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut dice = crate::pump::Dice::new(seed);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&dice.roll().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_log_is_read() {
        let line = "10.1.0.5 40000 GET /file 200 100000 1795282713.500 4.250 c1-17";
        let wanted = Logged {
            arguments: "c1-17".to_owned(),
            begun_ms: 1_795_282_709_250.0,
            ended_ms: 1_795_282_713_500.0,
            sent_bytes: 100_000,
        };
        assert_eq!(Logged::read(line), Some(wanted));
        assert_eq!(Logged::read("10.1.0.5 40000 GET /file 200 100000"), None);
        assert_eq!(Logged::read(""), None);
    }
}
