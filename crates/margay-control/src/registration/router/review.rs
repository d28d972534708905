//! What a member may has changed while its stream stands: grants, or groups.

use std::sync::Arc;

use margay_core::name::{Name, Prefix};

use super::super::ledger::Act;
use super::super::proto::{self, Code, from_router};
use super::super::refusal::{No, refusal};
use super::super::rights::by_grant;
use super::{Guest, answer_of, blocking};
use crate::store::MemberKey;

impl Guest {
    /// What the host may register has changed: what it may no longer is withdrawn, and it is told.
    pub(super) async fn review(&mut self) -> Vec<proto::FromRouter> {
        let (store, key) =
            (Arc::clone(&self.shared.store), MemberKey { host: self.host, authority: self.place.authority });
        let before = match blocking(move || store.member(&key)).await {
            Ok(Ok(Some(member))) => std::mem::replace(&mut self.member, member),
            Ok(Ok(None)) => {
                self.shared.roll.lock().expel(self.place.host, &*self.shared.sal);
                return Vec::new();
            }
            Ok(Err(error)) => return vec![refusal(0, No(Code::Store, error.to_string()))],
            Err(no) => return vec![refusal(0, no)],
        };
        // It may have been put out and let in again by another router of the cluster.
        let mut told = if before.groups == self.member.groups { Vec::new() } else { self.membership(0) };
        if before.grants == self.member.grants {
            return told;
        }
        let names = self.shared.roll.lock().names(&self.place).into_iter();
        let granted = names.filter(|(prefix, _)| self.granted.contains(prefix));
        let gone: Vec<(Prefix, String, No)> = granted
            .filter_map(|(prefix, written)| {
                let name: Name = written.parse().ok()?;
                Some((prefix, written, by_grant(&self.member, &name, &prefix).err()?))
            })
            .collect();
        let mut lost = Vec::new();
        for (prefix, name, No(code, text)) in gone {
            self.withdraw(&prefix);
            self.note(Act::RegisterRefused, format!("{name}: {text}"));
            lost.push(proto::Lost {
                service_id: prefix.id.0.to_vec(),
                bits: prefix.bits.into(),
                code: code.into(),
                text,
            });
        }
        told.push(answer_of(from_router::Body::Granted(proto::Granted { lost })));
        told.extend(self.review_announced());
        told
    }
}
