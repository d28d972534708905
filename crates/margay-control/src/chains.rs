//! Which sessions go through which boxes, as an authority says: rules that routers sign, and that hosts go by
//! (docs/decisions/0074).

use std::ops::{Deref, RangeInclusive};

use margay_core::chain::{BoxWanted, ChainPolicy, ChainRule, Client, Filter, PolicyError, Program, Requirement};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{AUTHORITY_BITS, Name, NameError, Prefix, group_number};
use prost::Message;

use crate::api::v1::{PolicyChain, PolicyRequirement};
use crate::keyring::Authority;
use crate::lineage::Lineage;
pub use crate::registration::proto::ChainRules;
use crate::statement::{Statement, StatementDoubt};

/// Encoded rules of one authority: with all around them they fit into one message to a host.
const RULES_LEN_MAX: usize = 57_344;
const CONTEXT: &[u8] = b"margay 2026 chains";
/// Rules count for so long after they were signed, and no longer than their signer may sign. The router that has signed
/// them signs them again in time.
pub const LIFETIME_S: u64 = 30 * 24 * 60 * 60;
/// It does so when less is left.
const RENEW_BEFORE_S: u64 = 20 * 24 * 60 * 60;
/// A signature that would count for less longer than the one before is not worth the telling.
const RENEW_GAIN_S: u64 = 60 * 60;
/// Characters of a filter's expression.
pub const FILTER_LEN_MAX: usize = 1024;
/// Rules that were signed by a clock that is ahead by less are taken: others could not be replaced for long.
const AHEAD_MAX_S: u64 = 24 * 60 * 60;
const MS_PER_S: u64 = 1000;

/// Rules that an authority has signed; of two, the later count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedChains(Statement);

impl Deref for SignedChains {
    type Target = Statement;

    fn deref(&self) -> &Statement {
        &self.0
    }
}

/// Why rules are none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// A name.
    #[error("{place}: {error}")]
    Name {
        /// The rule: its section and its name or number, as the error shows it.
        place: String,
        /// What is wrong.
        error: NameError,
    },
    /// Something else of one rule.
    #[error("{place}: {what}")]
    Wrong {
        /// The rule: its section and its name or number, as the error shows it.
        place: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// They cannot be gone by.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Together they are too long.
    #[error("the chains of one authority are {0} bytes long; at most {RULES_LEN_MAX} fit into a message to a host")]
    Long(usize),
}

/// Why signed rules are not gone by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// Not of this format.
    #[error("they are malformed")]
    Malformed,
    /// Not signed, or by a key that may not.
    #[error("they are not signed by the authority, nor by a router that may sign for all of its services")]
    Unsigned,
    /// By a key that was taken back.
    #[error(
        "they are signed by a key that the authority has taken back; apply the policy again on a router that may sign: \
         `margay policy apply`"
    )]
    Revoked,
    /// Too late.
    #[error(
        "their signature has run out, or their signer's right to sign has; apply the policy again on a router that may \
         sign: `margay policy apply`"
    )]
    Ended,
    /// From the future.
    #[error("they were signed more than a day from now; check both clocks")]
    Ahead,
    /// They say what this version does not know.
    #[error("they have words that this version does not know; update it")]
    Newer,
    /// They make no sense to this version.
    #[error(transparent)]
    Rules(#[from] RulesError),
}

impl SignedChains {
    /// Signs rules, later than `before` was signed.
    ///
    /// # Errors
    ///
    /// The rules are none.
    pub fn sign(by: &Authority, rules: &ChainRules, before: Option<&Self>, unix_ms: u64) -> Result<Self, RulesError> {
        compile(rules, by.block())?;
        let signed_ms = unix_ms.max(before.map_or(0, |before| before.signed_ms.saturating_add(1)));
        Ok(Self(Statement::sign(CONTEXT, by, rules.encode_to_vec(), signed_ms)))
    }

    /// From [`Statement::encode`].
    ///
    /// # Errors
    ///
    /// It is nothing of that kind.
    pub fn decode(bytes: &[u8]) -> Result<Self, Doubt> {
        Statement::decode(bytes).map(Self).ok_or(Doubt::Malformed)
    }

    /// The rules.
    ///
    /// # Errors
    ///
    /// They are none, or say more than this version knows: what it left out could be what a rule is not for.
    pub fn rules(&self) -> Result<ChainRules, Doubt> {
        let rules = ChainRules::decode(&self.body[..]).map_err(|_| Doubt::Malformed)?;
        if rules.encode_to_vec() == self.body { Ok(rules) } else { Err(Doubt::Newer) }
    }

