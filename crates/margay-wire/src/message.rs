//! A whole message: base header, resolvable part, extensions, payload.

use core::net::SocketAddr;

use crate::chain::Chain;
use crate::change::ChangeRepr;
use crate::extension::{
    AUTH_EXT_LEN, Addresses, AuthRepr, CapabilitiesRepr, ErrorRepr, Extension, FlowPortRepr, KeyExchangeRepr, MoveRepr,
    QuietRepr, SessionRepr, StackRepr, TermsRepr, extension_type,
};
use crate::grant::GrantRepr;
use crate::handover::HandoverRepr;
use crate::header::{Error, Flags, FlowId, HEADER_LEN, HeaderRepr, Kind, NextProtocol};
use crate::loss::LossRepr;
use crate::notice::NoticeRepr;
use crate::order::OrderRepr;
use crate::reconfiguration::ReconfigurationRepr;
use crate::resolvable::{RESOLVABLE_LEN, ResolvableRepr};
use crate::splice::{CutRepr, SpliceRepr};
use crate::stripe::{ArrivalsRepr, StripeRepr};
use crate::timing::TimingRepr;

const TAG_LEN: usize = 16;

/// A checked message. Once [`Message::parse`] has succeeded no accessor fails.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// What it is.
    pub kind: Kind,
    /// Flags.
    pub flags: Flags,
    /// What the payload is.
    pub next_protocol: NextProtocol,
    /// The receiver's flow.
    pub dst_flow: FlowId,
    /// The sender's flow.
    pub src_flow: FlowId,
    /// For the replay window.
    pub control_seq: u32,
    /// Present when the flags say so.
    pub resolvable: Option<ResolvableRepr>,
    extensions: &'a [u8],
    /// Usually an IP packet of an application.
    pub payload: &'a [u8],
    signed: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads and checks a datagram.
    ///
    /// # Errors
    ///
    /// It does not follow the format; an extension comes twice; AUTH is not the last; GRANT of a SYN has not a port for
    /// each flow; or it is DATA.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, Error> {
        let header = HeaderRepr::parse(datagram)?;
        let header_len = usize::from(header.header_len);
        let signed = &datagram[..header_len + usize::from(header.payload_len)];
        let rest = &datagram[HEADER_LEN..header_len];
        let (resolvable, extensions) = if header.flags.contains(Flags::RESOLVABLE) {
            (Some(ResolvableRepr::parse(rest)?), &rest[RESOLVABLE_LEN..])
        } else {
            (None, rest)
        };
        check_extensions(header.kind, extensions)?;
        Ok(Self {
            kind: header.kind,
            flags: header.flags,
            next_protocol: header.next_protocol,
            dst_flow: header.dst_flow,
            src_flow: header.src_flow,
            control_seq: header.control_seq,
            resolvable,
            extensions,
            payload: &signed[header_len..],
            signed,
        })
    }

    /// The extensions in order; unknown ones that are not critical are left out.
    pub fn extensions(&self) -> impl Iterator<Item = Extension<'a>> {
        walk(self.extensions).filter_map(|(extension, ..)| extension)
    }

    /// The type byte of each extension, in order, and its bytes, prefix and padding included. Those that this program
    /// does not know are among them.
    pub fn extension_bytes(&self) -> impl Iterator<Item = (u8, &'a [u8])> {
        let mut rest = self.extensions;
        walk(self.extensions).map_while(move |(_, byte, taken)| {
            let (bytes, behind) = rest.split_at_checked(taken)?;
            rest = behind;
            Some((byte, bytes))
        })
    }

    fn find<T>(&self, pick: impl FnMut(Extension<'a>) -> Option<T>) -> Option<T> {
        self.extensions().find_map(pick)
    }

    /// SESSION.
    pub fn session(&self) -> Option<SessionRepr> {
        self.find(|extension| if let Extension::Session(session) = extension { Some(session) } else { None })
    }

    /// SOURCE_SERVICE.
    pub fn source_service(&self) -> Option<[u8; 32]> {
        self.find(|extension| if let Extension::SourceService(service) = extension { Some(service) } else { None })
    }

    /// ADDRESSES.
    pub fn addresses(&self) -> Option<Addresses<'a>> {
        self.find(|extension| if let Extension::Addresses(addresses) = extension { Some(addresses) } else { None })
    }

    /// CAPABILITIES.
    pub fn capabilities(&self) -> Option<CapabilitiesRepr> {
        self.find(
            |extension| if let Extension::Capabilities(capabilities) = extension { Some(capabilities) } else { None },
        )
    }

    /// TERMS.
    pub fn terms(&self) -> Option<TermsRepr> {
        self.find(|extension| if let Extension::Terms(terms) = extension { Some(terms) } else { None })
    }

    /// HANDOVER.
    pub fn handover(&self) -> Option<HandoverRepr> {
        self.find(|extension| if let Extension::Handover(handover) = extension { Some(handover) } else { None })
    }

    /// QUIET.
    pub fn quiet(&self) -> Option<QuietRepr> {
        self.find(|extension| if let Extension::Quiet(quiet) = extension { Some(quiet) } else { None })
    }

    /// FENCE_NUMBER.
    pub fn fence_number(&self) -> Option<u64> {
        self.find(|extension| if let Extension::FenceNumber(number) = extension { Some(number) } else { None })
    }

    /// CHANGE.
    pub fn change(&self) -> Option<ChangeRepr> {
        self.find(|extension| if let Extension::Change(change) = extension { Some(change) } else { None })
    }

    /// RECONFIGURATION.
    pub fn reconfiguration(&self) -> Option<ReconfigurationRepr> {
        self.find(|extension| if let Extension::Reconfiguration(step) = extension { Some(step) } else { None })
    }

    /// SPLICE.
    pub fn splice(&self) -> Option<SpliceRepr> {
        self.find(|extension| if let Extension::Splice(splice) = extension { Some(splice) } else { None })
    }

    /// CUT.
    pub fn cut(&self) -> Option<CutRepr> {
        self.find(|extension| if let Extension::Cut(cut) = extension { Some(cut) } else { None })
    }

    /// ORDER.
    pub fn order(&self) -> Option<OrderRepr> {
        self.find(|extension| if let Extension::Order(order) = extension { Some(order) } else { None })
    }

    /// STACK.
    pub fn stack(&self) -> Option<StackRepr> {
        self.find(|extension| if let Extension::Stack(stack) = extension { Some(stack) } else { None })
    }

    /// KEY_EXCHANGE.
    pub fn key_exchange(&self) -> Option<KeyExchangeRepr<'a>> {
        self.find(|extension| if let Extension::KeyExchange(exchange) = extension { Some(exchange) } else { None })
    }

    /// The value of CERTIFICATE: a chain.
    pub fn certificate(&self) -> Option<&'a [u8]> {
        self.find(|extension| if let Extension::Certificate(chain) = extension { Some(chain) } else { None })
    }

    /// CHAIN.
    pub fn chain(&self) -> Option<Chain<'a>> {
        self.find(|extension| if let Extension::Chain(chain) = extension { Some(chain) } else { None })
    }

    /// SYN_SEEN.
    pub fn syn_seen(&self) -> Option<[u8; 32]> {
        self.find(|extension| if let Extension::SynSeen(digest) = extension { Some(digest) } else { None })
    }

    /// RENDEZVOUS.
    pub fn rendezvous(&self) -> Option<SocketAddr> {
        self.find(|extension| if let Extension::Rendezvous(address) = extension { Some(address) } else { None })
    }

    /// ERROR.
    pub fn error(&self) -> Option<ErrorRepr<'a>> {
        self.find(|extension| if let Extension::Error(error) = extension { Some(error) } else { None })
    }

    /// MOVE.
    pub fn location(&self) -> Option<MoveRepr> {
        self.find(|extension| if let Extension::Move(location) = extension { Some(location) } else { None })
    }

    /// STRIPE.
    pub fn stripe(&self) -> Option<StripeRepr> {
        self.find(|extension| if let Extension::Stripe(stripe) = extension { Some(stripe) } else { None })
    }

    /// LOSS.
    pub fn loss(&self) -> Option<LossRepr> {
        self.find(|extension| if let Extension::Loss(loss) = extension { Some(loss) } else { None })
    }

    /// TIMING.
    pub fn timing(&self) -> Option<TimingRepr> {
        self.find(|extension| if let Extension::Timing(timing) = extension { Some(timing) } else { None })
    }

    /// ARRIVALS.
    pub fn arrivals(&self) -> Option<ArrivalsRepr> {
        self.find(|extension| if let Extension::Arrivals(arrivals) = extension { Some(arrivals) } else { None })
    }

    /// NOTICE.
    pub fn notice(&self) -> Option<NoticeRepr> {
        self.find(|extension| if let Extension::Notice(notice) = extension { Some(notice) } else { None })
    }

    /// GRANT.
    pub fn grant(&self) -> Option<GrantRepr> {
        self.find(|extension| if let Extension::Grant(grant) = extension { Some(grant) } else { None })
    }

    /// AUTH.
    pub fn auth(&self) -> Option<AuthRepr> {
        self.find(|extension| if let Extension::Auth(auth) = extension { Some(auth) } else { None })
    }

    /// COOKIE.
    pub fn cookie(&self) -> Option<[u8; 24]> {
        self.find(|extension| if let Extension::Cookie(cookie) = extension { Some(cookie) } else { None })
    }

    /// FLOW_PORT.
    pub fn flow_port(&self) -> Option<FlowPortRepr> {
        self.find(|extension| if let Extension::FlowPort(port) = extension { Some(port) } else { None })
    }

    /// The type byte of the first critical extension that this program does not know.
    pub fn unknown_critical(&self) -> Option<u8> {
        self.find(|extension| if let Extension::UnknownCritical(byte) = extension { Some(byte) } else { None })
    }

    /// Header and payload without the padding: what the tag is about.
    pub fn signed_bytes(&self) -> &'a [u8] {
        self.signed
    }

    /// Where the tag's bytes lie in [`signed_bytes`](Self::signed_bytes).
    pub fn auth_tag_offset(&self) -> Option<usize> {
        self.auth().map(|_| self.signed.len() - self.payload.len() - TAG_LEN)
    }
}

