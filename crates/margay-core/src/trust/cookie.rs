//! Cookies: a responder under load lets the initiator keep its state (DESIGN §7). Nothing is stored here but a secret.

use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::FlowId;

use crate::types::time::Instant;

/// How long a cookie is good.
const LIFETIME: Duration = Duration::from_secs(15);

/// Makes and checks cookies: eight bytes of time, sixteen of keyed BLAKE3 over time, address, flow and nonce.
pub struct CookieJar {
    secret: [u8; 32],
}

impl CookieJar {
    /// A jar with a secret of its own; another start has another, so cookies do not outlive the agent.
    pub fn new(secret: [u8; 32]) -> Self {
        Self { secret }
    }

    /// The cookie that a SYN of `flow` and `nonce` from `from` must bring.
    pub fn issue(&self, now: Instant, from: SocketAddr, flow: FlowId, nonce: u64) -> [u8; 24] {
        self.make(now.micros(), from, flow, nonce)
    }

    /// Whether the cookie is ours, fresh, and for this sender and flow.
    pub fn is_valid(&self, now: Instant, cookie: &[u8; 24], from: SocketAddr, flow: FlowId, nonce: u64) -> bool {
        let mut micros = [0; 8];
        micros.copy_from_slice(&cookie[..8]);
        let issued = u64::from_be_bytes(micros);
        let is_fresh = issued <= now.micros() && now.since(Instant::from_micros(issued)) <= LIFETIME;
        let wanted = self.make(issued, from, flow, nonce);
        let same = wanted.iter().zip(cookie).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0;
        is_fresh && same
    }

    fn make(&self, micros: u64, from: SocketAddr, flow: FlowId, nonce: u64) -> [u8; 24] {
        let ip = match from.ip() {
            core::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            core::net::IpAddr::V6(v6) => v6.octets(),
        };
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(&micros.to_be_bytes()).update(&ip).update(&from.port().to_be_bytes());
        hasher.update(&flow.0.to_be_bytes()).update(&nonce.to_be_bytes());
        let mut cookie = [0; 24];
        cookie[..8].copy_from_slice(&micros.to_be_bytes());
        cookie[8..].copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        cookie
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_good_for_its_sender_flow_and_time() {
        let jar = CookieJar::new([5; 32]);
        let from = SocketAddr::new([10, 0, 0, 1].into(), 54324);
        let now = Instant::from_millis(1000);
        let cookie = jar.issue(now, from, FlowId(1), 2);
        let later = now + Duration::from_secs(10);
        assert!(jar.is_valid(later, &cookie, from, FlowId(1), 2));
        assert!(!jar.is_valid(later, &cookie, from, FlowId(2), 2));
        assert!(!jar.is_valid(later, &cookie, from, FlowId(1), 3));
        assert!(!jar.is_valid(later, &cookie, SocketAddr::new([10, 0, 0, 2].into(), 54324), FlowId(1), 2));
        assert!(!jar.is_valid(now + LIFETIME + Duration::from_secs(1), &cookie, from, FlowId(1), 2));
        assert!(!jar.is_valid(Instant::ZERO, &cookie, from, FlowId(1), 2), "from the future");
        assert!(!CookieJar::new([6; 32]).is_valid(later, &cookie, from, FlowId(1), 2));
    }
}
