//! The old location redirects (SCAFFOLD §4.2.2, note 2): whoever finds this host at an address of its own that it is
//! leaving, or has left, is told from the new one where it is (docs/decisions/0018). An address that is gone tells
//! nobody; then the rendezvous does.

use alloc::vec::Vec;
use core::time::Duration;

use crate::association::location::LocationTable;
use crate::association::location::{Ask, Cause, Moving, Pair, Scope};
use crate::machine::sal::Sal;
use crate::types::key::HostId;
use crate::types::time::Instant;

/// For so long after a move what comes to the old address may have been sent before it.
const GRACE: Duration = Duration::from_secs(2);
/// A pair that works is not left for ever for one that is wished: after so many rounds without an answer, half a
/// minute, the pair in use stays. Six rounds in a row are lost too often where every fifth message is (decision 0018).
pub(crate) const WISHES_MAX: u32 = 30;
/// A pair that passes RSYN and not RSYN-DONE is not tried for ever: after so many moves to it that were not confirmed
/// another one will do.
const UNCONFIRMED_MAX: u8 = 4;

/// Whether a move goes to one place and no other will do. An order does, whatever the pair in use is worth: silence may
/// have been noticed before the order came. Moves for other reasons do while the pair in use works.
const fn is_on_purpose(ask: &Ask) -> bool {
    match ask.cause {
        Cause::Operator => true,
        Cause::Address | Cause::Sought => !ask.broken,
        Cause::Silence | Cause::Rebound | Cause::Restart | Cause::Unanswered | Cause::Peer => false,
    }
}

impl Sal {
    /// They have met, but not there. `wish`: where instead, and how many moves to there were not confirmed.
    pub(crate) fn pursue(&mut self, now: Instant, scope: Scope, wish: Option<(Pair, u8)>) {
        if let Some((wished, unconfirmed)) = wish.filter(|(wished, _)| self.pair_in_use(scope) != Some(*wished)) {
            self.leave(now, scope, Cause::Sought, false, alloc::vec![wished]);
            self.locations.note_wish(scope, None, unconfirmed);
        }
    }

    /// A move was answered over a pair, and not confirmed: it begins again with `pairs`, and any of them will do. One
    /// that was made on purpose goes on to where it was to go.
    pub(crate) fn replace_unconfirmed(&mut self, now: Instant, scope: Scope, answered: Pair, pairs: Vec<Pair>) {
        let ask = self.locations.get(scope).and_then(|location| location.ask.as_ref());
        let wished = ask.and_then(|ask| match ask.wish {
            None if is_on_purpose(ask) => ask.pairs.first().copied(),
            wish => wish,
        });
        let unconfirmed = ask.map_or(0, |ask| ask.unconfirmed.saturating_add(1));
        self.leave(now, scope, Cause::Silence, true, pairs);
        // The peer has answered where it is now.
        let wished = wished.map(|wished| if wished.local == answered.local { answered } else { wished });
        self.locations.note_wish(scope, wished.filter(|_| unconfirmed < UNCONFIRMED_MAX), unconfirmed);
    }

    /// A peer takes `pair` for the one in use; where that is another by now, it missed a move, and hears of it again.
    pub(crate) fn redirect(&mut self, now: Instant, host: HostId, pair: Pair) {
        let Some(present) = self.associations.pair_of(host) else { return };
        let (Some(local), Some(arrival)) = (present.local, pair.local) else { return };
        let own = &self.config.local_addresses;
        if local == arrival || !own.contains(&local) || !own.contains(&arrival) || !self.associations.is_followed(host)
        {
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

impl LocationTable {
    /// A peer has moved, too, and found this host at the local address of `pair`, which it is leaving on purpose: the
    /// pair that it wants instead.
    pub(crate) fn wish_instead_of(&self, scope: Scope, pair: Pair) -> Option<Pair> {
        let ask = self.get(scope)?.ask.as_ref()?;
        // Where the old address is lost, any place where they meet will do.
        let wished = match ask.wish {
            Some(wished) => wished.local?,
            None if is_on_purpose(ask) => ask.pairs.first()?.local?,
            None => return None,
        };
        let is_other = pair.local.is_some_and(|local| local != wished && local.is_ipv4() == wished.is_ipv4());
        is_other.then_some(Pair { local: Some(wished), remote: pair.remote })
    }

    fn note_wish(&mut self, scope: Scope, wish: Option<Pair>, unconfirmed: u8) {
        self.with(scope, |location| {
            if let Some(ask) = &mut location.ask {
                (ask.wish, ask.unconfirmed) = (wish, unconfirmed);
            }
        });
    }
}
