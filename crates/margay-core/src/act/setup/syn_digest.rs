//! What a SYN has asked for, as the ACK repeats it.
//!
//! A SYN has no tag, and may be all that a responder knows of a flow: which listener by port and protocol, which name,
//! whether a session moves here, whether a grant is wanted. So the ACK, which the association's tag covers, repeats a
//! digest of the SYN (SYN_SEEN, docs/decisions/0125). If somebody on the path has changed the SYN, the digest that the
//! responder has made differs, and the flow is refused before a program has anything of it.

use margay_wire::{FlowId, Message, extension_type};

const CONTEXT: &str = "margay 2026 syn seen";

/// A digest of what a SYN asks for: its flowIDs, the name, and every extension, known or not, in its order.
///
/// Left out is what differs between copies of one SYN: the flags, the cookie, the rest of the resolvable part, which
/// routers write, and the padding. So is the program's packet, for which a copy with a cookie may have no room: whoever
/// can change it can change the plain DATA that follows, and of an encrypted flow nothing in it is believed.
pub(super) fn digest_of_syn(message: &Message<'_>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    let FlowId(to) = message.dst_flow;
    let FlowId(from) = message.src_flow;
    hasher.update(&to.to_be_bytes()).update(&from.to_be_bytes());
    hasher.update(&message.resolvable.map_or([0; 32], |resolvable| resolvable.service));
    for (kind, bytes) in message.extension_bytes() {
        if kind != extension_type::COOKIE {
            hasher.update(bytes);
        }
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;
    use core::net::SocketAddr;

    use margay_wire::{
        CapabilitiesRepr, Extension, FLAGS_OFFSET, Flags, Kind, MessageWriter, NextProtocol, RESOLVABLE_LEN,
        RESOLVABLE_OFFSET, ResolvableRepr, SessionId, SessionRepr,
    };

    use super::*;

    const COOKIE: Extension<'_> = Extension::Cookie([9; 24]);

    fn syn(last: Option<Extension<'_>>, payload: &[u8], pad_to: usize) -> Vec<u8> {
        let client = SocketAddr::new([10, 0, 0, 1].into(), 0x1234);
        let session = SessionRepr { session: SessionId([3; 16]), client, service_port: 443, protocol: 6 };
        let resolvable =
            ResolvableRepr { hop_limit: 16, reply_to: None, via: None, service: [4; 32], nonce: 5, hop_tag: [0; 8] };
        let mut buf = alloc::vec![0; 400];
        let mut writer = MessageWriter::new(&mut buf, Kind::Syn, FlowId(0x0102_0304), FlowId(0x0506_0708), 0);
        writer.resolvable(&resolvable).expect("room");
        writer.extension(&Extension::Session(session)).expect("room");
        let able = CapabilitiesRepr { stacks: 6, mtu: 1400 };
        writer.extension(&Extension::Capabilities(able)).expect("room");
        last.iter().for_each(|extension| assert!(writer.extension(extension).is_ok()));
        writer.payload(NextProtocol::Ipv4, payload).expect("room").pad_to(pad_to);
        let len = writer.finish().expect("room");
        buf.truncate(len);
        buf
    }

    fn digest(bytes: &[u8]) -> [u8; 32] {
        digest_of_syn(&Message::parse(bytes).expect("ours"))
    }

    #[test]
    fn the_digest_is_as_written_in_the_book() {
        let mut hashed = alloc::vec![1, 2, 3, 4, 5, 6, 7, 8];
        hashed.extend([4; 32]);
        hashed.extend([2, 0, 0, 40]);
        hashed.extend([3; 16]);
        hashed.extend(*b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\x01\x12\x34\x01\xbb\x06\0\0\0");
        hashed.extend([4, 0, 0, 8, 0, 0, 0, 6, 0x05, 0x78, 0, 0]);
        assert_eq!(digest(&syn(None, &[], 0)), blake3::derive_key("margay 2026 syn seen", &hashed));
    }

    #[test]
    fn copies_of_a_syn_have_one_digest_and_whatever_is_asked_for_has_another() {
        let plain = syn(None, &[], 0);
        let copies = [syn(Some(COOKIE), &[], 0), syn(None, &[0x45; 24], 0), syn(None, &[], 300)];
        assert!(copies.iter().all(|copy| digest(copy) == digest(&plain)));
        let mut forwarded = plain.clone();
        forwarded[FLAGS_OFFSET] |= (Flags::FULL | Flags::COPIED).bits();
        let written = ResolvableRepr {
            hop_limit: 15,
            reply_to: Some(SocketAddr::new([10, 0, 0, 2].into(), 7)),
            via: Some(SocketAddr::new([10, 0, 0, 3].into(), 8)),
            service: [4; 32],
            nonce: 5,
            hop_tag: [6; 8],
        };
        written.emit(&mut forwarded[RESOLVABLE_OFFSET..RESOLVABLE_OFFSET + RESOLVABLE_LEN]);
        assert_eq!(digest(&forwarded), digest(&plain));
        // Both flowIDs, the serviceID, every byte of what the extensions say.
        let session = RESOLVABLE_OFFSET + RESOLVABLE_LEN;
        let asked = (8..16).chain(RESOLVABLE_OFFSET + 40..RESOLVABLE_OFFSET + 72);
        for at in asked.chain(session + 4..session + 44).chain(session + 48..session + 56) {
            let mut changed = plain.clone();
            changed[at] ^= 1;
            assert_ne!(digest(&changed), digest(&plain), "byte {at}");
        }
        let mut more = syn(Some(Extension::FenceNumber(1)), &[], 0);
        let known = digest(&more);
        more[session + 56] = 0x7e;
        assert!(digest(&more) != known && digest(&more) != digest(&plain), "nor one that this program does not know");
    }
}