/// Extension (or `None`, skipped), type byte and length, until the end; the bytes were checked.
fn walk<'a>(mut bytes: &'a [u8]) -> impl Iterator<Item = (Option<Extension<'a>>, u8, usize)> {
    core::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let (extension, byte, taken) = Extension::parse(bytes).ok()?;
        bytes = &bytes[taken..];
        Some((extension, byte, taken))
    })
}

/// The extensions of one message so far: each may come once, and nothing after AUTH.
#[derive(Default)]
struct Order {
    seen: [u128; 2],
}

impl Order {
    fn admit(&mut self, byte: u8) -> Result<(), Error> {
        if self.has(byte) || self.has(extension_type::AUTH) {
            return Err(Error);
        }
        self.seen[usize::from(byte >> 7)] |= 1 << (byte & 127);
        Ok(())
    }

    fn has(&self, byte: u8) -> bool {
        self.seen[usize::from(byte >> 7)] & 1 << (byte & 127) != 0
    }
}

/// What an extension alone does not show: the flows of a SYN's GRANT have a port each.
fn suits(kind: Kind, extension: &Extension<'_>) -> bool {
    !matches!(extension, Extension::Grant(grant) if kind == Kind::Syn && !grant.ports_rise())
}

fn check_extensions(kind: Kind, mut bytes: &[u8]) -> Result<(), Error> {
    let mut order = Order::default();
    while !bytes.is_empty() {
        let (extension, byte, taken) = Extension::parse(bytes)?;
        if extension.is_some_and(|extension| !suits(kind, &extension)) {
            return Err(Error);
        }
        order.admit(byte)?;
        bytes = &bytes[taken..];
    }
    Ok(())
}

