//! Fenced names: this host serves one only while it holds it, by the word of a router that is not too old (DESIGN §3.9,
//! docs/decisions/0072).

use std::time::Duration;

use margay_core::name::{Name, Prefix};
use tokio::time::Instant;

use super::{Published, Services};

/// For so long after its start an agent does not end flows of fenced names that it held before: a router may give them
/// to it again, and gives them to nobody else meanwhile.
const GRACE: Duration = Duration::from_millis(1200);

/// How this host stands with a name that it publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenancy {
    /// It is not fenced, or this host has no router for it.
    Free,
    /// Nobody has given it to this host yet. Until then flows of it that an earlier start of the agent had may go on.
    Awaited(Instant),
    /// This host holds it.
    Held,
    /// It does not.
    Lost,
}

impl Tenancy {
    /// Whether programs here may be connected to by the name.
    pub const fn may_serve(self) -> bool {
        matches!(self, Self::Free | Self::Held)
    }

    /// What it is by what is known now; with whether it is lost just now, and when to look again at the latest.
    fn after(self, held: Option<Instant>, now: Instant) -> (Self, bool, Option<Instant>) {
        match (self, held) {
            (_, Some(until)) => (Self::Held, false, Some(until)),
            (Self::Free, None) => (Self::Awaited(now + GRACE), false, Some(now + GRACE)),
            (Self::Awaited(until), None) if now < until => (self, false, Some(until)),
            (Self::Awaited(_) | Self::Held, None) => (Self::Lost, true, None),
            (Self::Lost, None) => (self, false, None),
        }
    }
}

/// What follows from a look at fenced names.
#[derive(Debug, Default)]
pub struct Tenancies {
    /// Names that this host holds no longer.
    pub lost: Vec<(Name, Prefix)>,
    /// When to look again at the latest.
    pub next: Option<Instant>,
}

/// Routers ask for more than any host lives.
const FOR_EVER: Duration = Duration::from_secs(86_400);

impl Services {
    /// How a name that was not published before stands.
    pub(super) fn first_tenancy(&self, service: &Published) -> Tenancy {
        if !service.terms.fenced || self.is_free(service) {
            return Tenancy::Free;
        }
        let now = Instant::now();
        Tenancy::Free.after(self.held_until(service, now), now).0
    }

    /// Nobody could give it to this host.
    fn is_free(&self, service: &Published) -> bool {
        !self.is_of_own_router(service) && self.homes_of(&service.name).is_empty()
    }

    fn is_of_own_router(&self, service: &Published) -> bool {
        self.router.is_some() && self.signs(service.prefix().id.authority())
    }

    /// Until when this host holds a fenced name, whatever is heard of routers.
    fn held_until(&self, service: &Published, now: Instant) -> Option<Instant> {
        if service.is_served && self.is_of_own_router(service) {
            return Some(now + FOR_EVER);
        }
        let prefix = service.prefix();
        let by_home = |home: &std::sync::Arc<super::Home>| match home.tenure(&prefix) {
            Some(tenure) => Some(tenure.until).filter(|until| now < *until),
            // A router that fences nothing.
            None => home.registration(&prefix).filter(|state| state.state == "registered").map(|_| now + FOR_EVER),
        };
        self.homes_of(&service.name).iter().filter_map(by_home).max()
    }

    /// Serves the fenced names that this host holds, and no others.
    pub fn follow_tenures(&self) -> Tenancies {
        let now = Instant::now();
        let mut found = Tenancies::default();
        let mut is_changed = false;
        let mut published = self.published.lock();
        for service in published.iter_mut() {
            let before = service.clone();
            if !service.terms.fenced || self.is_free(service) {
                service.tenancy = Tenancy::Free;
            } else {
                let (tenancy, is_lost, next) = service.tenancy.after(self.held_until(service, now), now);
                service.tenancy = tenancy;
                found.next = found.next.into_iter().chain(next).min();
                found.lost.extend(is_lost.then(|| (service.name.clone(), service.prefix())));
            }
            is_changed |= service.tenancy != before.tenancy;
            if service.tenancy.may_serve() == before.tenancy.may_serve() {
                continue;
            }
            if let Err(error) = self.put_in_table(Some(&before), service) {
                tracing::warn!(
                    name = %before.name,
                    %error,
                    "the service table does not follow who holds a fenced name"
                );
                *service = before;
            }
        }
        drop(published);
        if is_changed {
            self.changes.send_modify(|version| *version = version.wrapping_add(1));
        }
        found
    }

    /// Whether this host serves a name, as a router knows.
    pub fn serves(&self, name: &Name) -> bool {
        let Some(service) = self.find(name).filter(|service| service.is_served) else { return false };
        if service.terms.fenced {
            return service.tenancy == Tenancy::Held;
        }
        let prefix = service.prefix();
        let is_registered = |home: &std::sync::Arc<super::Home>| {
            home.registration(&prefix).is_some_and(|state| state.state == "registered")
        };
        self.is_of_own_router(&service) || self.homes_of(name).iter().any(is_registered)
    }

    /// Fenced names that this host publishes, whether it holds them or not.
    pub fn fenced(&self) -> Vec<Prefix> {
        self.published.lock().iter().filter(|service| service.terms.fenced).map(Published::prefix).collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_name_is_served_while_it_is_held_and_lost_once() {
        let now = Instant::now();
        let later = now + GRACE;
        let until = now + Duration::from_secs(9);
        assert_eq!(Tenancy::Free.after(None, now), (Tenancy::Awaited(later), false, Some(later)));
        assert_eq!(Tenancy::Awaited(later).after(None, now), (Tenancy::Awaited(later), false, Some(later)));
        assert_eq!(Tenancy::Awaited(later).after(None, later), (Tenancy::Lost, true, None));
        for before in [Tenancy::Free, Tenancy::Awaited(later), Tenancy::Held, Tenancy::Lost] {
            assert_eq!(before.after(Some(until), now), (Tenancy::Held, false, Some(until)));
        }
        assert_eq!(Tenancy::Held.after(None, now), (Tenancy::Lost, true, None));
        assert_eq!(Tenancy::Lost.after(None, until), (Tenancy::Lost, false, None));
        let all = [Tenancy::Free, Tenancy::Held, Tenancy::Awaited(now), Tenancy::Lost];
        assert_eq!(all.map(Tenancy::may_serve), [true, true, false, false]);
    }
}
