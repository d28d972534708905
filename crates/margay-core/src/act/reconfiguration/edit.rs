//! What an operator wants of a session's boxes.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use margay_wire::BOXES_MAX;

use crate::act::chain::Chained;
use crate::session::flow::Flow;
use crate::types::name::ServiceId;

/// Kinds of [`Edit`].
pub const EDITS: usize = 4;

/// What is to become of the boxes of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    /// A box is put in: before another one, or behind all.
    Insert {
        /// The name of the box.
        service: ServiceId,
        /// The box that it comes before; `None`: it is the last one before the session's end.
        before: Option<ServiceId>,
    },
    /// A box is taken out.
    Remove {
        /// The name of the box.
        service: ServiceId,
    },
    /// A box takes the place of another one.
    Replace {
        /// The name of the box that is taken out.
        service: ServiceId,
        /// The name of the box that is put in.
        by: ServiceId,
    },
    /// The program at the other end leaves, and the session goes on with whom it had connected to. It says so itself:
    /// nobody orders that at the client's host.
    Leave {
        /// The name that it is reached by.
        service: ServiceId,
    },
}

/// The boxes of a session that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionBoxes {
    /// The proxy that has begun the session.
    pub begun_by: Option<ServiceId>,
    /// Those that the session goes through between its two ends, in order.
    pub between: Vec<ServiceId>,
    /// The proxy that the session ends at.
    pub ends_at: Option<ServiceId>,
}

/// Why the boxes of a session cannot be changed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text(ServiceId::to_string))]
pub enum EditError {
    /// Not one of the session's.
    Absent(ServiceId),
    /// One of the session's already.
    Present(ServiceId),
    /// Too many.
    TooMany,
    /// A proxy, at which the session begins or ends.
    Proxy(ServiceId),
    /// The session begins at a proxy, and does not go through what is before the proxy.
    BeforeProxy {
        /// What was to be changed.
        service: ServiceId,
        /// The proxy.
        proxy: ServiceId,
    },
    /// The session ends at a proxy, and does not go through what is behind the proxy.
    BehindProxy {
        /// What was to be changed.
        service: ServiceId,
        /// The proxy.
        proxy: ServiceId,
    },
}

impl EditError {
    /// A sentence for people. `name`: how a box is called.
    pub fn text(&self, name: impl Fn(&ServiceId) -> String) -> String {
        match self {
            Self::Absent(service) => {
                format!("the session does not go through {}; `margay chain show` has its boxes", name(service))
            }
            Self::Present(service) => {
                format!("the session goes through {} already, and passes a box once", name(service))
            }
            Self::TooMany => format!("a session goes through {BOXES_MAX} boxes at most"),
            Self::Proxy(proxy) => format!(
                "the session begins or ends at {0}, a proxy, and no order takes {0} out: its program can leave the \
                 session (\"A proxy that leaves\" in the book)",
                name(proxy)
            ),
            Self::BeforeProxy { service, proxy } => format!(
                "the session begins at proxy {} and does not go through {}: boxes before the proxy are changed on the \
                 hosts of the proxy's clients, by `margay chain` there",
                name(proxy),
                name(service)
            ),
            Self::BehindProxy { service, proxy } => format!(
                "the session ends at proxy {} and does not go through {}: boxes behind the proxy are changed on the \
                 proxy's host, by `margay chain` there",
                name(proxy),
                name(service)
            ),
        }
    }
}

impl SessionBoxes {
    /// Those of a session with an end here, by its flow.
    pub(super) fn of(flow: &Flow) -> Self {
        flow.chain.as_deref().map(Self::of_chain).unwrap_or_default()
    }

    fn of_chain(chained: &Chained) -> Self {
        Self { begun_by: chained.begun_by(), between: chained.boxes_between(), ends_at: chained.ends_at() }
    }

    /// The proxies at the session's ends.
    fn proxies(&self) -> impl Iterator<Item = &ServiceId> {
        self.begun_by.iter().chain(&self.ends_at)
    }

    /// Where among the boxes between the ends one is.
    fn find(&self, service: &ServiceId) -> Result<usize, EditError> {
        let service = *service;
        let missing = || match (self.begun_by, self.ends_at) {
            _ if self.proxies().any(|proxy| *proxy == service) => EditError::Proxy(service),
            (_, Some(proxy)) => EditError::BehindProxy { service, proxy },
            (Some(proxy), None) => EditError::BeforeProxy { service, proxy },
            (None, None) => EditError::Absent(service),
        };
        self.between.iter().position(|one| *one == service).ok_or_else(missing)
    }

    /// Where a box comes in that is put before another one; `None`: it is the last one before the session's end.
    fn place_before(&self, service: ServiceId, before: Option<&ServiceId>) -> Result<usize, EditError> {
        match (before, self.begun_by) {
            (Some(before), Some(proxy)) if *before == proxy => Err(EditError::BeforeProxy { service, proxy }),
            (Some(before), _) if self.ends_at != Some(*before) => self.find(before),
            _ => Ok(self.between.len()),
        }
    }

    fn is_new(&self, service: &ServiceId) -> Result<(), EditError> {
        let is_known = self.proxies().chain(&self.between).any(|one| one == service);
        if is_known { Err(EditError::Present(*service)) } else { Ok(()) }
    }
}