/// Writes a message into a buffer of the caller: resolvable part, extensions, payload, padding, in this order.
pub struct MessageWriter<'b> {
    buf: &'b mut [u8],
    header: HeaderRepr,
    at: usize,
    order: Order,
    has_resolvable: bool,
    has_payload: bool,
    pad_to: usize,
}

impl<'b> MessageWriter<'b> {
    /// Starts a message.
    pub fn new(buf: &'b mut [u8], kind: Kind, dst_flow: FlowId, src_flow: FlowId, control_seq: u32) -> Self {
        let header = HeaderRepr {
            kind,
            flags: Flags::empty(),
            next_protocol: NextProtocol::None,
            header_len: 0,
            payload_len: 0,
            dst_flow,
            src_flow,
            control_seq,
        };
        let order = Order::default();
        Self { buf, header, at: HEADER_LEN, order, has_resolvable: false, has_payload: false, pad_to: 0 }
    }

    /// Adds flags.
    pub fn flags(&mut self, flags: Flags) -> &mut Self {
        self.header.flags |= flags;
        self
    }

    /// Adds the resolvable part, before any extension.
    ///
    /// # Errors
    ///
    /// The buffer is too small, or something came before.
    pub fn resolvable(&mut self, resolvable: &ResolvableRepr) -> Result<&mut Self, Error> {
        let place = self.buf.get_mut(self.at..self.at + RESOLVABLE_LEN).ok_or(Error)?;
        if self.at != HEADER_LEN || self.has_payload {
            return Err(Error);
        }
        resolvable.emit(place);
        self.header.flags |= Flags::RESOLVABLE;
        self.has_resolvable = true;
        self.at += RESOLVABLE_LEN;
        Ok(self)
    }

