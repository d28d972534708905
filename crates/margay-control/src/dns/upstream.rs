//! Questions about everybody else's names, handed on to the servers that this host asked before. The bytes pass
//! unchanged but for the number: signatures, unknown types and options mean the same afterwards.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{Carrier, HEADER};

/// So long a server may think before the next one is asked, too.
const PATIENCE: Duration = Duration::from_millis(700);
/// For all of them. Resolvers of programs give up after five seconds.
const LIMIT: Duration = Duration::from_millis(4_500);
/// Each server is asked so often: a datagram may be lost.
const ROUNDS: usize = 2;
/// So long the server that has answered last is asked first, where those before it did not.
const PREFERRED: Duration = Duration::from_secs(10);
const MESSAGE_MAX: usize = 65_535;

/// Which servers are asked, in this order, now.
pub type Servers = Box<dyn Fn() -> Vec<SocketAddr> + Send + Sync>;

pub(super) struct Upstreams {
    servers: Servers,
    preferred: Mutex<Option<(SocketAddr, Instant)>>,
}

/// What became of a question.
pub(super) enum Forwarded {
    /// A server's answer.
    Answer(Vec<u8>),
    /// There is no server.
    NoServer,
    /// None has answered.
    Silence,
}

impl Upstreams {
    pub(super) fn new(servers: Servers) -> Self {
        Self { servers, preferred: Mutex::new(None) }
    }

    /// Asks one server after the other until one knows, or knows that there is nothing.
    pub(super) async fn ask(&self, question: &[u8], carrier: Carrier) -> Forwarded {
        let servers = self.in_order();
        if servers.is_empty() {
            return Forwarded::NoServer;
        }
        let start = Instant::now();
        let mut rest = (0..ROUNDS).flat_map(|_| servers.iter().copied());
        let mut asked: JoinSet<(SocketAddr, io::Result<Vec<u8>>)> = JoinSet::new();
        let mut next_at = start;
        let mut refusal: Option<Vec<u8>> = None;
        loop {
            // Where all have been asked, nothing is left but to wait.
            let due = if rest.size_hint().1 == Some(0) { start + LIMIT } else { next_at };
            let answered = tokio::select! {
                Some(answered) = asked.join_next() => answered.ok(),
                () = sleep_until(due.min(start + LIMIT)) => None,
            };
            if Instant::now() >= start + LIMIT {
                break;
            }
            match answered {
                Some((server, Ok(answer))) if is_final(&answer) => {
                    self.prefer(server, &servers);
                    return Forwarded::Answer(answer);
                }
                // The first word is the best one: servers stand in the order of trust.
                Some((_, Ok(answer))) => refusal = refusal.or(Some(answer)),
                Some((_, Err(_))) | None => {}
            }
            match rest.next() {
                Some(server) => {
                    next_at = Instant::now() + PATIENCE;
                    let question = question.to_vec();
                    asked.spawn(async move { (server, ask_one(server, &question, carrier, start + LIMIT).await) });
                }
                None if asked.is_empty() => break,
                None => {}
            }
        }
        refusal.map_or(Forwarded::Silence, Forwarded::Answer)
    }

    fn in_order(&self) -> Vec<SocketAddr> {
        let mut servers = (self.servers)();
        let preferred = *self.preferred.lock();
        if let Some((server, until)) = preferred
            && until > Instant::now()
        {
            // The others stay as they are.
            servers.sort_by_key(|other| *other != server);
        }
        servers
    }

    fn prefer(&self, server: SocketAddr, servers: &[SocketAddr]) {
        let mut preferred = self.preferred.lock();
        let is_known = preferred.is_some_and(|(known, until)| known == server && until > Instant::now());
        if !is_known && servers.first() != Some(&server) {
            *preferred = Some((server, Instant::now() + PREFERRED));
        }
    }
}

/// Whether no other server is to be asked. What one does not know by its own fault, another may.
fn is_final(answer: &[u8]) -> bool {
    const NO_ERROR: u8 = 0;
    const NO_SUCH_NAME: u8 = 3;
    matches!(answer[3] & 0x0f, NO_ERROR | NO_SUCH_NAME)
}

async fn ask_one(server: SocketAddr, question: &[u8], carrier: Carrier, until: Instant) -> io::Result<Vec<u8>> {
    let mut number = [0; 2];
    // Without randomness, the number is the program's own.
    if getrandom::fill(&mut number).is_err() {
        number.copy_from_slice(&question[..2]);
    }
    let sent = [&number[..], &question[2..]].concat();
    let asked = async {
        match carrier {
            Carrier::Datagram => by_datagram(server, &sent).await,
            Carrier::Stream => by_stream(server, &sent).await,
        }
    };
    let mut answer = timeout_at(until, asked).await??;
    answer[..2].copy_from_slice(&question[..2]);
    Ok(answer)
}

