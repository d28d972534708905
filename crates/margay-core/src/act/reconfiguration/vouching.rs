//! What the host of a program that leaves says of the one session that is to be, where boxes pass it on
//! (docs/decisions/0104): its signature, by which each end takes the word of the host at its other end, and of no box.

use alloc::vec::Vec;

use margay_wire::{BOXES_MAX, BoxFlags, BoxRepr, ChainRepr, Message, SessionId, SessionRepr, SpliceRepr};

use super::TCP;
use crate::act::chain::service_of;
use crate::types::drop_reason::DropReason;
use crate::types::key::{HostId, HostPublic, HostSecret};
use crate::types::name::ServiceId;

const CONTEXT: &[u8] = b"margay 2026 splice";

/// What the receiver is told of the session beside SPLICE.
#[derive(Debug)]
pub(super) struct Vouched {
    /// The boxes that it goes through, in order: those of both sessions.
    pub boxes: Vec<ServiceId>,
    /// The port of the service that the right session is for; `None`: it goes through no boxes.
    pub port: Option<u16>,
}

/// What is signed, and for whom.
#[derive(Clone, Copy)]
pub(super) struct Said<'a> {
    /// Of the reconfiguration, or of the wish for one.
    pub number: u32,
    /// The receiver's session.
    pub to: SessionId,
    pub splice: &'a SpliceRepr,
}

impl Said<'_> {
    fn bytes(&self, port: u16, boxes: impl Iterator<Item = BoxRepr>) -> Vec<u8> {
        let mut bytes = CONTEXT.to_vec();
        bytes.extend_from_slice(&self.number.to_be_bytes());
        bytes.extend_from_slice(&self.to.0);
        bytes.extend_from_slice(&self.splice.to_bytes());
        bytes.extend_from_slice(&port.to_be_bytes());
        bytes.extend(boxes.flat_map(|one| one.service));
        bytes
    }

    /// CHAIN of a wish or a request; `None` where there are too many boxes.
    pub fn write(&self, key: &HostSecret, vouched: &Vouched) -> Option<Vec<u8>> {
        let ahead = |service: &ServiceId| {
            let mut name = [0; 12];
            name.copy_from_slice(&service.0[..12]);
            BoxRepr { service: name, flags: BoxFlags::empty(), added_by: 0 }
        };
        let boxes: Vec<BoxRepr> = vouched.boxes.iter().map(ahead).collect();
        let repr = ChainRepr {
            is_answer: false,
            shared: 0,
            failed_at: 0,
            destination: self.splice.service,
            time_s: 0,
            host_key: key.public().0,
            signature: key.sign(&self.bytes(vouched.port?, boxes.iter().copied())),
            boxes: &boxes,
            hosts: &[],
            certificates: &[],
        };
        let mut value = alloc::vec![0; repr.value_len()];
        repr.emit(&mut value).ok()?;
        Some(value)
    }

    /// What a message says. `by`: the host whose signature it must bear, since others have passed the message on.
    ///
    /// # Errors
    ///
    /// Not that host's word, or none that can be read.
    pub fn read(&self, message: &Message<'_>, by: Option<HostId>) -> Result<Vouched, DropReason> {
        let Some((chain, session)) = message.chain().zip(message.session()) else {
            return if by.is_some() {
                Err(DropReason::BadCertificate)
            } else {
                Ok(Vouched { boxes: Vec::new(), port: None })
            };
        };
        if chain.is_answer() || chain.destination() != self.splice.service {
            return Err(DropReason::Malformed);
        }
        let port = session.service_port;
        let key = HostPublic(chain.host_key());
        let is_its = |host: HostId| {
            let signed = || self.bytes(port, chain.boxes());
            key.id() == host && !key.is_of_low_order() && key.verify(&signed(), &chain.signature())
        };
        if !by.is_none_or(is_its) {
            return Err(DropReason::BadCertificate);
        }
        Ok(Vouched { boxes: chain.boxes().map(|one| service_of(&one)).collect(), port: Some(port) })
    }
}

impl Vouched {
    /// Of two sessions that are to be one. A box that both have passed is passed once.
    pub fn of(left: Vec<ServiceId>, right: Vec<ServiceId>, port: u16) -> Self {
        let mut boxes: Vec<ServiceId> = Vec::new();
        for one in left.into_iter().chain(right) {
            if !boxes.contains(&one) {
                boxes.push(one);
            }
        }
        let port = (!boxes.is_empty()).then_some(port);
        Self { boxes, port }
    }

    pub fn is_too_long(&self) -> bool {
        self.boxes.len() > BOXES_MAX
    }

