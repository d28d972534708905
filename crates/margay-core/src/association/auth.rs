//! The one check that guards all signalling (DESIGN §3.5): a message that is to change anything comes through
//! [`authenticate`] first, whatever its type, and is a [`Verified`] one from there on.

use core::ops::Deref;

use margay_wire::{HeaderRepr, Message, RESOLVABLE_LEN, RESOLVABLE_OFFSET};

use crate::association::{Association, AssociationTable, ReplayWindow};
use crate::types::drop_reason::DropReason;
use crate::types::time::Instant;

const TAG_LEN: usize = 16;

/// A message that has passed the check. [`authenticate`] alone makes one: a handler that takes it cannot be called with
/// a message that nobody has checked.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'m> {
    message: &'m Message<'m>,
    association: u32,
}

impl Verified<'_> {
    /// The local index of the association whose peer has sent the message.
    pub const fn association(&self) -> u32 {
        self.association
    }
}

impl<'m> Deref for Verified<'m> {
    type Target = Message<'m>;

    fn deref(&self) -> &Message<'m> {
        self.message
    }
}

/// A datagram that should be tagged has no room for the tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotTaggable;

/// The tag over header and payload, with the tag itself and the resolvable part left out: routers rewrite that part
/// (docs/decisions/0002).
fn tag(key: &[u8; 32], message: &Message<'_>, tag_offset: usize) -> [u8; TAG_LEN] {
    let bytes = message.signed_bytes();
    let mut hasher = blake3::Hasher::new_keyed(key);
    let start = if message.resolvable.is_some() {
        hasher.update(&bytes[..RESOLVABLE_OFFSET]);
        RESOLVABLE_OFFSET + RESOLVABLE_LEN
    } else {
        0
    };
    hasher.update(&bytes[start..tag_offset]).update(&[0; TAG_LEN]).update(&bytes[tag_offset + TAG_LEN..]);
    let mut tag = [0; TAG_LEN];
    tag.copy_from_slice(&hasher.finalize().as_bytes()[..TAG_LEN]);
    tag
}

/// Checks a message's tag against a key that came inside a handshake.
///
/// # Errors
///
/// No tag, or a wrong one.
pub fn verify_with_key(key: &[u8; 32], message: &Message<'_>) -> Result<(), DropReason> {
    let (auth, offset) = message.auth().zip(message.auth_tag_offset()).ok_or(DropReason::Untagged)?;
    let wanted = tag(key, message, offset);
    let difference = wanted.iter().zip(auth.tag).fold(0, |difference, (a, b)| difference | (a ^ b));
    if difference == 0 { Ok(()) } else { Err(DropReason::BadTag) }
}

/// The check: the message is tagged by the peer of an association, in its present or a newer epoch, for this agent's
/// present epoch, and new. What was sent to an earlier start of this agent changes nothing: that start has told the
/// next one nothing of the numbers that it had heard, so anybody could send it again.
///
/// # Errors
///
/// What is wrong with it. Nothing has changed then, but that the peer's newer epoch is known.
pub fn authenticate<'m>(
    table: &mut AssociationTable,
    message: &'m Message<'_>,
    now: Instant,
) -> Result<Verified<'m>, DropReason> {
    let auth = message.auth().ok_or(DropReason::Untagged)?;
    let own_epoch = table.epoch;
    let association = table.get_mut(auth.assoc_id).ok_or(DropReason::UnknownAssociation)?;
    if auth.epoch < association.peer_epoch {
        return Err(DropReason::OldEpoch);
    }
    let same_epoch = auth.epoch == association.peer_epoch;
    if same_epoch && !association.window.is_new(message.control_seq) {
        return Err(DropReason::Replayed);
    }
    let key = association.receiving_key(auth.epoch);
    verify_with_key(&key, message)?;
    let local_id = association.local_id;
    let is_for_present = auth.receiver_epoch == own_epoch;
    if !same_epoch {
        association.peer_epoch = auth.epoch;
        association.window = ReplayWindow::default();
        association.is_fresh = true;
    }
    if is_for_present {
        association.window.note(message.control_seq);
        association.heard = now;
        table.touch(local_id, now);
    } else {
        table.outdated.push(local_id);
    }
    if !same_epoch {
        table.renewed.push(local_id);
    }
    if !is_for_present {
        return Err(DropReason::OldEpoch);
    }
    Ok(Verified { message, association: local_id })
}

