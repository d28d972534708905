//! How the values of the configuration are read, each with the form that is wanted where it has another one.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use margay_control::token::{JoinToken, check_address};
use margay_core::give_up::{GIVE_UP_AFTER_MIN, GiveUpAfter};
use margay_core::quiet::{QUIET_MS_MAX, QUIET_MS_MIN};
use margay_core::{RangeError, RangeV4, RangeV6, Ranges};
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};

use crate::host::card::is_plain;
use crate::{allow, listener};

/// For ever, in the place of a time.
const NEVER: &str = "never";
/// A longer time is a mistake.
const GIVE_UP_AFTER_MAX: Duration = Duration::from_secs(86_400);
/// As long as a kernel's host name may be in bytes, several times.
const HOST_NAME_MAX: usize = 255;

/// A port.
pub fn port<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    let number = i64::deserialize(from)?;
    let port = u16::try_from(number).ok().filter(|port| *port != 0);
    port.ok_or_else(|| D::Error::custom(format!("{number} is no port; it is 1 to 65535")))
}

/// Names of interfaces.
pub fn interface_names<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<String>>, D::Error> {
    let names = Vec::<String>::deserialize(from)?;
    match names.iter().find(|name| !is_plain(name)) {
        Some(name) => {
            Err(D::Error::custom(format!("`{name}` is no name of an interface; write for example \"docker0\"")))
        }
        None => Ok(Some(names)),
    }
}

/// A port that may be left out.
pub fn some_port<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    port(from).map(Some)
}

/// A share among instances.
pub fn weight<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(from)?;
    let weight = u32::try_from(number).ok().filter(|weight| *weight <= listener::WEIGHT_MAX);
    weight.ok_or_else(|| {
        let most = listener::WEIGHT_MAX;
        D::Error::custom(format!("{number} is no weight; it is 0 to {most}, and 0 takes no new connections"))
    })
}

/// A number of partitions; gives the bits that number them.
pub fn partitions<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    listener::partition_bits(u32::deserialize(from)?).map_err(D::Error::custom)
}

/// A path that means the same wherever the agent is started.
pub fn absolute<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    let path = PathBuf::deserialize(from)?;
    if !path.is_absolute() {
        let text = format!("`{}` is no absolute path; write it from / on", path.display());
        return Err(D::Error::custom(text));
    }
    Ok(path)
}

/// The same, where it may be left out.
pub fn some_absolute<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    absolute(from).map(Some)
}

/// An address with a port, as it is written in the file and on the command line.
///
/// # Errors
///
/// It is none; the message has the form.
pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let parsed = text.parse::<SocketAddr>();
    let is_address = parsed.is_ok() || text.parse::<IpAddr>().is_ok();
    parsed.ok().filter(|address| address.port() != 0).ok_or_else(|| {
        let what = if is_address { "has no port" } else { "is no address with a port" };
        format!("`{text}` {what}; write for example \"10.0.0.1:8080\" or \"[fd00::1]:8080\"; names are not looked up")
    })
}

/// An address with a port.
pub fn address_and_port<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    socket_address(&String::deserialize(from)?).map_err(D::Error::custom)
}

/// The same, where it may be left out.
pub fn some_address_and_port<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    address_and_port(from).map(Some)
}

/// What lists call a host.
pub fn some_host_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let name = String::deserialize(from)?;
    if name.is_empty() || name.len() > HOST_NAME_MAX || name.chars().any(|one| one.is_whitespace() || one.is_control())
    {
        let text = format!("`{name}` is no name of a host: it has up to {HOST_NAME_MAX} letters, and no blanks");
        return Err(D::Error::custom(text));
    }
    Ok(Some(name))
}

/// A join token. The message does not show it.
pub fn some_token<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    text.trim().parse::<JoinToken>().map_err(D::Error::custom)?;
    Ok(Some(text))
}

/// Where others find something: a name or an address, with a port.
pub fn some_place<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    check_address(&text).map_err(D::Error::custom)?;
    Ok(Some(text))
}

/// An address without a port.
pub fn address<'de, D: Deserializer<'de>>(from: D) -> Result<IpAddr, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(|_| {
        let what = if text.parse::<SocketAddr>().is_ok() { "has a port" } else { "is no address" };
        D::Error::custom(format!("`{text}` {what}; write for example \"10.0.0.1\" or \"fd00::1\""))
    })
}

/// The same, where it may be left out.
pub fn some_address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<IpAddr>, D::Error> {
    address(from).map(Some)
}

/// A range of virtual addresses; `example` is one.
fn range<'de, D: Deserializer<'de>, R>(from: D, wanted: &str, example: &R) -> Result<R, D::Error>
where
    R: FromStr<Err = RangeError> + fmt::Display,
{
    let text = String::deserialize(from)?;
    text.parse().map_err(|error| {
        D::Error::custom(format!(
            "`{text}` {error}; write {wanted}, of which this host uses no address, as \"{example}\""
        ))
    })
}

