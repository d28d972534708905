//! The module of a switch, and whether it keeps its place.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use margay_core::Instant;
use serde_json::{Value, json};

use super::clients::Clients;
use crate::module::{Guest, Module};
use crate::protocol::Content;
use crate::router::Router;

/// So many connections may be lost by a module's fault within [`FAULTS_WITHIN`]; with the next it loses its place, if
/// more than half of the hosts that have connections, in more than half of their networks, have met a fault: the
/// requests of one client take the module from nobody else.
const FAULTS_MAX: usize = 10;
const FAULTS_WITHIN: Duration = Duration::from_secs(60);

/// A module, and where it is from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The module that new connections get.
    pub module: Arc<Module>,
    /// Its file, for lists.
    pub file: String,
}

/// A module in its place.
#[derive(Debug)]
pub(super) struct Placed {
    loaded: Loaded,
    /// Which of the modules that the switch has had.
    pub(super) number: u64,
    since: Instant,
    /// When, and whose connection.
    faults: VecDeque<(Instant, IpAddr)>,
    fault_count: u64,
    /// Connections that have come to it from another module, or from none.
    moved: u64,
    /// Requests that it was asked about.
    pub(super) calls: u64,
    last_fault: Option<String>,
    is_out: bool,
}

impl Placed {
    pub(super) fn new(now: Instant, loaded: Loaded, number: u64) -> Self {
        let faults = VecDeque::new();
        Self { loaded, number, since: now, faults, fault_count: 0, moved: 0, calls: 0, last_fault: None, is_out: false }
    }

    /// For a new connection of a client, beside others. An error says why there can be none.
    pub(super) fn router(
        &mut self,
        now: Instant,
        content: Content,
        client: IpAddr,
        others: &Clients,
    ) -> Result<Router, String> {
        if self.is_out {
            let why = self.last_fault.as_deref().unwrap_or_default();
            return Err(format!("its module has lost its place: {why}"));
        }
        // Its first calls have succeeded before: the same calls have the same answers.
        Guest::start(&self.loaded.module).map(|guest| Router::guided(content, guest)).map_err(|error| {
            self.note_fault(now, client, others, &error.to_string());
            format!("its module fails: {error}")
        })
    }

    /// Offers it a connection that has another module, or none. Whether it takes the connection, which goes on as it is
    /// otherwise; an error is a fault, in words.
    pub(super) fn adopt(&mut self, router: &mut Router) -> Result<bool, String> {
        if self.is_out {
            return Ok(false);
        }
        let is_moved = router.move_to(&self.loaded.module)?;
        self.moved += u64::from(is_moved);
        Ok(is_moved)
    }

    /// A connection of a client is lost by the module's fault, or does not come to it. Gives whether the module has
    /// lost its place with it. `others`: who else is there.
    pub(super) fn note_fault(&mut self, now: Instant, client: IpAddr, others: &Clients, why: &str) -> bool {
        self.fault_count += 1;
        self.last_fault = Some(why.to_owned());
        if self.is_out {
            return false;
        }
        while self.faults.front().is_some_and(|(at, _)| now.since(*at) > FAULTS_WITHIN) {
            self.faults.pop_front();
        }
        // Of one client, no more are of any use.
        let of_client = self.faults.iter().filter(|(_, of)| *of == client).count();
        if of_client > FAULTS_MAX
            && let Some(oldest) = self.faults.iter().position(|(_, of)| *of == client)
        {
            self.faults.remove(oldest);
        }
        self.faults.push_back((now, client));
        let met: BTreeSet<IpAddr> = self.faults.iter().map(|(_, of)| *of).collect();
        self.is_out = self.faults.len() > FAULTS_MAX && others.are_most(&met, client);
        self.is_out
    }

    /// For operators. `connection_count`: of the connections that there are.
    pub(super) fn show(&self, now: Instant, connection_count: usize) -> Value {
        json!({
            "file": self.loaded.file,
            "hash": self.loaded.module.hash(),
            "age_ms": u64::try_from(now.since(self.since).as_millis()).unwrap_or(u64::MAX),
            "connection_count": connection_count,
            "adopted": self.moved,
            "calls": self.calls,
            "faults": self.fault_count,
            "last_fault": self.last_fault,
            "state": if self.is_out { "out of its place" } else { "in its place" },
        })
    }
}

#[cfg(test)]
mod test {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::module::sample;
    use crate::protocol::Protocol;

    #[test]
    fn a_module_loses_its_place_by_faults_that_follow_each_other() {
        let at = Instant::from_millis;
        let loaded = Loaded { module: Arc::new(sample("to-first")), file: "first.wasm".to_owned() };
        let mut placed = Placed::new(at(0), loaded, 1);
        let client = Ipv4Addr::LOCALHOST.into();
        let nobody = Clients::new();
        let is_out = |placed: &mut Placed, millis| placed.note_fault(at(millis), client, &nobody, "redirect traps");
        assert!((0..10).all(|n| !is_out(&mut placed, n * 1000)));
        assert!(!is_out(&mut placed, 61_000), "two are of more than a minute ago");
        assert!(placed.router(at(61_000), Protocol::Memcached.into(), client, &nobody).is_ok());
        assert!((0..1).all(|_| !is_out(&mut placed, 61_500)));
        assert!(is_out(&mut placed, 61_700));
        assert!(!is_out(&mut placed, 61_700), "that is told once");
        let refused = placed.router(at(61_700), Protocol::Memcached.into(), client, &nobody);
        assert!(refused.is_err_and(|why| why.contains("redirect traps")));
        let shown = placed.show(at(62_000), 3);
        assert_eq!((shown["state"].as_str(), shown["faults"].as_u64()), (Some("out of its place"), Some(14)));
    }

    #[test]
    fn one_client_of_several_takes_the_module_from_nobody() {
        let at = Instant::from_millis;
        let loaded = Loaded { module: Arc::new(sample("to-first")), file: "first.wasm".to_owned() };
        let mut placed = Placed::new(at(0), loaded, 1);
        let [one, other] = [1, 2].map(|network| IpAddr::V4(Ipv4Addr::new(192, 0, network, 1)));
        let mut clients = Clients::new();
        [one, other].iter().for_each(|client| clients.add(at(0), *client).expect("room"));
        assert!((0..1000).all(|n| !placed.note_fault(at(n), one, &clients, "redirect traps")));
        assert!(placed.faults.len() <= FAULTS_MAX + 1);
        assert!(placed.note_fault(at(1000), other, &clients, "redirect traps"), "now nobody is served");
    }

    #[test]
    fn many_hosts_of_one_network_one_after_the_other_take_the_module_from_nobody() {
        let at = Instant::from_millis;
        let loaded = Loaded { module: Arc::new(sample("to-first")), file: "first.wasm".to_owned() };
        let mut placed = Placed::new(at(0), loaded, 1);
        let mut clients = Clients::new();
        (1..=10).for_each(|network| clients.add(at(0), Ipv4Addr::new(192, 0, network, 1).into()).expect("room"));
        for link in 0..256_u16 {
            let client = IpAddr::V6([0x2001, 0xdb8, 1, link, 0, 0, 0, 0].into());
            clients.add(at(0), client).expect("room");
            assert!(!placed.note_fault(at(link.into()), client, &clients, "redirect traps"));
            clients.remove(at(0), client);
        }
    }
}