    /// Until when they count, in seconds since 1970, if they do: the authority whose keys are `line` has signed them,
    /// by a key that might then and may now.
    ///
    /// # Errors
    ///
    /// Why nobody goes by them.
    pub fn until_s(&self, line: &Lineage, revoked: &[KeyRevocation], unix_s: u64) -> Result<u64, Doubt> {
        let until_s = self.check(CONTEXT, line, revoked, unix_s).map_err(|doubt| match doubt {
            StatementDoubt::Unsigned => Doubt::Unsigned,
            StatementDoubt::Revoked => Doubt::Revoked,
            StatementDoubt::Ended => Doubt::Ended,
        })?;
        if self.signed_s() > unix_s.saturating_add(AHEAD_MAX_S) {
            return Err(Doubt::Ahead);
        }
        let until_s = until_s.min(self.signed_s().saturating_add(LIFETIME_S));
        if until_s < unix_s { Err(Doubt::Ended) } else { Ok(until_s) }
    }

    /// The policy, if it counts.
    ///
    /// # Errors
    ///
    /// Why nobody goes by it.
    pub fn policy(&self, line: &Lineage, revoked: &[KeyRevocation], unix_s: u64) -> Result<ChainPolicy, Doubt> {
        self.until_s(line, revoked, unix_s)?;
        Ok(compile(&self.rules()?, self.authority)?)
    }

    /// Whether they take the place of `known`, what this host goes by until now. What counts gives way to what was
    /// signed later; what the authority's own key has signed, only to what its own key has signed: a stolen router's
    /// would undo what the operator demands. What counts no longer gives way to what counts, also if that was signed
    /// earlier: whoever has signed it may have dated it ahead, by a day at most. More would let old rules come back.
    /// Where nothing is known, rules that have ended are taken as well: they close names.
    pub fn replaces(&self, known: Option<&Self>, line: &Lineage, revoked: &[KeyRevocation], unix_s: u64) -> bool {
        let counts = match self.policy(line, revoked, unix_s) {
            // What only this version does not understand is for the next one.
            Ok(_) | Err(Doubt::Newer | Doubt::Rules(_)) => true,
            Err(Doubt::Ended | Doubt::Revoked) => false,
            Err(Doubt::Malformed | Doubt::Unsigned | Doubt::Ahead) => return false,
        };
        let Some(known) = known else { return true };
        match known.until_s(line, revoked, unix_s) {
            Ok(_) => counts && self.signed_ms > known.signed_ms && (known.is_by_warrant() || !self.is_by_warrant()),
            Err(Doubt::Ended | Doubt::Revoked) => {
                counts && self.signed_s().saturating_add(AHEAD_MAX_S) >= known.signed_s().min(unix_s)
            }
            Err(_) => true,
        }
    }

    /// The names that the rules are about, as far as this version can tell, where they were signed and do not count:
    /// nobody is to get past their middleboxes meanwhile.
    pub fn lapsed_names(&self) -> Vec<Prefix> {
        let rules = ChainRules::decode(&self.body[..]).unwrap_or_default();
        let of_chains = rules.chains.iter().filter(|chain| !chain.boxes.is_empty()).map(|chain| &chain.services);
        let named = of_chains.chain(rules.required.iter().map(|required| &required.services));
        let is_its = |prefix: &Prefix| prefix.bits >= AUTHORITY_BITS && prefix.id.authority() == self.authority;
        let mut all: Vec<Prefix> = named.filter_map(|text| services_of(text).ok()).filter(is_its).collect();
        all.sort_unstable_by_key(|prefix| (prefix.id, prefix.bits));
        all.dedup();
        all
    }

    /// The same rules, signed again before they end. Only what its own key has signed a router signs again: else the
    /// word of a stolen router would outlive the key that it was signed with. `None`: there is time, or no right.
    pub fn renewed(&self, by: &Authority, line: &Lineage, revoked: &[KeyRevocation], unix_s: u64) -> Option<Self> {
        let until_s = self.until_s(line, revoked, unix_s).ok()?;
        let is_own = self.signer == by.key.public() || by.warrant.is_none() && line.until_s(&self.signer).is_some();
        if !is_own || !by.is_valid(unix_s) || until_s - unix_s >= RENEW_BEFORE_S {
            return None;
        }
        let again = Self::sign(by, &self.rules().ok()?, Some(self), unix_s * MS_PER_S).ok()?;
        let longer_s = again.until_s(line, revoked, unix_s).ok()?.saturating_sub(until_s);
        (longer_s >= RENEW_GAIN_S).then_some(again)
    }
}

/// Which names are meant: a name, with its keys and partitions, or by `*.authority` all of an authority.
fn services_of(text: &str) -> Result<Prefix, NameError> {
    if let Some(authority) = text.strip_prefix("*.") {
        let any: Name = format!("any.{authority}").parse()?;
        return Ok(Prefix::new(any.service_id(), AUTHORITY_BITS));
    }
    let name: Name = text.parse()?;
    Ok(if name.is_service() { name.service_prefix() } else { name.prefix() })
}

