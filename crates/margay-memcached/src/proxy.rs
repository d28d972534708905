//! What clients see: a memcached on this host, by TCP and UDP.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use nix::sys::socket::{Backlog, listen};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::request::{One, Request};
use crate::server::{ANSWER_MAX, Answer, Servers, TOO_LARGE, values};

/// Clients at once; who comes later is told so.
const CLIENTS_MAX: usize = 4096;
/// Datagrams in work; others are dropped, as a network would.
const DATAGRAMS_MAX: usize = 1024;
/// Longest line of a client: a `get` of some hundred keys.
const LINE_MAX: u64 = 64 << 10;
/// Request, number, count and zero, two bytes each.
const FRAME: usize = 8;
/// What memcached puts into a datagram of an answer.
const PAYLOAD_MAX: usize = 1400 - FRAME;
/// Bytes of an answer by UDP: what memcached's largest item has by default, and what is around it. One datagram asks
/// for some thousand keys.
const DATAGRAMS_BYTES_MAX: usize = (1 << 20) + 4096;

/// Connections that wait to be accepted, as elsewhere in Margay; the standard library has 128.
const BACKLOG: i32 = 1024;

/// Where clients find a proxy. No runtime is needed, so that a process can have its sockets before it gives up its
/// privileges, and threads after.
pub struct Listeners {
    tcp: std::net::TcpListener,
    udp: std::net::UdpSocket,
}

impl Listeners {
    /// Listens.
    ///
    /// # Errors
    ///
    /// The address cannot be had.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let tcp = std::net::TcpListener::bind(address)?;
        listen(&tcp, Backlog::new(BACKLOG)?)?;
        // The same port, also where the system chose it.
        let udp = std::net::UdpSocket::bind(tcp.local_addr()?)?;
        tcp.set_nonblocking(true)?;
        udp.set_nonblocking(true)?;
        Ok(Self { tcp, udp })
    }
}

/// The sockets of a proxy.
pub struct Proxy {
    tcp: TcpListener,
    udp: Arc<UdpSocket>,
    servers: Arc<Servers>,
}

impl Proxy {
    /// Of clients at `listeners`, in the runtime that it is called in.
    ///
    /// # Errors
    ///
    /// The runtime refuses the sockets.
    pub fn new(listeners: Listeners, servers: Servers) -> io::Result<Self> {
        let tcp = TcpListener::from_std(listeners.tcp)?;
        let udp = Arc::new(UdpSocket::from_std(listeners.udp)?);
        Ok(Self { tcp, udp, servers: Arc::new(servers) })
    }

    /// Where.
    ///
    /// # Errors
    ///
    /// The kernel does not know it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Serves until it is dropped.
    pub async fn run(self) {
        let Self { tcp, udp, servers } = self;
        tokio::join!(
            serve_streams(tcp, Arc::clone(&servers)),
            serve_datagrams(udp, Arc::clone(&servers)),
            servers.tidy(),
            servers.learn()
        );
    }
}

async fn serve_streams(listener: TcpListener, servers: Arc<Servers>) {
    let room = Arc::new(Semaphore::new(CLIENTS_MAX));
    let mut clients = JoinSet::new();
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            // Mostly: no more descriptors. A moment later there may be some.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            continue;
        };
        while clients.try_join_next().is_some() {}
        let (servers, place) = (Arc::clone(&servers), Arc::clone(&room).try_acquire_owned());
        clients.spawn(async move {
            // How a client ends is its own affair.
            let _ = match place {
                Ok(_place) => serve_stream(stream, &servers).await,
                Err(_) => stream.write_all(b"SERVER_ERROR too many clients of this proxy\r\n").await,
            };
        });
    }
}

async fn serve_stream(stream: TcpStream, servers: &Arc<Servers>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    while let Some(answer) = next(&mut reader, servers, ANSWER_MAX).await? {
        writer.write_all(&answer).await?;
    }
    Ok(())
}