    /// Adds an extension.
    ///
    /// # Errors
    ///
    /// The buffer is too small, the value does not follow the format, the extension was written already, or AUTH or the
    /// payload was.
    pub fn extension(&mut self, extension: &Extension<'_>) -> Result<&mut Self, Error> {
        if self.has_payload || !suits(self.header.kind, extension) {
            return Err(Error);
        }
        self.order.admit(extension.type_byte())?;
        self.at += extension.emit(self.buf.get_mut(self.at..).ok_or(Error)?)?;
        Ok(self)
    }

    /// Adds the payload.
    ///
    /// # Errors
    ///
    /// The buffer is too small, a length does not fit its field, or there is a payload already.
    pub fn payload(&mut self, next_protocol: NextProtocol, payload: &[u8]) -> Result<&mut Self, Error> {
        let place = self.buf.get_mut(self.at..self.at + payload.len()).ok_or(Error)?;
        if self.has_payload {
            return Err(Error);
        }
        place.copy_from_slice(payload);
        self.header.next_protocol = next_protocol;
        self.header.header_len = u16::try_from(self.at).map_err(|_| Error)?;
        self.header.payload_len = u16::try_from(payload.len()).map_err(|_| Error)?;
        self.at += payload.len();
        self.has_payload = true;
        Ok(self)
    }

    /// Pads the finished datagram with zeros to at least `len` bytes.
    pub fn pad_to(&mut self, len: usize) -> &mut Self {
        self.pad_to = len;
        self
    }

    /// Writes the header and gives the datagram's length.
    ///
    /// # Errors
    ///
    /// The buffer is too small; or the message is one that no reader would take: DATA, which has a format of its own,
    /// or with the flag of a resolvable part that was not written.
    pub fn finish(mut self) -> Result<usize, Error> {
        if !self.has_payload {
            self.payload(NextProtocol::None, &[])?;
        }
        if self.header.kind == Kind::Data || self.header.flags.contains(Flags::RESOLVABLE) != self.has_resolvable {
            return Err(Error);
        }
        let end = self.at.max(self.pad_to);
        self.buf.get_mut(self.at..end).ok_or(Error)?.fill(0);
        self.header.emit(self.buf.get_mut(..HEADER_LEN).ok_or(Error)?);
        Ok(end)
    }
}

