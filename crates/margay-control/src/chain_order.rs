//! Orders by which an authority has its hosts change the boxes of their running sessions, all at once
//! (docs/decisions/0113). A router signs one; each host carries it out as it would its own operator's.

use std::collections::BTreeMap;
use std::ops::{Deref, RangeInclusive};

use margay_core::chain::{ChainRule, Client};
use margay_core::key::{HostId, to_hex};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::group_number;
use prost::Message;

use crate::api::v1::PolicyChain;
use crate::chains::{RulesError, rule};
use crate::keyring::Authority;
use crate::lineage::Lineage;
pub use crate::registration::proto::{ChainOrder as OrderWords, OrderReason, OrderReport};
use crate::statement::{Statement, StatementDoubt};

/// How long after it was signed an order may be begun with, in seconds.
pub const LIFE_S: RangeInclusive<u32> = 1..=600;
/// Orders that were signed by a clock that is ahead by more are not carried out: how long they live nobody could say.
pub const AHEAD_MAX_S: u64 = 600;
/// Reasons in one report, and characters of each.
pub const REASONS_MAX: usize = 16;
const WHY_LEN_MAX: usize = 200;
/// Encoded words of an order.
const WORDS_LEN_MAX: usize = 8192;
/// Hosts and groups that one order names.
const CLIENTS_MAX: usize = 64;
const CONTEXT: &[u8] = b"margay 2026 chain order";
const MS_PER_S: u64 = 1000;
/// Where there are more reasons than a report has room for.
const OTHER_REASONS: &str = "other reasons";

/// By what an order is told from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrderKey {
    /// The authority's block.
    pub authority: [u8; 8],
    /// Its number, which nobody can guess.
    pub number: [u8; 16],
}

impl OrderKey {
    /// As the store has it.
    pub fn bytes(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.authority);
        bytes[8..].copy_from_slice(&self.number);
        bytes
    }

    /// The number in hexadecimal digits.
    pub fn digits(&self) -> String {
        to_hex(&self.number)
    }
}

/// An order that an authority has signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedOrder {
    statement: Statement,
    /// Its number, and whose it is.
    pub key: OrderKey,
    /// Nobody begins with it later, in seconds since 1970.
    pub until_s: u64,
}

impl Deref for SignedOrder {
    type Target = Statement;

    fn deref(&self) -> &Statement {
        &self.statement
    }
}

