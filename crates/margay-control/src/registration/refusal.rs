//! What a router says to a host when it says no.

use margay_core::name::{Prefix, ServiceId};

use super::proto::{self, Code, from_router};
use super::roll::RollError;
use crate::store::{AdmitError, NameError};

const NAME_SHOWN_MAX: usize = 100;

/// A no with its number and its words.
pub(super) struct No(pub Code, pub String);

impl From<AdmitError> for No {
    fn from(error: AdmitError) -> Self {
        let code = match error {
            AdmitError::UnknownToken | AdmitError::Expired | AdmitError::UsedUp | AdmitError::OtherAuthority => {
                Code::Token
            }
            AdmitError::NotAMember => Code::NotAMember,
            AdmitError::TooMuch => Code::Limit,
            AdmitError::Store(_) => Code::Store,
        };
        Self(code, error.to_string())
    }
}

impl From<RollError> for No {
    fn from(error: RollError) -> Self {
        let code = match error {
            RollError::Hosts | RollError::Prefixes | RollError::Table(_) => Code::Limit,
            RollError::Clone => Code::Quarantined,
            RollError::Superseded => Code::Superseded,
            // What cannot be agreed about now may be in a moment.
            RollError::Held { .. } | RollError::Away { .. } | RollError::Kept { .. } => Code::Exclusive,
            RollError::Partitions { .. } => Code::Partitions,
        };
        Self(code, error.to_string())
    }
}

impl From<NameError> for No {
    fn from(error: NameError) -> Self {
        let code = match error {
            NameError::Store(_) => Code::Store,
            NameError::Share(_) => Code::Limit,
            NameError::Taken { .. } => Code::NameTaken,
        };
        Self(code, error.to_string())
    }
}

/// The host's words make no sense.
pub(super) fn invalid(text: &str) -> No {
    No(Code::Invalid, text.to_owned())
}

/// As the host hears it.
pub(super) fn refusal(request: u64, No(code, text): No) -> proto::FromRouter {
    let refusal = proto::Refusal { request, code: code.into(), text };
    proto::FromRouter { body: Some(from_router::Body::Refusal(refusal)) }
}

/// A prefix as it is written in messages.
///
/// # Errors
///
/// It is none.
pub(super) fn prefix_of(service_id: &[u8], bits: u32) -> Result<Prefix, No> {
    let id: [u8; 32] = service_id.try_into().map_err(|_| invalid("no serviceID"))?;
    let bits = u16::try_from(bits).ok().filter(|bits| *bits <= 256).ok_or_else(|| invalid("no prefix length"))?;
    let prefix = Prefix::new(ServiceId(id), bits);
    if prefix.id.0 == id { Ok(prefix) } else { Err(invalid("bits beyond the prefix are not zero")) }
}

/// What somebody calls a name, as far as people want to read it.
pub(super) fn shown(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(NAME_SHOWN_MAX).collect()
}
