//! Connections as client libraries keep them: each asks its server for its name now and then, and one that the server
//! has closed between two questions is opened again. A question without its whole answer is never asked again, so that
//! it is seen.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::host::write_line;
use crate::traffic::resolve;

/// An answer, or a connection, that takes longer does not come.
const LIMIT: Duration = Duration::from_secs(10);
const HTTP_QUESTION: &[u8] = b"GET /host HTTP/1.1\r\nHost: shop\r\n\r\n";
const REDIS_QUESTION: &[u8] = b"*2\r\n$3\r\nGET\r\n$4\r\nhost\r\n";
/// A longer answer is none of these.
const ANSWER_MAX: usize = 4096;

/// How questions are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// The file `/host`, over one connection again and again.
    Http,
    /// The key `host`.
    Redis,
}

/// What to ask, and how often.
#[derive(Args, Debug)]
pub struct Plan {
    /// Server's name or address
    host: String,
    /// Server's port
    port: u16,
    /// How to ask
    #[arg(long, value_enum)]
    protocol: Protocol,
    /// How many connections
    #[arg(long)]
    count: usize,
    /// Time between an answer and the next question of a connection
    #[arg(long)]
    every_ms: u64,
}

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Turn {
    /// A question was answered.
    Answered,
    /// The server has closed it between two questions.
    Closed,
    /// It was reset between two questions.
    Reset,
    /// It ended before the whole answer to a question had come.
    Cut,
    /// It could not be opened.
    Refused,
}

/// A turn of one connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pooled {
    /// The connection's number, from zero; the one that takes its place has the same.
    pub number: usize,
    /// What has happened.
    pub turn: Turn,
    /// The server's name; empty where none has answered.
    pub server: String,
    /// Questions that it has answered.
    pub answers: u64,
    /// What was wrong, in words.
    pub error: String,
}

/// Keeps so many connections until the input ends. Prints each [`Pooled`] as a line of JSON.
pub async fn keep(plan: Plan) -> Result<()> {
    let address = resolve(&plan.host, plan.port).await?;
    let plan = Arc::new(plan);
    for number in 0..plan.count {
        let plan = Arc::clone(&plan);
        tokio::spawn(keep_one(plan, address, number));
    }
    // Those that are open are closed with this.
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await.map(drop).context("cannot read the input")
}

/// A connection, and whichever takes its place.
async fn keep_one(plan: Arc<Plan>, address: SocketAddr, number: usize) -> Result<()> {
    loop {
        let pooled = hold(&plan, address, number).await;
        say(&pooled)?;
        if pooled.turn == Turn::Refused {
            // It is tried again, and not in a storm.
            sleep(Duration::from_millis(plan.every_ms)).await;
        }
    }
}

/// One connection, until it ends.
async fn hold(plan: &Plan, address: SocketAddr, number: usize) -> Pooled {
    let mut pooled = Pooled { number, turn: Turn::Refused, server: String::new(), answers: 0, error: String::new() };
    match timeout(LIMIT, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => {
            let mut stream = BufReader::new(stream);
            if let Err(error) = talk(plan, &mut stream, &mut pooled).await {
                pooled.error = format!("{error:#}");
            }
        }
        Ok(Err(error)) => pooled.error = error.to_string(),
        Err(_) => pooled.error = "no answer to a connect".to_owned(),
    }
    pooled
}

/// Asks until the connection ends, and notes how.
async fn talk(plan: &Plan, stream: &mut BufReader<TcpStream>, pooled: &mut Pooled) -> Result<()> {
    loop {
        pooled.turn = Turn::Cut;
        pooled.server = timeout(LIMIT, ask(plan.protocol, stream)).await.context("no whole answer in time")??;
        pooled.answers += 1;
        say(&Pooled { turn: Turn::Answered, ..pooled.clone() })?;
        let Ok(read) = timeout(Duration::from_millis(plan.every_ms), stream.fill_buf()).await else { continue };
        match read {
            Ok([]) => {
                pooled.turn = Turn::Closed;
                return Ok(());
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                pooled.turn = Turn::Reset;
                return Err(error.into());
            }
            Err(error) => return Err(error.into()),
            Ok(more) => anyhow::bail!("{} bytes that nobody has asked for", more.len()),
        }
    }
}

/// Asks, and reads the whole answer: the server's name.
async fn ask(protocol: Protocol, stream: &mut BufReader<TcpStream>) -> Result<String> {
    let question = match protocol {
        Protocol::Http => HTTP_QUESTION,
        Protocol::Redis => REDIS_QUESTION,
    };
    stream.write_all(question).await.context("the question does not go")?;
    let len = match protocol {
        Protocol::Http => http_len(stream).await?,
        Protocol::Redis => redis_len(stream).await?,
    };
    ensure!(len <= ANSWER_MAX, "an answer of {len} bytes");
    let mut answer = vec![0; len];
    stream.read_exact(&mut answer).await.context("the answer breaks off")?;
    Ok(String::from_utf8_lossy(&answer).trim().to_owned())
}

async fn line(stream: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = String::new();
    ensure!(stream.read_line(&mut line).await? > 0, "the end in the place of an answer");
    Ok(line.trim_end().to_owned())
}

/// Reads a head, and gives how long the body is.
async fn http_len(stream: &mut BufReader<TcpStream>) -> Result<usize> {
    let status = line(stream).await?;
    ensure!(status.starts_with("HTTP/1.1 200 "), "the answer is {status:?}");
    let mut len = None;
    loop {
        let field = line(stream).await?;
        if field.is_empty() {
            return len.context("an answer without a length");
        }
        if let Some((_, value)) = field.split_once(": ").filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        {
            len = Some(value.parse().context("a length that is none")?);
        }
    }
}

/// Reads the length of a bulk string (RESP), and gives it with the end of its line.
async fn redis_len(stream: &mut BufReader<TcpStream>) -> Result<usize> {
    let head = line(stream).await?;
    let len: usize = head.strip_prefix('$').and_then(|len| len.parse().ok()).with_context(|| format!("{head:?}"))?;
    Ok(len + 2)
}

fn say(pooled: &Pooled) -> Result<()> {
    write_line(&serde_json::to_string(pooled)?)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::{BufReader, Protocol, TcpStream, ask};

    async fn answer(protocol: Protocol, said: &'static [u8]) -> Result<String, String> {
        use tokio::io::AsyncWriteExt;

        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let mut client = BufReader::new(TcpStream::connect(address).await.expect("it listens"));
        let (mut server, _) = listener.accept().await.expect("a connection");
        server.write_all(said).await.expect("it goes");
        server.shutdown().await.expect("open");
        ask(protocol, &mut client).await.map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn an_answer_is_whole_or_cut() {
        let http = b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 5\r\n\r\nweb1\n";
        assert_eq!(answer(Protocol::Http, http).await.as_deref(), Ok("web1"));
        assert!(answer(Protocol::Http, &http[..http.len() - 1]).await.is_err(), "a byte is missing");
        let redis = b"$4\r\nweb1\r\n";
        assert_eq!(answer(Protocol::Redis, redis).await.as_deref(), Ok("web1"));
        assert!(answer(Protocol::Redis, &redis[..3]).await.is_err(), "half a line");
        assert!(answer(Protocol::Redis, b"").await.is_err(), "nothing");
    }
}