/// An order as a host carries it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainOrder {
    /// Its number, and whose it is.
    pub key: OrderKey,
    /// The router that has issued it.
    pub router: HostId,
    /// As it was signed.
    pub words: OrderWords,
    /// The sessions that it is about, and the hosts.
    pub rule: ChainRule,
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderDoubt {
    /// Not of this format.
    #[error("the order is malformed")]
    Malformed,
    /// Not signed, or by a key that may not.
    #[error("the order is not signed by the authority, nor by a router that may sign for all of its services")]
    Unsigned,
    /// By a key that was taken back.
    #[error("the order is signed by a key that may sign for the authority no longer")]
    Revoked,
    /// From the future.
    #[error("the order was signed more than ten minutes from now by this host's clock; check both clocks")]
    Ahead,
    /// Too late.
    #[error("the order came when its life was over by this host's clock; say it again, or check both clocks")]
    Late,
    /// It says what this version does not know.
    #[error("the order has words that this host's version does not know; update it")]
    Newer,
    /// It makes no sense to this version.
    #[error(transparent)]
    Rules(#[from] RulesError),
}

/// The sessions and the hosts of an order.
///
/// # Errors
///
/// What is wrong.
pub fn rule_of(words: &OrderWords, authority: [u8; 8]) -> Result<ChainRule, RulesError> {
    let place = || "the order".to_owned();
    let wrong = |what: String| RulesError::Wrong { place: place(), what };
    if words.clients.len() > CLIENTS_MAX {
        return Err(wrong(format!("it names more than {CLIENTS_MAX} clients: {}", words.clients.len())));
    }
    if words.first_port > words.last_port {
        return Err(wrong("it is for no port: the first port is greater than the last one".to_owned()));
    }
    if !LIFE_S.contains(&words.life_s) {
        return Err(wrong(format!("its life is from {} to {} seconds", LIFE_S.start(), LIFE_S.end())));
    }
    let others = [&words.r#box, &words.other];
    let chain = PolicyChain {
        name: "order".to_owned(),
        services: words.services.clone(),
        protocol: words.protocol.clone(),
        first_port: words.first_port,
        last_port: words.last_port,
        clients: words.clients.clone(),
        boxes: others.into_iter().filter(|name| !name.is_empty()).cloned().collect(),
        ..PolicyChain::default()
    };
    rule(&chain, place(), authority)
}

impl SignedOrder {
    /// Signs an order that is issued now.
    ///
    /// # Errors
    ///
    /// It is none.
    pub fn sign(by: &Authority, words: &OrderWords, unix_s: u64) -> Result<Self, RulesError> {
        rule_of(words, by.block())?;
        let statement = Statement::sign(CONTEXT, by, words.encode_to_vec(), unix_s * MS_PER_S);
        let malformed = || RulesError::Wrong { place: "the order".to_owned(), what: "it has no number".to_owned() };
        Self::of(statement).ok_or_else(malformed)
    }

    /// From [`Statement::encode`]; `None`: it is nothing of that kind.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Self::of(Statement::decode(bytes)?)
    }

    fn of(statement: Statement) -> Option<Self> {
        if statement.body.len() > WORDS_LEN_MAX {
            return None;
        }
        let words = OrderWords::decode(&statement.body[..]).ok()?;
        let key = OrderKey { authority: statement.authority, number: words.number.try_into().ok()? };
        let until_s = statement.signed_s().saturating_add(u64::from(words.life_s.min(*LIFE_S.end())));
        Some(Self { statement, key, until_s })
    }

    /// The order, if the authority whose keys are `line` has signed it, and it may be begun with now.
    ///
    /// # Errors
    ///
    /// Why nobody carries it out.
    pub fn order(&self, line: &Lineage, revoked: &[KeyRevocation], unix_s: u64) -> Result<ChainOrder, OrderDoubt> {
        self.check(CONTEXT, line, revoked, unix_s).map_err(|doubt| match doubt {
            StatementDoubt::Revoked => OrderDoubt::Revoked,
            StatementDoubt::Unsigned | StatementDoubt::Ended => OrderDoubt::Unsigned,
        })?;
        if self.signed_s() > unix_s.saturating_add(AHEAD_MAX_S) {
            return Err(OrderDoubt::Ahead);
        }
        if unix_s > self.until_s {
            return Err(OrderDoubt::Late);
        }
        let words = OrderWords::decode(&self.body[..]).map_err(|_| OrderDoubt::Malformed)?;
        if words.encode_to_vec() != self.body {
            return Err(OrderDoubt::Newer);
        }
        let router = words.router[..].try_into().map(HostId).map_err(|_| OrderDoubt::Malformed)?;
        let rule = rule_of(&words, self.authority)?;
        Ok(ChainOrder { key: self.key, router, words, rule })
    }
}

/// Whether an order is for a host that is in these groups of the authority.
pub fn is_for(rule: &ChainRule, host: HostId, groups: &[u32]) -> bool {
    let is_meant = |client: &Client| match client {
        Client::Host(one) => *one == host,
        Client::Group { group, .. } => groups.contains(group),
    };
    rule.clients.is_empty() || rule.clients.iter().any(is_meant)
}

/// Groups as certificates have them.
pub fn numbers_of(groups: &[String]) -> Vec<u32> {
    groups.iter().map(|name| group_number(name)).collect()
}

/// Counts sessions that have stayed as they were, by reason.
#[derive(Clone, Debug, Default)]
pub struct Reasons(BTreeMap<String, u32>);

impl Reasons {
    /// One more session, for this reason.
    pub fn add(&mut self, why: &str) {
        let why = clean(why);
        // The last place is for all that have none.
        let has_place = self.0.contains_key(&why) || self.0.len() + 1 < REASONS_MAX;
        *self.0.entry(if has_place { why } else { OTHER_REASONS.to_owned() }).or_default() += 1;
    }

    /// As a report has them.
    pub fn listed(&self) -> Vec<OrderReason> {
        self.0.iter().map(|(why, sessions)| OrderReason { why: why.clone(), sessions: *sessions }).collect()
    }
}

/// Words that come from elsewhere, for a terminal and of bounded length.
fn clean(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(WHY_LEN_MAX).collect()
}

/// A report as another host has sent it, within bounds.
pub fn bounded(mut report: OrderReport) -> OrderReport {
    report.refused = clean(&report.refused);
    report.as_before.truncate(REASONS_MAX);
    report.as_before.iter_mut().for_each(|reason| reason.why = clean(&reason.why));
    report
}

/// A report of a host that does not carry an order out.
pub fn refusal(key: &OrderKey, why: &str) -> OrderReport {
    OrderReport { number: key.number.to_vec(), over: true, refused: clean(why), ..OrderReport::default() }
}

#[cfg(test)]
mod test {
    use margay_core::key::SigningKey;
    use margay_core::name::authority_block;
    use margay_core::rng::Rng;

    use super::*;
    use crate::StateDir;
    use crate::chains::{ChainRules, SignedChains};
    use crate::registration::proto;
    use crate::store::Store;
    use crate::warrant::{Request, Warrant};

    const NOW_S: u64 = 1_700_000_000;

    /// Makes an order wrong.
    type Spoil = fn(&mut OrderWords);

    fn key(n: u8) -> SigningKey {
        SigningKey::generate(&mut Rng::new([n; 32]))
    }

    fn authority(n: u8) -> Authority {
        Authority { name: "shop".to_owned(), key: key(n), warrant: None, revoked: None, next: None }
    }

    fn line(n: u8) -> (tempfile::TempDir, Lineage) {
        let base = tempfile::tempdir().expect("a directory");
        let store = Store::open(&StateDir::open(base.path().join("s")).expect("made")).expect("opened");
        let line = Lineage::of(&store, authority_block("shop"), key(n).public()).expect("readable");
        (base, line)
    }

    fn words() -> OrderWords {
        OrderWords {
            number: vec![7; 16],
            router: vec![9; 16],
            act: "insert".to_owned(),
            r#box: "scrub.shop".to_owned(),
            services: "web.shop".to_owned(),
            protocol: "tcp".to_owned(),
            first_port: 80,
            last_port: 90,
            clients: vec!["group:staff".to_owned()],
            life_s: 30,
            ..OrderWords::default()
        }
    }

    fn sign(by: &Authority) -> SignedOrder {
        SignedOrder::sign(by, &words(), NOW_S).expect("signed")
    }

    #[test]
    fn what_is_signed_is_the_context_the_authority_the_time_and_the_words() {
        let signed = sign(&authority(1));
        let wanted = [
            &b"margay 2026 chain order"[..],
            &authority_block("shop"),
            &[0, 0, 0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x00],
            b"\x0a\x10\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07",
            b"\x12\x10\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09",
            b"\x1a\x06insert\x22\x0ascrub.shop\x32\x08web.shop\x3a\x03tcp\x40\x50\x48\x5a\x52\x0bgroup:staff\x58\x1e",
        ]
        .concat();
        let read = proto::Statement::decode(&signed.encode()[..]).expect("a statement");
        assert_eq!((&read.authority[..], read.signed_unix_ms), (&authority_block("shop")[..], NOW_S * 1000));
        let signature = read.signature.try_into().expect("64 bytes");
        assert!(key(1).public().verify(&wanted, &signature));
    }

    #[test]
    fn an_order_counts_while_it_lives_and_from_the_authority_alone() {
        let (_base, line) = line(1);
        let signed = sign(&authority(1));
        let read = SignedOrder::decode(&signed.encode()).expect("readable");
        assert_eq!((&read, read.until_s), (&signed, NOW_S + 30));
        let order = read.order(&line, &[], NOW_S + 30).expect("it lives");
        assert_eq!((order.router, order.rule.ports), (HostId([9; 16]), Some(80..=90)));
        assert_eq!(read.order(&line, &[], NOW_S + 31), Err(OrderDoubt::Late));
        assert_eq!(read.order(&line, &[], NOW_S - AHEAD_MAX_S - 1), Err(OrderDoubt::Ahead));
        assert_eq!(sign(&authority(2)).order(&line, &[], NOW_S), Err(OrderDoubt::Unsigned), "another's key");
        let mut forged = read.clone();
        forged.statement.signed_ms += 1000;
        assert_eq!(forged.order(&line, &[], NOW_S), Err(OrderDoubt::Unsigned), "a longer life");
        let mut forged = read;
        let at = forged.statement.body.len() - 1;
        forged.statement.body[at] ^= 1;
        assert_eq!(forged.order(&line, &[], NOW_S), Err(OrderDoubt::Unsigned), "other words");
        assert_eq!(SignedOrder::decode(b"abc"), None);
        // A policy of the same key is no order, whatever its bytes.
        let policy = SignedChains::sign(&authority(1), &ChainRules::default(), None, NOW_S * 1000).expect("signed");
        assert_eq!(SignedOrder::decode(&policy.encode()), None);
        let of_policy = Statement::sign(b"margay 2026 chains", &authority(1), words().encode_to_vec(), NOW_S * 1000);
        let of_policy = SignedOrder::of(of_policy).expect("it looks like one");
        assert_eq!(of_policy.order(&line, &[], NOW_S), Err(OrderDoubt::Unsigned));
    }

    #[test]
    fn a_router_orders_by_its_warrant_until_that_is_taken_back() {
        let (_base, line) = line(1);
        let Warrant::Authority(warrant) =
            Request::new("shop", &key(7)).grant(&authority(1), NOW_S, 3600).expect("granted")
        else {
            panic!("it is an authority's");
        };
        let router = Authority { key: key(7), warrant: Some(warrant), ..authority(1) };
        let signed = SignedOrder::decode(&sign(&router).encode()).expect("readable");
        assert!(signed.order(&line, &[], NOW_S).is_ok());
        let revoked = KeyRevocation::new(authority_block("shop"), key(7).public(), u64::MAX, &key(1));
        assert_eq!(signed.order(&line, &[revoked], NOW_S), Err(OrderDoubt::Revoked));
        let late = SignedOrder::sign(&router, &words(), NOW_S + 7200).expect("signed");
        assert_eq!(late.order(&line, &[], NOW_S + 7200), Err(OrderDoubt::Unsigned), "the warrant has ended");
    }

    #[test]
    fn words_of_a_later_version_are_not_carried_out() {
        let (_base, line) = line(1);
        let body = [&words().encode_to_vec()[..], &[0x78, 1]].concat();
        let signed = SignedOrder::of(Statement::sign(CONTEXT, &authority(1), body, NOW_S * 1000)).expect("an order");
        assert_eq!(signed.order(&line, &[], NOW_S), Err(OrderDoubt::Newer));
        let long = OrderWords { r#box: "x".repeat(WORDS_LEN_MAX), ..words() };
        let long = Statement::sign(CONTEXT, &authority(1), long.encode_to_vec(), NOW_S * 1000);
        assert_eq!(SignedOrder::of(long), None);
    }

    #[test]
    fn what_is_wrong_with_an_order_is_said() {
        let says = |act: Spoil| {
            let mut wrong = words();
            act(&mut wrong);
            SignedOrder::sign(&authority(1), &wrong, NOW_S).expect_err("wrong").to_string()
        };
        let cases: [(Spoil, &str); 10] = [
            (|one| one.services = "web.other".to_owned(), "the order: `web.other` is no name of the authority"),
            (|one| one.services = "web shop".to_owned(), "the order: "),
            (|one| one.protocol = "icmp".to_owned(), "`icmp` is no protocol"),
            (|one| one.first_port = 91, "for no port"),
            (|one| (one.first_port, one.last_port) = (0, 9), "0 is no port"),
            (|one| one.clients = vec!["staff".to_owned()], "`staff` is not host:<id> or group:<name>"),
            (|one| one.clients = vec!["group:a".to_owned(); 65], "more than 64 clients: 65"),
            (|one| one.r#box = "scrub".to_owned(), "the order: "),
            (|one| one.life_s = 601, "from 1 to 600 seconds"),
            (|one| one.number = vec![7; 15], "no number"),
        ];
        for (act, wanted) in cases {
            assert!(says(act).contains(wanted), "{wanted}: {}", says(act));
        }
    }

    #[test]
    fn hosts_are_meant_by_id_and_by_group() {
        let rule = |clients: &[&str]| {
            let clients = clients.iter().map(ToString::to_string).collect();
            rule_of(&OrderWords { clients, ..words() }, authority_block("shop")).expect("right")
        };
        let [one, two] = [HostId([1; 16]), HostId([2; 16])];
        let [staff, others] = ["staff", "others"].map(|name| numbers_of(&[name.to_owned()]));
        assert!(is_for(&rule(&[]), one, &[]) && is_for(&rule(&[]), two, &staff));
        let of_one = rule(&[&format!("host:{one}")]);
        assert!(is_for(&of_one, one, &[]) && !is_for(&of_one, two, &staff));
        let of_staff = rule(&["group:staff"]);
        assert!(is_for(&of_staff, two, &staff) && !is_for(&of_staff, two, &others) && !is_for(&of_staff, two, &[]));
    }

    #[test]
    fn reasons_are_counted_within_bounds_and_safe_to_print() {
        let mut reasons = Reasons::default();
        (0..3).for_each(|_| reasons.add("nobody serves the box"));
        reasons.add("\u{1b}[2J all is well\n");
        let listed = reasons.listed();
        assert_eq!((listed.len(), listed[1].sessions), (2, 3));
        assert_eq!(listed[0].why, "[2J all is well");
        (0..100).for_each(|number| reasons.add(&format!("{number} {}", "long ".repeat(100))));
        let listed = reasons.listed();
        assert!(listed.len() <= REASONS_MAX && listed.iter().all(|one| one.why.len() <= WHY_LEN_MAX));
        assert_eq!(listed.iter().map(|one| one.sessions).sum::<u32>(), 104, "none is left out");
        let hostile = OrderReport {
            refused: "\u{7}no".repeat(1000),
            as_before: vec![OrderReason { why: "x\n".repeat(300), sessions: 1 }; 40],
            ..OrderReport::default()
        };
        let read = bounded(hostile);
        assert_eq!((read.refused.len(), read.as_before.len(), read.as_before[0].why.len()), (200, 16, 200));
        assert!(!read.refused.contains('\u{7}'));
    }
}
