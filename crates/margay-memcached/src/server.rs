//! Who answers for a partition: connections to its virtual address, each of which leads to the partition's holder.
//!
//! TCP, not memcached's UDP: a request by UDP is one datagram, so that values beyond 1400 bytes could not be stored,
//! and nothing says whether a lost one was done. A connection stays with its server when the partition moves, so none
//! is used for longer than a second; a new one costs no more than a round trip.

use std::collections::HashMap;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use margay_sdk::{Agent, Protocol};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::partition::Partitions;
use crate::request::{VALUE_MAX, number};

/// So long at most a connection is used: by then who moved is found.
const LIFE: Duration = Duration::from_secs(1);
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const TRIES: usize = 3;
/// From an address that the agent did not give to the next question.
const LEARN_PAUSE: Duration = Duration::from_millis(200);
/// Unused connections kept of one partition.
const IDLE_MAX: usize = 16;
/// Longest line of an answer.
const LINE_MAX: u64 = 2048;
/// All values of an answer.
pub const ANSWER_MAX: usize = 8 * VALUE_MAX;
/// Why a request has no values.
pub const TOO_LARGE: &str = "the values are too large for one answer; ask for fewer keys, by TCP";

/// What ends an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The first line.
    Line,
    /// `END`, after values, which have so many bytes at most; or an error's line.
    Values(usize),
}

struct Connection {
    stream: BufReader<TcpStream>,
    opened: Instant,
}

/// The servers of a service.
pub struct Servers {
    /// How it is divided.
    pub partitions: Partitions,
    agent: Agent,
    port: u16,
    addresses: Mutex<HashMap<u16, IpAddr>>,
    idle: Mutex<HashMap<u16, Vec<Connection>>>,
}

impl Servers {
    /// Those behind the agent's virtual addresses, at this port.
    pub fn new(partitions: Partitions, agent: Agent, port: u16) -> Self {
        Self { partitions, agent, port, addresses: Mutex::default(), idle: Mutex::default() }
    }

    /// Says something to the holder of a partition, and gives its answer as it came. Where nothing says whether a
    /// request was done, only what is `repeatable` is said again.
    ///
    /// # Errors
    ///
    /// What failed last, in words for a line.
    pub async fn ask(
        self: &Arc<Self>,
        index: u16,
        message: &[u8],
        answer: Answer,
        repeatable: bool,
    ) -> Result<Vec<u8>, String> {
        let mut failed = String::new();
        for _ in 0..TRIES {
            let mut connection = match self.connection(index).await {
                Ok(connection) => connection,
                Err(error) => {
                    // Its address may have gone to another name, if the agent lost its leases.
                    locked(&self.addresses).remove(&index);
                    failed = error;
                    continue;
                }
            };
            match timeout(ANSWER_LIMIT, connection.exchange(message, answer)).await {
                Ok(Ok(bytes)) => {
                    self.put_back(index, connection);
                    return Ok(bytes);
                }
                Ok(Err(error)) if error.kind() == ErrorKind::FileTooLarge => return Err(TOO_LARGE.to_owned()),
                Ok(Err(error)) => failed = format!("the server broke off: {error}"),
                Err(_) => failed = format!("no answer in {ANSWER_LIMIT:?}"),
            }
            if !repeatable {
                failed.push_str("; it may be done, or not");
                break;
            }
        }
        Err(format!("partition {index}: {failed}"))
    }

    async fn connection(self: &Arc<Self>, index: u16) -> Result<Connection, String> {
        while let Some(mut known) = locked(&self.idle).get_mut(&index).and_then(Vec::pop) {
            if known.is_usable() {
                return Ok(known);
            }
        }
        let address = SocketAddr::new(self.address(index).await?, self.port);
        let failed = |error: &dyn Display| format!("nobody answers at {address}: {error}");
        let stream = timeout(CONNECT_LIMIT, TcpStream::connect(address)).await;
        let stream = stream.map_err(|_| failed(&"no connection in a second"))?.map_err(|error| failed(&error))?;
        stream.set_nodelay(true).map_err(|error| failed(&error))?;
        Ok(Connection { stream: BufReader::new(stream), opened: Instant::now() })
    }

    async fn address(self: &Arc<Self>, index: u16) -> Result<IpAddr, String> {
        if let Some(known) = locked(&self.addresses).get(&index) {
            return Ok(*known);
        }
        let found = self.agent.resolve(&self.partitions.prefix(index), Protocol::Tcp).await;
        let found = found.map_err(|error| error.to_string())?;
        // Any host has IPv4; and one of the two there always is.
        let address = found.v4.map(IpAddr::V4).or(found.v6.map(IpAddr::V6)).ok_or("the agent gave no address")?;
        locked(&self.addresses).insert(index, address);
        Ok(address)
    }

    /// Learns the addresses of all partitions. An agent gives no more than a few new ones in a second, so that it is
    /// better begun before they are wanted.
    pub async fn learn(self: &Arc<Self>) {
        for index in 0..self.partitions.count() {
            while self.address(index).await.is_err() {
                tokio::time::sleep(LEARN_PAUSE).await;
            }
        }
    }

