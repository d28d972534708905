//! How a service is checked, as the configuration and orders say it.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use super::state::Bounds;
use crate::fields::{time, written, written_some_time, written_time};
use crate::listener::Protocol;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const TIMEOUT_MIN: Duration = Duration::from_millis(50);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// More checks in a row are a mistake.
const STREAK_MAX: u32 = 100;
/// Words of one command.
const WORDS_MAX: usize = 64;
/// Bytes of all its words, and of the path of a request.
const BYTES_MAX: usize = 4096;
/// Redirections are well: where they lead is not asked.
const STATUS_USUAL: StatusRange = StatusRange { least: 200, most: 399 };

/// `[service.health]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthSection {
    /// Open a connection to each listener, and close it.
    #[serde(default)]
    pub connect: bool,
    /// Instead: the path that each listener is asked for by `GET`, over HTTP/1.1 without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
    /// With `http`: statuses of an answer that is well, as `200` or `200-299`; `200-399` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<StatusRange>,
    /// Instead: a program, by its absolute path, and its arguments; it says by the exit status 0 that all is well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// From one check to the next: `1s` to `1h`.
    #[serde(default = "default_interval", deserialize_with = "interval", serialize_with = "written_time")]
    pub interval: Duration,
    /// A check that takes longer has failed: `50ms` to `1m`.
    #[serde(default = "default_timeout", deserialize_with = "timeout", serialize_with = "written_time")]
    pub timeout: Duration,
    /// So many checks in a row succeed before a sick service is well.
    #[serde(default = "default_rise", deserialize_with = "streak")]
    pub rise: u32,
    /// So many checks in a row fail before a service is sick.
    #[serde(default = "default_fall", deserialize_with = "streak")]
    pub fall: u32,
    /// How long the weight of a service that was sick takes to grow back, in ten steps: up to `1h`; at once unless
    /// given.
    #[serde(default, deserialize_with = "some_slow_start", serialize_with = "written_some_time")]
    pub slow_start: Option<Duration>,
}

/// `[service.load]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadSection {
    /// The pressure on the processors of the host, as the kernel has it of the program's cgroup (`cpu.pressure`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cpu: bool,
    /// Instead: a program, by its absolute path, and its arguments; it prints how much of the weight is to stay: 0 to
    /// 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// From one question to the next: `1s` to `1h`.
    #[serde(default = "default_load_interval", deserialize_with = "interval", serialize_with = "written_time")]
    pub interval: Duration,
    /// With `command`: an answer that takes longer is not waited for, and the last one holds: `50ms` to `1m`; `1s`
    /// unless given.
    #[serde(default, deserialize_with = "some_timeout", serialize_with = "written_some_time")]
    pub timeout: Option<Duration>,
}

/// What is done to find out whether a service is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe<'a> {
    /// A connection to each listener.
    Connect,
    /// A request to each listener.
    Http {
        /// What is asked for.
        path: &'a str,
        /// Answers that are well.
        status: StatusRange,
    },
    /// A program, and its arguments.
    Command(&'a [String]),
}

impl HealthSection {
    /// What is done. Of several, which [`check`](Self::check) does not let through, the first.
    pub fn probe(&self) -> Probe<'_> {
        match &self.http {
            Some(path) => Probe::Http { path, status: self.status.unwrap_or(STATUS_USUAL) },
            None if self.command.is_empty() => Probe::Connect,
            None => Probe::Command(&self.command),
        }
    }

    /// When a service becomes sick, and well again.
    pub fn bounds(&self) -> Bounds {
        Bounds { rise: self.rise, fall: self.fall, slow_start: self.slow_start.unwrap_or_default() }
    }

    /// What is wrong with it as a whole, and what to do. `protocol` is what the service is served over; `None`: TCP and
    /// UDP.
    ///
    /// # Errors
    ///
    /// It says nothing that could be done, or several things.
    pub fn check(&self, protocol: Option<Protocol>) -> Result<(), (String, String)> {
        let ways = [self.connect, self.http.is_some(), !self.command.is_empty()];
        let count = ways.into_iter().filter(|is_given| *is_given).count();
        if count != 1 {
            let what = format!("`health` says {count} ways to check a service; one is wanted");
            return Err((
                what,
                "write one of `connect = true`, `http = \"/path\"`, `command = [\"/path\"]`".to_owned(),
            ));
        }
        if self.status.is_some() && self.http.is_none() {
            let what = "`status` is about the answer to a request, and `health` makes none".to_owned();
            return Err((what, "remove `status`, or check with `http`".to_owned()));
        }
        if let Some(path) = &self.http {
            check_path(path)?;
        }
        if !self.command.is_empty() {
            return check_command(&self.command);
        }
        if protocol == Some(Protocol::Udp) {
            let what = "a service for datagrams alone cannot be connected to".to_owned();
            return Err((what, "check it with `command`".to_owned()));
        }
        Ok(())
    }
}

