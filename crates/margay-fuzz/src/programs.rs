//! What programs say: to their host's agent, and to framers.

use margay_frames::protocol::{Asked, Progress, Protocol, Reader, Shape, Step, answer_len};
use margay_wire::{ProgramReplyRepr, ProgramRequestRepr, ProgramTarget};

/// Both directions of the program socket.
pub fn program_socket(bytes: &[u8]) {
    if let Ok(request) = ProgramRequestRepr::parse(bytes) {
        let mut again = request.emit().to_vec();
        again.extend(request.text.as_bytes());
        assert_eq!(ProgramRequestRepr::parse(&again), Ok(request), "what was read can be written");
        let target = ProgramTarget::parse(&request.id);
        assert!(target.is_none_or(|target| target.emit() == request.id), "so can where a first packet goes to");
    }
    let _ = ProgramReplyRepr::parse(bytes);
}

/// Clients and servers of memcached.
pub fn memcached(bytes: &[u8]) {
    client(Protocol::Memcached, bytes);
    for shape in [Shape::Line, Shape::Values, Shape::Meta] {
        server(shape, bytes);
    }
}

/// Clients and servers of Redis.
pub fn resp(bytes: &[u8]) {
    client(Protocol::Resp, bytes);
    server(Shape::Message, bytes);
}

/// Reads requests as they come, until there is no whole one.
fn client(protocol: Protocol, bytes: &[u8]) {
    let mut reader = Reader::new(protocol);
    let mut rest = bytes;
    while !rest.is_empty() && !reader.is_waiting() {
        let step = reader.step(rest);
        let len = match step {
            Step::More(_) => return,
            Step::Passed(len) => len,
            // The connection ends, whatever follows.
            Step::Taken(_, Asked::Last(_)) => return,
            Step::Taken(len, asked) => {
                if let Asked::Servers { parts, join } = asked {
                    for part in &parts {
                        let bytes = &part.bytes;
                        let _ = (protocol.key_of(bytes), protocol.is_safe(bytes), protocol.shown(bytes));
                        let _ = protocol.shape_of(bytes);
                    }
                    let _ = join.join(parts.into_iter().map(|part| part.bytes).collect());
                }
                len
            }
        };
        assert!(len > 0, "each step gets further");
        rest = rest.get(len..).unwrap_or_default();
    }
    let _ = (protocol.key_of(bytes), protocol.is_safe(bytes), protocol.is_request(bytes), protocol.shape_of(bytes));
}

/// An answer that comes in pieces ends where it ends when it comes at once.
fn server(shape: Shape, bytes: &[u8]) {
    let whole = answer_len(bytes, shape, &mut Progress::default());
    let mut progress = Progress::default();
    let half = answer_len(&bytes[..bytes.len() / 2], shape, &mut progress);
    match half {
        Ok(None) => assert_eq!(answer_len(bytes, shape, &mut progress).ok(), whole.ok()),
        Ok(Some(len)) => assert_eq!(whole.ok(), Some(Some(len))),
        Err(_) => assert!(whole.is_err(), "no answer becomes one by what follows"),
    }
}