/// The rules as the core goes by them.
///
/// # Errors
///
/// What is wrong, and in which rule.
pub fn compile(rules: &ChainRules, authority: [u8; 8]) -> Result<ChainPolicy, RulesError> {
    let len = rules.encoded_len();
    if len > RULES_LEN_MAX {
        return Err(RulesError::Long(len));
    }
    for (at, chain) in rules.chains.iter().enumerate() {
        if rules.chains[..at].iter().any(|earlier| earlier.name == chain.name) {
            let place = place_of(chain);
            return Err(RulesError::Wrong { place, what: "there is another one of this name".to_owned() });
        }
    }
    let policy = ChainPolicy {
        rules: rules.chains.iter().map(|chain| rule(chain, place_of(chain), authority)).collect::<Result<_, _>>()?,
        required: rules.required.iter().map(|one| requirement(one, authority)).collect::<Result<_, _>>()?,
        lapsed: Vec::new(),
    };
    policy.check()?;
    for (written, required) in rules.required.iter().zip(&policy.required) {
        can_be_met(written, required, &policy)?;
    }
    Ok(policy)
}

fn place_of(chain: &PolicyChain) -> String {
    format!("chain `{}`", chain.name)
}

fn services(text: &str, place: &str, authority: [u8; 8]) -> Result<Prefix, RulesError> {
    let prefix = services_of(text).map_err(|error| RulesError::Name { place: place.to_owned(), error })?;
    if prefix.bits < AUTHORITY_BITS || prefix.id.authority() != authority {
        let what = format!("`{text}` is no name of the authority that signs; each authority has its own chains");
        return Err(RulesError::Wrong { place: place.to_owned(), what });
    }
    Ok(prefix)
}

/// Boxes may be those of other authorities.
fn boxes(names: &[String], place: &str, may_be_left_out: bool) -> Result<Vec<BoxWanted>, RulesError> {
    let wanted = |text: &String| {
        let name: Name = text.parse().map_err(|error| RulesError::Name { place: place.to_owned(), error })?;
        let service = name.service_id();
        Ok(BoxWanted { name: name.written().to_owned(), service, may_be_left_out, is_proxy: false })
    };
    names.iter().map(wanted).collect()
}

/// The boxes of a chain, of which some are proxies.
fn boxes_of(chain: &PolicyChain, place: &str) -> Result<Vec<BoxWanted>, RulesError> {
    let mut all = boxes(&chain.boxes, place, chain.bypass)?;
    for proxy in boxes(&chain.proxies, place, false)? {
        let Some(known) = all.iter_mut().find(|one| one.service == proxy.service) else {
            let what = format!("the proxy {} is none of the boxes that sessions go through", proxy.name);
            return Err(RulesError::Wrong { place: place.to_owned(), what });
        };
        known.is_proxy = true;
    }
    Ok(all)
}

/// A rule as the core goes by it; `place` is how errors call it.
pub(crate) fn rule(chain: &PolicyChain, place: String, authority: [u8; 8]) -> Result<ChainRule, RulesError> {
    let wrong = |what: String| RulesError::Wrong { place: place.clone(), what };
    if chain.name.is_empty() {
        return Err(wrong("it has no name; write one, by which errors call it".to_owned()));
    }
    let protocol = match chain.protocol.as_str() {
        "" => None,
        "tcp" => Some(6),
        "udp" => Some(17),
        other => return Err(wrong(format!("`{other}` is no protocol; it is tcp, udp, or both when left out"))),
    };
    let port = |number: u32| {
        let port = u16::try_from(number).ok().filter(|port| *port != 0);
        port.ok_or_else(|| wrong(format!("{number} is no port; it is 1 to 65535")))
    };
    let ports = match (chain.first_port, chain.last_port) {
        (0, 0) => None,
        (first, last) => Some(RangeInclusive::new(port(first)?, port(last)?)),
    };
    let client = |word: &String| client(word, authority).map_err(wrong);
    Ok(ChainRule {
        name: chain.name.clone(),
        services: services(&chain.services, &place, authority)?,
        protocol,
        ports,
        clients: chain.clients.iter().map(client).collect::<Result<_, _>>()?,
        filter: filter(chain).map_err(wrong)?,
        boxes: boxes_of(chain, &place)?,
        is_ordered: chain.ordered,
        may_add: boxes(&chain.may_add, &place, chain.bypass)?,
    })
}

/// What first packets look like. Whether the program is what libpcap makes of the expression is for whoever signs.
fn filter(chain: &PolicyChain) -> Result<Option<Filter>, String> {
    let text = &chain.filter;
    match (text.is_empty(), chain.filter_program.is_empty()) {
        (true, true) => return Ok(None),
        (true, false) => return Err("it has the program of a filter, and not its expression".to_owned()),
        (false, true) => return Err(format!("the filter `{text}` comes without the program that libpcap makes of it")),
        (false, false) => {}
    }
    if text.len() > FILTER_LEN_MAX {
        return Err(format!("its filter has {} characters; at most {FILTER_LEN_MAX} are allowed", text.len()));
    }
    let program = Program::parse(&chain.filter_program).map_err(|why| format!("the filter `{text}`: {why}"))?;
    Ok(Some(Filter { text: text.clone(), program }))
}

fn client(word: &str, authority: [u8; 8]) -> Result<Client, String> {
    match word.split_once(':') {
        Some(("host", id)) => id
            .parse()
            .map(Client::Host)
            .map_err(|error| format!("`{word}`: {error}; `margay id` on that host shows it")),
        Some(("group", name)) if !name.is_empty() => Ok(Client::Group { authority, group: group_number(name) }),
        _ => Err(format!("`{word}` is not host:<id> or group:<name>")),
    }
}