/// Writes the tag of a finished datagram whose AUTH extension has zeros in its place.
///
/// # Errors
///
/// The datagram has no AUTH extension.
pub fn sign_with_key(key: &[u8; 32], datagram: &mut [u8]) -> Result<(), NotTaggable> {
    let message = Message::parse(datagram).map_err(|_| NotTaggable)?;
    let offset = message.auth_tag_offset().ok_or(NotTaggable)?;
    let tag = tag(key, &message, offset);
    datagram.get_mut(offset..offset + TAG_LEN).ok_or(NotTaggable)?.copy_from_slice(&tag);
    Ok(())
}

/// The same under an association; the epoch is the one that the AUTH extension names.
///
/// # Errors
///
/// The datagram has no AUTH extension.
pub fn sign(association: &mut Association, datagram: &mut [u8]) -> Result<(), NotTaggable> {
    let epoch = Message::parse(datagram).ok().and_then(|message| message.auth()).ok_or(NotTaggable)?.epoch;
    let key = association.sending_key(epoch);
    sign_with_key(&key, datagram)
}

/// Makes a datagram that was tagged before fit to be sent again: under the next sequence number, since by now newer
/// messages may have pushed the old one out of the peer's window; and for the peer's present start, which may have
/// begun since.
///
/// # Errors
///
/// The datagram has no AUTH extension.
pub fn sign_again(association: &mut Association, datagram: &mut [u8]) -> Result<(), NotTaggable> {
    let mut header = HeaderRepr::parse(datagram).map_err(|_| NotTaggable)?;
    header.control_seq = association.next_seq();
    header.emit(datagram);
    let tag_at = Message::parse(datagram).ok().and_then(|message| message.auth_tag_offset()).ok_or(NotTaggable)?;
    // It stands before the tag.
    let epoch = tag_at.checked_sub(4).and_then(|at| datagram.get_mut(at..tag_at)).ok_or(NotTaggable)?;
    epoch.copy_from_slice(&association.peer_epoch.to_be_bytes());
    sign(association, datagram)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;
    use core::net::SocketAddr;

    use margay_wire::{AuthRepr, Extension, FlowId, Kind, MessageWriter, NextProtocol, ResolvableRepr};

    use super::*;
    use crate::trust::handshake::Keys;
    use crate::types::key::HostPublic;
    use crate::types::keyed_hash::KeyedHash;

    const OWN_EPOCH: u32 = 3;

    fn pair() -> (Association, AssociationTable) {
        let remote = SocketAddr::new([10, 0, 0, 1].into(), 54324);
        let one = |initiator| Association::new(7, 7, HostPublic([1; 32]), Keys { root: [2; 32] }, initiator, remote);
        let mut table = AssociationTable::with_hasher(64, 64, OWN_EPOCH, KeyedHash(1, 2));
        table.insert(one(false)).expect("room");
        let mut sender = one(true);
        sender.peer_epoch = OWN_EPOCH;
        (sender, table)
    }

    fn message(sender: &mut Association, epoch: u32) -> Vec<u8> {
        let mut buf = alloc::vec![0; 256];
        let mut writer = MessageWriter::new(&mut buf, Kind::Probe, FlowId(1), FlowId(2), sender.next_seq());
        let auth = AuthRepr { assoc_id: sender.remote_id, epoch, receiver_epoch: sender.peer_epoch, tag: [0; 16] };
        writer
            .extension(&Extension::Auth(auth))
            .and_then(|writer| writer.payload(NextProtocol::None, b"x"))
            .expect("room");
        let len = writer.finish().expect("room");
        buf.truncate(len);
        sign(sender, &mut buf).expect("it has AUTH");
        buf
    }

    fn check(table: &mut AssociationTable, datagram: &[u8]) -> Result<u32, DropReason> {
        let message = Message::parse(datagram).map_err(|_| DropReason::Malformed)?;
        authenticate(table, &message, Instant::ZERO).map(|verified| verified.association())
    }

    #[test]
    fn a_tag_is_good_once_and_any_changed_bit_is_not() {
        let (mut sender, mut table) = pair();
        let good = message(&mut sender, 1);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(check(&mut table, &bad).is_err(), "bit {bit}");
        }
        assert_eq!(check(&mut table, &good), Ok(7));
        assert_eq!(check(&mut table, &good), Err(DropReason::Replayed));
    }

    #[test]
    fn a_newer_epoch_starts_a_fresh_window_and_ends_the_older() {
        let (mut sender, mut table) = pair();
        let late = message(&mut sender, 1);
        let newer = message(&mut sender, 2);
        assert_eq!(check(&mut table, &newer), Ok(7));
        assert_eq!(check(&mut table, &late), Err(DropReason::OldEpoch));
        assert_eq!(check(&mut table, &newer), Err(DropReason::Replayed));
    }

    #[test]
    fn what_was_sent_to_an_earlier_start_changes_nothing_and_has_the_peer_told() {
        let (mut sender, mut table) = pair();
        sender.peer_epoch = OWN_EPOCH - 1;
        let kept = message(&mut sender, 1);
        assert_eq!(check(&mut table, &kept), Err(DropReason::OldEpoch));
        assert_eq!(core::mem::take(&mut table.outdated), [7]);
        // Its own newer epoch is true all the same: ends that have both started again learn it from each other.
        let newer = message(&mut sender, 2);
        assert_eq!(check(&mut table, &newer), Err(DropReason::OldEpoch));
        assert_eq!(table.get_mut(7).expect("its own").peer_epoch, 2);
        sender.peer_epoch = OWN_EPOCH;
        let present = message(&mut sender, 2);
        assert_eq!(check(&mut table, &present), Ok(7));
    }

    #[test]
    fn a_message_that_is_sent_again_passes_however_much_came_between() {
        let (mut sender, mut table) = pair();
        let mut lost = message(&mut sender, 1);
        for _ in 0..200 {
            let between = message(&mut sender, 1);
            assert_eq!(check(&mut table, &between), Ok(7));
        }
        assert_eq!(check(&mut table, &lost), Err(DropReason::Replayed));
        sign_again(&mut sender, &mut lost).expect("it has AUTH");
        assert_eq!(check(&mut table, &lost), Ok(7));
    }

    #[test]
    fn a_message_that_is_sent_again_is_for_the_start_of_its_receiver_that_is_known_by_then() {
        let (mut sender, mut table) = pair();
        sender.peer_epoch = OWN_EPOCH - 1;
        let mut early = message(&mut sender, 1);
        assert_eq!(check(&mut table, &early), Err(DropReason::OldEpoch));
        sender.peer_epoch = OWN_EPOCH;
        sign_again(&mut sender, &mut early).expect("it has AUTH");
        assert_eq!(check(&mut table, &early), Ok(7));
    }

    #[test]
    fn routers_may_rewrite_the_resolvable_part_and_nothing_else() {
        let (mut sender, mut table) = pair();
        let mut buf = alloc::vec![0; 512];
        let mut writer = MessageWriter::new(&mut buf, Kind::SynAck, FlowId(1), FlowId(2), sender.next_seq());
        let part =
            ResolvableRepr { hop_limit: 9, reply_to: None, via: None, service: [3; 32], nonce: 4, hop_tag: [0; 8] };
        let auth = AuthRepr { assoc_id: sender.remote_id, epoch: 1, receiver_epoch: OWN_EPOCH, tag: [0; 16] };
        writer.resolvable(&part).and_then(|writer| writer.extension(&Extension::Auth(auth))).expect("room");
        writer.payload(NextProtocol::None, b"xyz").expect("room").pad_to(300);
        let len = writer.finish().expect("room");
        buf.truncate(len);
        sign(&mut sender, &mut buf).expect("it has AUTH");
        let signed_len = Message::parse(&buf).expect("our own").signed_bytes().len();
        for at in 0..buf.len() {
            let mut changed = buf.clone();
            changed[at] ^= 0x10;
            let is_resolvable = (RESOLVABLE_OFFSET..RESOLVABLE_OFFSET + RESOLVABLE_LEN).contains(&at);
            let (_, mut fresh) = pair();
            let passes = check(&mut fresh, &changed).is_ok();
            assert_eq!(passes, is_resolvable || at >= signed_len, "byte {at}");
        }
        assert_eq!(check(&mut table, &buf), Ok(7));
    }
}
