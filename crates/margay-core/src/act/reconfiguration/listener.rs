//! Whose allow list decides where a session is to go another way: that of the listener which has the session. A SYN
//! names a port too, and its sender chooses that one.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use margay_wire::{BoxFlags, BoxRepr, Message, ReconfigurationStep};

use crate::act::chain::is_for;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::table::{Action, Allow, Demux, HAND_OVER_PORT, SERVICE_PORT};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;

impl Sal {
    /// Of a SYN by which a session that ends at this host is to go another way, and that has come to that end: the port
    /// of the service that the session is for, and its listener. `None`: the SYN is none such.
    pub(crate) fn listener_of_new_path(
        &self,
        message: &Message<'_>,
        asked: &ServiceId,
    ) -> Option<Result<(u16, Demux), DropReason>> {
        let begin = message.reconfiguration()?;
        let chain = message.chain();
        let ahead = chain.as_ref().and_then(|chain| chain.boxes().find(BoxRepr::is_ahead));
        let comes_to_end = ahead.is_none_or(|one| one.flags.contains(BoxFlags::ENDS));
        let is_here = begin.step == ReconfigurationStep::Begin && HostId(begin.host) == self.config.host_id();
        if !is_here || !comes_to_end {
            return None;
        }
        let is_alone = message.grant().is_none() && message.handover().is_none();
        if !is_alone || !is_for(chain.as_ref(), asked, ahead.is_some()) {
            return Some(Err(DropReason::Unexpected));
        }
        let flow = self.reconfigurations.followed(&self.flows, message.session()?.session);
        let listener = flow.and_then(|flow| listener_of(self, flow)).unwrap_or_else(nobodys);
        Some(Ok((flow.map_or(0, |flow| flow.port), listener)))
    }
}

/// Where a new session to the name and port of this one would be taken now. `None`: nowhere, any more.
fn listener_of(sal: &Sal, flow: &Flow) -> Option<Demux> {
    // Agents hand connections over there, from anywhere; no program's session is let in by that.
    let port = Some(flow.port).filter(|port| *port != HAND_OVER_PORT)?;
    let is_its = |demux: &Demux| {
        let is_of_protocol = demux.protocol.is_none_or(|protocol| protocol == flow.app.protocol);
        // Who asked for no port in particular was taken by one of several listeners.
        let is_of_any = port != SERVICE_PORT || demux.listener.port() == flow.app.source.port();
        is_of_protocol && is_of_any && demux.answers(port)
    };
    sal.rules_covering(flow.asked()).find_map(|(_, _, rule)| {
        let listener = match &rule.action {
            Action::Demux(demux) => Some(demux.clone()),
            Action::Box(middlebox) => middlebox.listener(),
            _ => None,
        };
        listener.filter(is_its)
    })
}

/// Lets nobody in.
fn nobodys() -> Demux {
    Demux {
        listener: SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: None,
        allow: Allow::List(Vec::new()),
    }
}
