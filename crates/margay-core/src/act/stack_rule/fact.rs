//! Facts: what conditions of stack rules are about.

use alloc::string::String;
use core::fmt;
use core::net::IpAddr;

use crate::types::name::{Prefix, ServiceId};

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// True or false.
    Bool,
    /// A number, whole or not.
    Number,
    /// A text.
    Text,
    /// An IP address.
    Address,
    /// A name of a service.
    Name,
}

impl Kind {
    /// With its article.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Bool => "a truth value",
            Self::Number => "a number",
            Self::Text => "a text",
            Self::Address => "an address",
            Self::Name => "a service name",
        }
    }
}

/// How often a fact may become another while its flow lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// Never, or with a move, of which the engine hears.
    Seldom,
    /// With every packet.
    Always,
    /// Every minute.
    Clock,
}

macro_rules! facts {
    ($($(#[doc = $doc:literal])* $fact:ident = $name:literal, $kind:ident, $pace:ident;)*) => {
        /// A fact about a flow, its path or the time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Fact { $($(#[doc = $doc])* $fact,)* }

        impl Fact {
            /// All of them, in the order of the book.
            pub const ALL: &'static [Self] = &[$(Self::$fact),*];

            /// As rules write it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$fact => $name,)* }
            }

            /// The kind of its values, in every rule the same.
            pub const fn kind(self) -> Kind {
                match self { $(Self::$fact => Kind::$kind,)* }
            }

            pub(super) const fn pace(self) -> Pace {
                match self { $(Self::$fact => Pace::$pace,)* }
            }
        }
    };
}

facts! {
    /// `tcp` or `udp`.
    Protocol = "flow.protocol", Text, Seldom;
    /// The name that the flow was made to.
    Service = "flow.service", Name, Seldom;
    /// What the client's socket is called, where it has a name.
    Source = "flow.source", Name, Seldom;
    /// `initiator` or `responder`.
    Role = "flow.role", Text, Seldom;
    /// Seconds since the flow began.
    AgeS = "flow.age_s", Number, Always;
    /// Bytes that the flow has carried, both ways.
    Bytes = "flow.bytes", Number, Always;
    /// Bytes in a second of late, both ways.
    BytesPerS = "flow.bytes_per_s", Number, Always;
    /// The file of the program at this end, with its path.
    Executable = "program.executable", Text, Seldom;
    /// What systemd calls it: `backup.service`.
    Unit = "program.unit", Text, Seldom;
    /// The user as whom it runs.
    User = "program.user", Text, Seldom;
    /// This host's address that the flow uses.
    Local = "path.local", Address, Seldom;
    /// The peer's.
    Remote = "path.remote", Address, Seldom;
    /// The network of this host's address: `10.1.0.0/16`.
    Prefix = "path.prefix", Text, Seldom;
    /// The interface that has this host's address.
    Interface = "path.interface", Text, Seldom;
    /// Whether that interface is a radio's.
    IsWireless = "path.wireless", Bool, Seldom;
    /// Milliseconds of the last round trip of signalling.
    RttMs = "path.rtt_ms", Number, Always;
    /// Share of a flow's datagrams that is lost, of the way that loses more.
    Loss = "path.loss", Number, Always;
    /// Milliseconds by which the time varies that a flow's datagrams take, of the way that varies more.
    JitterMs = "path.jitter_ms", Number, Always;
    /// Share of a flow's datagrams that come behind a later one, of the way on which more do.
    Reordering = "path.reordering", Number, Always;
    /// Bytes of the largest IP packet that both ends' links take.
    Mtu = "path.mtu", Number, Seldom;
    /// Whether an address translator is between the hosts.
    IsTranslated = "path.nat", Bool, Always;
    /// 0 to 23, in UTC.
    Hour = "time.hour", Number, Clock;
    /// 0 to 59.
    Minute = "time.minute", Number, Clock;
    /// 1 (Monday) to 7 (Sunday), in UTC.
    Weekday = "time.weekday", Number, Clock;
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A value that stands in a rule.
#[derive(Clone, Debug, PartialEq)]
pub enum Constant {
    /// True or false.
    Bool(bool),
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
    /// An address of this host, or of the peer.
    Address(IpAddr),
    /// A name, or all names under a prefix.
    Name(Prefix),
}

/// What a fact is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// True or false.
    Bool(bool),
    /// A number.
    Number(f64),
    /// A text.
    Text(&'a str),
    /// An address of this host, or of the peer.
    Address(IpAddr),
    /// A flow's name.
    Name(ServiceId),
    /// A name of a rule: every name under it.
    Under(Prefix),
}

impl Constant {
    /// The kind, which conditions are typed by.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Bool(_) => Kind::Bool,
            Self::Number(_) => Kind::Number,
            Self::Text(_) => Kind::Text,
            Self::Address(_) => Kind::Address,
            Self::Name(_) => Kind::Name,
        }
    }

    pub(super) fn value(&self) -> Value<'_> {
        match self {
            Self::Bool(is) => Value::Bool(*is),
            Self::Number(number) => Value::Number(*number),
            Self::Text(text) => Value::Text(text),
            Self::Address(address) => Value::Address(*address),
            Self::Name(name) => Value::Under(*name),
        }
    }
}

impl Value<'_> {
    /// The kind, which conditions are typed by.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Bool(_) => Kind::Bool,
            Self::Number(_) => Kind::Number,
            Self::Text(_) => Kind::Text,
            Self::Address(_) => Kind::Address,
            Self::Name(_) | Self::Under(_) => Kind::Name,
        }
    }

    /// Whether two values are the same; a name of a rule is the same as each name under it.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(name), Self::Under(prefix)) | (Self::Under(prefix), Self::Name(name)) => prefix.contains(name),
            (one, other) => one == other,
        }
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(is) => write!(f, "{is}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Name(name) => write!(f, "{name}"),
            Self::Under(prefix) => write!(f, "{prefix}"),
        }
    }
}

/// What conditions are evaluated with.
pub trait Facts {
    /// A fact, where it is known.
    fn fact(&self, fact: Fact) -> Option<Value<'_>>;

    /// A fact from outside, where it is set.
    fn outside(&self, name: &str) -> Option<Value<'_>>;
}
