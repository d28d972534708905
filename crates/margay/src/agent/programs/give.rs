//! Programs that are asked to give their connections to other hosts: all of a name, since a drain of it has begun here
//! (docs/decisions/0070), or single ones, since another instance has fewer than its share (docs/decisions/0071).

use std::net::{IpAddr, SocketAddr};

use margay_core::name::Prefix;

use super::message::{Kind, Reply};

/// What one program is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The connections that are meant: those of names under it.
    pub name: Prefix,
    /// The host that gets them, by its host-ID; empty: the program chooses.
    pub host: String,
    /// The one connection that is meant, by its peer as the program sees that; `None`: all of them.
    pub peer: Option<SocketAddr>,
}

impl Wish {
    /// The message to the program.
    pub fn message(&self) -> Reply {
        let mut message = Reply::done(Kind::Give);
        (message.id, message.bits) = (self.name.id, self.name.bits);
        message.text.clone_from(&self.host);
        if let Some(peer) = self.peer {
            message.port = peer.port();
            message.v6 = match peer.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
        }
        message
    }
}

/// What all programs of drained names are asked for, from the beginning of the drain to its end.
#[derive(Debug)]
pub struct Asking {
    /// The name that is drained; all of the host where there is none.
    pub drained: Option<Prefix>,
    /// The names whose connections are to go.
    pub scope: Prefix,
    /// Host-IDs that the operator has named.
    pub hosts: Vec<String>,
    /// How many programs were asked.
    asked: usize,
}

impl Asking {
    /// Nobody was asked yet.
    pub const fn new(drained: Option<Prefix>, scope: Prefix, hosts: Vec<String>) -> Self {
        Self { drained, scope, hosts, asked: 0 }
    }

    /// What a program that takes over `name` is asked for; each program gets the next host in turn. `None`: the drain
    /// does not concern it.
    pub fn wish_for(&mut self, name: &Prefix) -> Option<Wish> {
        if !self.scope.overlaps(name) {
            return None;
        }
        let narrower = if self.scope.covers(name) { *name } else { self.scope };
        let host = self.hosts.get(self.asked % self.hosts.len().max(1)).cloned().unwrap_or_default();
        self.asked += 1;
        Some(Wish { name: narrower, host, peer: None })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn prefix(text: &str) -> Prefix {
        text.parse::<margay_core::name::Name>().expect("literal").prefix()
    }

    fn asking(scope: Prefix, hosts: &[&str]) -> Asking {
        Asking::new(Some(scope), scope, hosts.iter().map(|host| (*host).to_owned()).collect())
    }

    #[test]
    fn a_program_is_asked_for_what_is_drained_and_what_it_takes_over() {
        let shop = prefix("web.shop");
        let name_of = |scope: Prefix, name: Prefix| asking(scope, &[]).wish_for(&name).map(|wish| wish.name);
        assert_eq!(name_of(shop, shop), Some(shop));
        assert_eq!(name_of(Prefix::default(), shop), Some(shop), "all of the host");
        assert_eq!(name_of(prefix("sid:aabb/16"), prefix("sid:aa/8")), Some(prefix("sid:aabb/16")));
        assert_eq!(name_of(prefix("sid:aa/8"), prefix("sid:aabb/16")), Some(prefix("sid:aabb/16")));
        assert_eq!(name_of(shop, prefix("db.shop")), None);
    }

    #[test]
    fn each_program_gets_the_next_host_and_none_where_none_was_named() {
        let shop = prefix("web.shop");
        let mut asking = asking(shop, &["a", "b"]);
        let mut next = || asking.wish_for(&shop).map(|wish| wish.host);
        assert_eq!([next(), next(), next()].map(Option::unwrap_or_default), ["a", "b", "a"]);
        assert_eq!(asking.wish_for(&prefix("db.shop")), None);
        assert_eq!(asking.wish_for(&shop).map(|wish| wish.host).as_deref(), Some("b"), "no turn was lost");
        assert_eq!(
            Asking::new(None, Prefix::default(), Vec::new()).wish_for(&shop).map(|wish| wish.host),
            Some(String::new())
        );
    }

    #[test]
    fn the_message_is_as_the_book_has_it() {
        let all = Wish { name: prefix("sid:aabb/16"), host: "00ff".to_owned(), peer: None };
        let bytes = all.message().emit();
        assert_eq!(bytes[..10], [1, 12, 0, 0, 0, 16, 0, 0, 0xaa, 0xbb]);
        assert_eq!((&bytes[40..60], &bytes[60..]), (&[0; 20][..], &b"00ff"[..]));
        let one = Wish { peer: Some(SocketAddr::from(([10, 1, 0, 3], 0x1234))), ..all.clone() }.message().emit();
        assert_eq!(one[6..8], [0x12, 0x34]);
        assert_eq!(one[50..56], [0xff, 0xff, 10, 1, 0, 3], "mapped");
        let peer = "[fd01::3]:4660".parse().ok();
        let one = Wish { peer, ..all }.message().emit();
        assert_eq!((&one[40..44], one[55]), (&[0xfd, 1, 0, 0][..], 3));
    }
}
