//! Boxes whose programs name the boxes that a session goes through next: docs/book/chains.md.

use std::net::SocketAddr;

use margay_core::Tuple;
use margay_core::chain::AddRefused;
use margay_core::name::{Name, Prefix, ServiceId};
use margay_wire::ProgramTarget;
use nix::errno::Errno;
use tokio::task::block_in_place;

use super::message::{Kind, Reply, Request};
use super::request::{No, written};
use super::rights::{Caller, Rights};
use crate::agent::Agent;
use crate::agent::health::processes;
use crate::listener::Protocol;

/// Adds boxes behind the one of this host that a session has come to, if the program is that box's.
pub fn answer(agent: &Agent, caller: &Caller, request: &Request) -> Result<Reply, No> {
    let seen = tuple(request)?;
    let boxes = boxes(&request.text)?;
    let known = agent.core.0.with_sal(|sal, _| {
        let (flow, _) = sal.flow_of(&seen.reversed())?;
        let one = sal.flow(flow)?.chain?.box_here()?;
        Some((one, sal.chain_policy().name_of_box(&one).map(str::to_owned)))
    });
    let Some((service, name)) = known else { return Err(refused(AddRefused::Unknown, &boxes)) };
    let name = match name.and_then(|name| name.parse().ok()) {
        Some(name) => name,
        None => written(agent, &Prefix::from(service))?,
    };
    check_right(agent, caller, &name)?;
    let services: Vec<ServiceId> = boxes.iter().map(Name::service_id).collect();
    let added = agent.core.0.with_sal(|sal, _| sal.add_boxes(&seen, &services));
    let client = seen.source;
    added.map_err(|error| {
        tracing::info!(%client, %name, asked = request.text, why = %error, "a box names boxes that are not added");
        refused(error, &boxes)
    })?;
    tracing::debug!(%client, %name, next = request.text, program = caller.describe(), "a box names the next ones");
    Ok(Reply::done(Kind::Next))
}

/// The program is the name's: it belongs to what was started as the name's service or box, or its user may serve the
/// name.
fn check_right(agent: &Agent, caller: &Caller, name: &Name) -> Result<(), No> {
    check_speaker(&agent.connections.programs.rights.read().clone(), caller, name, |name| serves(agent, caller, name))
}

/// Whether the program of a caller serves a name.
pub(super) fn serves(agent: &Agent, caller: &Caller, name: &Name) -> bool {
    caller.process.is_some_and(|process| block_in_place(|| processes::serves(agent, name, process)))
}

/// Whether a program may speak for a name; without a right of its user only where it `serves` the name.
pub(super) fn check_speaker(
    rights: &Rights,
    caller: &Caller,
    name: &Name,
    serves: impl FnOnce(&Name) -> bool,
) -> Result<(), No> {
    let checked = rights.check(caller, &name.prefix(), name.written());
    checked.or_else(|text| if serves(name) { Ok(()) } else { Err((Errno::EACCES, text)) })
}

/// The five-tuple of the first packet as it comes to the box.
fn tuple(request: &Request) -> Result<Tuple, No> {
    let misuse = |text: &str| (Errno::EINVAL, text.to_owned());
    let protocol =
        Protocol::of_number(request.protocol).ok_or_else(|| misuse("sessions are of TCP (6) or UDP (17)"))?;
    let ProgramTarget(destination) =
        ProgramTarget::parse(&request.id.0).ok_or_else(|| misuse("what is reserved is zero"))?;
    let source = SocketAddr::new(request.address, request.port);
    if source.is_ipv4() != destination.is_ipv4() {
        return Err(misuse("the two addresses are of two families; give both as the session's first packet has them"));
    }
    Ok(Tuple { protocol: protocol.number(), source, destination })
}

