//! What an operator wants of a session's boxes.

use alloc::vec::Vec;
use core::fmt;

use margay_wire::BOXES_MAX;

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
        /// The box that it comes before; `None`: it is the last one.
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

/// Why the boxes of a session cannot be changed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// Not one of the session's.
    #[error("the session does not go through {}; `margay chain show` has its boxes", .0)]
    Absent(ServiceId),
    /// One of the session's already.
    #[error("the session goes through {} already, and passes a box once", .0)]
    Present(ServiceId),
    /// Too many.
    #[error("a session goes through {BOXES_MAX} boxes at most")]
    TooMany,
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

    /// The boxes that a session is to have, in order.
    ///
    /// # Errors
    ///
    /// It cannot have those.
    pub fn of(&self, boxes: &[ServiceId]) -> Result<Vec<ServiceId>, EditError> {
        let place = |service: &ServiceId| boxes.iter().position(|one| one == service);
        let find = |service: &ServiceId| place(service).ok_or(EditError::Absent(*service));
        let is_new = |service: &ServiceId| place(service).map_or(Ok(()), |_| Err(EditError::Present(*service)));
        let mut boxes = boxes.to_vec();
        match self {
            Self::Insert { service, before } => {
                is_new(service)?;
                if boxes.len() >= BOXES_MAX {
                    return Err(EditError::TooMany);
                }
                let at = before.as_ref().map_or(Ok(boxes.len()), find)?;
                boxes.insert(at, *service);
            }
            Self::Remove { service } => {
                boxes.remove(find(service)?);
            }
            Self::Replace { service, by } => {
                is_new(by)?;
                boxes[find(service)?] = *by;
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
        let boxes = [one(1), one(2)];
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
            assert_eq!(edit.of(&boxes), wanted, "{edit:?}");
        }
        let full: Vec<ServiceId> = (0..8).map(one).collect();
        assert_eq!(Edit::Insert { service: one(9), before: None }.of(&full), Err(EditError::TooMany));
    }
}
