//! What a router says to a host when it says no.

use super::proto::{self, Code, from_router};
use super::roll::RollError;
use crate::store::{AdmitError, NameError};

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
            RollError::Held { .. } => Code::Exclusive,
            RollError::Partitions { .. } => Code::Partitions,
        };
        Self(code, error.to_string())
    }
}

impl From<NameError> for No {
    fn from(error: NameError) -> Self {
        let code = if matches!(error, NameError::Store(_)) { Code::Store } else { Code::NameTaken };
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
