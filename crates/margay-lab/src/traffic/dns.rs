//! A name server of somebody else: it knows every name, and says the same about each.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use anyhow::{Context, Result};

use crate::host::write_line;

const HEADER_LEN: usize = 12;
const TYPE_A: [u8; 2] = [0, 1];
const MESSAGE_MAX: usize = 512;

/// Answers until it is ended. Says "ready" when it listens.
pub fn serve(listen: SocketAddr, answer: Ipv4Addr) -> Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    write_line("ready")?;
    let mut message = [0; MESSAGE_MAX];
    loop {
        // An ICMP error about an earlier answer comes back here; the next question has nothing to do with it.
        let Ok((length, from)) = socket.recv_from(&mut message) else { continue };
        if let Some(reply) = reply(&message[..length], answer) {
            let _ = socket.send_to(&reply, from);
        }
    }
}

/// The answer to a question: one address for type A, nothing for any other.
fn reply(message: &[u8], answer: Ipv4Addr) -> Option<Vec<u8>> {
    let question = message.get(HEADER_LEN..)?;
    // Labels, the empty one at their end, type and class.
    let mut end = 0;
    while *question.get(end)? != 0 {
        end += 1 + usize::from(*question.get(end)?);
    }
    let question = question.get(..end + 5)?;
    let has_address = question[end + 1..end + 3] == TYPE_A;
    let mut reply = message.get(..2)?.to_vec();
    // An answer with recursion, no error; one question, perhaps one answer, nothing else.
    reply.extend([0x81, 0x80, 0, 1, 0, u8::from(has_address), 0, 0, 0, 0]);
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
        let answered = reply(&question, Ipv4Addr::new(192, 0, 2, 1)).expect("it is a question");
        assert_eq!(&answered[..8], [0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1]);
        assert!(answered.ends_with(&[0, 4, 192, 0, 2, 1]), "{answered:?}");
        // Type AAAA.
        question[19] = 28;
        assert_eq!(reply(&question, Ipv4Addr::LOCALHOST).expect("it is a question")[7], 0);
        assert_eq!(reply(&question[..question.len() - 1], Ipv4Addr::LOCALHOST), None);
    }
}