impl LoadSection {
    /// How long a command has for its answer.
    pub fn limit(&self) -> Duration {
        self.timeout.unwrap_or(default_timeout())
    }

    /// What is wrong with it as a whole, and what to do.
    ///
    /// # Errors
    ///
    /// It says no way to know the load, or two; or its command is none.
    pub fn check(&self) -> Result<(), (String, String)> {
        match (self.cpu, self.command.is_empty()) {
            (false, false) => check_command(&self.command),
            (false, true) => Err((
                "`load` says no way to find out how loaded a service is".to_owned(),
                "write `cpu = true`, or `command = [\"/path\"]`".to_owned(),
            )),
            (true, false) => Err((
                "`load` has `cpu` and a command, and one of them is wanted".to_owned(),
                "remove `cpu`, or let the command print what both say together".to_owned(),
            )),
            (true, true) if self.timeout.is_some() => Err((
                "`timeout` is about the answer of a command, and `load` has none".to_owned(),
                "remove `timeout`".to_owned(),
            )),
            (true, true) => Ok(()),
        }
    }
}

impl fmt::Display for HealthSection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.probe() {
            Probe::Connect => write!(f, "connect")?,
            Probe::Http { path, status } => write!(f, "GET {path}, {status} wanted")?,
            Probe::Command(words) => write!(f, "`{}`", words.join(" "))?,
        }
        write!(f, ", every {}", humantime::format_duration(self.interval))
    }
}

fn check_path(path: &str) -> Result<(), (String, String)> {
    let is_plain = path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if !path.starts_with('/') || !is_plain || path.len() > BYTES_MAX {
        let what = format!("`{path}` is no path of a request: it begins with /, and has no blanks and no #");
        return Err((what, "write for example \"/healthz\"".to_owned()));
    }
    Ok(())
}

fn check_command(words: &[String]) -> Result<(), (String, String)> {
    let advice = "write for example [\"/usr/local/bin/check-web\", \"--fast\"]".to_owned();
    let program = words.first().map(String::as_str).unwrap_or_default();
    if !Path::new(program).is_absolute() {
        return Err((format!("`{program}` is no absolute path of a program"), advice));
    }
    let bytes: usize = words.iter().map(String::len).sum();
    if words.len() > WORDS_MAX || bytes > BYTES_MAX || words.iter().any(|word| word.contains('\0')) {
        let what = format!("a command has up to {WORDS_MAX} words and {BYTES_MAX} bytes, and none of them is zero");
        return Err((what, "put it into a script".to_owned()));
    }
    Ok(())
}

/// Statuses of HTTP answers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StatusRange {
    /// The lowest.
    pub least: u16,
    /// The highest.
    pub most: u16,
}

impl StatusRange {
    /// Whether a status is among them.
    pub fn contains(self, status: u16) -> bool {
        (self.least..=self.most).contains(&status)
    }
}

impl FromStr for StatusRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const STATUSES: RangeInclusive<u16> = 100..=599;
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        match (least.parse::<u16>(), most.parse::<u16>()) {
            (Ok(least), Ok(most)) if least <= most && STATUSES.contains(&least) && STATUSES.contains(&most) => {
                Ok(Self { least, most })
            }
            _ => Err(format!("`{text}` is no range of HTTP statuses; write \"200-399\", or \"200\"")),
        }
    }
}

impl fmt::Display for StatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.least == self.most { write!(f, "{}", self.least) } else { write!(f, "{}-{}", self.least, self.most) }
    }
}

impl fmt::Debug for StatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for StatusRange {
    fn serialize<S: serde::Serializer>(&self, into: S) -> Result<S::Ok, S::Error> {
        written(self, into)
    }
}

impl<'de> Deserialize<'de> for StatusRange {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A time between checks.
///
/// # Errors
///
/// It is none; the message has the form.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    time(text, SECOND, HOUR)
}

/// A time that a check may take.
///
/// # Errors
///
/// It is none; the message has the form.
pub fn parse_timeout(text: &str) -> Result<Duration, String> {
    time(text, TIMEOUT_MIN, TIMEOUT_MAX)
}

/// A time in which the weight grows back.
///
/// # Errors
///
/// It is none; the message has the form.
pub fn parse_slow_start(text: &str) -> Result<Duration, String> {
    time(text, Duration::ZERO, HOUR)
}

/// A number of checks in a row.
///
/// # Errors
///
/// It is none, or too many.
pub fn parse_streak(text: &str) -> Result<u32, String> {
    let count = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    check_streak(count).map(|()| count)
}

fn check_streak(count: u32) -> Result<(), String> {
    if (1..=STREAK_MAX).contains(&count) {
        return Ok(());
    }
    Err(format!("{count} is no number of checks in a row; it is 1 to {STREAK_MAX}"))
}

fn interval<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    parse_interval(&String::deserialize(from)?).map_err(D::Error::custom)
}

fn timeout<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    parse_timeout(&String::deserialize(from)?).map_err(D::Error::custom)
}

fn some_timeout<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(from)?;
    text.map(|text| parse_timeout(&text)).transpose().map_err(D::Error::custom)
}