fn requirement(one: &PolicyRequirement, authority: [u8; 8]) -> Result<Requirement, RulesError> {
    let place = format!("what `{}` requires", one.services);
    let wanted = boxes(&one.boxes, &place, false)?;
    Ok(Requirement {
        services: services(&one.services, &place, authority)?,
        boxes: wanted.into_iter().map(|one| one.service).collect(),
    })
}

/// What sessions of a rule have passed where they come to the services of a prefix: to the service of the rule behind
/// its last proxy, and that one is among them; or to a proxy of the rule.
fn ways_to<'a>(rule: &'a ChainRule, services: &Prefix) -> Vec<&'a [BoxWanted]> {
    let mut ways = Vec::new();
    let mut begin = 0;
    for (at, _) in rule.boxes.iter().enumerate().filter(|(_, one)| one.is_proxy) {
        ways.extend(services.contains(&rule.boxes[at].service).then(|| &rule.boxes[begin..at]));
        begin = at;
    }
    ways.extend(rule.services.overlaps(services).then(|| &rule.boxes[begin..]));
    ways
}

/// Whether some session that goes by the rules is taken. The server's host sees the certificate of the last box alone.
fn can_be_met(written: &PolicyRequirement, required: &Requirement, policy: &ChainPolicy) -> Result<(), RulesError> {
    let has_all = |way: &&[BoxWanted]| required.boxes.iter().all(|wanted| way.iter().any(|one| one.service == *wanted));
    let ends_in_it = |way: &[BoxWanted]| way.last().is_some_and(|last| required.boxes.contains(&last.service));
    let ways = policy.rules.iter().flat_map(|rule| ways_to(rule, &required.services));
    let mut met = ways.filter(has_all).peekable();
    let names = written.boxes.join(", ");
    let what = match met.peek().and_then(|way| way.last()) {
        None => format!(
            "no chain for it has all of {names}, so that it would take no session at all; write that chain, too \
             (behind a proxy, a session has passed none of the boxes before it: the proxy is to require those)"
        ),
        Some(last) => format!(
            "the last box of a chain must be one that the service requires, whose host shows its certificate there; \
             require {} as well",
            last.name
        ),
    };
    if met.any(ends_in_it) {
        return Ok(());
    }
    Err(RulesError::Wrong { place: format!("what `{}` requires", written.services), what })
}

/// The block of the authority whose names a rule is for.
///
/// # Errors
///
/// They are no names.
pub fn authority_of(services: &str) -> Result<[u8; 8], NameError> {
    services_of(services).map(|prefix| prefix.id.authority())
}

/// A chain as one line, for people.
pub fn written(chain: &PolicyChain) -> String {
    let mut words = vec![format!("{}: {}", chain.name, chain.services)];
    words.extend((!chain.protocol.is_empty()).then(|| chain.protocol.clone()));
    match (chain.first_port, chain.last_port) {
        (0, 0) => {}
        (first, last) if first == last => words.push(format!("port {first}")),
        (first, last) => words.push(format!("ports {first}-{last}")),
    }
    words.extend((!chain.clients.is_empty()).then(|| format!("from {}", chain.clients.join(", "))));
    words.extend((!chain.filter.is_empty()).then(|| format!("filter `{}`", chain.filter)));
    let order = if chain.ordered { ", in order while they are changed" } else { "" };
    if chain.boxes.is_empty() {
        return words.join(" ") + " through no boxes" + order;
    }
    let missing = if chain.bypass { ", or without those that nobody serves" } else { "" };
    let kind = |name: &String| if chain.proxies.contains(name) { format!("{name} (a proxy)") } else { name.clone() };
    let boxes: Vec<String> = chain.boxes.iter().map(kind).collect();
    let may_add = match &chain.may_add[..] {
        [] => String::new(),
        names => format!(", whose hosts may add {}", names.join(", ")),
    };
    format!("{} through {}{may_add}{missing}{order}", words.join(" "), boxes.join(", "))
}

#[cfg(test)]
mod tests {
    use margay_core::key::SigningKey;
    use margay_core::name::authority_block;
    use margay_core::rng::Rng;
    use margay_core::succession::Succession;

    use super::*;
    use crate::StateDir;
    use crate::store::Store;
    use crate::warrant::{Request, Warrant};

    const NOW_S: u64 = 1_700_000_000;
    const NOW_MS: u64 = NOW_S * 1000;

    fn key(n: u8) -> SigningKey {
        SigningKey::generate(&mut Rng::new([n; 32]))
    }

    fn authority(n: u8) -> Authority {
        Authority { name: "shop".to_owned(), key: key(n), warrant: None, revoked: None, next: None }
    }

    fn chain(name: &str, services: &str, boxes: &[&str]) -> PolicyChain {
        PolicyChain {
            name: name.to_owned(),
            services: services.to_owned(),
            boxes: boxes.iter().map(ToString::to_string).collect(),
            ..PolicyChain::default()
        }
    }

