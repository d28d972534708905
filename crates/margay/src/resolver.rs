//! `[[resolver]]`: somebody who is asked who serves a name, and which names are.

use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

use margay_control::resolver::TIMEOUT;
use margay_core::delay::QUESTION_TIMEOUT;
use margay_core::key::{VerifyingKey, from_hex};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use crate::fields::{self, some_port, zone};
use crate::listener::ServiceName;

const DNS_PORT: u16 = 53;
/// Servers of one section.
const SERVERS_MAX: usize = 8;
/// Letters of a resolver's name.
const NAME_MAX: usize = 32;
const TIMEOUT_MIN: Duration = Duration::from_millis(50);

/// What a resolver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A file of names and addresses.
    Static,
    /// A router's registry.
    Registry,
    /// Servers that know a zone.
    Dns,
    /// A DHT.
    Dht,
}

impl Kind {
    /// As the file has it.
    const fn word(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Registry => "registry",
            Self::Dns => "dns",
            Self::Dht => "dht",
        }
    }

    /// Fields that it needs.
    const fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Static => &["file"],
            Self::Registry => &["router"],
            Self::Dns => &["servers", "zone"],
            Self::Dht => &["bootstrap"],
        }
    }

    /// Fields that it may have besides.
    const fn takes(self) -> &'static [&'static str] {
        match self {
            Self::Static | Self::Registry => &[],
            Self::Dns => &["publish", "key_file"],
            Self::Dht => &["publish", "port", "keys"],
        }
    }
}

/// `[[resolver]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolverSection {
    /// What rules and lists call it.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Names, or prefixes (`sid:<hex>/bits`), whose first packets wait for it.
    #[serde(default)]
    pub names: Vec<ServiceName>,
    /// Of these rules: higher first, the next is asked when one has failed.
    #[serde(default = "default_priority")]
    pub priority: u32,
    /// How long a question may take.
    #[serde(default = "default_timeout", deserialize_with = "timeout")]
    pub timeout_ms: u64,
    /// `static`: the file.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub file: Option<PathBuf>,
    /// `registry`: HOST:PORT of a router that this host is registered with.
    #[serde(default, deserialize_with = "router")]
    pub router: Option<String>,
    /// `dns`: addresses of its servers, with a port or not.
    #[serde(default, deserialize_with = "servers")]
    pub servers: Vec<SocketAddr>,
    /// `dns`: the zone under which names are.
    #[serde(default, deserialize_with = "some_zone")]
    pub zone: Option<String>,
    /// `dns`: a file with the TSIG key by which the first server lets this host change the zone.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub key_file: Option<PathBuf>,
    /// `dht`: addresses of nodes by which it is joined.
    #[serde(default, deserialize_with = "nodes")]
    pub bootstrap: Vec<SocketAddrV4>,
    /// `dht`: the UDP port at which this host is a node, too.
    #[serde(default, deserialize_with = "some_port")]
    pub port: Option<u16>,
    /// `dht`: public keys of services, whose names need not be looked for.
    #[serde(default, deserialize_with = "keys")]
    pub keys: Vec<VerifyingKey>,
    /// `dns`, `dht`: names, or prefixes, that are written there as they are registered here.
    #[serde(default)]
    pub publish: Vec<ServiceName>,
}