    fn put_back(&self, index: u16, connection: Connection) {
        let mut idle = locked(&self.idle);
        let others = idle.entry(index).or_default();
        others.retain(Connection::is_young);
        if others.len() < IDLE_MAX && connection.is_young() {
            others.push(connection);
        }
    }

    /// Closes connections that nobody has used, for ever.
    pub async fn tidy(&self) {
        loop {
            tokio::time::sleep(LIFE).await;
            locked(&self.idle).retain(|_, connections| {
                connections.retain(Connection::is_young);
                !connections.is_empty()
            });
        }
    }
}

impl Connection {
    fn is_young(&self) -> bool {
        self.opened.elapsed() < LIFE
    }

    /// Whether it is young, and the server has neither closed it nor said what nobody asked for.
    fn is_usable(&mut self) -> bool {
        let is_quiet =
            matches!(self.stream.get_ref().try_read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        self.is_young() && self.stream.buffer().is_empty() && is_quiet
    }

    async fn exchange(&mut self, message: &[u8], answer: Answer) -> io::Result<Vec<u8>> {
        self.stream.write_all(message).await?;
        let mut bytes = Vec::new();
        loop {
            let from = bytes.len();
            (&mut self.stream).take(LINE_MAX).read_until(b'\n', &mut bytes).await?;
            let Some(line) = bytes[from..].strip_suffix(b"\r\n") else {
                return Err(io::Error::new(ErrorKind::UnexpectedEof, "in the middle of an answer"));
            };
            let Answer::Values(max) = answer else { return Ok(bytes) };
            if !line.starts_with(b"VALUE ") {
                return Ok(bytes);
            }
            let length = value_length(line).filter(|length| *length <= ANSWER_MAX.saturating_sub(bytes.len()));
            let length = length.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "a value of no good length"))?;
            let value_at = bytes.len();
            if value_at + length > max {
                return Err(ErrorKind::FileTooLarge.into());
            }
            bytes.resize(value_at + length + 2, 0);
            self.stream.read_exact(&mut bytes[value_at..]).await?;
        }
    }
}

/// The length in `VALUE <key> <flags> <length> [<cas>]`.
fn value_length(line: &[u8]) -> Option<usize> {
    line.split(|byte| *byte == b' ').nth(3).and_then(number)
}

/// The values of an answer, each with its key and its own `VALUE` line; `None` if it is an error's line.
pub fn values(answer: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let (mut found, mut rest) = (Vec::new(), answer);
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let line = &rest[..end];
        if line == b"END" {
            return Some(found);
        }
        let key = line.strip_prefix(b"VALUE ")?.split(|byte| *byte == b' ').next()?;
        let length = value_length(line)?.checked_add(end + 4)?;
        found.push((key, rest.get(..length)?));
        rest = &rest[length..];
    }
    None
}

/// What the lock holds is whole whenever it is let go.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod test {
    use super::*;

    /// Its length and that of what is around it come to less than nothing.
    const ENDLESS: &[u8] = b"VALUE a 0 18446744073709551615\r\nEND\r\n";

    #[tokio::test]
    async fn a_server_that_claims_an_endless_value_is_left() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it has one");
        let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
        let stream = BufReader::new(client.expect("connected"));
        let mut connection = Connection { stream, opened: Instant::now() };
        let (mut server, _) = server.expect("accepted");
        server.write_all(ENDLESS).await.expect("written");
        let error =
            connection.exchange(b"get a\r\n", Answer::Values(ANSWER_MAX)).await.expect_err("no value is that long");
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn values_that_nobody_has_room_for_are_not_read() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it has one");
        let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
        let stream = BufReader::new(client.expect("connected"));
        let mut connection = Connection { stream, opened: Instant::now() };
        let (mut server, _) = server.expect("accepted");
        // The rest of the values never comes.
        server.write_all(b"VALUE a 0 3\r\nabc\r\nVALUE b 0 1000\r\n").await.expect("written");
        let error = connection.exchange(b"get a b\r\n", Answer::Values(1000)).await.expect_err("too large");
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn values_are_told_apart_whatever_is_in_them() {
        let answer = b"VALUE a 0 5\r\n\r\nEND\r\nVALUE b 7 0 12\r\n\r\nEND\r\n";
        let found = values(answer).expect("values");
        assert_eq!(found, [(&b"a"[..], &b"VALUE a 0 5\r\n\r\nEND\r\n"[..]), (b"b", b"VALUE b 7 0 12\r\n\r\n")]);
        assert_eq!(values(b"END\r\n"), Some(Vec::new()));
        for bad in [&b"SERVER_ERROR no\r\n"[..], b"", b"VALUE a 0 9\r\nab\r\n", b"VALUE a 0\r\n", ENDLESS] {
            assert_eq!(values(bad), None);
        }
    }
}
