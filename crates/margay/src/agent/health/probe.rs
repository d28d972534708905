//! One check of a service: whether it is well now.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::command;
use super::spec::{Probe, StatusRange};

/// Letters of a reason: it is shown in one line.
const REASON_MAX: usize = 200;

/// Why a check has not succeeded, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was answered, and not well; or was refused.
    Failed(String),
    /// It was not answered in time.
    TimedOut(String),
}

impl Failure {
    /// It was not answered well.
    pub fn failed(reason: impl Into<String>) -> Self {
        Self::Failed(reason.into())
    }

    /// Why.
    pub fn reason(&self) -> &str {
        match self {
            Self::Failed(reason) | Self::TimedOut(reason) => reason,
        }
    }

    /// The reason as lists show it.
    pub fn line(&self) -> String {
        let plain = |letter: char| if letter.is_control() { ' ' } else { letter };
        self.reason().chars().map(plain).take(REASON_MAX).collect()
    }
}

/// Checks a service whose connections are taken at `listeners`: all of them must be well.
///
/// # Errors
///
/// Why it is not well.
pub async fn check(probe: Probe<'_>, listeners: &[SocketAddr], limit: Duration) -> Result<(), Failure> {
    if let Probe::Command(words) = probe {
        return command::run(words, limit).await.map(drop);
    }
    if listeners.is_empty() {
        return Err(Failure::failed("no socket takes its connections"));
    }
    for listener in listeners {
        let at = reached_at(*listener);
        let asked = async {
            match probe {
                Probe::Http { path, status } => get(at, path, status).await,
                Probe::Connect | Probe::Command(_) => {
                    TcpStream::connect(at).await.map(drop).map_err(|error| error.to_string())
                }
            }
        };
        let answered = timeout(limit, asked).await.map_err(|_| {
            Failure::TimedOut(format!("{listener}: no answer within {}", humantime::format_duration(limit)))
        })?;
        answered.map_err(|why| Failure::failed(format!("{listener}: {why}")))?;
    }
    Ok(())
}

/// Where this host itself reaches a socket.
fn reached_at(listener: SocketAddr) -> SocketAddr {
    let ip = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listener.port())
}

/// Asks for a path. Of the answer, the status counts; its content is not read.
async fn get(at: SocketAddr, path: &str, wanted: StatusRange) -> Result<(), String> {
    let stream = TcpStream::connect(at).await.map_err(|error| error.to_string())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| causes(&error))?;
    let request =
        Request::get(path).header(HOST, at.to_string()).header(USER_AGENT, "margay").header(CONNECTION, "close");
    let request = request.body(String::new()).map_err(|error| error.to_string())?;
    let mut asked = pin!(sender.send_request(request));
    let answer = tokio::select! {
        answer = &mut asked => answer,
        // It may have brought the answer before it ended; otherwise the answer is why there is none.
        _ = connection => asked.await,
    };
    let status: StatusCode = answer.map_err(|error| causes(&error))?.status();
    if wanted.contains(status.as_u16()) { Ok(()) } else { Err(format!("answers {status}, {wanted} is wanted")) }
}

/// An error with what has caused it.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod test {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(100);

    /// Answers each connection with these bytes after the head of a request, and closes it.
    async fn server(answer: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("an address");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    match stream.read_u8().await {
                        Ok(byte) => head.push(byte),
                        Err(_) => break,
                    }
                }
                assert!(head.is_empty() || head.starts_with(b"GET /healthz HTTP/1.1\r\n"), "{head:?}");
                // A client may have gone away.
                let _ = stream.write_all(answer).await;
            }
        });
        address
    }

    async fn ask(at: &[SocketAddr], limit: Duration) -> Result<(), Failure> {
        check(Probe::Http { path: "/healthz", status: "200-399".parse().expect("a range") }, at, limit).await
    }

    #[tokio::test]
    async fn the_status_of_an_answer_counts() {
        let well = server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        let moved = server(b"HTTP/1.0 302 Found\r\nLocation: /x\r\n\r\n").await;
        let sick = server(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 1000000\r\n\r\n").await;
        assert_eq!(ask(&[well], LONG).await, Ok(()));
        assert_eq!(ask(&[moved], LONG).await, Ok(()));
        let why = ask(&[well, sick], LONG).await.expect_err("one of two is not well");
        let expected = format!("{sick}: answers 503 Service Unavailable, 200-399 is wanted");
        assert_eq!(why, Failure::Failed(expected));
    }

    #[tokio::test]
    async fn what_is_no_answer_is_a_failure() {
        let silent = server(b"").await;
        let garbage = server(b"SSH-2.0-OpenSSH_9.9\r\n").await;
        for at in [silent, garbage] {
            let why = ask(&[at], LONG).await.expect_err("no answer");
            assert!(matches!(&why, Failure::Failed(text) if text.starts_with(&at.to_string())), "{why:?}");
        }
        let why = ask(&[], LONG).await.expect_err("nowhere");
        assert_eq!(why.reason(), "no socket takes its connections");
    }

    #[tokio::test]
    async fn a_connection_is_enough_where_it_is_what_is_wanted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("an address");
        let at = listener.local_addr().expect("bound");
        assert_eq!(check(Probe::Connect, &[at], LONG).await, Ok(()));
        // The kernel takes the connection; nobody answers.
        let why = ask(&[at], SHORT).await.expect_err("no answer");
        assert_eq!(why, Failure::TimedOut(format!("{at}: no answer within 100ms")));
        drop(listener);
        let why = check(Probe::Connect, &[at], LONG).await.expect_err("refused");
        assert!(why.reason().contains("refused"), "{why:?}");
    }

    #[test]
    fn a_reason_is_one_line() {
        let long = "x".repeat(1000);
        assert_eq!(Failure::failed(format!("a\nb\t{long}")).line().chars().count(), REASON_MAX);
        assert_eq!(Failure::failed("a\nb").line(), "a b");
    }

    #[test]
    fn a_socket_at_every_address_is_reached_on_the_loopback() {
        for (listener, at) in [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("10.0.0.2:80", "10.0.0.2:80")]
        {
            assert_eq!(reached_at(listener.parse().expect("an address")).to_string(), at);
        }
    }
}