/// Virtual IPv4 addresses.
pub fn range_v4<'de, D: Deserializer<'de>>(from: D) -> Result<RangeV4, D::Error> {
    range(from, "a /15 of 10.0.0.0/8, 172.16.0.0/12, 100.64.0.0/10 or 198.18.0.0/15", &Ranges::USUAL.v4)
}

/// Virtual IPv6 addresses.
pub fn range_v6<'de, D: Deserializer<'de>>(from: D) -> Result<RangeV6, D::Error> {
    range(from, "a /32 of fc00::/7", &Ranges::USUAL.v6)
}

/// How long a silent peer is waited for, as people write it: a time, or `never`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Patience(pub GiveUpAfter);

impl FromStr for Patience {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == NEVER {
            return Ok(Self(GiveUpAfter(None)));
        }
        let parsed = humantime::parse_duration(text);
        let limit = parsed.ok().filter(|limit| (GIVE_UP_AFTER_MIN..=GIVE_UP_AFTER_MAX).contains(limit));
        let limit = limit.ok_or_else(|| {
            let least = humantime::format_duration(GIVE_UP_AFTER_MIN);
            format!("`{text}` is not {NEVER}, and no time from {least} to a day; write \"30s\"")
        })?;
        Ok(Self(GiveUpAfter(Some(limit))))
    }
}

impl fmt::Display for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.0 {
            Some(limit) => write!(f, "{}", humantime::format_duration(limit)),
            None => f.write_str(NEVER),
        }
    }
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl<'de> Deserialize<'de> for Patience {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A time that an API client wants silent hosts to be waited for, in milliseconds; all ones: for ever.
///
/// # Errors
///
/// Shorter than half a second, or longer than a day.
pub fn give_up_after_ms(ms: u32) -> Result<u32, String> {
    let limit = GiveUpAfter::of_ms(ms);
    let is_in_bounds = limit.ms() == ms && limit.0.is_none_or(|limit| limit <= GIVE_UP_AFTER_MAX);
    if is_in_bounds { Ok(ms) } else { Err(format!("{ms} ms is no time from 500 ms to a day; 4294967295 means never")) }
}

/// How long a connection must have carried nothing for a drain to end it, in milliseconds.
///
/// # Errors
///
/// Out of bounds.
pub fn quiet_ms(ms: u32) -> Result<u32, String> {
    let is_in_bounds = (QUIET_MS_MIN..=QUIET_MS_MAX).contains(&ms);
    if is_in_bounds { Ok(ms) } else { Err(format!("{ms} ms is no time from {QUIET_MS_MIN} to {QUIET_MS_MAX} ms")) }
}

/// The same in the configuration.
pub fn some_quiet_ms<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    u32::deserialize(from).and_then(|ms| quiet_ms(ms).map_err(D::Error::custom)).map(Some)
}

/// What the command line has of it.
///
/// # Errors
///
/// No number, or out of bounds.
pub fn quiet_ms_word(text: &str) -> Result<u32, String> {
    text.parse::<u32>().map_err(|_| format!("`{text}` is no number of milliseconds")).and_then(quiet_ms)
}

/// A time between two bounds, as people write it.
///
/// # Errors
///
/// It is none; the message has the form and the bounds.
pub fn time(text: &str, least: Duration, most: Duration) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(text).ok();
    parsed.filter(|time| (least..=most).contains(time)).ok_or_else(|| {
        let least = humantime::format_duration(least);
        let most = humantime::format_duration(most);
        format!("`{text}` is no time from {least} to {most}; write for example \"2s\"")
    })
}

/// A time as people write it.
pub fn written_time<S: Serializer>(value: &Duration, into: S) -> Result<S::Ok, S::Error> {
    into.collect_str(&humantime::format_duration(*value))
}

/// The same, where it may be left out.
pub fn written_some_time<S: Serializer>(value: &Option<Duration>, into: S) -> Result<S::Ok, S::Error> {
    value.map(|time| humantime::format_duration(time).to_string()).serialize(into)
}

/// A value as people write it.
pub fn written<S: Serializer>(value: &impl fmt::Display, into: S) -> Result<S::Ok, S::Error> {
    into.collect_str(value)
}

/// Who may connect.
pub fn allow_list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let words = Vec::<String>::deserialize(from)?;
    allow::parse(&words).map_err(D::Error::custom)?;
    Ok(words)
}

/// A DNS zone.
pub fn zone<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let zone = String::deserialize(from)?.trim_end_matches('.').to_ascii_lowercase();
    let is_label = |label: &str| {
        !label.is_empty() && label.len() <= 63 && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    if zone.len() > 128 || !zone.split('.').all(is_label) {
        return Err(D::Error::custom(format!("`{zone}` is no DNS zone; write for example \"sal.internal\"")));
    }
    Ok(zone)
}