async fn serve_datagrams(socket: Arc<UdpSocket>, servers: Arc<Servers>) {
    let room = Arc::new(Semaphore::new(DATAGRAMS_MAX));
    let mut work = JoinSet::new();
    let mut buffer = vec![0; 65_536];
    loop {
        // An error is one of an earlier answer, and no reason to stop.
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { continue };
        while work.try_join_next().is_some() {}
        let Ok(place) = Arc::clone(&room).try_acquire_owned() else { continue };
        let (datagram, socket, servers) = (buffer[..length].to_vec(), Arc::clone(&socket), Arc::clone(&servers));
        work.spawn(async move {
            let _place = place;
            for answer in answer_datagram(&datagram, &servers).await {
                // It may be lost on the way as well.
                let _ = socket.send_to(&answer, from).await;
            }
        });
    }
}

/// The datagrams that answer one. Requests are one datagram, in this protocol.
async fn answer_datagram(datagram: &[u8], servers: &Arc<Servers>) -> Vec<Vec<u8>> {
    let Some((frame, mut text)) = datagram.split_first_chunk::<FRAME>() else { return Vec::new() };
    let mut answer = Vec::new();
    let mut is_too_large = false;
    if frame[2..6] == [0, 0, 0, 1] {
        // Reading from memory does not fail, and what is cut off is no request.
        while !is_too_large && let Ok(Some(more)) = next(&mut text, servers, DATAGRAMS_BYTES_MAX).await {
            is_too_large = answer.len() + more.len() > DATAGRAMS_BYTES_MAX;
            answer.extend(more);
        }
    } else {
        answer.extend_from_slice(b"SERVER_ERROR multi-packet request not supported\r\n");
    }
    let pieces: Vec<&[u8]> = answer.chunks(PAYLOAD_MAX).collect();
    let Some(count) = u16::try_from(pieces.len()).ok().filter(|_| !is_too_large) else {
        let text = b"SERVER_ERROR the answer is too large for UDP; use TCP\r\n";
        return vec![framed(frame, 0, 1, text)];
    };
    (0..count).zip(pieces).map(|(number, piece)| framed(frame, number, count, piece)).collect()
}

fn framed(of_request: &[u8; FRAME], number: u16, count: u16, piece: &[u8]) -> Vec<u8> {
    let mut datagram = of_request[..2].to_vec();
    datagram.extend(number.to_be_bytes());
    datagram.extend(count.to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend_from_slice(piece);
    datagram
}

/// Reads a request and does it; gives its answer, which may be empty. `None`: the client goes, or has to. Values that
/// come to more than `values_max` bytes are not given.
async fn next(
    reader: &mut (impl AsyncBufRead + Unpin),
    servers: &Arc<Servers>,
    values_max: usize,
) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    (&mut *reader).take(LINE_MAX).read_until(b'\n', &mut line).await?;
    let Some(line) = line.strip_suffix(b"\n") else { return Ok(None) };
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let answer = match Request::parse(line) {
        Request::Get { verb, keys } => get(servers, verb, &keys, values_max).await,
        Request::One(request) => {
            let mut message = request.line.clone();
            message.extend_from_slice(b"\r\n");
            if let Some(length) = request.value {
                let at = message.len();
                message.resize(at + length + 2, 0);
                reader.read_exact(&mut message[at..]).await?;
                if !message.ends_with(b"\r\n") {
                    // Where the next request begins is not known any more.
                    return skip_line(reader).await.map(|()| Some(b"CLIENT_ERROR bad data chunk\r\n".to_vec()));
                }
            }
            one(servers, &request, &message).await
        }
        Request::Version => format!("VERSION {}\r\n", env!("CARGO_PKG_VERSION")).into_bytes(),
        Request::Verbosity { quiet } => {
            if quiet {
                Vec::new()
            } else {
                b"OK\r\n".to_vec()
            }
        }
        Request::Quit => return Ok(None),
        Request::Bad(text) => format!("{text}\r\n").into_bytes(),
        Request::TooLarge(length) => {
            // Whatever the client says: what it calls a value is never read as its next request.
            let rest = (length as u64).saturating_add(2);
            tokio::io::copy_buf(&mut (&mut *reader).take(rest), &mut tokio::io::sink()).await?;
            b"SERVER_ERROR object too large for cache\r\n".to_vec()
        }
    };
    Ok(Some(answer))
}