    fn require(services: &str, boxes: &[&str]) -> PolicyRequirement {
        let boxes = boxes.iter().map(ToString::to_string).collect();
        PolicyRequirement { services: services.to_owned(), boxes }
    }

    fn rules(chains: &[PolicyChain], required: &[PolicyRequirement]) -> ChainRules {
        ChainRules { chains: chains.to_vec(), required: required.to_vec() }
    }

    fn line(n: u8) -> (tempfile::TempDir, Lineage) {
        let base = tempfile::tempdir().expect("a directory");
        let store = Store::open(&StateDir::open(base.path().join("s")).expect("made")).expect("opened");
        let line = Lineage::of(&store, authority_block("shop"), key(n).public()).expect("readable");
        (base, line)
    }

    fn sign(by: &Authority) -> SignedChains {
        let rules = rules(&[chain("inspect", "web.shop", &["fw.shop"])], &[]);
        SignedChains::sign(by, &rules, None, NOW_MS).expect("signed")
    }

    #[test]
    fn rules_are_compiled_as_they_are_written() {
        let mut first = chain("staff", "web.shop", &["fw.shop", "ids.infra"]);
        first.clients = vec!["group:staff".to_owned(), "host:00112233445566778899aabbccddeeff".to_owned()];
        first.protocol = "tcp".to_owned();
        (first.first_port, first.last_port, first.bypass) = (80, 90, true);
        first.may_add = vec!["log.shop".to_owned()];
        let required = [require("*.shop", &["fw.shop", "ids.infra"])];
        // ret #1
        (first.filter, first.filter_program) = ("ip or ip6".to_owned(), vec![0, 6, 0, 0, 0, 0, 0, 1]);
        let block = authority_block("shop");
        let policy = compile(&rules(&[first, chain("rest", "*.Shop", &[])], &required), block).expect("right");
        let one = &policy.rules[0];
        assert_eq!((one.protocol, one.ports.clone(), one.clients.len()), (Some(6), Some(80..=90), 2));
        assert!(one.filter.as_ref().is_some_and(|filter| filter.text == "ip or ip6" && filter.program.matches(&[])));
        assert_eq!(policy.rules[1].filter, None);
        assert_eq!(one.clients[0], Client::Group { authority: block, group: group_number("staff") });
        assert!(one.boxes.iter().all(|one| one.may_be_left_out) && one.boxes[1].name == "ids.infra");
        assert!(one.may_add.iter().all(|one| one.may_be_left_out && one.name == "log.shop"));
        assert_eq!((one.may_add.len(), policy.rules[1].may_add.len()), (1, 0));
        assert_eq!(policy.rules[1].services, Prefix::of_authority("shop"));
        let web: Name = "web.shop/key:user42".parse().expect("literal");
        assert!(one.services.contains(&web.service_id()), "keys of a service are meant with it");
        assert_eq!(policy.required[0].services, Prefix::of_authority("shop"));
    }

