//! Certificates as an authority in these worlds would sign them.

use margay_core::certificate::{Certificate, CertificateKind, encode_chain};
use margay_core::key::{SigningKey, VerifyingKey};
use margay_core::name::Prefix;

/// Until then, in seconds since 1970: longer than any world lasts.
const END_S: u64 = 4_000_000_000;

/// What the host with this key may do with a prefix, says `by`.
pub fn chain(kind: CertificateKind, prefix: Prefix, host_key: [u8; 32], by: &SigningKey) -> Vec<u8> {
    let certificate = Certificate {
        kind,
        prefix,
        host_key,
        not_before_s: 0,
        not_after_s: END_S,
        groups: Vec::new(),
        issuer: VerifyingKey([0; 32]),
        delegate: None,
        signature: [0; 64],
    };
    encode_chain(&[certificate.sign(by)])
}
