//! The packets that a program and its framed socket say to each other, and the Unix socket that has them.
//!
//! ```text
//!  0 kind | 1 flags | 2..4 order | 4..8 number | 8 length of the key | 9..264 key, then zeros | 264.. payload
//!
//!  S  program  send: number: of an answer, what it answers
//!  O  socket   it is open, or served
//!  F  socket   a frame: with its own number
//!  L  socket   the server died with the frame of this number
//!  A  socket   a connection was accepted, whose socket comes with the packet. Payload: the name of who has opened it
//!  E  socket   it is over, or could not be. Number: errno; payload: why, in words
//! ```
//! Flags: 1 safe, 2 wants an answer, 4 is one. Order: 0 per member, 0xffff none, else a stream. Numbers are in network
//! order. The head has one length, so that a program reads the payload to where it wants it. A payload with more than
//! 64 KiB comes as a file of memory (memfd) that goes with the packet: a socket's buffer has no room for it.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use margay_sdk::FRAME_MAX;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Bytes of a head.
const HEAD_LEN: usize = 264;
const KEY_MAX: usize = 255;
/// Bytes of a payload that go within a packet.
const INLINE_MAX: usize = 64 << 10;

/// An order that is none.
pub const UNORDERED: u16 = u16::MAX;
/// As flags.
pub const SAFE: u8 = 1;
/// See there.
pub const WANTS_ANSWER: u8 = 2;
/// See there.
pub const IS_ANSWER: u8 = 4;

/// One packet, either way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packet {
    /// A letter, as above.
    pub kind: u8,
    /// As above.
    pub flags: u8,
    /// As above.
    pub order: u16,
    /// As above.
    pub number: u32,
    /// At most 255 bytes.
    pub key: Vec<u8>,
    /// At most [`FRAME_MAX`] bytes.
    pub payload: Vec<u8>,
}

impl Packet {
    /// One that says nothing but its kind.
    pub fn new(kind: u8) -> Self {
        Self { kind, ..Self::default() }
    }

    fn head(&self) -> [u8; HEAD_LEN] {
        let mut head = [0; HEAD_LEN];
        let key = &self.key[..self.key.len().min(KEY_MAX)];
        head[0] = self.kind;
        head[1] = self.flags;
        head[2..4].copy_from_slice(&self.order.to_be_bytes());
        head[4..8].copy_from_slice(&self.number.to_be_bytes());
        // At most 255.
        head[8] = key.len() as u8;
        head[9..9 + key.len()].copy_from_slice(key);
        head
    }

    /// Reads a packet whose payload is within it. Nothing: it is none.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (&[kind, flags, order_0, order_1, number_0, number_1, number_2, number_3, key_len], rest) =
            bytes.split_first_chunk()?;
        let (key, payload) = rest.split_at_checked(KEY_MAX)?;
        Some(Self {
            kind,
            flags,
            order: u16::from_be_bytes([order_0, order_1]),
            number: u32::from_be_bytes([number_0, number_1, number_2, number_3]),
            key: key[..key_len.into()].to_vec(),
            payload: payload.to_vec(),
        })
    }
}

/// A Unix socket of packets.
#[derive(Debug)]
pub struct Packets(UnixStream);

impl Packets {
    /// Of a socket that the program has given.
    ///
    /// # Errors
    /// It is none of packets.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        if sockopt::socket_type(&socket).ok() != Some(SocketType::SEQPACKET) {
            let why = "standard input is not the socket that the SDKs of this version give; a person has no use for it";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        rustix::io::ioctl_fionbio(&socket, true)?;
        // The type knows of streams alone; waiting is the same for packets in sequence.
        Ok(Self(UnixStream::from_std(socket.into())?))
    }

    /// Two ends, of which the second one is for a program: its reads and writes wait.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::new(ours)?, theirs))
    }

    /// The next packet; nothing once the other end is gone.
    ///
    /// # Errors
    /// What has come is no packet, or the socket has failed.
    pub async fn receive(&self) -> io::Result<Option<Packet>> {
        self.0.async_io(Interest::READABLE, || receive(self.0.as_fd())).await
    }

    /// Sends a packet as a whole, and maybe a descriptor with it.
    ///
    /// # Errors
    /// The other end is gone, or there is no memory for a large payload.
    pub async fn send(&self, packet: &Packet, passed: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let head = packet.head();
        let file = if packet.payload.len() > INLINE_MAX { Some(filed(&packet.payload)?) } else { None };
        let payload = if file.is_some() { &[] } else { &*packet.payload };
        let passed = file.as_ref().map(AsFd::as_fd).or(passed);
        let parts = [IoSlice::new(&head), IoSlice::new(payload)];
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if let Some(passed) = &passed {
                control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(passed)));
            }
            sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
            Ok(())
        };
        self.0.async_io(Interest::WRITABLE, send).await
    }
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Packet>> {
    // One more, to see what is too long.
    let mut bytes = vec![0; HEAD_LEN + INLINE_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // Its payload was a file for which no descriptor is free: without that it would be another packet.
        return Err(io::Error::from_raw_os_error(Errno::MFILE.raw_os_error()));
    }
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let none = || io::Error::new(io::ErrorKind::InvalidInput, "this is no packet of a program");
    let is_whole = received.bytes <= HEAD_LEN + INLINE_MAX;
    let mut packet = Packet::parse(&bytes[..received.bytes]).filter(|_| is_whole).ok_or_else(none)?;
    if let Some(file) = file {
        packet.payload = unfiled(file)?.filter(|_| packet.payload.is_empty()).ok_or_else(none)?;
    }
    Ok(Some(packet))
}

