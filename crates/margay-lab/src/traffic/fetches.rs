//! Closed-loop clients of a web server: each fetches a file, over a new connection every time, as soon as it has had it
//! before.

use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::host::write_line;
use crate::traffic::{now_ms, resolve};

const PATIENCE: Duration = Duration::from_secs(10);
/// Between a fetch that failed and the next: a server that refuses is not asked thousands of times.
const AFTER_FAILURE: Duration = Duration::from_millis(20);

/// One fetch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fetched {
    /// When it began, as [`now_ms`] has it.
    pub begun_ms: f64,
    /// When all of it was here.
    pub ended_ms: f64,
    /// The first line of the file: who served it.
    pub server: String,
    /// Why it is not here; empty when it is.
    pub error: String,
}

/// Fetches with so many clients until the input ends; prints a [`Fetched`] as a line of JSON for each.
pub async fn keep_fetching(host: &str, port: u16, path: &str, clients: usize) -> Result<()> {
    let to = resolve(host, port).await?;
    let ask: Arc<str> = format!("GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n").into();
    let stopped = Arc::new(AtomicBool::new(false));
    let at_end = Arc::clone(&stopped);
    std::thread::spawn(move || {
        // Whatever ends it, it has ended.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        at_end.store(true, Ordering::Relaxed);
    });
    let mut all = JoinSet::new();
    for _ in 0..clients {
        let (ask, stopped) = (Arc::clone(&ask), Arc::clone(&stopped));
        all.spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                let begun_ms = now_ms();
                let got = timeout(PATIENCE, fetch(to, &ask)).await;
                let got = got.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer in {PATIENCE:?}")));
                let (server, error) = match got {
                    Ok(server) => (server, String::new()),
                    Err(error) => (String::new(), format!("{error:#}")),
                };
                let has_failed = !error.is_empty();
                write_line(&serde_json::to_string(&Fetched { begun_ms, ended_ms: now_ms(), server, error })?)?;
                if has_failed {
                    sleep(AFTER_FAILURE).await;
                }
            }
            anyhow::Ok(())
        });
    }
    all.join_all().await.into_iter().collect()
}

async fn fetch(to: SocketAddr, ask: &str) -> Result<String> {
    let mut stream = TcpStream::connect(to).await.context("cannot connect")?;
    stream.write_all(ask.as_bytes()).await.context("cannot ask")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.context("the answer broke off")?;
    understand(&answer)
}

/// The first line of a whole file.
fn understand(answer: &[u8]) -> Result<String> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").context("an answer without a head")?;
    let (head, body) = (std::str::from_utf8(&answer[..end]).context("a head that is no text")?, &answer[end + 4..]);
    if head.split(' ').nth(1) != Some("200") {
        bail!("the server says {:?}", head.lines().next().unwrap_or_default());
    }
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).context("no length")?;
    ensure!(length.parse() == Ok(body.len()), "{} bytes of {length} came", body.len());
    let line = body.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}

#[cfg(test)]
mod tests {
    use super::understand;

    #[test]
    fn an_answer_is_a_whole_file_or_a_failure() {
        let answer = |text: &str| understand(text.as_bytes());
        assert_eq!(answer("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\ns1\nabc").expect("whole"), "s1");
        for (bad, why) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ns1\nabc", "6 bytes of 7"),
            ("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "503 Busy"),
            ("HTTP/1.1 200 OK\r\n", "without a head"),
        ] {
            assert!(answer(bad).expect_err("not whole").to_string().contains(why), "{bad}");
        }
    }
}
