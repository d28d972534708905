//! Chains: which sessions go through which boxes, and those that do.

use std::collections::{BTreeSet, HashMap};

use margay_control::api::v1::*;
use margay_control::chains::{ChainRules, Doubt, RulesError, SignedChains, authority_of, compile, written};
use margay_control::keyring::Authority;
use margay_control::warrant::{believed, lineages};
use margay_core::chain::{ChainPlace, ChainRecord, PassedBox};
use margay_core::key::{HostId, to_hex};
use margay_core::name::{Name, Prefix, ServiceId};
use tonic::Status;

use super::{blocking, environment, flow, misuse};
use crate::agent::chain::{self, Said};
use crate::agent::{Agent, Host, naming};

const MS_PER_S: u64 = 1000;

/// What is to become of the chains of one authority.
pub(super) struct Declared {
    by: Authority,
    rules: ChainRules,
    before: Option<SignedChains>,
    /// For people.
    pub changes: Vec<PolicyChange>,
}

/// What a policy would change of chains; authorities of which it says the same as before are left out.
pub(super) fn declared(agent: &Agent, request: &PolicyApplyRequest) -> Result<Vec<Declared>, Status> {
    let chains = request.chains.as_ref();
    let required = request.required.as_ref();
    if chains.is_none() && required.is_none() {
        return Ok(Vec::new());
    }
    let authorities = blocking(|| agent.host.keyring.authorities()).map_err(environment)?;
    let kept = blocking(|| chain::said(&agent.host.keyring, &agent.host.store, agent.host.clock.unix_s()))
        .map_err(environment)?;
    let chains = chains.map(|all| of_authorities(&all.chains, &authorities)).transpose()?;
    let required = required.map(|all| of_authorities(&all.required, &authorities)).transpose()?;
    let mut declared = Vec::new();
    for by in authorities {
        let kept = kept.iter().find(|known| known.signed.authority == by.block());
        let before = kept.map(|known| known.signed.clone());
        let known = before.as_ref().map(SignedChains::rules).transpose();
        let known = known.map_err(|why| environment(format!("the chains of {}: {why}", by.name)))?.unwrap_or_default();
        let doubt = kept.and_then(|known| known.policy.as_ref().err());
        if let Some(why) = doubt {
            ensure_complete(request, &by.name, &known, why)?;
        }
        let own_chains = chains.as_ref().map(|all| all.get(&by.block()).cloned().unwrap_or_default());
        let own_required = required.as_ref().map(|all| all.get(&by.block()).cloned().unwrap_or_default());
        let rules = ChainRules {
            chains: own_chains.unwrap_or_else(|| known.chains.clone()),
            required: own_required.unwrap_or_else(|| known.required.clone()),
        };
        if rules == known && doubt.is_none() {
            continue;
        }
        if !by.is_valid(agent.host.clock.unix_s()) {
            return Err(environment(by.ended()));
        }
        if by.warrant.is_some() && kept.is_some_and(|known| known.until_s != 0 && !known.signed.is_by_warrant()) {
            return Err(misuse(format!(
                "the chains of {0} are signed by the authority's own key, and a router's key cannot replace them: \
                 apply the policy on the router that has the key of {0} (`margay id` lists the keys of a host)",
                by.name
            )));
        }
        compile(&rules, by.block()).map_err(misuse)?;
        let mut changes = changes(&known, &rules);
        changes.extend(doubt.map(|why| PolicyChange {
            act: "change".to_owned(),
            what: "chain".to_owned(),
            text: format!("all of {} are signed again, since {why}", by.name),
        }));
        declared.push(Declared { by, rules, before, changes });
    }
    Ok(declared)
}

/// What stays as it was counts no longer, and somebody else may have signed it: nobody signs that unread.
fn ensure_complete(
    request: &PolicyApplyRequest,
    authority: &str,
    known: &ChainRules,
    why: &Doubt,
) -> Result<(), Status> {
    let is_left_out = request.chains.is_none() && !known.chains.is_empty()
        || request.required.is_none() && !known.required.is_empty();
    if is_left_out {
        return Err(misuse(format!(
            "the chains of {authority} count no longer ({why}): write both `[[chain]]` and `[[require]]` into the \
             policy, which leaves one of them as it was"
        )));
    }
    Ok(())
}

/// What a policy says of names.
trait OfNames: Clone {
    fn services(&self) -> &str;
    /// For errors.
    fn place(&self) -> String;
}

impl OfNames for PolicyChain {
    fn services(&self) -> &str {
        &self.services
    }

    fn place(&self) -> String {
        format!("chain `{}`", self.name)
    }
}

impl OfNames for PolicyRequirement {
    fn services(&self) -> &str {
        &self.services
    }

    fn place(&self) -> String {
        format!("what `{}` requires", self.services)
    }
}

