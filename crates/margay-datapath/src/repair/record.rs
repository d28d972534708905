//! A TCP socket that was taken down, as bytes.
//!
//! ```text
//!  0 "MTCP" | 4 version = 1 | 5 family (4, 6) | 6 state (1 ESTABLISHED, 8 CLOSE-WAIT) | 7 zero
//!  8..12 flags | 12..16 receive sequence | 16..20 send sequence | 20..24 unsent bytes | 24..26 MSS
//! 26 scale of what is sent | 27 scale of what is received | 28..32 timestamp
//! 32..52 window: sequence of the last update, send, greatest send, receive, sequence of the last announcement
//! 52..54 keepalive idle (s) | 54..56 keepalive interval (s) | 56 keepalive probes
//! 57 TOS | 58 traffic class | 59 zero
//! 60..64 user time-out (ms) | 64..68 linger (s) | 68..72 receive buffer | 72..76 send buffer | 76..80 priority
//! 80..84 receive low-water mark | 84..92 receive time-out (µs) | 92..100 send time-out (µs)
//! 100 length, congestion control | length (4 bytes), receive queue | length (4 bytes), send queue
//! ```
//!
//! Numbers are big-endian. What a flag says is absent is zero. There is one encoding of each record.

use super::QUEUE_MAX;
use super::error::RecordError;

const MAGIC: [u8; 4] = *b"MTCP";
const VERSION: u8 = 1;
/// Greatest window scale (RFC 7323 §2.3).
pub(super) const SCALE_MAX: u8 = 14;
/// Longest name of a congestion control, of the kernel's `TCP_CA_NAME_MAX` without its end.
pub(super) const CONGESTION_MAX: usize = 15;
/// The kernel's bounds of `TCP_KEEPIDLE` and `TCP_KEEPINTVL` in seconds, and of `TCP_KEEPCNT`.
pub(super) const KEEPALIVE_MAX_S: u16 = 32_767;
pub(super) const KEEPALIVE_PROBES_MAX: u8 = 127;
/// What `int` can say: bounds of lengths and times that the kernel takes as one.
pub(super) const INT_MAX: u32 = i32::MAX.cast_unsigned();
/// Greatest time-out of a read or a write: about 35 years.
pub(super) const TIMEOUT_MAX_US: u64 = 1 << 50;

const SCALES: u32 = 1;
const TIMESTAMPS: u32 = 1 << 1;
const SELECTIVE_ACKS: u32 = 1 << 2;
const ECN: u32 = 1 << 3;
const READING_IS_SHUT: u32 = 1 << 4;
const NON_BLOCKING: u32 = 1 << 5;
const REUSES_ADDRESS: u32 = 1 << 6;
const SHARES_PORT: u32 = 1 << 7;
const KEEPALIVE: u32 = 1 << 8;
const NO_DELAY: u32 = 1 << 9;
const CORKED: u32 = 1 << 10;
const URGENT_INLINE: u32 = 1 << 11;
const RECEIVE_BUFFER_SET: u32 = 1 << 12;
const SEND_BUFFER_SET: u32 = 1 << 13;
const LINGERS: u32 = 1 << 14;
const FLAGS: u32 = (1 << 15) - 1;

/// The family that the socket was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`, which may speak IPv4 by mapped addresses.
    V6,
}

/// How far the connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Both ends may send.
    Established,
    /// The peer has sent its FIN.
    CloseWait,
}

/// Powers of two by which windows are multiplied (RFC 7323); 0 to 14 each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowScales {
    /// Of the windows that the peer announces.
    pub send: u8,
    /// Of the windows that this end announces.
    pub receive: u8,
}

/// Flow control, by `TCP_REPAIR_WINDOW`. Lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Sequence number of the segment that has updated the send window last (SND.WL1 of RFC 9293).
    pub update_sequence: u32,
    /// What the peer takes.
    pub send_len: u32,
    /// The most that the peer has ever taken; at least `send_len`.
    pub send_max_len: u32,
    /// What this end takes.
    pub receive_len: u32,
    /// The sequence number that was expected when this end announced its window last.
    pub receive_from: u32,
}