const _: () = assert!(AUTH_EXT_LEN == 4 + 12 + TAG_LEN);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extension::ErrorCode;

    const AUTH: Extension<'_> = Extension::Auth(AuthRepr { assoc_id: 1, epoch: 2, receiver_epoch: 4, tag: [3; 16] });
    const STACK: Extension<'_> = Extension::Stack(StackRepr { stack: 2, demands: false });

    fn writer(buf: &mut [u8]) -> MessageWriter<'_> {
        MessageWriter::new(buf, Kind::Syn, FlowId(0), FlowId(7), 0)
    }

    #[test]
    fn nothing_is_written_that_no_reader_takes() {
        let mut buf = [0; 512];
        assert!(writer(&mut buf).extension(&STACK).and_then(|writer| writer.extension(&STACK)).is_err(), "twice");
        assert!(writer(&mut buf).extension(&AUTH).and_then(|writer| writer.extension(&STACK)).is_err(), "after AUTH");
        for byte in [extension_type::STACK, extension_type::SESSION, 0x55] {
            assert!(writer(&mut buf).extension(&Extension::UnknownCritical(byte)).is_err(), "{byte} is not that");
        }
        let long = [b'x'; 129];
        let text = core::str::from_utf8(&long).expect("letters");
        let error = Extension::Error(ErrorRepr { code: ErrorCode::Closed, text });
        assert!(writer(&mut buf).extension(&error).is_err(), "text too long");
        let mut flagged = writer(&mut buf);
        flagged.flags(Flags::RESOLVABLE);
        assert_eq!(flagged.finish(), Err(Error), "a flag without its part");
        for (first_flow, port, count) in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 129), (u32::MAX, 1, 2), (1, 65535, 2)]
        {
            let grant = GrantRepr { first_flow: FlowId(first_flow), port, count, lifetime_ms: 1 };
            assert!(writer(&mut buf).extension(&Extension::Grant(grant)).is_err(), "{grant:?}");
        }
        assert_eq!(MessageWriter::new(&mut buf, Kind::Data, FlowId(0), FlowId(0), 0).finish(), Err(Error));
        let mut ended = writer(&mut buf);
        ended.payload(NextProtocol::None, &[]).expect("fits");
        assert!(ended.extension(&STACK).is_err(), "after the payload");
        assert!(ended.payload(NextProtocol::None, &[]).is_err(), "two payloads");
    }

    #[test]
    fn a_buffer_of_any_size_is_enough_or_said_not_to_be() {
        for len in 0..80 {
            let mut buf = [0; 80];
            let mut writer = writer(&mut buf[..len]);
            let written =
                writer.extension(&AUTH).and_then(|writer| writer.payload(NextProtocol::Ipv4, &[9; 4])).is_ok();
            writer.pad_to(60);
            let finished = writer.finish();
            assert_eq!((written, finished.is_ok()), (len >= 56, len >= 60), "{len}");
        }
    }

    #[test]
    fn the_bytes_of_extensions_are_read_also_of_unknown_ones() {
        let mut buf = [0; 80];
        let mut writer = writer(&mut buf);
        writer.extension(&STACK).and_then(|writer| writer.extension(&AUTH)).expect("fits");
        let len = writer.finish().expect("fits");
        // One that may be skipped in the place of STACK, with padding that is not zero.
        buf[HEADER_LEN..HEADER_LEN + 8].copy_from_slice(&[0x7e, 0, 0, 3, 1, 2, 3, 9]);
        let message = Message::parse(&buf[..len]).expect("not a critical one");
        assert!(message.extensions().eq([AUTH]), "it is skipped");
        let mut bytes = message.extension_bytes();
        assert_eq!(bytes.next(), Some((0x7e, &[0x7e, 0, 0, 3, 1, 2, 3, 9][..])));
        assert_eq!(bytes.next(), Some((extension_type::AUTH, &buf[HEADER_LEN + 8..len])));
        assert_eq!(bytes.next(), None);
    }

    #[test]
    fn the_tag_lies_where_it_is_said_to() {
        let mut buf = [0; 80];
        let mut writer = writer(&mut buf);
        writer.extension(&AUTH).and_then(|writer| writer.payload(NextProtocol::Ipv4, &[9; 5])).expect("fits");
        writer.pad_to(64);
        let len = writer.finish().expect("fits");
        let message = Message::parse(&buf[..len]).expect("ours");
        assert_eq!((len, message.signed_bytes().len()), (64, 57));
        let at = message.auth_tag_offset().expect("tagged");
        assert_eq!(message.signed_bytes()[at..at + TAG_LEN], [3; 16]);
    }
}
