//! What is another in one configuration than in another, and what each change needs before it holds (decision 0050).

use crate::config::Config;

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
    ($($needs:ident $name:literal $($field:ident).+;)*) => {
        [$(Key {
            name: $name,
            needs: Needs::$needs,
            is_same: |one, other| one.$($field).+ == other.$($field).+,
            take: |into, from| into.$($field).+.clone_from(&from.$($field).+),
        }),*]
    };
}

/// Every key.
pub static KEYS: [Key; 32] = keys! {
    Restart "direct" direct;
    Restart "secure" secure;
    Nothing "inside" inside;
    Down "[host] state_dir" host.state_dir;
    Down "[host] runtime_dir" host.runtime_dir;
    Down "[host] port" host.port;
    Restart "[host] name" host.name;
    Restart "[host] group" host.group;
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
    Restart "[[resolver]]" resolver;
    Nothing "[[fallback]]" fallback;
    Down "[dns] enabled" dns.enabled;
    Down "[dns] zone" dns.zone;
    Down "[dns] listen" dns.listen;
    Restart "[metrics] listen" metrics.listen;
    Restart "[api]" api;
    Nothing "[log] level" log.level;
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
    fn what_can_change_while_the_agent_runs_does_and_the_rest_is_named() {
        let running = config("[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"");
        let wanted = config(
            "# a comment moves what follows\ndirect = false\n[host]\nport = 7\n[log]\nlevel = \"debug\"\n\
             [[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\n[[service]]\nname = \"adm.shop\"\nlisten_port = 9",
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