    #[test]
    fn a_chain_is_a_line_for_people() {
        let mut one = chain("inspect", "web.shop", &["fw.shop", "ids.shop"]);
        assert_eq!(written(&one), "inspect: web.shop through fw.shop, ids.shop");
        one.protocol = "tcp".to_owned();
        (one.first_port, one.last_port, one.bypass) = (80, 90, true);
        one.clients = vec!["group:staff".to_owned()];
        one.filter = "len > 40".to_owned();
        let wanted = "inspect: web.shop tcp ports 80-90 from group:staff filter `len > 40` through fw.shop, ids.shop, \
                      or without those that nobody serves";
        assert_eq!(written(&one), wanted);
        assert_eq!(written(&chain("exempt", "*.shop", &[])), "exempt: *.shop through no boxes");
        let mut adds = chain("sort", "web.shop", &["fw.shop"]);
        adds.may_add = vec!["ids.shop".to_owned(), "log.shop".to_owned()];
        assert_eq!(written(&adds), "sort: web.shop through fw.shop, whose hosts may add ids.shop, log.shop");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_rule() {
        let says = |rules: &ChainRules| compile(rules, authority_block("shop")).expect_err("wrong").to_string();
        let with = |act: &dyn Fn(&mut PolicyChain)| {
            let mut one = chain("inspect", "web.shop", &["fw.shop"]);
            act(&mut one);
            rules(&[one], &[])
        };
        for (rules, wanted) in [
            (with(&|one| one.services = "web shop".to_owned()), "chain `inspect`: "),
            (with(&|one| one.services = "web.other".to_owned()), "no name of the authority"),
            (with(&|one| one.boxes = vec!["fw".to_owned()]), "chain `inspect`: "),
            (with(&|one| one.protocol = "icmp".to_owned()), "`icmp` is no protocol"),
            (with(&|one| (one.first_port, one.last_port) = (0, 80)), "0 is no port"),
            (with(&|one| (one.first_port, one.last_port) = (80, 70_000)), "70000 is no port"),
            (with(&|one| (one.first_port, one.last_port) = (90, 80)), "for no port"),
            (with(&|one| one.clients = vec!["staff".to_owned()]), "`staff` is not host:<id> or group:<name>"),
            (with(&|one| one.clients = vec!["host:12".to_owned()]), "32 hexadecimal"),
            (with(&|one| one.boxes = vec!["fw.shop".to_owned(); 2]), "twice"),
            (with(&|one| one.boxes = vec!["web.shop".to_owned()]), "a loop"),
            (with(&|one| one.name.clear()), "it has no name"),
            (with(&|one| one.filter = "udp".to_owned()), "the filter `udp` comes without the program"),
            (with(&|one| one.filter_program = vec![0, 6, 0, 0, 0, 0, 0, 1]), "and not its expression"),
            (
                with(&|one| (one.filter, one.filter_program) = ("udp".to_owned(), vec![0; 8])),
                "chain `inspect`: the filter `udp`: it does not end",
            ),
            (
                with(&|one| {
                    let all = "udp or ".repeat(200) + "udp";
                    (one.filter, one.filter_program) = (all, vec![0, 6, 0, 0, 0, 0, 0, 1]);
                }),
                "its filter has 1403 characters",
            ),
            (with(&|one| one.boxes = (0..9).map(|n| format!("b{n}.shop")).collect()), "has 9 boxes"),
            (with(&|one| one.may_add = (0..8).map(|n| format!("b{n}.shop")).collect()), "has 9 boxes"),
            (with(&|one| one.may_add = vec!["ids".to_owned()]), "chain `inspect`: "),
            (with(&|one| one.may_add = vec!["fw.shop".to_owned()]), "names box 2 twice"),
            (with(&|one| one.may_add = vec!["web.shop".to_owned()]), "a loop"),
            (
                with(&|one| (one.boxes, one.may_add) = (Vec::new(), vec!["ids.shop".to_owned()])),
                "chain `inspect` says which boxes may be added",
            ),
            (
                with(&|one| {
                    one.protocol = "tcp".to_owned();
                    (one.may_add, one.proxies) = (vec!["lb.shop".to_owned()], vec!["lb.shop".to_owned()]);
                }),
                "the proxy lb.shop is none of the boxes that sessions go through",
            ),
        ] {
            assert!(says(&rules).contains(wanted), "{wanted}: {}", says(&rules));
        }
        let one = chain("inspect", "web.shop", &["fw.shop"]);
        let twice = rules(&[one.clone(), chain("inspect", "mail.shop", &[])], &[]);
        assert!(says(&twice).contains("another one of this name"));
        let unmet = rules(std::slice::from_ref(&one), &[require("web.shop", &["ids.shop"])]);
        assert!(says(&unmet).contains("no chain for it has all of ids.shop"), "{}", says(&unmet));
        let block = authority_block("shop");
        assert!(compile(&rules(&[one], &[require("web.shop", &["fw.shop"])]), block).is_ok());
        let two = chain("inspect", "web.shop", &["fw.shop", "ids.shop"]);
        let of_first = rules(std::slice::from_ref(&two), &[require("web.shop", &["fw.shop"])]);
        assert!(says(&of_first).contains("require ids.shop as well"), "{}", says(&of_first));
        for enough in [&["ids.shop"][..], &["fw.shop", "ids.shop"]] {
            assert!(compile(&rules(std::slice::from_ref(&two), &[require("web.shop", enough)]), block).is_ok());
        }
        let long: Vec<_> =
            (0..1000).map(|n| chain(&format!("{n}{}", "x".repeat(60)), &format!("s{n}.shop"), &[])).collect();
        assert!(says(&rules(&long, &[])).contains("bytes long"));
    }

    #[test]
    fn what_an_authority_has_signed_comes_back_and_counts() {
        let (_base, line) = line(1);
        let signed = sign(&authority(1));
        let read = SignedChains::decode(&signed.encode()).expect("readable");
        assert_eq!(read, signed);
        assert_eq!(read.policy(&line, &[], NOW_S).expect("signed").rules.len(), 1);
        assert_eq!(sign(&authority(2)).policy(&line, &[], NOW_S), Err(Doubt::Unsigned), "another's key");
        let mut changed = signed.clone();
        changed.0.signed_ms += 1;
        assert_eq!(changed.policy(&line, &[], NOW_S), Err(Doubt::Unsigned));
        assert_eq!(signed.policy(&line, &[], NOW_S - 2 * AHEAD_MAX_S), Err(Doubt::Ahead));
        assert_eq!(SignedChains::decode(b"abc"), Err(Doubt::Malformed));
        let again = SignedChains::sign(&authority(1), &ChainRules::default(), Some(&signed), 5).expect("signed");
        assert!(again.signed_ms > signed.signed_ms, "a clock that was set back makes nothing older");
    }

    #[test]
    fn a_router_signs_by_its_warrant_while_that_lasts_and_until_it_is_taken_back() {
        let (_base, line) = line(1);
        let Warrant::Authority(warrant) =
            Request::new("shop", &key(7)).grant(&authority(1), NOW_S, 3600).expect("granted")
        else {
            panic!("it is an authority's");
        };
        let router = Authority { key: key(7), warrant: Some(warrant), ..authority(1) };
        let signed = sign(&router);
        let read = SignedChains::decode(&signed.encode()).expect("readable");
        assert!(read.policy(&line, &[], NOW_S + 3600).is_ok());
        assert_eq!(read.policy(&line, &[], NOW_S + 3601), Err(Doubt::Ended), "what it has signed ends with its right");
        let rules = rules(&[], &[]);
        let late = SignedChains::sign(&router, &rules, None, NOW_MS + 7_200_000).expect("signed");
        assert_eq!(late.policy(&line, &[], NOW_S + 7200), Err(Doubt::Unsigned), "the warrant has ended");
        let revoked = |key| KeyRevocation::new(authority_block("shop"), key, u64::MAX, &self::key(1));
        assert_eq!(signed.policy(&line, &[revoked(key(7).public())], NOW_S), Err(Doubt::Revoked));
        assert!(signed.policy(&line, &[revoked(key(8).public())], NOW_S).is_ok());
        let posing = Authority { key: key(8), ..router };
        assert_eq!(sign(&posing).policy(&line, &[], NOW_S), Err(Doubt::Unsigned), "another key's warrant");
    }

    #[test]
    fn a_key_that_another_one_follows_signs_for_its_time() {
        let base = tempfile::tempdir().expect("a directory");
        let store = Store::open(&StateDir::open(base.path().join("s")).expect("made")).expect("opened");
        let block = authority_block("shop");
        let follows = Succession::new(block, &key(1), &key(2), NOW_S - 100, NOW_S - 10);
        store.keep_succession(&follows, "shop", NOW_S).expect("kept");
        let line = Lineage::of(&store, block, key(1).public()).expect("readable");
        assert_eq!(sign(&authority(1)).policy(&line, &[], NOW_S), Err(Doubt::Unsigned));
        assert!(sign(&authority(2)).policy(&line, &[], NOW_S).is_ok());
        let earlier = SignedChains::sign(&authority(1), &ChainRules::default(), None, NOW_MS - 20_000).expect("signed");
        assert!(earlier.policy(&line, &[], NOW_S - 10).is_ok());
        assert_eq!(
            earlier.policy(&line, &[], NOW_S),
            Err(Doubt::Ended),
            "who has the key still may have dated it back"
        );
        let again = earlier.renewed(&authority(2), &line, &[], NOW_S - 10).expect("its end is near");
        assert!(again.policy(&line, &[], NOW_S).is_ok());
    }

    #[test]
    fn a_router_signs_its_own_rules_again_in_time_and_nobody_elses() {
        let (_base, line) = line(1);
        let by = authority(1);
        let signed = sign(&by);
        let end_s = NOW_S + LIFETIME_S;
        assert_eq!(signed.until_s(&line, &[], NOW_S), Ok(end_s));
        assert_eq!(signed.until_s(&line, &[], end_s + 1), Err(Doubt::Ended));
        assert_eq!(signed.renewed(&by, &line, &[], end_s - RENEW_BEFORE_S), None, "there is time");
        let again = signed.renewed(&by, &line, &[], end_s - RENEW_BEFORE_S + 1).expect("it is time");
        assert_eq!(again.rules(), signed.rules());
        assert!(again.signed_ms > signed.signed_ms && again.until_s(&line, &[], end_s + 1).is_ok());
        assert_eq!(signed.renewed(&by, &line, &[], end_s + 1), None, "an operator is to look at it first");
        let grant = |lifetime_s| {
            let granted = Request::new("shop", &key(7)).grant(&by, NOW_S, lifetime_s).expect("granted");
            let Warrant::Authority(warrant) = granted else { panic!("it is an authority's") };
            Authority { key: key(7), warrant: Some(warrant), ..authority(1) }
        };
        let router = grant(5 * 86_400);
        let of_router = sign(&router);
        assert_eq!(of_router.renewed(&by, &line, &[], NOW_S), None, "a stolen router's word would live on");
        assert_eq!(signed.renewed(&router, &line, &[], end_s - 1), None);
        assert_eq!(of_router.renewed(&router, &line, &[], NOW_S + 86_400), None, "it would end no later");
        let again =
            of_router.renewed(&grant(90 * 86_400), &line, &[], NOW_S + 86_400).expect("its right is longer now");
        assert_eq!(again.until_s(&line, &[], NOW_S), Ok(NOW_S + 86_400 + LIFETIME_S));
    }

    #[test]
    fn what_counts_gives_way_to_a_later_word_and_the_authoritys_own_to_its_own_alone() {
        let (_base, line) = line(1);
        let own = authority(1);
        let Warrant::Authority(warrant) = Request::new("shop", &key(7)).grant(&own, NOW_S, 86_400).expect("granted")
        else {
            panic!("it is an authority's")
        };
        let router = Authority { key: key(7), warrant: Some(warrant), ..own.clone() };
        let empty = |by: &Authority, ms| SignedChains::sign(by, &ChainRules::default(), None, ms).expect("signed");
        let replaces = |one: &SignedChains, known: &SignedChains| one.replaces(Some(known), &line, &[], NOW_S);
        let (operators, stolen) = (sign(&own), empty(&router, NOW_MS + 10));
        assert!(!replaces(&stolen, &operators) && replaces(&empty(&own, NOW_MS + 10), &operators));
        assert!(replaces(&stolen, &sign(&router)) && !replaces(&sign(&router), &stolen));
        assert!(replaces(&empty(&own, NOW_MS + 20), &stolen) && !replaces(&operators, &stolen));
        // What was taken back gives way to an earlier date, but to nothing that was replaced long ago.
        let revoked = [KeyRevocation::new(own.block(), key(7).public(), u64::MAX, &key(1))];
        let replaces = |one: &SignedChains| one.replaces(Some(&stolen), &line, &revoked, NOW_S);
        assert!(replaces(&operators) && !replaces(&empty(&own, NOW_MS - 2 * AHEAD_MAX_S * MS_PER_S)));
        // Where nothing is known, what has ended closes names; what nobody has signed is nothing.
        let late_s = NOW_S + LIFETIME_S + 1;
        assert!(operators.replaces(None, &line, &[], late_s) && !operators.replaces(Some(&stolen), &line, &[], late_s));
        assert!(!sign(&authority(2)).replaces(None, &line, &[], NOW_S));
    }

    #[test]
    fn names_of_rules_that_count_no_longer_are_known() {
        let by = authority(1);
        let web: Name = "web.shop".parse().expect("literal");
        let all = [chain("inspect", "web.shop", &["fw.shop"]), chain("exempt", "mail.shop", &[])];
        let signed = SignedChains::sign(&by, &rules(&all, &[require("web.shop", &["fw.shop"])]), None, NOW_MS);
        assert_eq!(signed.expect("signed").lapsed_names(), [web.service_prefix()]);
        let newer = [&sign(&by).body[..], &[15 << 3, 1]].concat();
        let newer = SignedChains(Statement::sign(CONTEXT, &by, newer, NOW_MS));
        assert_eq!(newer.lapsed_names(), [web.service_prefix()]);
    }

    #[test]
    fn words_of_a_later_version_are_passed_on_and_not_gone_by() {
        let (_base, line) = line(1);
        let by = authority(1);
        let mut newer = sign(&by);
        // Field 15 of the rules, which nobody knows.
        let rules = [&newer.body[..], &[15 << 3, 1]].concat();
        newer = SignedChains(Statement::sign(CONTEXT, &by, rules, NOW_MS));
        let read = SignedChains::decode(&newer.encode()).expect("readable");
        assert_eq!(read, newer);
        assert_eq!(read.policy(&line, &[], NOW_S), Err(Doubt::Newer));
    }
    #[test]
    fn a_proxy_divides_a_chain() {
        let block = authority_block("shop");
        let mut proxied = chain("inspect", "web.shop", &["fw.shop", "lb.shop", "ids.shop"]);
        proxied.protocol = "tcp".to_owned();
        proxied.proxies = vec!["lb.shop".to_owned()];
        assert!(written(&proxied).ends_with("through fw.shop, lb.shop (a proxy), ids.shop"));
        let ordered = PolicyChain { ordered: true, ..proxied.clone() };
        assert!(written(&ordered).ends_with("ids.shop, in order while they are changed"));
        assert!(compile(&rules(&[ordered], &[]), block).expect("sound").rules[0].is_ordered);
        let compiled = |required: &[PolicyRequirement]| {
            compile(&rules(std::slice::from_ref(&proxied), required), block).map_err(|error| error.to_string())
        };
        let policy = compiled(&[]).expect("sound");
        assert_eq!(policy.rules[0].boxes.iter().map(|one| one.is_proxy).collect::<Vec<_>>(), [false, true, false]);
        // What comes behind the proxy, and what comes to it.
        assert!(compiled(&[require("web.shop", &["lb.shop", "ids.shop"])]).is_ok());
        assert!(compiled(&[require("lb.shop", &["fw.shop"])]).is_ok());
        let error = compiled(&[require("web.shop", &["fw.shop", "ids.shop"])]).expect_err("none passes both");
        assert!(error.contains("web.shop") && error.contains("behind a proxy"), "{error}");
        let error = compiled(&[require("lb.shop", &["ids.shop"])]).expect_err("that one comes later");
        assert!(error.contains("lb.shop"), "{error}");
        let stranger = PolicyChain { proxies: vec!["other.shop".to_owned()], ..proxied.clone() };
        let error = compile(&rules(&[stranger], &[]), block).expect_err("it is no box of the chain").to_string();
        assert!(error.contains("chain `inspect`") && error.contains("other.shop"), "{error}");
        let of_both = PolicyChain { protocol: String::new(), ..proxied.clone() };
        let error = compile(&rules(&[of_both], &[]), block).expect_err("proxies end TCP alone").to_string();
        assert!(error.contains("chain `inspect`") && error.contains("tcp"), "{error}");
    }
}
