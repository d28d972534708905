//! Quiet ends at the client's host: a drained instance asks that a connection of a program here ends, and this looks at
//! the program's own socket (docs/decisions/0066). One that has carried nothing for as long as is asked, and owes
//! nothing, reads the end of its stream from then on, as if the server had closed. All else is the program's to do.

mod sockets;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use margay_core::quiet::{QuietAnswer, QuietRequest};
use margay_datapath::stillness::Stillness;
use rustix::net::{Shutdown, shutdown};

use super::Agent;

pub use self::sockets::{Owner, Sockets};

/// From one look at the processes of this host to the next: requests that come meanwhile are answered together,
/// however many a peer sends.
const PAUSE: Duration = Duration::from_millis(10);
/// For the report of the drain; as long as an error's text may be.
const NO_SOCKET: &str = "no socket of the connection in the network namespace of the agent; a container's, perhaps";

/// Answers what peers ask, until the datapath ends.
///
/// # Errors
///
/// The system has no thread to give.
pub fn start(agent: &Arc<Agent>) -> io::Result<()> {
    let (news, running) = (agent.core.0.quiet_news(), Arc::downgrade(&agent.core.0));
    let follow = move || {
        while news.wait().is_ok_and(|goes_on| goes_on) {
            let Some(core) = running.upgrade() else { return };
            let requests = core.with_sal(|sal, now| sal.take_quiet_requests(now));
            let sockets = Sockets::of(&requests.iter().map(|request| request.app).collect());
            for request in requests {
                let answer = end(&sockets, &request);
                tracing::debug!(app = %request.app, ?answer, "a peer wants a connection to end if it is quiet");
                core.with_sal(|sal, now| sal.answer_quiet_end(now, request.flow, &answer));
            }
            drop(core);
            thread::sleep(PAUSE);
        }
    };
    thread::Builder::new().name("margay-quiet".to_owned()).spawn(follow)?;
    Ok(())
}

fn end(sockets: &Sockets, request: &QuietRequest) -> QuietAnswer {
    let refused = |error: io::Error| QuietAnswer::NotNow(format!("the program's socket cannot be looked at: {error}"));
    try_end(sockets, request).unwrap_or_else(refused)
}

fn try_end(sockets: &Sockets, request: &QuietRequest) -> io::Result<QuietAnswer> {
    let Some(socket) = sockets.copy(&request.app)? else { return Ok(QuietAnswer::NotNow(NO_SOCKET.to_owned())) };
    if !Stillness::of(socket.as_fd())?.is_quiet(Duration::from_millis(request.quiet_ms.into())) {
        return Ok(QuietAnswer::NotNow(String::new()));
    }
    // Right after the look, by the same descriptor: a request of the program may come between the two, and is then one
    // to a server that has just closed. What comes later of the server's can still be read.
    shutdown(&socket, Shutdown::Read)?;
    Ok(QuietAnswer::Ended)
}

#[cfg(test)]
mod test {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use margay_core::Tuple;
    use margay_wire::FlowId;

    use super::*;

    const TCP: u8 = 6;

    struct Pair {
        client: TcpStream,
        server: TcpStream,
        request: QuietRequest,
    }

    fn pair(quiet_ms: u32) -> Pair {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let destination = listener.local_addr().expect("bound");
        let client = TcpStream::connect(destination).expect("it listens");
        let (server, source) = listener.accept().expect("a connection");
        let app = Tuple { protocol: TCP, source, destination };
        Pair { client, server, request: QuietRequest { flow: FlowId(1), app, quiet_ms } }
    }

    fn look(request: &QuietRequest) -> QuietAnswer {
        end(&Sockets::of(&[request.app].into()), request)
    }

    /// Whether something comes to be so, within many looks.
    fn comes(mut look: impl FnMut() -> bool) -> bool {
        (0..100_000).any(|_| look())
    }

    #[test]
    fn a_quiet_connection_ends_at_the_client_and_loses_nothing() {
        let Pair { mut client, mut server, request } = pair(10);
        assert!(comes(|| look(&request) == QuietAnswer::Ended), "it carries nothing");
        assert_eq!(look(&request), QuietAnswer::Ended, "asked again");
        let mut text = [0; 4];
        assert_eq!(client.read(&mut text).expect("the end of the stream"), 0);
        server.write_all(b"late").expect("the client has not closed");
        assert!(comes(|| client.read(&mut text).expect("open") == 4), "what comes later can be read");
        drop(client);
        assert_eq!(server.read(&mut text).expect("in order"), 0, "the server reads the end, and no reset");
    }

    #[test]
    fn a_busy_connection_goes_on() {
        let Pair { mut client, mut server, request } = pair(10);
        server.write_all(b"four").expect("open");
        client.peek(&mut [0; 4]).expect("it has come");
        assert_eq!(look(&request), QuietAnswer::NotNow(String::new()), "the program has not read it");
        client.read_exact(&mut [0; 4]).expect("four bytes");
        let hurried = QuietRequest { quiet_ms: margay_core::quiet::QUIET_MS_MAX, ..request };
        assert_eq!(look(&hurried), QuietAnswer::NotNow(String::new()), "it has just carried something");
        assert_eq!(Sockets::of(&[request.app].into()).is_quiet(&request.app, Duration::from_secs(600)), Some(false));
        client.write_all(b"more").expect("nothing has ended");
        server.read_exact(&mut [0; 4]).expect("four bytes");
    }

    #[test]
    fn a_connection_without_a_socket_is_said_to_have_none() {
        let Pair { client, server, request } = pair(10);
        drop((client, server));
        let answer = QuietAnswer::NotNow(NO_SOCKET.to_owned());
        assert!(comes(|| look(&request) == answer));
        assert!(NO_SOCKET.len() <= margay_wire::ERROR_TEXT_MAX);
        assert_eq!(Sockets::of(&[request.app].into()).is_quiet(&request.app, Duration::ZERO), None);
    }
}
