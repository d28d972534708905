//! What registration, resolvers and the responder of names read.

use margay_control::chain_order::SignedOrder;
use margay_control::chains::SignedChains;
use margay_control::dns::{Received, receive};
use margay_control::lineage::read_succession;
use margay_control::token::JoinToken;
use margay_control::warrant::{Request, Warrant, read_revocation};

/// Texts that operators hand to each other, and what an authority signs of boxes and orders.
pub fn records(bytes: &[u8]) {
    let _ = (SignedChains::decode(bytes).is_ok(), SignedOrder::decode(bytes).is_some());
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = (text.parse::<JoinToken>().is_ok(), text.parse::<Request>().is_ok(), text.parse::<Warrant>().is_ok());
    let _ = (read_succession(text).is_ok(), read_revocation(text).is_ok());
}

/// Datagrams to the responder: whatever is said back is an answer.
pub fn dns(bytes: &[u8]) {
    if let Received::Malformed(reply) = receive(bytes) {
        assert!(reply[2] & 0x80 != 0, "a reply is marked as one");
        assert_eq!(reply[..2], bytes[..2], "and has the question's number");
        assert!(matches!(receive(&reply), Received::Nothing), "so that two responders do not answer each other");
    }
}
