//! What goes over UDP port 54324, and packets of programs.

use margay_datapath::packet;
use margay_wire::{
    DATA_HEADER_LEN, DataRepr, Extension, HeaderRepr, Kind, Message, PlaceRepr, RepairRepr, ResolvableRepr, TrainRepr,
    kind_of,
};

/// Messages and DATA, whole and in parts.
pub fn wire(bytes: &[u8]) {
    let message = Message::parse(bytes);
    if let Ok(message) = &message {
        assert_eq!(kind_of(bytes), Ok(message.kind));
        assert!(bytes.starts_with(message.signed_bytes()), "what is signed is in the datagram");
        assert!(message.signed_bytes().ends_with(message.payload), "with the payload");
        assert!(HeaderRepr::parse(bytes).is_ok(), "no message without its header");
        let tag = message.auth_tag_offset().map(|at| &message.signed_bytes()[at..at + 16]);
        assert_eq!(tag, message.auth().as_ref().map(|auth| &auth.tag[..]), "the tag lies where it is said to lie");
    }
    if let Ok(header) = DataRepr::parse(bytes) {
        assert!(message.is_err(), "both a message and DATA");
        assert_eq!(kind_of(bytes), Ok(Kind::Data));
        let mut again = [0; DATA_HEADER_LEN];
        header.emit(&mut again);
        assert_eq!(again, bytes[..DATA_HEADER_LEN], "no field of the header is lost");
        let chunk = &bytes[DATA_HEADER_LEN..];
        let _ = (TrainRepr::parse(chunk), PlaceRepr::parse(chunk), RepairRepr::parse(chunk));
    }
    let _ = (Extension::parse(bytes), ResolvableRepr::parse(bytes));
}

/// Packets that a program or the network has given.
pub fn packets(bytes: &[u8]) {
    let _ = packet::parse(bytes, bytes.len());
}