/// By the block of the authority whose names they are of, which signs them.
fn of_authorities<T: OfNames>(all: &[T], authorities: &[Authority]) -> Result<HashMap<[u8; 8], Vec<T>>, Status> {
    let mut sorted: HashMap<[u8; 8], Vec<T>> = HashMap::new();
    for one in all {
        let block =
            authority_of(one.services()).map_err(|error| misuse(RulesError::Name { place: one.place(), error }))?;
        if !authorities.iter().any(|known| known.block() == block) {
            return Err(misuse(format!(
                "{}: no key of the authority of `{}` is on this host; apply the policy on a router that signs for it",
                one.place(),
                one.services()
            )));
        }
        sorted.entry(block).or_default().push(one.clone());
    }
    Ok(sorted)
}

/// Signs what was declared, and tells hosts.
pub(super) fn apply(agent: &Agent, declared: &[Declared]) -> Result<(), Status> {
    let Host { keyring, store, clock, .. } = &agent.host;
    let unix_s = clock.unix_s();
    let lines = blocking(|| lineages(keyring, store)).map_err(environment)?;
    let revoked = blocking(|| believed(keyring, store, unix_s)).map_err(environment)?;
    for Declared { by, rules, before, .. } in declared {
        let name = &by.name;
        let (_, line) = lines.get(&by.block()).ok_or_else(|| environment(format!("the key of {name} is gone")))?;
        let signed = SignedChains::sign(by, rules, before.as_ref(), unix_s * MS_PER_S).map_err(misuse)?;
        let replaces = |known: Option<&SignedChains>| signed.replaces(known, line, &revoked, unix_s);
        let kept = blocking(|| store.keep_chains(&signed, name, unix_s, replaces)).map_err(environment)?;
        if !kept {
            return Err(environment(format!(
                "the chains of {name} were changed by somebody else meanwhile; try again"
            )));
        }
    }
    // The next connection goes by it, and does not wait for whoever follows the store.
    blocking(|| chain::renew(agent));
    Ok(())
}

/// Boxes that nobody serves now, as far as the router on this host knows; each as a sentence.
pub(super) fn warnings(agent: &Agent, declared: &[Declared]) -> Vec<String> {
    let Some(router) = &agent.routing.router else { return Vec::new() };
    let is_served = |name: &str| {
        name.parse::<Name>().is_ok_and(|name| {
            let is_own = agent.publishing.services.find(&name).is_some_and(|own| own.is_served && own.is_box());
            is_own || !router.instances_of(&name.service_id()).is_empty()
        })
    };
    let chains = declared.iter().flat_map(|one| &one.rules.chains);
    let boxes = chains.flat_map(|chain| chain.boxes.iter().chain(&chain.may_add));
    let unserved: BTreeSet<&String> = boxes.filter(|name| !is_served(name)).collect();
    let sentence = |name: &String| {
        format!(
            "nobody serves the box {name} now, as far as this router knows; `margay middlebox serve {name} \
                 --kind forward` does"
        )
    };
    unserved.into_iter().map(sentence).collect()
}

fn changes(before: &ChainRules, after: &ChainRules) -> Vec<PolicyChange> {
    let change =
        |act: &str, what: &str, text: String| PolicyChange { act: act.to_owned(), what: what.to_owned(), text };
    let mut changes = Vec::new();
    for one in &after.chains {
        match before.chains.iter().find(|known| known.name == one.name) {
            None => changes.push(change("add", "chain", written(one))),
            Some(known) if known.filter_program != one.filter_program && known.filter == one.filter => {
                let text = format!("{}: libpcap compiles its filter to another program now", written(one));
                changes.push(change("change", "chain", text));
            }
            Some(known) if known != one => {
                changes.push(change("change", "chain", format!("{} -> {}", written(known), written(one))));
            }
            Some(_) => {}
        }
    }
    let is_gone = |known: &&PolicyChain| !after.chains.iter().any(|one| one.name == known.name);
    changes.extend(before.chains.iter().filter(is_gone).map(|known| change("delete", "chain", written(known))));
    let names = |all: &[PolicyChain]| all.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
    if changes.is_empty() && before.chains != after.chains {
        changes.push(change("change", "chain", format!("their order: {}", names(&after.chains).join(", "))));
    }
    let is_new = |one: &&PolicyRequirement| !before.required.contains(one);
    changes.extend(after.required.iter().filter(is_new).map(|one| change("add", "require", required(one))));
    let is_gone = |one: &&PolicyRequirement| !after.required.contains(one);
    changes.extend(before.required.iter().filter(is_gone).map(|one| change("delete", "require", required(one))));
    changes
}

fn required(one: &PolicyRequirement) -> String {
    format!("{}: {}", one.services, one.boxes.join(", "))
}

pub(super) async fn show(agent: &Agent) -> Result<ChainShowReply, Status> {
    let said = blocking(|| chain::said(&agent.host.keyring, &agent.host.store, agent.host.clock.unix_s()))
        .map_err(environment)?;
    let policy = |Said { authority, signed, policy, until_s, .. }: Said| {
        // What this version cannot read it does not go by, and says so.
        let rules = signed.rules().unwrap_or_default();
        ChainPolicyInfo {
            authority,
            signed_unix_s: signed.signed_s(),
            signer: to_hex(&signed.signer.0),
            chains: rules.chains,
            required: rules.required,
            refused: policy.err().map(|why| why.to_string()).unwrap_or_default(),
            until_unix_s: until_s,
        }
    };
    let config = agent.config();
    let services = config.service.iter().map(|section| section.get_ref()).filter(|one| !one.require.is_empty());
    let own = services.map(|one| PolicyRequirement {
        services: one.name.to_string(),
        boxes: one.require.iter().map(ToString::to_string).collect(),
    });
    Ok(ChainShowReply {
        policies: said.into_iter().map(policy).collect(),
        required: own.collect(),
        flows: flow::of_chains(agent).await,
    })
}

