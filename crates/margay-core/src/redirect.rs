//! The old location redirects (SCAFFOLD §4.2.2, note 2): whoever finds this host at an address of its own that it is leaving, or has
//! left, is told from the new one where it is (docs/decisions/0018). An address that is gone tells nobody; then the rendezvous does.

use core::time::Duration;

use crate::key::HostId;
use crate::location::{Cause, Moving, Pair, Scope};
use crate::sal::Sal;
use crate::time::Instant;

/// For so long after a move what comes to the old address may have been sent before it.
const GRACE: Duration = Duration::from_secs(2);
/// A pair that works is not left for ever for one that is wished: after so many rounds without an answer, half a
/// minute, the pair in use stays. Six rounds in a row are lost too often where every fifth message is (decision 0018).
pub(crate) const WISHES_MAX: u32 = 30;

impl Sal {
    /// A peer has moved, too, and found this host at the local address of `pair`, which it is leaving on purpose: the pair that it
    /// wants instead.
    pub(crate) fn wish_instead_of(&self, scope: Scope, pair: Pair) -> Option<Pair> {
        let ask = self.locations.get(scope)?.ask.as_ref()?;
        // Where the old address is lost, any place where they meet will do.
        if ask.broken || !matches!(ask.cause, Cause::Operator | Cause::Address | Cause::Sought) {
            return None;
        }
        let wished = ask.pairs.first()?.local?;
        let is_other = pair.local.is_some_and(|local| local != wished && local.is_ipv4() == wished.is_ipv4());
        is_other.then_some(Pair { local: Some(wished), remote: pair.remote })
    }

    /// They have met, but not there.
    pub(crate) fn pursue(&mut self, now: Instant, scope: Scope, wish: Option<Pair>) {
        if let Some(wished) = wish.filter(|wished| self.pair_in_use(scope) != Some(*wished)) {
            self.leave(now, scope, Cause::Sought, false, alloc::vec![wished]);
        }
    }

    /// A peer takes `pair` for the one in use; where that is another by now, it missed a move, and hears of it again.
    pub(crate) fn redirect(&mut self, now: Instant, host: HostId, pair: Pair) {
        let Some(present) = self.pair_of(host) else { return };
        let (Some(local), Some(arrival)) = (present.local, pair.local) else { return };
        let own = &self.config.local_addresses;
        if local == arrival || !own.contains(&local) || !own.contains(&arrival) || !self.is_followed(host) {
            return;
        }
        let is_settled = self.locations.get(Scope::of(host)).is_some_and(|location| {
            let is_late = location.moved.is_none_or(|moved| now.since(moved.at) >= GRACE);
            location.state == Moving::Settled && location.suspicion.is_none() && is_late
        });
        if is_settled {
            self.leave(now, Scope::of(host), Cause::Sought, false, alloc::vec![present]);
        }
    }
}