/// A buffer of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Bytes, as `SO_RCVBUF` and `SO_SNDBUF` are read: twice what a program asks for. Less than 2³¹.
    pub len: u32,
    /// The program has set it, so that the kernel does not change it.
    pub is_set: bool,
}

/// What a program has set on its socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// `O_NONBLOCK`, which is of the file description.
    pub non_blocking: bool,
    /// `SO_REUSEADDR`.
    pub reuses_address: bool,
    /// `SO_REUSEPORT`.
    pub shares_port: bool,
    /// `SO_KEEPALIVE`.
    pub keepalive: bool,
    /// `TCP_KEEPIDLE`, seconds; 1 to 32767.
    pub keepalive_idle_s: u16,
    /// `TCP_KEEPINTVL`, seconds; 1 to 32767.
    pub keepalive_interval_s: u16,
    /// `TCP_KEEPCNT`, 1 to 127.
    pub keepalive_probes: u8,
    /// `TCP_NODELAY`.
    pub no_delay: bool,
    /// `TCP_CORK`.
    pub corked: bool,
    /// `TCP_USER_TIMEOUT`, milliseconds; less than 2³¹, 0 is the system's.
    pub user_timeout_ms: u32,
    /// `TCP_CONGESTION`, 1 to 15 bytes of ASCII.
    pub congestion: String,
    /// `SO_LINGER`, seconds; less than 2³¹, `None` where it is off.
    pub linger_s: Option<u32>,
    /// `SO_RCVBUF`.
    pub receive_buffer: Buffer,
    /// `SO_SNDBUF`.
    pub send_buffer: Buffer,
    /// `IP_TOS`.
    pub tos: u8,
    /// `IPV6_TCLASS`; 0 for a socket of `AF_INET`.
    pub traffic_class: u8,
    /// `SO_PRIORITY`; less than 2³¹.
    pub priority: u32,
    /// `SO_OOBINLINE`.
    pub urgent_inline: bool,
    /// `SO_RCVLOWAT`, bytes; 1 to 2³¹ - 1.
    pub receive_low_water: u32,
    /// `SO_RCVTIMEO`, microseconds; at most 2⁵⁰, 0 is none.
    pub receive_timeout_us: u64,
    /// `SO_SNDTIMEO`, microseconds; at most 2⁵⁰, 0 is none.
    pub send_timeout_us: u64,
}

/// A connected TCP socket that was taken down. Its addresses are not in it: both hosts know them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpRecord {
    /// The socket's family.
    pub family: Family,
    /// How far the connection is.
    pub state: State,
    /// What is expected from the peer next: behind the receive queue's last byte and, in CLOSE-WAIT, the peer's FIN.
    pub receive_sequence: u32,
    /// Behind the send queue's last byte.
    pub send_sequence: u32,
    /// How many of the send queue's last bytes were never sent.
    pub unsent_len: u32,
    /// The most that the peer takes in a segment, bytes; at least 1.
    pub mss: u16,
    /// Window scales; `None` where the ends have not agreed on the option.
    pub scales: Option<WindowScales>,
    /// The clock of this end's timestamps, in the kernel's opaque form; `None` where they are not used.
    pub timestamp: Option<u32>,
    /// Selective acknowledgements are permitted (RFC 2018).
    pub selective_acks: bool,
    /// Congestion is notified explicitly (RFC 3168). The kernel cannot set up a socket that does.
    pub ecn: bool,
    /// The program has shut the socket for reading, without the peer's FIN.
    pub reading_is_shut: bool,
    /// Flow control.
    pub window: Window,
    /// The socket's own options.
    pub options: SocketOptions,
    /// What the program has not read yet; at most [`QUEUE_MAX`] bytes.
    pub receive_queue: Vec<u8>,
    /// What the peer has not acknowledged yet; at most [`QUEUE_MAX`] bytes.
    pub send_queue: Vec<u8>,
}

impl TcpRecord {
    /// Sequence number of the send queue's first byte.
    pub(super) fn first_unacknowledged(&self) -> u32 {
        self.send_sequence.wrapping_sub(self.send_queue.len() as u32)
    }

