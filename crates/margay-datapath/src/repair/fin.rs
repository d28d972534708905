//! The FIN that a peer had sent before its connection was carried. The kernel has no other way into CLOSE-WAIT.

use std::net::SocketAddr;

use super::record::TcpRecord;
use crate::packet::{ACK, FIN, TCP, TCP_LEN};
use crate::pinhole::ip_packet;

const CHECKSUM_AT: usize = 16;

/// The IP packet as it came from the peer: it acknowledges nothing new, and leaves the peer's window as it is. `None`
/// when the addresses are of two families.
pub(super) fn segment(record: &TcpRecord, local: SocketAddr, remote: SocketAddr) -> Option<Vec<u8>> {
    let scale = record.scales.map_or(0, |scales| scales.send);
    let window = u16::try_from(record.window.send_len >> scale).unwrap_or(u16::MAX);
    let mut transport = Vec::with_capacity(TCP_LEN);
    transport.extend(remote.port().to_be_bytes());
    transport.extend(local.port().to_be_bytes());
    transport.extend(record.receive_sequence.wrapping_sub(1).to_be_bytes());
    transport.extend(record.first_unacknowledged().to_be_bytes());
    transport.extend([(TCP_LEN as u8 / 4) << 4, FIN | ACK]);
    transport.extend(window.to_be_bytes());
    transport.extend([0; 4]);
    let addresses = (remote.ip().to_canonical(), local.ip().to_canonical());
    ip_packet(addresses, TCP, transport, CHECKSUM_AT)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::repair::record_test::sample;

    #[test]
    fn literal_bytes() {
        let record = sample();
        let local = "[::ffff:10.1.0.2]:80".parse().expect("literal");
        let packet = segment(&record, local, "10.1.0.1:61001".parse().expect("literal")).expect("one family");
        assert_eq!(packet[12..20], [10, 1, 0, 1, 10, 1, 0, 2]);
        let expected = [
            0xee, 0x49, 0, 80, // Ports.
            1, 2, 3, 3, // One before what is expected next.
            5, 6, 7, 5, // Three bytes wait in the send queue.
            0x50, 0x11, 2, 0, // 65536 bytes, scaled by 7.
        ];
        assert_eq!(packet[20..36], expected);
    }
}