async fn by_datagram(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // A port of its own for each question: whoever would forge an answer has to guess it.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut answer = vec![0; MESSAGE_MAX];
    loop {
        let len = socket.recv(&mut answer).await?;
        if is_answer(&answer[..len], question) {
            answer.truncate(len);
            return Ok(answer);
        }
    }
}

async fn by_stream(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    // No question is longer than what came in one.
    let len = u16::try_from(question.len()).map_err(io::Error::other)?;
    stream.write_all(&[&len.to_be_bytes()[..], question].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    if is_answer(&answer, question) { Ok(answer) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Whether bytes answer a question: the same number, and the same name and type, in whatever letters.
fn is_answer(answer: &[u8], question: &[u8]) -> bool {
    if answer.len() < HEADER || answer[..2] != question[..2] || answer[2] & 0x80 == 0 {
        return false;
    }
    // Some repeat no question that they cannot read.
    if answer[4..6] == [0, 0] {
        return answer[3] & 0x0f != 0;
    }
    let Some(end) = question_end(question) else { return false };
    answer.get(HEADER..end).is_some_and(|asked| asked.eq_ignore_ascii_case(&question[HEADER..end]))
}

/// Where the first question ends.
pub(super) fn question_end(message: &[u8]) -> Option<usize> {
    let mut at = HEADER;
    loop {
        let len = usize::from(*message.get(at)?);
        at += 1;
        if len == 0 {
            break;
        }
        at += len;
    }
    let end = at + 4;
    (end <= message.len()).then_some(end)
}

#[cfg(test)]
mod test {
    use super::*;

    const QUESTION: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01x\x04test\0\0\x01\0\x01";

    fn answer(code: u8, text: &[u8]) -> Vec<u8> {
        let mut answer = QUESTION.to_vec();
        answer[2] |= 0x80;
        answer[3] = code;
        answer.extend(text);
        answer
    }

    #[test]
    fn an_answer_has_the_number_and_the_question() {
        assert!(is_answer(&answer(0, b"more"), QUESTION));
        let mut other = answer(0, b"");
        other[13] = b'X';
        assert!(is_answer(&other, QUESTION), "in other letters");
        other[13] = b'y';
        assert!(!is_answer(&other, QUESTION));
        other = answer(0, b"");
        other[0] = 0x13;
        assert!(!is_answer(&other, QUESTION));
        assert!(!is_answer(QUESTION, QUESTION), "a question is none");
        assert!(!is_answer(&answer(0, b"")[..11], QUESTION));
        let mut bare = answer(1, b"")[..HEADER].to_vec();
        bare[5] = 0;
        assert!(is_answer(&bare, QUESTION), "a format error may have nothing");
    }

    async fn server(code: u8) -> (SocketAddr, tokio::task::JoinHandle<()>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let at = socket.local_addr().expect("bound");
        let task = tokio::spawn(async move {
            let mut bytes = [0; 512];
            loop {
                let (len, from) = socket.recv_from(&mut bytes).await.expect("received");
                let mut reply = bytes[..len].to_vec();
                reply[2] |= 0x80;
                reply[3] = code;
                socket.send_to(&reply, from).await.expect("sent");
            }
        });
        (at, task)
    }

    #[tokio::test]
    async fn the_next_server_is_asked_where_one_fails_and_is_preferred_for_a_while() {
        let (refuses, _first) = server(5).await;
        let (knows, _second) = server(0).await;
        let gone: SocketAddr = "127.0.0.1:1".parse().expect("literal");
        let servers = vec![gone, refuses, knows];
        let upstreams = Upstreams::new(Box::new(move || servers.clone()));
        let Forwarded::Answer(found) = upstreams.ask(QUESTION, Carrier::Datagram).await else { panic!("no answer") };
        assert_eq!((&found[..2], found[3]), (&QUESTION[..2], 0));
        assert_eq!(upstreams.in_order(), [knows, gone, refuses]);
    }

    #[tokio::test]
    async fn a_refusal_of_all_is_the_first_ones_and_none_is_said_to_be_none() {
        let (refuses, _first) = server(5).await;
        let (fails, _second) = server(2).await;
        let upstreams = Upstreams::new(Box::new(move || vec![refuses, fails]));
        let Forwarded::Answer(found) = upstreams.ask(QUESTION, Carrier::Datagram).await else { panic!("no answer") };
        assert_eq!(found[3], 5);
        let upstreams = Upstreams::new(Box::new(Vec::new));
        assert!(matches!(upstreams.ask(QUESTION, Carrier::Datagram).await, Forwarded::NoServer));
    }
}
