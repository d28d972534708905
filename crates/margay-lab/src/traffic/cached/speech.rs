//! What is said to a cache, by memcached's text protocol and by Redis' own, and what is heard.

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpStream;

/// A request, with all that is said of it.
#[derive(Clone, Debug)]
pub(super) enum Said {
    Get(Vec<String>),
    Set(String, Vec<u8>),
    Delete(String),
    Increase(String),
}

/// What an answer comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Keys that have one, and their values.
    Values(Vec<(String, Vec<u8>)>),
    Stored,
    /// Whether there was one.
    Deleted(bool),
    Count(u64),
    /// There is no such number.
    NoCount,
    /// An error, in words.
    Refused(String),
}

/// The protocol of a cache, as its client speaks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speech {
    Memcached,
    Redis,
}

impl Speech {
    pub(super) fn say(self, said: &Said) -> Vec<u8> {
        match self {
            Self::Memcached => say_to_memcached(said),
            Self::Redis => say_to_redis(said),
        }
    }

    /// # Errors
    ///
    /// The connection has ended, or this is no answer.
    pub(super) async fn hear(self, stream: &mut BufReader<TcpStream>, said: &Said) -> Result<Outcome> {
        match self {
            Self::Memcached => hear_memcached(stream, said).await,
            Self::Redis => hear_redis(stream, said).await,
        }
    }
}

fn say_to_memcached(said: &Said) -> Vec<u8> {
    match said {
        Said::Get(keys) => format!("get {}\r\n", keys.join(" ")).into_bytes(),
        Said::Set(key, value) => [format!("set {key} 0 0 {}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat(),
        Said::Delete(key) => format!("delete {key}\r\n").into_bytes(),
        Said::Increase(key) => format!("incr {key} 1\r\n").into_bytes(),
    }
}

fn say_to_redis(said: &Said) -> Vec<u8> {
    let words: Vec<&[u8]> = match said {
        Said::Get(keys) => [&b"MGET"[..]].into_iter().chain(keys.iter().map(String::as_bytes)).collect(),
        Said::Set(key, value) => vec![b"SET", key.as_bytes(), value],
        Said::Delete(key) => vec![b"DEL", key.as_bytes()],
        Said::Increase(key) => vec![b"INCR", key.as_bytes()],
    };
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

async fn line(stream: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = String::new();
    ensure!(stream.read_line(&mut line).await? > 0, "the framer has closed the connection");
    Ok(line.trim_end().to_owned())
}

/// A value of so many bytes, and the end of its line.
async fn value(stream: &mut BufReader<TcpStream>, len: usize) -> Result<Vec<u8>> {
    let mut value = vec![0; len + 2];
    stream.read_exact(&mut value).await?;
    ensure!(value.ends_with(b"\r\n"), "a value is longer than it says");
    value.truncate(len);
    Ok(value)
}

async fn hear_memcached(stream: &mut BufReader<TcpStream>, said: &Said) -> Result<Outcome> {
    let mut values = Vec::new();
    loop {
        let line = line(stream).await?;
        if let Some(about) = line.strip_prefix("VALUE ") {
            let mut words = about.split_whitespace();
            let key = words.next().context("a value without a key")?.to_owned();
            let len = words.nth(1).context("a value without a length")?.parse()?;
            values.push((key, value(stream, len).await?));
            continue;
        }
        if line.starts_with("SERVER_ERROR") {
            return Ok(Outcome::Refused(line));
        }
        return Ok(match (said, line.as_str()) {
            (Said::Get(_), "END") => Outcome::Values(values),
            (Said::Set(..), "STORED") => Outcome::Stored,
            (Said::Delete(_), "DELETED") => Outcome::Deleted(true),
            (Said::Delete(_), "NOT_FOUND") => Outcome::Deleted(false),
            (Said::Increase(_), "NOT_FOUND") => Outcome::NoCount,
            (Said::Increase(_), count) => Outcome::Count(count.parse().with_context(|| line.clone())?),
            _ => bail!("{line:?} is no answer to {said:?}"),
        });
    }
}

async fn hear_redis(stream: &mut BufReader<TcpStream>, said: &Said) -> Result<Outcome> {
    let line = line(stream).await?;
    if line.starts_with('-') {
        return Ok(Outcome::Refused(line));
    }
    Ok(match (said, line.as_str()) {
        (Said::Set(..), "+OK") => Outcome::Stored,
        (Said::Delete(_), ":1") => Outcome::Deleted(true),
        (Said::Delete(_), ":0") => Outcome::Deleted(false),
        // Where there was no number, one begins.
        (Said::Increase(_), ":1") => Outcome::NoCount,
        (Said::Increase(_), _) => {
            Outcome::Count(line.strip_prefix(':').and_then(|count| count.parse().ok()).with_context(|| line.clone())?)
        }
        (Said::Get(keys), _) => {
            ensure!(line == format!("*{}", keys.len()), "{line:?} is no answer to {said:?}");
            Outcome::Values(elements(stream, keys).await?)
        }
        _ => bail!("{line:?} is no answer to {said:?}"),
    })
}

async fn elements(stream: &mut BufReader<TcpStream>, keys: &[String]) -> Result<Vec<(String, Vec<u8>)>> {
    let mut values = Vec::new();
    for key in keys {
        let head = line(stream).await?;
        match head.strip_prefix('$') {
            Some("-1") => {}
            Some(len) => values.push((key.clone(), value(stream, len.parse()?).await?)),
            None => bail!("{head:?} is no value of {key}"),
        }
    }
    Ok(values)
}
