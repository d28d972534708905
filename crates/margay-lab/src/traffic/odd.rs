//! What few programs do with TCP: urgent data, and closing in the same moment as the other side.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use socket2::SockRef;

use super::attempt::Outcome;
use crate::host::write_line;

const PATIENCE: Duration = Duration::from_secs(5);
const PART: usize = 100;
const PAUSE: Duration = Duration::from_millis(20);
/// From the connection's start to its end: time for it to become an ordinary one.
const CLOSE_AFTER: Duration = Duration::from_millis(300);

fn connect(host: &str, port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((host, port)).with_context(|| format!("cannot connect to {host}:{port}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// On one connection to an echo server, again and again: some bytes, an urgent one, some more. A server that does not
/// ask for urgent bytes does not see them, so all others come back and it does not: then it was urgent when it arrived.
/// Prints an [`Outcome`].
pub fn urgent(host: &str, port: u16, count: usize) -> Result<()> {
    let mut stream = connect(host, port)?;
    let mut outcome = Outcome::default();
    for _ in 0..count {
        let start = Instant::now();
        let result = exchange_around_urgent(&mut stream);
        outcome.add(&result, start.elapsed().as_secs_f64() * 1e3);
        if result.is_err() {
            // What comes back from here on is out of step.
            break;
        }
        sleep(PAUSE);
    }
    write_line(&serde_json::to_string(&outcome)?)
}

fn exchange_around_urgent(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(&[b'a'; PART])?;
    if SockRef::from(&*stream).send_out_of_band(b"!")? != 1 {
        bail!("the urgent byte was not taken");
    }
    stream.write_all(&[b'b'; PART])?;
    let mut back = [0; 2 * PART];
    stream.read_exact(&mut back).context("not all came back")?;
    if back[..PART] != [b'a'; PART] || back[PART..] != [b'b'; PART] {
        bail!("wrong bytes came back");
    }
    Ok(())
}

/// Connections, each of which both sides close at a moment that the client names (all hosts of a lab have one clock):
/// on a link with a delay, their last segments cross. Prints an [`Outcome`].
pub fn close_together(host: &str, port: u16, count: usize) -> Result<()> {
    let mut outcome = Outcome::default();
    for _ in 0..count {
        let start = Instant::now();
        let result = connect(host, port).and_then(|mut stream| {
            let when = SystemTime::now() + CLOSE_AFTER;
            let nanos = when.duration_since(UNIX_EPOCH)?.as_nanos() as u64;
            stream.write_all(&nanos.to_be_bytes())?;
            close_at(&mut stream, when)
        });
        outcome.add(&result, start.elapsed().as_secs_f64() * 1e3);
    }
    write_line(&serde_json::to_string(&outcome)?)
}

/// The other side of [`close_together`]. Says "ready" when it listens.
pub fn serve_closing(listen: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    write_line("ready")?;
    for stream in listener.incoming() {
        // The client counts; what it sees of an error here is a reset or silence.
        let _ = stream.map_err(Into::into).and_then(|mut stream| -> Result<()> {
            stream.set_read_timeout(Some(PATIENCE))?;
            let mut nanos = [0; 8];
            stream.read_exact(&mut nanos)?;
            close_at(&mut stream, UNIX_EPOCH + Duration::from_nanos(u64::from_be_bytes(nanos)))
        });
    }
    Ok(())
}

/// Ends its own direction then, and reads the other's to its end.
fn close_at(stream: &mut TcpStream, when: SystemTime) -> Result<()> {
    sleep(when.duration_since(SystemTime::now()).unwrap_or_default());
    stream.shutdown(Shutdown::Write)?;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).context("the other side's end did not come")?;
    if rest.is_empty() { Ok(()) } else { bail!("{} bytes came that nobody sent", rest.len()) }
}