    /// What is expected from the peer next while its FIN is left out.
    pub(super) fn receive_sequence_of_data(&self) -> u32 {
        self.receive_sequence.wrapping_sub(u32::from(self.state == State::CloseWait))
    }

    /// The flow control of the socket while the peer's FIN is left out: the window ends at the same byte.
    pub(super) fn window_of_data(&self) -> Window {
        let next = self.receive_sequence_of_data();
        let ahead = self.window.receive_from.wrapping_sub(next);
        match self.state {
            State::CloseWait if ahead == 1 => {
                Window { receive_from: next, receive_len: self.window.receive_len.saturating_add(1), ..self.window }
            }
            _ => self.window,
        }
    }

    fn flags(&self) -> u32 {
        let options = &self.options;
        let all = [
            (SCALES, self.scales.is_some()),
            (TIMESTAMPS, self.timestamp.is_some()),
            (SELECTIVE_ACKS, self.selective_acks),
            (ECN, self.ecn),
            (READING_IS_SHUT, self.reading_is_shut),
            (NON_BLOCKING, options.non_blocking),
            (REUSES_ADDRESS, options.reuses_address),
            (SHARES_PORT, options.shares_port),
            (KEEPALIVE, options.keepalive),
            (NO_DELAY, options.no_delay),
            (CORKED, options.corked),
            (URGENT_INLINE, options.urgent_inline),
            (RECEIVE_BUFFER_SET, options.receive_buffer.is_set),
            (SEND_BUFFER_SET, options.send_buffer.is_set),
            (LINGERS, options.linger_s.is_some()),
        ];
        all.into_iter().filter(|(_, is_set)| *is_set).fold(0, |flags, (flag, _)| flags | flag)
    }

    /// The record as bytes. Fields out of their documented bounds give what [`decode`](Self::decode) refuses; in
    /// bounds, all lengths fit their fields.
    pub fn encode(&self) -> Vec<u8> {
        let options = &self.options;
        let scales = self.scales.unwrap_or(WindowScales { send: 0, receive: 0 });
        let family = match self.family {
            Family::V4 => 4,
            Family::V6 => 6,
        };
        let state = match self.state {
            State::Established => 1,
            State::CloseWait => 8,
        };
        let queues_len = self.receive_queue.len() + self.send_queue.len();
        let mut bytes = Vec::with_capacity(128 + queues_len);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, family, state, 0]);
        for word in [self.flags(), self.receive_sequence, self.send_sequence, self.unsent_len] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(self.mss.to_be_bytes());
        bytes.extend([scales.send, scales.receive]);
        bytes.extend(self.timestamp.unwrap_or(0).to_be_bytes());
        let window = self.window;
        let lengths = [window.send_len, window.send_max_len, window.receive_len];
        for word in [window.update_sequence].into_iter().chain(lengths).chain([window.receive_from]) {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(options.keepalive_idle_s.to_be_bytes());
        bytes.extend(options.keepalive_interval_s.to_be_bytes());
        bytes.extend([options.keepalive_probes, options.tos, options.traffic_class, 0]);
        let buffers = [options.receive_buffer.len, options.send_buffer.len];
        let words = [options.user_timeout_ms, options.linger_s.unwrap_or(0)].into_iter().chain(buffers);
        for word in words.chain([options.priority, options.receive_low_water]) {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(options.receive_timeout_us.to_be_bytes());
        bytes.extend(options.send_timeout_us.to_be_bytes());
        bytes.push(options.congestion.len() as u8);
        bytes.extend(options.congestion.as_bytes());
        for queue in [&self.receive_queue, &self.send_queue] {
            bytes.extend((queue.len() as u32).to_be_bytes());
            bytes.extend(queue);
        }
        bytes
    }

    /// Reads a record. Every field is checked, and nothing may follow.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let mut reader = Reader { bytes, at: 0 };
        reader.check(|reader| Ok(reader.array::<4>()? == MAGIC), "it does not begin with MTCP")?;
        reader.check(|reader| Ok(reader.byte()? == VERSION), "a version that this agent does not know")?;
        let family = match reader.bounded(4, 6, Reader::byte, "neither IPv4 nor IPv6")? {
            4 => Family::V4,
            6 => Family::V6,
            _ => return Err(RecordError { at: 5, what: "neither IPv4 nor IPv6" }),
        };
        let state = match reader.byte()? {
            1 => State::Established,
            8 => State::CloseWait,
            _ => return Err(RecordError { at: 6, what: "neither ESTABLISHED nor CLOSE-WAIT" }),
        };
        reader.zero()?;
        let flags = reader.bounded(0, FLAGS, Reader::word, "a flag that this agent does not know")?;
        let has = |flag: u32| flags & flag != 0;
        let receive_sequence = reader.word()?;
        let send_sequence = reader.word()?;
        let unsent_at = reader.at;
        let unsent_len = reader.word()?;
        let mss = reader.bounded(1, u16::MAX, Reader::half, "an MSS of zero")?;
        let scale_max = if has(SCALES) { SCALE_MAX } else { 0 };
        let mut scale =
            || reader.bounded(0, scale_max, Reader::byte, "a window scale above 14, or one without its flag");
        let scales = WindowScales { send: scale()?, receive: scale()? };
        let clock_max = if has(TIMESTAMPS) { u32::MAX } else { 0 };
        let timestamp = reader.bounded(0, clock_max, Reader::word, "a timestamp without its flag")?;
        let window = reader.window(receive_sequence)?;
        let options = reader.options(&has, family)?;
        let receive_queue = reader.queue()?;
        let send_queue = reader.queue()?;
        if reader.at != bytes.len() {
            return Err(RecordError { at: reader.at, what: "bytes follow the record" });
        }
        if unsent_len as usize > send_queue.len() {
            return Err(RecordError { at: unsent_at, what: "more bytes are unsent than the send queue has" });
        }
        Ok(Self {
            family,
            state,
            receive_sequence,
            send_sequence,
            unsent_len,
            mss,
            scales: has(SCALES).then_some(scales),
            timestamp: has(TIMESTAMPS).then_some(timestamp),
            selective_acks: has(SELECTIVE_ACKS),
            ecn: has(ECN),
            reading_is_shut: has(READING_IS_SHUT),
            window,
            options,
            receive_queue,
            send_queue,
        })
    }
}