fn some_slow_start<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(from)?;
    text.map(|text| parse_slow_start(&text)).transpose().map_err(D::Error::custom)
}

fn streak<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let count = u32::deserialize(from)?;
    check_streak(count).map(|()| count).map_err(D::Error::custom)
}

/// Time between checks unless another is given.
pub const fn default_interval() -> Duration {
    Duration::from_secs(2)
}

/// Time between questions about load unless another is given.
pub const fn default_load_interval() -> Duration {
    Duration::from_secs(5)
}

/// Time for a check unless another is given.
pub const fn default_timeout() -> Duration {
    SECOND
}

/// Checks that succeed before a service is well, unless another number is given.
pub const fn default_rise() -> u32 {
    2
}

/// Checks that fail before a service is sick, unless another number is given.
pub const fn default_fall() -> u32 {
    3
}

#[cfg(test)]
mod test {
    use super::*;

    fn health(text: &str) -> HealthSection {
        toml::from_str(text).expect("read")
    }

    #[test]
    fn a_check_has_defaults_and_one_way() {
        let section = health("http = \"/healthz\"");
        assert_eq!(section.probe(), Probe::Http { path: "/healthz", status: STATUS_USUAL });
        assert_eq!((section.interval, section.timeout, section.rise, section.fall), (2 * SECOND, SECOND, 2, 3));
        assert_eq!(section.slow_start, None);
        assert_eq!(section.check(None), Ok(()));
        assert_eq!(section.to_string(), "GET /healthz, 200-399 wanted, every 2s");
        assert_eq!(health("connect = true").check(None), Ok(()));
        assert_eq!(health("command = [\"/usr/bin/true\"]").check(Some(Protocol::Udp)), Ok(()));
        for (text, why) in [
            ("", "0 ways"),
            ("connect = true\nhttp = \"/\"", "2 ways"),
            ("connect = true\nstatus = \"200\"", "makes none"),
            ("http = \"healthz\"", "no path of a request"),
            ("http = \"/a b\"", "no path of a request"),
            ("command = [\"true\"]", "no absolute path"),
        ] {
            let (what, _) = health(text).check(None).expect_err("refused");
            assert!(what.contains(why), "{text}: {what}");
        }
        assert!(health("connect = true").check(Some(Protocol::Udp)).expect_err("refused").0.contains("datagrams"));
    }

    #[test]
    fn values_out_of_bounds_are_refused() {
        for text in [
            "interval = \"500ms\"",
            "interval = 2",
            "timeout = \"2m\"",
            "rise = 0",
            "fall = 101",
            "slow_start = \"2h\"",
        ] {
            assert!(toml::from_str::<HealthSection>(&format!("connect = true\n{text}")).is_err(), "{text}");
        }
        for text in ["", "399-200", "20", "200-", "200-600", "ok"] {
            assert!(text.parse::<StatusRange>().is_err(), "{text}");
        }
        let one: StatusRange = "204".parse().expect("a status");
        assert!(one.contains(204) && !one.contains(200));
    }

    #[test]
    fn what_is_kept_is_read_again() {
        for text in ["http = \"/\"\nstatus = \"200-299\"\nslow_start = \"1m\"", "connect = true\ninterval = \"1m 30s\""]
        {
            let section = health(text);
            let kept = serde_json::to_string(&section).expect("plain data");
            assert_eq!(serde_json::from_str::<HealthSection>(&kept).expect("read"), section, "{kept}");
        }
        for text in
            ["command = [\"/a\", \"b\"]\ninterval = \"10s\"", "cpu = true", "command = [\"/a\"]\ntimeout = \"2s\""]
        {
            let load: LoadSection = toml::from_str(text).expect("read");
            let kept = serde_json::to_string(&load).expect("plain data");
            assert_eq!(serde_json::from_str::<LoadSection>(&kept).expect("read"), load, "{kept}");
        }
        // As earlier versions have kept it.
        let kept = r#"{"command":["/a"],"interval":"5s","timeout":"1s"}"#;
        assert_eq!(serde_json::from_str::<LoadSection>(kept).expect("read").limit(), SECOND);
    }

    #[test]
    fn load_is_known_in_one_way() {
        let load = |text: &str| toml::from_str::<LoadSection>(text).expect("read");
        for text in ["cpu = true", "cpu = true\ninterval = \"10s\"", "command = [\"/a\"]\ntimeout = \"2s\""] {
            assert_eq!(load(text).check(), Ok(()), "{text}");
        }
        for (text, why) in [
            ("", "no way to find out"),
            ("cpu = false", "no way to find out"),
            ("cpu = true\ncommand = [\"/a\"]", "one of them is wanted"),
            ("cpu = true\ntimeout = \"2s\"", "`load` has none"),
            ("command = [\"a\"]", "no absolute path"),
        ] {
            let (what, _) = load(text).check().expect_err("refused");
            assert!(what.contains(why), "{text}: {what}");
        }
    }
}
