//! What is another in one configuration than in another, and what each change needs before it holds (decision 0050).

use toml::Spanned;

use crate::config::Config;
use crate::resolver::{Kind, ResolverSection};

/// What the new value of a key needs before it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: the running agent takes it.
    Nothing,
    /// The next start of the agent; connections stay.
    Restart,
    /// `margay down` and `margay up`: the host itself is prepared otherwise, and connections end.
    Down,
}

/// A key of the file, or a section that may stand there several times.
pub struct Key {
    /// As people write it.
    pub name: &'static str,
    /// What a change of it needs.
    pub needs: Needs,
    is_same: fn(&Config, &Config) -> bool,
    take: fn(&mut Config, &Config),
}

macro_rules! keys {
    ($($needs:ident $name:literal $($field:ident).+;)* => $($other:expr),*) => {
        [$(Key {
            name: $name,
            needs: Needs::$needs,
            is_same: |one, other| one.$($field).+ == other.$($field).+,
            take: |into, from| into.$($field).+.clone_from(&from.$($field).+),
        },)* $($other),*]
    };
}

/// Resolvers that may come and go while the agent runs.
const RESOLVERS: Key = Key {
    name: "[[resolver]]",
    needs: Needs::Nothing,
    is_same: |one, other| resolvers(one, false) == resolvers(other, false),
    take: |into, from| take_resolvers(into, from, false),
};

/// A node of a DHT has a port, which the next one may need.
const NODES: Key = Key {
    name: "[[resolver]] of the kind dht",
    needs: Needs::Restart,
    is_same: |one, other| resolvers(one, true) == resolvers(other, true),
    take: |into, from| take_resolvers(into, from, true),
};

fn resolvers(config: &Config, are_nodes: bool) -> Vec<&ResolverSection> {
    let all = config.resolver.iter().map(Spanned::get_ref);
    all.filter(|section| (section.kind == Kind::Dht) == are_nodes).collect()
}

fn take_resolvers(into: &mut Config, from: &Config, are_nodes: bool) {
    into.resolver.retain(|section| (section.get_ref().kind == Kind::Dht) != are_nodes);
    let stays: Vec<String> = into.resolver.iter().map(|section| section.get_ref().name.clone()).collect();
    let taken = from.resolver.iter().filter(|section| (section.get_ref().kind == Kind::Dht) == are_nodes);
    // One that becomes of the other kind keeps its name, and waits for the restart.
    into.resolver.extend(taken.filter(|section| !stays.contains(&section.get_ref().name)).cloned());
}

/// Every key.
pub static KEYS: [Key; 39] = keys! {
    Restart "direct" direct;
    Restart "secure" secure;
    Nothing "inside" inside;
    Down "[host] state_dir" host.state_dir;
    Down "[host] runtime_dir" host.runtime_dir;
    Down "[host] port" host.port;
    Restart "[host] name" host.name;
    Restart "[host] boxes" host.boxes;
    Restart "[host] group" host.group;
    Nothing "[host] give_up_after" host.give_up_after;
    Restart "[router] enabled" router.enabled;
    Restart "[router] listen" router.listen;
    Nothing "[router] address" router.address;
    Restart "[router.etcd]" router.etcd;
    Restart "[router] site" router.site;
    Restart "[router] announce" router.announce;
    Restart "[router] site_weight" router.site_weight;
    Restart "[[router.scope]]" router.scope;
    Restart "[[router.neighbour]]" router.neighbour;
    Nothing "[join]" join;
    Restart "[ad_hoc] enabled" ad_hoc.enabled;
    Nothing "[ad_hoc] relay" ad_hoc.relay;
    Nothing "[ad_hoc] flood" ad_hoc.flood;
    Nothing "[[service]]" service;
    Nothing "[[bind]]" bind;
    Nothing "[[multihoming]]" multihoming;
    Nothing "[[stack_rule]]" stack_rule;
    Nothing "[[ensemble]]" ensemble;
    Nothing "[[fallback]]" fallback;
    Down "[ranges] ipv4" ranges.ipv4;
    Down "[ranges] ipv6" ranges.ipv6;
    Down "[dns] enabled" dns.enabled;
    Down "[dns] zone" dns.zone;
    Down "[dns] listen" dns.listen;
    Nothing "[metrics] listen" metrics.listen;
    Restart "[api]" api;
    Nothing "[log] level" log.level;
    => RESOLVERS, NODES
};

