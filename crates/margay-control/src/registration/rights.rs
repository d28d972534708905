//! What a host may register: what its operator has granted, or a name whose own key says so.

use margay_core::certificate::TrustStore;
use margay_core::key::HostPublic;
use margay_core::name::{Name, Prefix, SERVICE_BITS, ServiceId};

use super::proto::Code;
use super::refusal::{No, invalid};
use crate::store::Member;

/// Written and proved as a host says.
pub struct Claim<'a> {
    /// As written.
    pub name: &'a Name,
    /// Its bits.
    pub prefix: &'a Prefix,
    /// The service has partitions.
    pub is_divided: bool,
    /// The chain that the name's key signed; empty: there is none.
    pub proof: &'a [u8],
}

impl Claim<'_> {
    /// Whether a host may register it.
    ///
    /// # Errors
    ///
    /// Why it may not, and what to do.
    pub fn check(&self, member: &Member, host: &HostPublic, unix_s: u64) -> Result<(), No> {
        let Self { name, prefix, is_divided, proof } = self;
        // A certificate for it makes its host a router of the authority.
        if **prefix == Prefix::from(ServiceId::of_routers(prefix.id.authority())) {
            return Err(invalid("the name is that of the authority's routers, and no host may register it"));
        }
        if proof.is_empty() {
            by_grant(member, name, prefix)?;
            let stands_for = if *is_divided { name.service_prefix() } else { name.prefix() };
            return if **prefix == stands_for { Ok(()) } else { Err(another()) };
        }
        // A name that certifies itself needs no authority's leave; the key's own word is enough.
        let proved = TrustStore::default().verify_service(proof, &prefix.id, &host.0, unix_s);
        if prefix.bits != 256 || !proved.is_ok_and(|proved| proved.is_proved()) {
            return Err(No(Code::Proof, format!("{name} is not certified by the key that it names")));
        }
        // It is written as the service whose key it is, or as bits.
        let head = Prefix::new(prefix.id, SERVICE_BITS);
        if Prefix::new(name.service_id(), SERVICE_BITS) == head { Ok(()) } else { Err(another()) }
    }
}

fn another() -> No {
    invalid("the name does not stand for these bits")
}

/// Whether a grant is for it.
///
/// # Errors
///
/// Why none is, and what to do.
pub fn by_grant(member: &Member, name: &Name, prefix: &Prefix) -> Result<(), No> {
    if may_certify_itself(name) && !member.is_granted_exactly(prefix) {
        let text = format!(
            "{name} may be the name of a key, and this host shows no certificate by it: serve it where that key is, or \
             ask for a grant of it: `margay id token create --grant {name}`, or `margay id member grant`"
        );
        return Err(No(Code::Proof, text));
    }
    // A grant for a service is one for its partitions.
    let own = if *prefix == name.service_prefix() { name.prefix() } else { *prefix };
    if member.may_register(&own) {
        return Ok(());
    }
    let text = format!(
        "this host has no grant for {name}; join again with a token that has: `margay id token create --grant`, or ask \
         for it: `margay id member grant`"
    );
    Err(No(Code::NoGrant, text))
}

/// Whether a name says bits alone, and those of one tail: they may be the hash of a service's key, which nobody can
/// tell by looking at them. Then a grant for the service, or for all of the authority, is not meant for it.
fn may_certify_itself(name: &Name) -> bool {
    let is_whole = name.prefix().bits == 256 && name.service_id().tail().iter().any(|byte| *byte != 0);
    is_whole && name.written().starts_with("sid:")
}