impl Edit {
    /// The name that lists and metrics carry.
    pub const fn label(&self) -> &'static str {
        Self::LABELS[self.number()]
    }

    /// Names of all kinds, in the order in which they are counted.
    pub const LABELS: [&'static str; EDITS] = ["insert", "remove", "replace", "leave"];

    pub(crate) const fn number(&self) -> usize {
        match self {
            Self::Insert { .. } => 0,
            Self::Remove { .. } => 1,
            Self::Replace { .. } => 2,
            Self::Leave { .. } => 3,
        }
    }

    /// The boxes that a session is to have between its two ends, in order.
    ///
    /// # Errors
    ///
    /// The session cannot have those.
    pub fn of(&self, known: &SessionBoxes) -> Result<Vec<ServiceId>, EditError> {
        let mut boxes = known.between.clone();
        match self {
            Self::Insert { service, before } => {
                known.is_new(service)?;
                if boxes.len() + known.proxies().count() >= BOXES_MAX {
                    return Err(EditError::TooMany);
                }
                boxes.insert(known.place_before(*service, before.as_ref())?, *service);
            }
            Self::Remove { service } => {
                boxes.remove(known.find(service)?);
            }
            Self::Replace { service, by } => {
                known.is_new(by)?;
                boxes[known.find(service)?] = *by;
            }
            Self::Leave { .. } => boxes.clear(),
        }
        Ok(boxes)
    }
}

impl fmt::Display for Edit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(number: u8) -> ServiceId {
        ServiceId([number; 32])
    }

    #[test]
    fn boxes_are_put_in_taken_out_and_replaced_in_their_order() {
        let known = SessionBoxes { between: alloc::vec![one(1), one(2)], ..SessionBoxes::default() };
        for (edit, wanted) in [
            (Edit::Insert { service: one(3), before: None }, Ok(alloc::vec![one(1), one(2), one(3)])),
            (Edit::Insert { service: one(3), before: Some(one(1)) }, Ok(alloc::vec![one(3), one(1), one(2)])),
            (Edit::Insert { service: one(3), before: Some(one(4)) }, Err(EditError::Absent(one(4)))),
            (Edit::Insert { service: one(2), before: None }, Err(EditError::Present(one(2)))),
            (Edit::Remove { service: one(1) }, Ok(alloc::vec![one(2)])),
            (Edit::Remove { service: one(3) }, Err(EditError::Absent(one(3)))),
            (Edit::Replace { service: one(2), by: one(3) }, Ok(alloc::vec![one(1), one(3)])),
            (Edit::Replace { service: one(2), by: one(1) }, Err(EditError::Present(one(1)))),
            (Edit::Replace { service: one(3), by: one(4) }, Err(EditError::Absent(one(3)))),
        ] {
            assert_eq!(edit.of(&known), wanted, "{edit:?}");
        }
        let full = SessionBoxes { between: (0..8).map(one).collect(), ..SessionBoxes::default() };
        assert_eq!(Edit::Insert { service: one(9), before: None }.of(&full), Err(EditError::TooMany));
    }

    #[test]
    fn proxies_stay_at_the_ends_and_orders_about_what_is_beyond_say_where_to_order() {
        let [begun_by, ends_at] = [7, 8].map(one);
        let left = SessionBoxes { begun_by: None, between: alloc::vec![one(1)], ends_at: Some(ends_at) };
        let right = SessionBoxes { begun_by: Some(begun_by), between: alloc::vec![one(1)], ends_at: None };
        let insert = |number, before| Edit::Insert { service: one(number), before };
        let replace = |service, number| Edit::Replace { service, by: one(number) };
        let behind = |number| Err(EditError::BehindProxy { service: one(number), proxy: ends_at });
        let before = |number| Err(EditError::BeforeProxy { service: one(number), proxy: begun_by });
        for (known, edit, wanted) in [
            (&left, insert(2, None), Ok(alloc::vec![one(1), one(2)])),
            (&left, insert(2, Some(ends_at)), Ok(alloc::vec![one(1), one(2)])),
            (&left, insert(2, Some(one(1))), Ok(alloc::vec![one(2), one(1)])),
            (&left, insert(2, Some(one(3))), behind(3)),
            (&left, insert(8, None), Err(EditError::Present(ends_at))),
            (&left, Edit::Remove { service: ends_at }, Err(EditError::Proxy(ends_at))),
            (&left, Edit::Remove { service: one(3) }, behind(3)),
            (&left, replace(ends_at, 2), Err(EditError::Proxy(ends_at))),
            (&left, replace(one(1), 8), Err(EditError::Present(ends_at))),
            (&right, insert(2, None), Ok(alloc::vec![one(1), one(2)])),
            (&right, insert(2, Some(begun_by)), before(2)),
            (&right, insert(7, None), Err(EditError::Present(begun_by))),
            (&right, Edit::Remove { service: begun_by }, Err(EditError::Proxy(begun_by))),
            (&right, Edit::Remove { service: one(1) }, Ok(Vec::new())),
            (&right, Edit::Remove { service: one(3) }, before(3)),
        ] {
            assert_eq!(edit.of(known), wanted, "{edit:?} of {known:?}");
        }
        let full = SessionBoxes { between: (0..7).map(one).collect(), ..left };
        assert_eq!(insert(9, None).of(&full), Err(EditError::TooMany), "the proxy counts");
        let text = EditError::Proxy(ends_at).text(|_| "lb.shop".to_string());
        assert!(text.contains("lb.shop") && text.contains("leave"), "{text}");
    }
}
