//! A router among others: what its hosts serve is heard outside, and what routers of other sites say is heard here
//! ([`crate::wide_area`]).

use std::sync::Arc;

use margay_core::way::Relation;
use tokio::task::JoinHandle;

use super::{Guest, Shared, answer_of};
use crate::registration::proto::{self, from_host};
use crate::registration::refusal::{No, invalid};
use crate::wide_area::{Census, Link, Words};

impl Shared {
    /// Has other sites hear of what is served here.
    pub(super) fn follow_area(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        let area = self.area.clone()?;
        area.set_ledger(Arc::clone(&self.ledger));
        let mut roll = self.roll.lock();
        roll.census = Census::new(Arc::clone(area.policy()));
        let (changes, shared) = (roll.changes(), Arc::clone(self));
        Some(tokio::spawn(area.follow(changes, move || shared.roll.lock().census.take_changes())))
    }
}

impl Guest {
    /// The host is the router of another site.
    pub(super) fn attach(&mut self, site: &proto::Site) -> Vec<proto::FromRouter> {
        let link = Link { host: self.place.host, authority: self.place.authority, joined: false };
        let relation = if site.beside { Relation::Beside } else { Relation::Below };
        let address = self.shared.roll.lock().address_of(self.place.host);
        let attached = self
            .shared
            .area
            .as_ref()
            .zip(address)
            .map(|(area, address)| area.attach(link, address, &site.name, relation, Some(self.member.clone())));
        match attached {
            Some(Ok(attachment)) => {
                self.attachment = Some(attachment);
                Vec::new()
            }
            Some(Err(fault)) => self.refuse(0, No(fault.code(), fault.to_string())),
            None => self.refuse(0, invalid("this router belongs to no site")),
        }
    }

    /// What other sites serve, by the word of the host.
    pub(super) fn hear(&mut self, asked: from_host::Body) -> Vec<proto::FromRouter> {
        let words = match asked {
            from_host::Body::Announce(announce) => Words::Announce(announce),
            from_host::Body::Retract(retract) => Words::Retract(retract),
            from_host::Body::Declined(declined) => Words::Declined(declined),
            _ => return self.refuse(0, invalid("the message is not about other sites")),
        };
        let Some(attachment) = &self.attachment else { return self.refuse(0, invalid("the host named no site")) };
        attachment.take(words).map(|words| answer_of(words.into())).into_iter().collect()
    }

    /// What the host may announce has changed.
    pub(super) fn review_announced(&mut self) -> Vec<proto::FromRouter> {
        let declined = self.attachment.as_mut().map(|attachment| attachment.review(&self.member));
        declined.into_iter().flatten().map(|words| answer_of(words.into())).collect()
    }
}