impl ResolverSection {
    /// Fields that single kinds have, and whether this section has them.
    fn special(&self) -> [(&'static str, bool); 9] {
        [
            ("file", self.file.is_some()),
            ("router", self.router.is_some()),
            ("servers", !self.servers.is_empty()),
            ("zone", self.zone.is_some()),
            ("key_file", self.key_file.is_some()),
            ("bootstrap", !self.bootstrap.is_empty()),
            ("port", self.port.is_some()),
            ("keys", !self.keys.is_empty()),
            ("publish", !self.publish.is_empty()),
        ]
    }

    /// What is wrong with it as a whole, and what to do.
    pub fn check(&self) -> Result<(), (String, String)> {
        let word = self.kind.word();
        for (field, is_given) in self.special() {
            let (is_needed, is_taken) = (self.kind.needs().contains(&field), self.kind.takes().contains(&field));
            if is_needed && !is_given {
                let what = format!("the resolver `{}` is `{word}`, and has no `{field}`", self.name);
                return Err((what, format!("add `{field}`")));
            }
            if is_given && !is_needed && !is_taken {
                let what = format!("the resolver `{}` is `{word}`, which has no `{field}`", self.name);
                return Err((what, format!("remove `{field}`, or correct `kind`")));
            }
        }
        if self.kind == Kind::Dns && self.publish.is_empty() != self.key_file.is_none() {
            let what = format!("the resolver `{}` has only one of `publish` and `key_file`", self.name);
            let advice = "add the other: which names are written there, and the TSIG key that the server knows";
            return Err((what, advice.to_owned()));
        }
        if self.priority == u32::MAX {
            let what = format!("the resolver `{}` has the highest priority that there is", self.name);
            return Err((what, "what it answers needs a higher one; write a lower `priority`".to_owned()));
        }
        Ok(())
    }

    /// How long a question may take.
    pub const fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

const fn default_priority() -> u32 {
    100
}

fn default_timeout() -> u64 {
    u64::try_from(TIMEOUT.as_millis()).unwrap_or(u64::MAX)
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_good) {
        let text = format!("`{name}` is no name of a resolver: up to {NAME_MAX} of a to z, 0 to 9 and -");
        return Err(D::Error::custom(text));
    }
    Ok(name)
}

fn timeout<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let ms = u64::deserialize(from)?;
    let range = TIMEOUT_MIN.as_millis()..=QUESTION_TIMEOUT.as_millis();
    if !range.contains(&u128::from(ms)) {
        let text = format!("timeout_ms is {} to {}: packets wait meanwhile", range.start(), range.end());
        return Err(D::Error::custom(text));
    }
    Ok(ms)
}

fn servers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SocketAddr>, D::Error> {
    let words = Vec::<String>::deserialize(from)?;
    if words.len() > SERVERS_MAX {
        return Err(D::Error::custom(format!("{} servers: there are {SERVERS_MAX} at most", words.len())));
    }
    let address = |text: &String| {
        let with_port = |ip: IpAddr| SocketAddr::new(ip, DNS_PORT);
        text.parse::<IpAddr>().map(with_port).or_else(|_| text.parse::<SocketAddr>()).map_err(|_| {
            D::Error::custom(format!("`{text}` is no address of a server; write for example \"10.1.0.53\""))
        })
    };
    words.iter().map(address).collect()
}

fn nodes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SocketAddrV4>, D::Error> {
    let words = Vec::<String>::deserialize(from)?;
    if words.len() > SERVERS_MAX {
        return Err(D::Error::custom(format!("{} nodes: there are {SERVERS_MAX} at most", words.len())));
    }
    let address = |text: &String| {
        text.parse().map_err(|_| {
            let advice = "the DHT speaks IPv4 alone; write for example \"10.1.0.1:6881\"";
            D::Error::custom(format!("`{text}` is no IPv4 address with a port: {advice}"))
        })
    };
    words.iter().map(address).collect()
}

fn keys<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<VerifyingKey>, D::Error> {
    let words = Vec::<String>::deserialize(from)?;
    let key = |text: &String| {
        from_hex(text).map(VerifyingKey).map_err(|_| {
            D::Error::custom(format!("`{text}` is no public key; `margay id` shows those of this host's services"))
        })
    };
    words.iter().map(key).collect()
}

fn some_zone<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    zone(from).map(Some)
}

fn router<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    let is_place = text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if !is_place {
        let text =
            format!("`{text}` is no address with a port; write it as `margay status` has it: \"10.1.0.1:54324\"");
        return Err(D::Error::custom(text));
    }
    Ok(Some(text))
}
