//! The facts of one flow, as a condition sees them.

use core::net::{IpAddr, SocketAddr};

use super::fact::{Fact, Facts, Pace, Value};
use super::program::Program;
use super::{Carried, LocalPlace};
use crate::association::Association;
use crate::association::location::Pair;
use crate::leg::timing::Timing;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::types::name::ServiceId;
use crate::types::role::Role;

const UDP: u8 = 17;
/// What an IP packet has before the payload of UDP, in bytes.
const HEADS_V4: u16 = 28;
const HEADS_V6: u16 = 48;

/// A flow, or one that is about to begin; what is not known is left out.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub sal: &'a Sal,
    pub service: ServiceId,
    pub protocol: u8,
    pub role: Role,
    pub source: Option<ServiceId>,
    pub flow: Option<&'a Flow>,
    pub local: Option<IpAddr>,
    pub remote: Option<SocketAddr>,
    pub carried: Option<Carried>,
}

impl<'a> Seen<'a> {
    /// A flow as it goes by a pair of addresses.
    pub fn at(sal: &'a Sal, flow: &'a Flow, pair: Pair, carried: Option<Carried>) -> Self {
        Self {
            sal,
            service: flow.service,
            protocol: flow.app.protocol,
            role: flow.role,
            source: flow.source.as_deref().copied(),
            flow: Some(flow),
            local: pair.local.or_else(|| sal.routes.get(&pair.remote.ip()).copied().flatten()),
            remote: Some(pair.remote),
            carried,
        }
    }

    /// A flow, for what every packet changes alone: where it goes is left out, since to look for that costs more.
    pub fn of_packets(sal: &'a Sal, flow: &'a Flow, carried: Option<Carried>) -> Self {
        Self {
            sal,
            service: flow.service,
            protocol: flow.app.protocol,
            role: flow.role,
            source: None,
            flow: Some(flow),
            local: None,
            remote: None,
            carried,
        }
    }

    fn place(&self) -> Option<&'a LocalPlace> {
        let local = self.local?;
        self.sal.stack_rules.places.iter().find(|place| place.address == local)
    }

    fn program(&self) -> Option<&'a Program> {
        self.sal.stack_rules.programs.of(self.flow?.id)
    }

    fn association(&self) -> Option<&'a Association> {
        self.sal.associations.get(self.flow?.association)
    }

    fn timing(&self) -> Option<Timing> {
        Some(self.sal.losses.timing_of(self.flow?.id).worst())
    }

    fn mtu(&self) -> Option<f64> {
        let heads = if self.remote?.is_ipv4() { HEADS_V4 } else { HEADS_V6 };
        Some(f64::from(self.association()?.datagram_max.saturating_add(heads)))
    }

    fn clock(&self, fact: Fact) -> f64 {
        let minutes = self.sal.unix_s() / 60;
        let number = match fact {
            Fact::Minute => minutes % 60,
            Fact::Hour => minutes / 60 % 24,
            // 1970 began on a Thursday.
            _ => (minutes / 1440 + 3) % 7 + 1,
        };
        u32::try_from(number).map_or(0.0, f64::from)
    }
}

/// A flow without what changes with every packet.
pub(super) struct Steady<'a>(pub Seen<'a>);

impl Facts for Steady<'_> {
    fn fact(&self, fact: Fact) -> Option<Value<'_>> {
        if fact.pace() == Pace::Always { None } else { self.0.fact(fact) }
    }

    fn outside(&self, name: &str) -> Option<Value<'_>> {
        self.0.outside(name)
    }
}

impl Facts for Seen<'_> {
    fn fact(&self, fact: Fact) -> Option<Value<'_>> {
        Some(match fact {
            Fact::Protocol => Value::Text(if self.protocol == UDP { "udp" } else { "tcp" }),
            Fact::Service => Value::Name(self.service),
            Fact::Source => Value::Name(self.source?),
            Fact::Role => Value::Text(if self.role == Role::Initiator { "initiator" } else { "responder" }),
            Fact::AgeS => Value::Number(self.flow.map_or(0.0, |flow| self.sal.now.since(flow.since).as_secs_f64())),
            Fact::Executable => Value::Text(self.program()?.executable.as_deref()?),
            Fact::Unit => Value::Text(self.program()?.unit.as_deref()?),
            Fact::User => Value::Text(self.program()?.user.as_deref()?),
            // Exact up to 2^53, which is more than any flow carries.
            Fact::Bytes => Value::Number(self.carried?.bytes as f64),
            Fact::BytesPerS => Value::Number(self.carried?.bytes_per_s),
            Fact::Local => Value::Address(self.local?),
            Fact::Remote => Value::Address(self.remote?.ip()),
            Fact::Prefix => Value::Text(&self.place()?.prefix),
            Fact::Interface => Value::Text(&self.place()?.interface),
            Fact::IsWireless => Value::Bool(self.place()?.is_wireless),
            Fact::RttMs => Value::Number(self.association()?.rtt?.as_secs_f64() * 1000.0),
            Fact::Loss => Value::Number(f64::from(self.sal.losses.of(self.flow?.id).worst_ppm()?) / 1e6),
            Fact::JitterMs => Value::Number(f64::from(self.timing()?.jitter_us?) / 1e3),
            Fact::Reordering => Value::Number(f64::from(self.timing()?.reordered_ppm?) / 1e6),
            Fact::Mtu => Value::Number(self.mtu()?),
            Fact::IsTranslated => Value::Bool(self.sal.locations.is_translated_between(
                &self.sal.associations,
                &self.sal.config,
                self.association()?.host,
            )),
            Fact::Hour | Fact::Minute | Fact::Weekday => Value::Number(self.clock(fact)),
        })
    }

    fn outside(&self, name: &str) -> Option<Value<'_>> {
        let fact = self.sal.stack_rules.outside.get(name).filter(|fact| fact.until > self.sal.now)?;
        Some(fact.value.value())
    }
}
