//! Random worlds from seeds. A failure names its seed; `MARGAY_SEED=n cargo test -p margay-sim one_seed` replays it.
//! `MARGAY_SEEDS` sets how many are tried (`make test-long` tries more).

use std::net::SocketAddr;
use std::time::Duration;

use margay_sim::check::{all_ended_within, ends_agree, no_request_met, nothing_left_over};
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::PORT;

const QUIET: Duration = Duration::from_secs(90);
const PATIENCE: Duration = Duration::from_secs(25);

fn number_from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// One world: up to five instances of two services, up to four client hosts, foul weather, cuts, a caught-and-replayed
/// stream of everything that was sent, and forgotten caches. Gives a fingerprint of all that was sent.
fn run(seed: u64) -> Result<u64, String> {
    let mut world = World::new(seed, Weather::FAIR);
    let mut pick = |world: &mut World, below: u32| world.random() % below;
    let router = world.add_host(true);
    let instances: Vec<HostId> = (0..1 + pick(&mut world, 4)).map(|_| world.add_host(false)).collect();
    let clients: Vec<HostId> = (0..1 + pick(&mut world, 4)).map(|_| world.add_host(false)).collect();
    for host in instances.iter().chain(&clients) {
        world.register(router, *host);
    }
    for (number, host) in instances.iter().enumerate() {
        let name = if number % 2 == 0 { "web.shop" } else { "mail.shop" };
        world.publish(router, *host, name, number as u32);
    }
    if pick(&mut world, 2) == 0 {
        let private = world.host(clients[0]).address;
        world.network.put_behind_nat(private, [192, 0, 2, 7].into());
    }
    world.network.weather = Weather {
        delay_max: Duration::from_millis(1 + u64::from(pick(&mut world, 60))),
        loss_per_mille: pick(&mut world, 300),
        duplicate_per_mille: pick(&mut world, 300),
        ..Weather::FAIR
    };
    world.recording = Some(Vec::new());
    for _ in 0..40 {
        match pick(&mut world, 10) {
            0 => cut_or_heal(&mut world, &mut pick),
            1 => replay(&mut world, &mut pick),
            2 => {
                let hosts = world.hosts.len() as u32;
                let host = pick(&mut world, hosts) as usize;
                world.hosts[host].cache.clear();
            }
            _ => {
                let all: Vec<HostId> = clients.iter().chain(&instances).copied().collect();
                let host = all[pick(&mut world, all.len() as u32) as usize];
                let name = ["web.shop", "mail.shop", "none.shop"][pick(&mut world, 3) as usize];
                world.connect(host, name);
            }
        }
        let pause = pick(&mut world, 400).into();
        world.run_for(Duration::from_millis(pause));
        ends_agree(&world)?;
    }
    world.network.heal();
    world.network.weather = Weather::FAIR;
    world.run_for(QUIET);
    all_ended_within(&world, PATIENCE)?;
    ends_agree(&world)?;
    no_request_met(&world)?;
    nothing_left_over(&world)?;
    liveness(&mut world, &clients)?;
    let sent = world.recording.take().unwrap_or_default();
    Ok(fingerprint(&sent))
}

fn cut_or_heal(world: &mut World, pick: &mut impl FnMut(&mut World, u32) -> u32) {
    if pick(world, 2) == 0 {
        world.network.heal();
        return;
    }
    let hosts = world.hosts.len() as u32;
    let (a, b) = (pick(world, hosts) as usize, pick(world, hosts) as usize);
    let (a, b) = (world.hosts[a].address, world.hosts[b].address);
    world.network.cut(a, b);
}

/// One who saw earlier packets sends some of them again, from where they came and from elsewhere.
fn replay(world: &mut World, pick: &mut impl FnMut(&mut World, u32) -> u32) {
    let sent = world.recording.clone().unwrap_or_default();
    if sent.is_empty() {
        return;
    }
    for _ in 0..20 {
        let (from, to, mut bytes) = sent[pick(world, sent.len() as u32) as usize].clone();
        if to.ip().is_loopback() {
            continue;
        }
        if pick(world, 2) == 0 && !bytes.is_empty() {
            let at = pick(world, bytes.len() as u32) as usize;
            bytes[at] ^= 1 << pick(world, 8);
        }
        let from = if pick(world, 2) == 0 { from } else { SocketAddr::new([203, 0, 113, 9].into(), PORT) };
        world.inject(from, to, bytes);
    }
}

/// After healing everything that is served can be reached.
fn liveness(world: &mut World, clients: &[HostId]) -> Result<(), String> {
    for host in clients {
        let client = world.connect(*host, "web.shop");
        world.run_for(Duration::from_secs(3));
        let outcome = world.host(*host).clients[client].outcome;
        if !matches!(outcome, Outcome::Answered(_)) {
            return Err(format!("after healing, host {host:?} got {outcome:?}"));
        }
    }
    Ok(())
}

fn fingerprint(sent: &[(SocketAddr, SocketAddr, Vec<u8>)]) -> u64 {
    let bytes = sent.iter().flat_map(|(_, _, bytes)| bytes.iter());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn random_worlds_keep_every_promise() {
    for seed in 0..number_from_environment("MARGAY_SEEDS", 150) {
        if let Err(why) = run(seed) {
            panic!("seed {seed}: {why}");
        }
    }
}

#[test]
fn one_seed_gives_one_run() {
    let seed = number_from_environment("MARGAY_SEED", 5);
    assert_eq!(run(seed).expect("the seed holds"), run(seed).expect("the seed holds"));
}