    /// SESSION of a wish or a request, which bears the port.
    pub fn session(&self, session: SessionId) -> Option<SessionRepr> {
        let service_port = self.port?;
        Some(SessionRepr { session, client: super::nowhere(), service_port, protocol: TCP })
    }
}

#[cfg(test)]
mod test {
    use alloc::vec;

    use margay_wire::{Extension, FlowId, Kind, MessageWriter, SpliceSocketRepr};

    use super::*;
    use crate::types::rng::Rng;

    fn splice() -> SpliceRepr {
        let socket =
            SpliceSocketRepr { unread: 1, written: 2, timestamp: Some(3), peer_scale: 4, own_scale: 5, has_sack: true };
        SpliceRepr { host: [1; 16], session: SessionId([2; 16]), service: [3; 32], left: socket, right: socket }
    }

    fn one(number: u8) -> ServiceId {
        let mut id = [0; 32];
        id[..12].fill(number);
        ServiceId(id)
    }

    /// What the receiver makes of a step. `as_read`: for what it takes it.
    fn read(
        written: (&Said<'_>, &HostSecret, &Vouched),
        as_read: &Said<'_>,
        by: Option<HostId>,
    ) -> Result<Vouched, DropReason> {
        let (said, key, vouched) = written;
        let value = said.write(key, vouched).expect("there are boxes");
        let chain = margay_wire::Chain::parse(&value).expect("it is sound");
        let mut bytes = vec![0; 2048];
        let mut writer = MessageWriter::new(&mut bytes, Kind::Change, FlowId(1), FlowId(2), 0);
        writer.extension(&Extension::Chain(chain)).expect("it fits");
        let session = vouched.session(said.splice.session).expect("it has a port");
        writer.extension(&Extension::Session(session)).expect("it fits");
        let len = writer.finish().expect("it fits");
        as_read.read(&Message::parse(&bytes[..len]).expect("it is sound"), by)
    }

    #[test]
    fn boxes_are_those_of_both_sessions_each_once() {
        let [a, b, c] = [1, 2, 3].map(one);
        assert_eq!(Vouched::of(vec![a, b], vec![b, c], 80).boxes, [a, b, c]);
        let none = Vouched::of(Vec::new(), Vec::new(), 80);
        assert_eq!((none.boxes.len(), none.port), (0, None));
        assert!(none.session(SessionId([1; 16])).is_none());
        let nine = Vouched::of((0..5).map(one).collect(), (5..9).map(one).collect(), 80);
        assert!(nine.is_too_long() && !Vouched::of((0..8).map(one).collect(), Vec::new(), 80).is_too_long());
    }

    #[test]
    fn a_word_that_a_box_has_passed_on_counts_by_the_hosts_signature_alone() {
        let mut rng = Rng::new([7; 32]);
        let [key, other] = [(); 2].map(|()| HostSecret::generate(&mut rng));
        let host = Some(key.public().id());
        let said = Said { number: 5, to: SessionId([9; 16]), splice: &splice() };
        let vouched = Vouched::of(vec![one(1)], vec![one(2)], 443);
        let taken = read((&said, &key, &vouched), &said, host).expect("it is its word");
        assert_eq!((taken.boxes, taken.port), (vec![one(1), one(2)], Some(443)));
        assert!(read((&said, &other, &vouched), &said, host).is_err(), "another host's");
        assert!(read((&said, &other, &vouched), &said, None).is_ok(), "it has said so itself");
        let elsewhere = SpliceRepr { host: [8; 16], ..splice() };
        let socket = SpliceSocketRepr { unread: 7, ..splice().right };
        let counted = SpliceRepr { right: socket, ..splice() };
        for (what, as_read) in [
            ("another step's", Said { number: 6, ..said }),
            ("another session's", Said { to: SessionId([8; 16]), ..said }),
            ("another end", Said { splice: &elsewhere, ..said }),
            ("other numbers", Said { splice: &counted, ..said }),
        ] {
            assert_eq!(read((&said, &key, &vouched), &as_read, host).err(), Some(DropReason::BadCertificate), "{what}");
        }
        let mut bytes = vec![0; 256];
        let writer = MessageWriter::new(&mut bytes, Kind::Change, FlowId(1), FlowId(2), 0);
        let len = writer.finish().expect("it fits");
        let bare = Message::parse(&bytes[..len]).expect("it is sound");
        assert_eq!(said.read(&bare, host).err(), Some(DropReason::BadCertificate), "no signature");
        assert_eq!(said.read(&bare, None).map(|taken| taken.port), Ok(None), "no boxes");
    }
}