/// Keys that have another value in `to` than in `from`, in the order of the book.
pub fn between<'a>(from: &'a Config, to: &'a Config) -> impl Iterator<Item = &'static Key> + use<'a> {
    KEYS.iter().filter(|key| !(key.is_same)(from, to))
}

/// `running` with what can be taken from `wanted` while the agent runs.
pub fn effective(running: &Config, wanted: &Config) -> Config {
    let mut effective = running.clone();
    for key in between(running, wanted).filter(|key| key.needs == Needs::Nothing) {
        (key.take)(&mut effective, wanted);
    }
    effective
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;
    use crate::reference::settings;

    fn config(text: &str) -> Config {
        Config::parse(text, Path::new("margay.toml")).expect("a configuration")
    }

    #[test]
    fn every_key_of_the_configuration_is_known() {
        let mut missing = Vec::new();
        for section in settings::sections() {
            let heading = section.heading.trim_matches('`').to_owned();
            for key in section.keys {
                let names = match heading.as_str() {
                    "Before all sections" => [key.name.clone(), String::new()],
                    // What is of a [[service]] changes with it.
                    "[service.health]" | "[service.load]" => ["[[service]]".to_owned(), String::new()],
                    heading => [format!("{heading} {}", key.name), heading.to_owned()],
                };
                if !KEYS.iter().any(|known| names.iter().any(|name| name == known.name)) {
                    missing.push(names);
                }
            }
        }
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn resolvers_change_while_the_agent_runs_but_for_nodes_of_a_dht() {
        let file = |name: &str, file: &str| {
            format!("[[resolver]]\nname = \"{name}\"\nkind = \"static\"\nfile = \"{file}\"\nnames = [\"a.shop\"]\n")
        };
        let node = |name: &str, port: u16| {
            format!(
                "[[resolver]]\nname = \"{name}\"\nkind = \"dht\"\nport = {port}\nnames = [\"b.shop\"]\nbootstrap = \
                 [\"10.0.0.1:1\"]\n"
            )
        };
        let running = config(&format!("{}{}", file("one", "/a"), node("two", 7000)));
        let wanted = config(&format!("{}{}{}", node("two", 7001), file("one", "/b"), file("three", "/c")));
        let names = |from, to| between(from, to).map(|key| key.name).collect::<Vec<_>>();
        assert_eq!(names(&running, &wanted), ["[[resolver]]", "[[resolver]] of the kind dht"]);
        let now = effective(&running, &wanted);
        let known: Vec<_> =
            now.resolver.iter().map(|section| (&*section.get_ref().name, section.get_ref().port)).collect();
        assert_eq!(known, [("two", Some(7000)), ("one", None), ("three", None)]);
        assert_eq!(names(&now, &wanted), ["[[resolver]] of the kind dht"]);
        // What becomes a file has the name of a node that is there still.
        let now = effective(&running, &config(&file("two", "/a")));
        assert_eq!(now.resolver.len(), 1);
        assert_eq!(now.resolver[0].get_ref().kind, Kind::Dht);
    }

    #[test]
    fn what_can_change_while_the_agent_runs_does_and_the_rest_is_named() {
        let running = config("[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"");
        let wanted = config(
            "# a comment moves what follows\ndirect = false\n[host]\nport = 7\n[log]\nlevel = \"debug\"\n\
             [[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\n[[service]]\nname = \"adm.shop\"\nlisten_port \
             = 9",
        );
        let names: Vec<_> = between(&running, &wanted).map(|key| (key.name, key.needs)).collect();
        let expected = [
            ("direct", Needs::Restart),
            ("[host] port", Needs::Down),
            ("[[service]]", Needs::Nothing),
            ("[log] level", Needs::Nothing),
        ];
        assert_eq!(names, expected);
        let effective = effective(&running, &wanted);
        assert!(effective.direct && effective.host.port != 7);
        assert_eq!((effective.service.len(), &effective.log), (2, &wanted.log));
        assert_eq!(between(&effective, &wanted).count(), 2, "what is pending stays so");
        assert_eq!(between(&running, &config("[[service]]\nname=\"web.shop\"\nlisten=\"0.0.0.0:80\"")).count(), 0);
    }
}
