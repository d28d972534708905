//! What is read from disk, or was signed by somebody.

use margay_core::certificate::{Certificate, decode_chain, encode_chain};
use margay_core::fence::FenceNotice;
use margay_core::handover::HandoverRecord;
use margay_core::key_revocation::KeyRevocation;
use margay_core::succession::Succession;
use margay_core::time::Instant;
use margay_datapath::repair::TcpRecord;

use crate::core_machine::new_sal;

/// Certificates, alone and in chains, and what revokes or succeeds keys.
pub fn certificates(bytes: &[u8]) {
    if let Ok(certificate) = Certificate::decode(bytes) {
        assert_eq!(certificate.encode(), bytes, "what is read is all that there is");
    }
    if let Ok(chain) = decode_chain(bytes) {
        assert_eq!(encode_chain(&chain), bytes, "what is read is all that there is");
    }
    let _ = (FenceNotice::decode(bytes), KeyRevocation::decode(bytes), Succession::decode(bytes));
}

/// Records of flows, of associations, and of TCP connections.
pub fn records(bytes: &[u8]) {
    if let Ok(record) = HandoverRecord::decode(bytes) {
        let again = HandoverRecord::decode(&record.encode());
        assert_eq!(again.as_ref(), Ok(&record), "what was read can be written");
    }
    if let Ok(record) = TcpRecord::decode(bytes) {
        assert_eq!(record.encode(), bytes, "what is read is all that there is");
    }
    let _ = new_sal().take_up_associations(Instant::from_millis(1), bytes);
}
