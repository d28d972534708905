//! Certificates as an authority in these worlds would sign them.

use margay_core::certificate::{Certificate, CertificateKind, TrustAnchor, encode_chain};
use margay_core::key::{SigningKey, VerifyingKey};
use margay_core::name::Prefix;

use crate::host::HostId;
use crate::world::{World, service};

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

/// These hosts trust this authority, which is that of `name`, and of which all are members.
pub fn trust(world: &mut World, hosts: &[HostId], name: &str, authority: &SigningKey) {
    for host in hosts {
        let anchor = TrustAnchor { authority: service(name).authority(), key: authority.public() };
        let key = world.host(*host).public_key();
        let member = chain(CertificateKind::Member, Prefix::new(service(name), 64), key, authority);
        let sal = &mut world.host(*host).sal;
        sal.add_trust_anchor(anchor);
        sal.set_membership(member);
    }
}

/// The authority lets a host speak for a name.
pub fn certify(world: &mut World, host: HostId, name: &str, authority: &SigningKey) {
    let prefix = Prefix::new(service(name), 96);
    let key = world.host(host).public_key();
    let shown = chain(CertificateKind::Service, prefix, key, authority);
    world.host(host).sal.set_service_certificate(prefix, shown);
}