async fn skip_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<()> {
    let mut rest = Vec::new();
    (&mut *reader).take(LINE_MAX).read_until(b'\n', &mut rest).await.map(|_| ())
}

async fn one(servers: &Arc<Servers>, request: &One, message: &[u8]) -> Vec<u8> {
    let index = servers.partitions.index_of(&request.key);
    let answer = servers.ask(index, message, Answer::Line, request.repeatable).await;
    match answer {
        _ if request.quiet => Vec::new(),
        Ok(line) => line,
        Err(why) => format!("SERVER_ERROR {why}\r\n").into_bytes(),
    }
}

/// Asks each partition for its keys, all at once, and gives what was found in the order of the keys.
async fn get(servers: &Arc<Servers>, verb: &'static str, keys: &[Vec<u8>], values_max: usize) -> Vec<u8> {
    let mut lines: BTreeMap<u16, Vec<u8>> = BTreeMap::new();
    for key in keys {
        let line = lines.entry(servers.partitions.index_of(key)).or_insert_with(|| verb.as_bytes().to_vec());
        line.push(b' ');
        line.extend_from_slice(key);
    }
    let mut asked = JoinSet::new();
    for (index, mut line) in lines {
        line.extend_from_slice(b"\r\n");
        let servers = Arc::clone(servers);
        asked.spawn(async move { servers.ask(index, &line, Answer::Values(values_max), true).await });
    }
    let mut answers: Vec<Vec<u8>> = Vec::new();
    let mut room = values_max;
    while let Some(answer) = asked.join_next().await {
        match answer {
            Ok(Ok(answer)) if answer.len() > room => {
                return format!("SERVER_ERROR {TOO_LARGE}\r\n").into_bytes();
            }
            Ok(Ok(answer)) => {
                room -= answer.len();
                answers.push(answer);
            }
            Ok(Err(why)) => return format!("SERVER_ERROR {why}\r\n").into_bytes(),
            Err(error) => return format!("SERVER_ERROR {error}\r\n").into_bytes(),
        }
    }
    let mut found: BTreeMap<&[u8], &[u8]> = BTreeMap::new();
    for answer in &answers {
        match values(answer) {
            Some(values) => found.extend(values),
            // What a server has against it goes to whoever asked.
            None => return answer.clone(),
        }
    }
    let mut whole = Vec::new();
    keys.iter().filter_map(|key| found.get(key.as_slice())).for_each(|value| whole.extend_from_slice(value));
    whole.extend_from_slice(b"END\r\n");
    whole
}

#[cfg(test)]
mod test {
    use margay_sdk::Agent;

    use super::*;
    use crate::partition::Partitions;

    /// A length to which two more make none.
    #[tokio::test]
    async fn what_is_called_an_endless_value_is_no_request() {
        let partitions = Partitions::new(&"cache.shop".parse().expect("a name"), 2).expect("a number of partitions");
        let servers = Arc::new(Servers::new(partitions, Agent::shared(), 80));
        let said = b"set a 0 0 18446744073709551615\r\nversion\r\n";
        let mut reader = &said[..];
        let answer = next(&mut reader, &servers, 1 << 20).await.expect("read from memory").expect("an answer");
        assert!(answer.starts_with(b"SERVER_ERROR object too large"));
        assert_eq!(next(&mut reader, &servers, 1 << 20).await.expect("read from memory"), None);
    }
}
