//! A name server of somebody else: it says the same about each name that it knows, over UDP and TCP.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;

use anyhow::{Context, Result};

use crate::host::write_line;

const HEADER_LEN: usize = 12;
const TYPE_A: [u8; 2] = [0, 1];
const MESSAGE_MAX: usize = 4096;
const NO_SUCH_NAME: u8 = 3;

/// Answers until it is ended. Says "ready" when it listens. With `under`, other names do not exist.
pub fn serve(listen: SocketAddr, answer: Ipv4Addr, under: Option<&str>) -> Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    let streams = TcpListener::bind(listen).with_context(|| format!("cannot listen at {listen}"))?;
    let known = under.map(str::to_owned);
    thread::spawn(move || {
        for stream in streams.incoming().flatten() {
            // Whoever asks may have gone.
            let _ = serve_stream(stream, answer, known.as_deref());
        }
    });
    write_line("ready")?;
    let mut message = [0; MESSAGE_MAX];
    loop {
        // An ICMP error about an earlier answer comes back here; the next question has nothing to do with it.
        let Ok((length, from)) = socket.recv_from(&mut message) else { continue };
        if let Some(reply) = reply(&message[..length], answer, under) {
            let _ = socket.send_to(&reply, from);
        }
    }
}

/// One question.
fn serve_stream(mut stream: TcpStream, answer: Ipv4Addr, under: Option<&str>) -> io::Result<()> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut message)?;
    let Some(reply) = reply(&message, answer, under) else { return Ok(()) };
    let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], &reply].concat())
}

/// The answer to a question: one address for type A, nothing for any other.
fn reply(message: &[u8], answer: Ipv4Addr, under: Option<&str>) -> Option<Vec<u8>> {
    let question = message.get(HEADER_LEN..)?;
    // Labels, the empty one at their end, type and class.
    let mut end = 0;
    while *question.get(end)? != 0 {
        end += 1 + usize::from(*question.get(end)?);
    }
    let question = question.get(..end + 5)?;
    let last = under.map(|label| [&[label.len() as u8][..], label.as_bytes()].concat());
    let exists = last.is_none_or(|last| question[..end].to_ascii_lowercase().ends_with(&last));
    let has_address = exists && question[end + 1..end + 3] == TYPE_A;
    let mut reply = message.get(..2)?.to_vec();
    // An answer with recursion; one question, perhaps one answer, nothing else.
    reply.extend([0x81, if exists { 0x80 } else { 0x80 | NO_SUCH_NAME }, 0, 1, 0, u8::from(has_address), 0, 0, 0, 0]);
    reply.extend(question);
    if has_address {
        // The name of the question; type A, class IN, no caching, four bytes.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        reply.extend(answer.octets());
    }
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_answered() {
        let mut question = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'x', 2, b'y', b'z', 0, 0, 1, 0, 1];
        let answered = reply(&question, Ipv4Addr::new(192, 0, 2, 1), None).expect("it is a question");
        assert_eq!(&answered[..8], [0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1]);
        assert!(answered.ends_with(&[0, 4, 192, 0, 2, 1]), "{answered:?}");
        let elsewhere = reply(&question, Ipv4Addr::LOCALHOST, Some("test")).expect("it is a question");
        assert_eq!(&elsewhere[2..8], [0x81, 0x83, 0, 1, 0, 0]);
        assert_eq!(reply(&question, Ipv4Addr::LOCALHOST, Some("yz")).expect("it is a question")[7], 1);
        // Type AAAA.
        question[19] = 28;
        assert_eq!(reply(&question, Ipv4Addr::LOCALHOST, None).expect("it is a question")[7], 0);
        assert_eq!(reply(&question[..question.len() - 1], Ipv4Addr::LOCALHOST, None), None);
    }
}