fn filed(payload: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("frame", MemfdFlags::CLOEXEC)?);
    file.write_all(payload)?;
    Ok(file.into())
}

/// Nothing: it is no file, or too large.
fn unfiled(file: OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let file = File::from(file);
    let about = file.metadata()?;
    let Some(len) = usize::try_from(about.len()).ok().filter(|&len| about.is_file() && len <= FRAME_MAX) else {
        return Ok(None);
    };
    let mut payload = vec![0; len];
    file.read_exact_at(&mut payload, 0)?;
    Ok(Some(payload))
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn packets_come_as_they_were_sent_with_payloads_of_any_length() {
        let (ours, theirs) = Packets::pair().expect("sockets");
        let theirs = Packets::new(theirs).expect("a socket of packets");
        for len in [0, 1, INLINE_MAX, INLINE_MAX + 1, FRAME_MAX] {
            let payload = (0..len).map(|at| at as u8).collect();
            let sent = Packet { kind: b'S', flags: 3, order: UNORDERED, number: 258, key: vec![7; KEY_MAX], payload };
            ours.send(&sent, None).await.expect("sent");
            assert!(theirs.receive().await.expect("a packet") == Some(sent), "{len}");
        }
        drop(ours);
        assert_eq!(theirs.receive().await.expect("an end"), None);
    }

    #[test]
    fn a_head_has_its_places() {
        let packet =
            Packet { kind: b'F', flags: 4, order: 2, number: 7, key: b"k".to_vec(), payload: b"data".to_vec() };
        let mut bytes = packet.head().to_vec();
        assert_eq!((&bytes[..10], bytes.len()), (&b"F\x04\0\x02\0\0\0\x07\x01k"[..], HEAD_LEN));
        assert!(bytes[10..].iter().all(|&byte| byte == 0));
        assert_eq!(Packet::parse(&bytes[..HEAD_LEN - 1]), None);
        bytes.extend_from_slice(b"data");
        assert_eq!(Packet::parse(&bytes), Some(packet));
    }

    #[tokio::test]
    async fn what_is_no_packet_is_an_error() {
        let says = async |bytes: &[u8], passed: Option<BorrowedFd<'_>>| {
            let (ours, theirs) = Packets::pair().expect("sockets");
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if let Some(passed) = &passed {
                control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(passed)));
            }
            sendmsg(&theirs, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).expect("sent");
            ours.receive().await.is_err()
        };
        let file = File::from(memfd_create("frame", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(FRAME_MAX as u64 + 1).expect("room");
        let (pipe, _writer) = std::io::pipe().expect("a pipe");
        assert!(says(b"S", None).await);
        assert!(says(&[b'S'; HEAD_LEN + INLINE_MAX + 1], None).await);
        assert!(says(&[0; HEAD_LEN], Some(file.as_fd())).await);
        assert!(says(&[0; HEAD_LEN], Some(pipe.as_fd())).await);
        file.set_len(5).expect("less");
        assert!(says(&[0; HEAD_LEN + 1], Some(file.as_fd())).await);
        assert!(!says(&[0; HEAD_LEN], Some(file.as_fd())).await);
        let (stream, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        assert!(Packets::new(stream.into()).is_err());
    }
}