/// The chain that decides over a session of a program here.
pub(super) fn deciding(agent: &Agent, service: &ServiceId, protocol: u8, port: u16) -> Option<PolicyChain> {
    let rule = agent.core.0.with_sal(|sal, _| sal.chain_rule_for(service, protocol, port).cloned())?;
    let said = blocking(|| chain::said(&agent.host.keyring, &agent.host.store, agent.host.clock.unix_s())).ok()?;
    let of_authority = said.into_iter().find(|said| said.signed.authority == service.authority())?;
    let rules = of_authority.signed.rules().ok()?;
    rules.chains.into_iter().find(|chain| chain.name == rule.name)
}

/// The chain of a flow's session.
pub(super) fn info(agent: &Agent, names: &HashMap<HostId, String>, record: &ChainRecord) -> ChainInfo {
    let of_box = |one: &PassedBox| {
        let named = agent.core.0.with_sal(|sal, _| sal.chain_policy().name_of_box(&one.service).map(str::to_owned));
        ChainBox {
            name: named.unwrap_or_else(|| naming::prefix(agent, &Prefix::from(one.service))),
            host_id: one.host.map(|host| host.to_string()).unwrap_or_default(),
            host_name: one.host.and_then(|host| names.get(&host).cloned()).unwrap_or_default(),
            left_out: one.is_left_out,
            ends: one.is_end,
            added: one.is_added,
        }
    };
    ChainInfo {
        place: match record.place {
            ChainPlace::First => "first",
            ChainPlace::Left => "left",
            ChainPlace::Right => "right",
            ChainPlace::Last => "last",
            ChainPlace::Proxy => "proxy",
        }
        .to_owned(),
        boxes: record.boxes.iter().map(of_box).collect(),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn chain(name: &str, boxes: &[&str]) -> PolicyChain {
        PolicyChain {
            name: name.to_owned(),
            services: "web.shop".to_owned(),
            boxes: boxes.iter().map(ToString::to_string).collect(),
            ..PolicyChain::default()
        }
    }

    fn texts(before: &[PolicyChain], after: &[PolicyChain]) -> Vec<String> {
        let rules = |chains: &[PolicyChain]| ChainRules { chains: chains.to_vec(), required: Vec::new() };
        let changes = changes(&rules(before), &rules(after));
        changes.iter().map(|one| format!("{} {} {}", one.act, one.what, one.text)).collect()
    }

    #[test]
    fn a_difference_is_told_chain_by_chain() {
        let one = chain("one", &["fw.shop"]);
        let other = chain("other", &[]);
        assert!(texts(&[], &[]).is_empty());
        assert_eq!(texts(&[], std::slice::from_ref(&one)), ["add chain one: web.shop through fw.shop"]);
        assert_eq!(
            texts(&[other.clone(), one.clone()], std::slice::from_ref(&one)),
            ["delete chain other: web.shop through no boxes"]
        );
        assert_eq!(
            texts(&[other.clone(), one.clone()], &[one.clone(), other]),
            ["change chain their order: one, other"]
        );
        let narrow = PolicyChain { protocol: "tcp".to_owned(), first_port: 80, last_port: 90, ..one.clone() };
        let wanted = "change chain one: web.shop through fw.shop -> one: web.shop tcp ports 80-90 through fw.shop";
        assert_eq!(texts(std::slice::from_ref(&one), &[narrow]), [wanted]);
        let filtered =
            |program: u8| PolicyChain { filter: "udp".to_owned(), filter_program: vec![program], ..one.clone() };
        let wanted = "change chain one: web.shop through fw.shop -> one: web.shop filter `udp` through fw.shop";
        assert_eq!(texts(std::slice::from_ref(&one), &[filtered(1)]), [wanted]);
        let wanted = "change chain one: web.shop filter `udp` through fw.shop: libpcap compiles its filter to another \
                      program now";
        assert_eq!(texts(&[filtered(1)], &[filtered(2)]), [wanted]);
    }

    #[test]
    fn names_are_their_authoritys_to_sign() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = margay_control::StateDir::open(base.path().join("s")).expect("made");
        let keyring = margay_control::keyring::Keyring::open(&dir).expect("opened");
        let authorities = [keyring.create_authority("shop").expect("made")];
        let sorted = of_authorities(&[chain("one", &[])], &authorities).expect("its key is here");
        assert_eq!(sorted[&authorities[0].block()].len(), 1);
        let foreign = PolicyChain { services: "web.lab".to_owned(), ..chain("one", &[]) };
        let error = of_authorities(&[foreign], &authorities).expect_err("no key");
        assert!(error.message().contains("chain `one`") && error.message().contains("`web.lab`"), "{error}");
    }
}