struct Reader<'bytes> {
    bytes: &'bytes [u8],
    at: usize,
}

impl<'bytes> Reader<'bytes> {
    fn take(&mut self, len: usize) -> Result<&'bytes [u8], RecordError> {
        let end = self.at.checked_add(len);
        let Some(taken) = end.and_then(|end| self.bytes.get(self.at..end)) else {
            return Err(RecordError { at: self.at, what: "the record ends within a field" });
        };
        self.at += len;
        Ok(taken)
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], RecordError> {
        let taken = self.take(LEN)?;
        Ok(std::array::from_fn(|byte| taken[byte]))
    }

    fn byte(&mut self) -> Result<u8, RecordError> {
        Ok(self.array::<1>()?[0])
    }

    fn half(&mut self) -> Result<u16, RecordError> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn word(&mut self) -> Result<u32, RecordError> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    fn double(&mut self) -> Result<u64, RecordError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A field that `is_good`, or `what` is wrong with it.
    fn check(
        &mut self,
        is_good: impl FnOnce(&mut Self) -> Result<bool, RecordError>,
        what: &'static str,
    ) -> Result<(), RecordError> {
        let at = self.at;
        if is_good(self)? { Ok(()) } else { Err(RecordError { at, what }) }
    }

    fn bounded<T: PartialOrd>(
        &mut self,
        low: T,
        high: T,
        read: impl FnOnce(&mut Self) -> Result<T, RecordError>,
        what: &'static str,
    ) -> Result<T, RecordError> {
        let at = self.at;
        let value = read(self)?;
        if value < low || value > high { Err(RecordError { at, what }) } else { Ok(value) }
    }

    fn zero(&mut self) -> Result<(), RecordError> {
        self.check(|reader| Ok(reader.byte()? == 0), "a byte that must be zero")
    }

    /// What the kernel would take, given what is expected next.
    fn window(&mut self, receive_sequence: u32) -> Result<Window, RecordError> {
        let is_after = |one: u32, other: u32| one.wrapping_sub(other).cast_signed() > 0;
        let at = self.at;
        let update_sequence = self.word()?;
        let send_len = self.word()?;
        let send_max_len = self.bounded(send_len, u32::MAX, Self::word, "the greatest window is not the greatest")?;
        let receive_len = self.bounded(0, INT_MAX, Self::word, "a window of more than 2 GiB")?;
        if is_after(update_sequence, receive_sequence.wrapping_add(receive_len)) {
            return Err(RecordError { at, what: "a window update from beyond the window" });
        }
        let at = self.at;
        let receive_from = self.word()?;
        if is_after(receive_from, receive_sequence) {
            return Err(RecordError { at, what: "a window announced beyond what has come" });
        }
        Ok(Window { update_sequence, send_len, send_max_len, receive_len, receive_from })
    }

    fn options(&mut self, has: &impl Fn(u32) -> bool, family: Family) -> Result<SocketOptions, RecordError> {
        let keepalive = "a keepalive option out of its bounds";
        let number = "a number of 2\u{b3}\u{b9} or more";
        let keepalive_idle_s = self.bounded(1, KEEPALIVE_MAX_S, Self::half, keepalive)?;
        let keepalive_interval_s = self.bounded(1, KEEPALIVE_MAX_S, Self::half, keepalive)?;
        let keepalive_probes = self.bounded(1, KEEPALIVE_PROBES_MAX, Self::byte, keepalive)?;
        let tos = self.byte()?;
        let class_max = if family == Family::V6 { u8::MAX } else { 0 };
        let traffic_class = self.bounded(0, class_max, Self::byte, "a traffic class of an IPv4 socket")?;
        self.zero()?;
        let user_timeout_ms = self.bounded(0, INT_MAX, Self::word, number)?;
        let linger_max_s = if has(LINGERS) { INT_MAX } else { 0 };
        let linger_s = self.bounded(0, linger_max_s, Self::word, "a linger time out of its bounds")?;
        let receive_buffer_len = self.bounded(0, INT_MAX, Self::word, number)?;
        let send_buffer_len = self.bounded(0, INT_MAX, Self::word, number)?;
        let priority = self.bounded(0, INT_MAX, Self::word, number)?;
        let receive_low_water = self.bounded(1, INT_MAX, Self::word, "a low-water mark out of its bounds")?;
        let long = "a time-out of more than 2\u{2075}\u{2070} µs";
        let receive_timeout_us = self.bounded(0, TIMEOUT_MAX_US, Self::double, long)?;
        let send_timeout_us = self.bounded(0, TIMEOUT_MAX_US, Self::double, long)?;
        let congestion = self.congestion()?;
        Ok(SocketOptions {
            non_blocking: has(NON_BLOCKING),
            reuses_address: has(REUSES_ADDRESS),
            shares_port: has(SHARES_PORT),
            keepalive: has(KEEPALIVE),
            keepalive_idle_s,
            keepalive_interval_s,
            keepalive_probes,
            no_delay: has(NO_DELAY),
            corked: has(CORKED),
            user_timeout_ms,
            congestion,
            linger_s: has(LINGERS).then_some(linger_s),
            receive_buffer: Buffer { len: receive_buffer_len, is_set: has(RECEIVE_BUFFER_SET) },
            send_buffer: Buffer { len: send_buffer_len, is_set: has(SEND_BUFFER_SET) },
            tos,
            traffic_class,
            priority,
            urgent_inline: has(URGENT_INLINE),
            receive_low_water,
            receive_timeout_us,
            send_timeout_us,
        })
    }

    fn congestion(&mut self) -> Result<String, RecordError> {
        let what = "no name of a congestion control";
        let len = self.bounded(1, CONGESTION_MAX as u8, Self::byte, what)?;
        let at = self.at;
        let name = self.take(len.into())?;
        match str::from_utf8(name) {
            Ok(name) if name.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(name.to_owned()),
            _ => Err(RecordError { at, what }),
        }
    }

    fn queue(&mut self) -> Result<Vec<u8>, RecordError> {
        let len = self.bounded(0, QUEUE_MAX as u32, Self::word, "a queue of more than 16 MiB")?;
        Ok(self.take(len as usize)?.to_vec())
    }
}
