//! Sessions through boxes that say nothing for long, in virtual time: what is left of them at the hosts on the way, and
//! who learns that a box's agent is no more.

mod line;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use line::{Line, line};
use margay_core::{Event, RemoveReason};
use margay_sim::network::TimeOuts;
use margay_sim::stream::{Plan, State};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Weather};

const SECOND: Duration = Duration::from_secs(1);
/// Longer than translators and agents remember what says nothing.
const HOURS: Duration = Duration::from_secs(4 * 3600);
/// Says a little at first, and then nothing.
const QUIET: Plan = Plan { write: 300, every: Duration::from_millis(100), writes: 10, closes: false };
const TALK: &str = "talk.shop";

fn flows(line: &mut Line) -> Vec<usize> {
    let hosts = line.all();
    hosts.into_iter().map(|host| line.world.host(host).sal.flow_count()).collect()
}

/// One end says something, and the other hears it.
fn speak(line: &mut Line, is_client: bool) {
    let ends = [line.client, line.server];
    let [speaker, hearer] = if is_client { ends } else { [ends[1], ends[0]] };
    let now = line.world.now;
    let before = line.world.host(hearer).streams[0].received;
    line.world.host(speaker).streams[0].follow(now, Plan { writes: 1, every: Duration::from_millis(1), ..QUIET });
    line.world.run_for(6 * SECOND);
    let stream = &line.world.host(hearer).streams[0];
    assert!(stream.state == State::Open && !stream.was_reset, "{:?}", stream.state);
    assert_eq!(stream.received, before + 300);
}

/// Agents say nothing of it, a translator on the way forgets it, and whoever speaks first is heard.
#[test]
fn a_session_that_is_idle_for_hours_keeps_its_halves_and_goes_on() {
    for (is_direct, is_translated, is_client) in [(true, false, true), (false, true, false)] {
        let mut line = line(31, Weather::FAIR, 2);
        if is_translated {
            let client = line.client;
            let address = line.world.host(client).address;
            line.world.network.put_behind_nat(address, [192, 0, 2, 7].into());
            line.world.network.time_outs = TimeOuts { datagrams: 30 * SECOND, direct: 300 * SECOND };
            let router = line.router;
            line.world.register_again(router, client);
        }
        line.set_direct(is_direct);
        line.talk(QUIET);
        line.world.run_for(5 * SECOND);
        let before = flows(&mut line);
        assert_eq!(before, [0, 1, 1, 2, 2], "the ends, and two halves at each box");
        line.world.run_for(HOURS);
        assert_eq!(flows(&mut line), before);
        speak(&mut line, is_client);
        speak(&mut line, !is_client);
    }
}

#[test]
fn an_idle_time_out_of_one_end_is_told_along_the_chain() {
    let mut line = line(32, Weather::FAIR, 2);
    assert_eq!(line.ask_by_datagrams(1), 1);
    assert_eq!(flows(&mut line), [0, 1, 1, 2, 2]);
    line.world.run_for(100 * SECOND);
    // The server's host does not hear of this one: its own time is over sooner.
    let [last, server] = [line.boxes[1], line.server].map(|host| line.world.host(host).address);
    line.world.network.cut(last, server);
    let ranges = line.world.host(line.client).ranges();
    let here = SocketAddr::new(ranges.host_v6().into(), 4000);
    let there = SocketAddr::new(ranges.virtual_v6(&service(TALK)).into(), 53);
    let client = line.client;
    line.world.say(client, &Datagram::new(here, there, &[7]));
    line.world.run_for(5 * SECOND);
    line.world.network.heal();
    line.world.run_for(95 * SECOND);
    assert_eq!(flows(&mut line), [0; 5], "with the first of both ends");
    // What is said then begins a session anew.
    assert_eq!(line.ask_by_datagrams(1), 2);
}

/// The agents of these hosts hear from their routers that a host is not listed any more.
fn tell(line: &mut Line, told: &[HostId], absent: HostId) {
    let now = line.world.now;
    let absent = BTreeSet::from([line.world.host(absent).sal.host()]);
    for host in told {
        line.world.host(*host).sal.set_absent(now, &absent);
        line.world.touch(*host);
    }
}

/// Nobody says a word of data, and both programs learn of it.
#[test]
fn a_box_whose_host_is_gone_ends_an_idle_session_at_both_ends() {
    for at in 0..3 {
        let mut line = line(33, Weather::FAIR, 3);
        let stream = line.talk(QUIET);
        line.world.run_for(60 * SECOND);
        let gone = line.boxes[at];
        let address = line.world.host(gone).address;
        for host in line.all().into_iter().filter(|host| *host != gone) {
            let other = line.world.host(host).address;
            line.world.network.cut(address, other);
        }
        // Who leans on it hears so of its router: by whose flows that is known.
        let name = service(&format!("box-{at}.shop"));
        let id = line.world.host(gone).sal.host();
        let leans = |host: &HostId, line: &mut Line| {
            line.world.host(*host).sal.initiated().get(&id).is_some_and(|names| names.contains(&name))
        };
        let hosts: Vec<HostId> = line.all().into_iter().filter(|host| *host != gone).collect();
        let told: Vec<HostId> = hosts.into_iter().filter(|host| leans(host, &mut line)).collect();
        assert_eq!(told.len(), 2, "box {at}: those on either side");
        tell(&mut line, &told, gone);
        line.world.run_for(28 * SECOND);
        assert!(!line.served().was_reset, "box {at}: it may come back");
        line.world.run_for(10 * SECOND);
        let client = line.client;
        assert!(line.world.host(client).streams[stream].was_reset, "box {at}: the client's program");
        assert!(line.served().was_reset, "box {at}: the server's program");
        line.world.run_for(70 * SECOND);
        for host in line.all().into_iter().filter(|host| *host != gone) {
            assert_eq!(line.world.host(host).sal.flow_count(), 0, "box {at}: {host:?}");
        }
        for host in told {
            let is_it = |event: &Event| matches!(event, Event::FlowClosed { reason: RemoveReason::GivenUp, .. });
            assert!(line.world.host(host).events.iter().any(is_it), "box {at}: {host:?} has given it up");
        }
    }
}

/// Whose agent is back before it is given up has lost nothing.
#[test]
fn a_box_whose_agent_is_back_in_time_has_its_halves() {
    let mut line = line(34, Weather::FAIR, 2);
    line.talk(QUIET);
    line.world.run_for(60 * SECOND);
    let gone = line.boxes[0];
    line.world.kill_agent(gone);
    let [client, next] = [line.client, line.boxes[1]];
    tell(&mut line, &[client, next], gone);
    line.world.run_for(20 * SECOND);
    line.world.start_agent(gone);
    let router = line.router;
    line.world.register_again(router, gone);
    line.world.run_for(60 * SECOND);
    assert_eq!(flows(&mut line), [0, 1, 1, 2, 2]);
    speak(&mut line, true);
    speak(&mut line, false);
}