fn boxes(text: &str) -> Result<Vec<Name>, No> {
    let misuse = |text: String| (Errno::EINVAL, text);
    let named = |word: &str| -> Result<Name, No> {
        let name: Name = word.parse().map_err(|error| misuse(format!("`{word}`: {error}")))?;
        if name.is_service() { Ok(name) } else { Err(misuse(format!("{name} is no service's name, as a box has it"))) }
    };
    let boxes: Vec<Name> = text.split_whitespace().map(named).collect::<Result<_, _>>()?;
    if boxes.is_empty() { Err(misuse("no box is named; write fw.shop, say".to_owned())) } else { Ok(boxes) }
}

fn refused(error: AddRefused, boxes: &[Name]) -> No {
    let (errno, about) = match error {
        AddRefused::Unknown => (Errno::ENOTCONN, None),
        AddRefused::Proxy => (Errno::EINVAL, None),
        AddRefused::Late => (Errno::EALREADY, None),
        AddRefused::Unnamed(at) => (Errno::EPERM, boxes.get(at)),
        AddRefused::Twice(at) => (Errno::EINVAL, boxes.get(at)),
        AddRefused::Many(_) => (Errno::E2BIG, None),
    };
    let text = match about {
        Some(name) => format!("{name} is not added: {error}"),
        None => error.to_string(),
    };
    (errno, text)
}

#[cfg(test)]
mod test {
    use margay_wire::ProgramRequestRepr;

    use super::*;

    fn request(protocol: u8, from: &str, to: &str, text: &str) -> Request {
        let from: SocketAddr = from.parse().expect("literal");
        let id = ProgramTarget(to.parse().expect("literal")).emit();
        let repr = ProgramRequestRepr {
            protocol,
            address: from.ip(),
            port: from.port(),
            id,
            ..ProgramRequestRepr::new(Kind::Next)
        };
        let bytes = [&repr.emit()[..], text.as_bytes()].concat();
        Request::parse(&bytes).expect("a request")
    }

    #[test]
    fn a_session_is_called_by_its_first_packet() {
        let read = tuple(&request(6, "10.0.0.7:40000", "198.18.0.9:443", "ids.shop")).expect("sound");
        assert_eq!(read.protocol, 6);
        assert_eq!(
            (read.source, read.destination),
            ("10.0.0.7:40000".parse().expect("literal"), "198.18.0.9:443".parse().expect("literal"))
        );
        for (protocol, from, to, why) in [
            (1, "10.0.0.7:40000", "198.18.0.9:443", "TCP (6) or UDP (17)"),
            (17, "10.0.0.7:40000", "[fd5a:4c00::1]:443", "two families"),
        ] {
            let (errno, text) = tuple(&request(protocol, from, to, "ids.shop")).expect_err("refused");
            assert!(errno == Errno::EINVAL && text.contains(why), "{text}");
        }
        let mut reserved = request(6, "10.0.0.7:40000", "198.18.0.9:443", "ids.shop");
        reserved.id.0[31] = 1;
        assert!(tuple(&reserved).is_err());
    }

    #[test]
    fn boxes_are_services_in_order() {
        let names = |text: &str| boxes(text).map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(names("IDS.shop  fw2.shop"), Ok(vec!["ids.shop".to_owned(), "fw2.shop".to_owned()]));
        for (text, why) in [(" ", "no box"), ("ids", "`ids`"), ("ids.shop fw.shop/key:one", "no service's name")] {
            let (errno, said) = names(text).expect_err("refused");
            assert!(errno == Errno::EINVAL && said.contains(why), "{said}");
        }
    }

    #[test]
    fn a_refusal_names_the_box_that_it_is_about() {
        let all = boxes("ids.shop fw2.shop").expect("names");
        let (errno, text) = refused(AddRefused::Unnamed(1), &all);
        assert!(errno == Errno::EPERM && text.starts_with("fw2.shop is not added: no chain"), "{text}");
        let (errno, text) = refused(AddRefused::Late, &all);
        assert!(errno == Errno::EALREADY && text.contains("margay chain insert"), "{text}");
    }
}
