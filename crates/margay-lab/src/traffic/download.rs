//! Many downloads at once from a web server: each hashed by a sha256sum of its own, with the longest time that nothing
//! came.

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::host::write_line;

const PIECE: usize = 64 * 1024;
const HEAD_MAX: usize = 8 * 1024;
/// A download for which nothing came for so long has failed.
const PATIENCE: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// What to download.
#[derive(Clone, Debug, Args)]
pub struct Plan {
    /// Server's name or address
    pub host: String,
    /// Server's port
    pub port: u16,
    /// File on the server, without the first slash
    pub path: String,
    /// Connections at once
    #[arg(long)]
    pub count: usize,
    /// Bytes per second that each takes at most; 0: all that come
    #[arg(long, default_value_t = 0)]
    pub pace: u64,
}

/// What became of one.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Download {
    /// By sha256sum, of all that came.
    pub sha256: String,
    /// How much came.
    pub bytes: u64,
    /// Longest wait for the next bytes.
    pub stall_ms: f64,
    /// Why it ended before its end; empty when it did not.
    pub error: String,
    /// The error was a reset.
    pub reset: bool,
}

/// What all of them have done so far.
#[derive(Default)]
struct Tally {
    open: AtomicU64,
    bytes: AtomicU64,
    ended: AtomicU64,
}

impl Tally {
    fn line(&self) -> String {
        let of = |number: &AtomicU64| number.load(Ordering::Relaxed);
        json!({"open": of(&self.open), "bytes": of(&self.bytes), "ended": of(&self.ended)}).to_string()
    }
}

/// Runs all of them. Answers each line of input with a line of counts. When all have ended, the last line has each
/// [`Download`] under `downloads`.
pub fn run(plan: Plan) -> Result<()> {
    let to = (plan.host.as_str(), plan.port).to_socket_addrs();
    let to = to.with_context(|| format!("cannot resolve {}", plan.host))?.next();
    let to = to.with_context(|| format!("{} has no address", plan.host))?;
    let (plan, tally) = (Arc::new(plan), Arc::new(Tally::default()));
    let (done, results) = mpsc::channel();
    for _ in 0..plan.count {
        let (plan, tally, done) = (plan.clone(), tally.clone(), done.clone());
        let work = move || {
            let result = download(&plan, to, &tally);
            tally.ended.fetch_add(1, Ordering::Relaxed);
            // The other end lives until all have ended.
            let _ = done.send(result);
        };
        std::thread::Builder::new().name("download".into()).spawn(work).context("no thread left")?;
    }
    drop(done);
    let asked = tally.clone();
    // Ends with the process.
    std::thread::spawn(move || -> Result<()> {
        for line in std::io::stdin().lock().lines() {
            line?;
            write_line(&asked.line())?;
        }
        Ok(())
    });
    let downloads: Vec<Download> = results.iter().collect();
    write_line(&json!({"downloads": downloads}).to_string())
}

fn download(plan: &Plan, to: SocketAddr, tally: &Tally) -> Download {
    let mut found = Download::default();
    if let Err(error) = fetch(plan, to, tally, &mut found) {
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        found.reset = kind == Some(std::io::ErrorKind::ConnectionReset);
        found.error = format!("{error:#}");
    }
    found
}

fn fetch(plan: &Plan, to: SocketAddr, tally: &Tally, found: &mut Download) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT).context("cannot connect")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let request = format!("GET /{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", plan.path, plan.host);
    stream.write_all(request.as_bytes()).context("cannot ask")?;
    let length = head(&mut stream)?;
    tally.open.fetch_add(1, Ordering::Relaxed);
    let mut hasher = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start sha256sum")?;
    let received = receive(plan, &mut stream, &mut hasher, tally, found);
    // It ends with its input.
    drop(hasher.stdin.take());
    let output = hasher.wait_with_output().context("sha256sum does not end")?;
    found.sha256 = String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap_or_default().to_owned();
    received?;
    if found.bytes != length {
        bail!("the connection was closed after {} of {length} bytes", found.bytes);
    }
    Ok(())
}

/// Reads the answer's head, and gives the length of what follows.
fn head(stream: &mut TcpStream) -> Result<u64> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).context("no answer")?;
        head.push(byte[0]);
        if head.len() > HEAD_MAX {
            bail!("the answer has no end");
        }
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    if !head.starts_with("http/1.1 200 ") {
        bail!("the server says {:?}", head.lines().next().unwrap_or_default());
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    length.context("the server gives no length")?.trim().parse().context("the length is no number")
}

fn receive(plan: &Plan, stream: &mut TcpStream, hasher: &mut Child, tally: &Tally, found: &mut Download) -> Result<()> {
    let to_hash = hasher.stdin.as_mut().context("sha256sum has no input")?;
    let mut piece = vec![0; PIECE];
    let start = Instant::now();
    loop {
        let asked = Instant::now();
        let read = stream.read(&mut piece);
        found.stall_ms = found.stall_ms.max(asked.elapsed().as_secs_f64() * 1e3);
        let length = read.context("nothing more came")?;
        if length == 0 {
            return Ok(());
        }
        to_hash.write_all(&piece[..length]).context("sha256sum takes no more")?;
        found.bytes += length as u64;
        tally.bytes.fetch_add(length as u64, Ordering::Relaxed);
        if plan.pace > 0 {
            let due = Duration::from_secs_f64(found.bytes as f64 / plan.pace as f64);
            sleep(due.saturating_sub(start.elapsed()));
        }
    }
}
