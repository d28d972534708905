//! What an honest host's agent would ask of a router, for programs that are no agents.

use margay_control::registration::proto;
use margay_core::name::Prefix;

/// The first words: with the secret of a token, or without as a member.
pub fn hello(authority: [u8; 8], secret: &[u8], host_name: String) -> proto::Hello {
    proto::Hello {
        version: 1,
        secret: secret.to_vec(),
        authority: authority.to_vec(),
        epoch: 1,
        boot_id: vec![7; 16],
        association_id: 7,
        sal_port: 54_324,
        host_name,
        ..proto::Hello::default()
    }
}

/// To be one of those who serve a name.
pub fn registration(name: &str, prefix: Prefix) -> proto::Register {
    proto::Register {
        request: 1,
        name: name.to_owned(),
        service_id: prefix.id.0.to_vec(),
        bits: prefix.bits.into(),
        weight: 100,
        priority: 100,
        ..proto::Register::default()
    }
}
