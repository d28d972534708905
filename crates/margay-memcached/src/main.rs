//! `margay-memcached`: memcached in partitions for unmodified clients.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use margay_memcached::partition::Partitions;
use margay_memcached::process::{drop_privileges, raise_descriptor_limit};
use margay_memcached::proxy::{Listeners, Proxy};
use margay_memcached::server::Servers;
use margay_sdk::Agent;

/// Takes memcached clients to the partitions of a service.
///
/// Clients use it as they use a memcached on this host. It finds the partition of each key
/// (the first bits of the key's BLAKE3), and asks whoever holds that partition now, by the
/// virtual address that the Margay agent of this host gives it. Which server that is the
/// service router decides; clients and proxies need no list of servers.
///
/// On each server:  margay run --service cache.shop:11211 --partitions 16 -- memcached
/// On each client:  margay-memcached --service cache.shop --partitions 16
///
/// Supported: get, gets, set, add, replace, append, prepend, cas, delete, incr, decr, touch,
/// version, verbosity, quit.
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Args {
    /// The service
    #[arg(long, value_name = "NAME")]
    service: String,
    /// How many partitions it has: the number that the servers say
    #[arg(long, value_name = "NUMBER")]
    partitions: u32,
    /// The port of the service
    #[arg(long, default_value_t = 11211)]
    port: u16,
    /// Where clients find it, by TCP and UDP
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:11211")]
    listen: SocketAddr,
    /// The agent's socket for programs; default: MARGAY_PROGRAMS, or /run/margay/programs.sock
    #[arg(long, value_name = "FILE")]
    programs: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let listeners = Listeners::bind(args.listen).with_context(|| {
        format!("cannot listen on {}; does a memcached run here? --listen chooses another place", args.listen)
    })?;
    raise_descriptor_limit();
    drop_privileges().context("cannot give up privileges")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no event loop")?;
    runtime.block_on(run(args, listeners))
}

async fn run(args: Args, listeners: Listeners) -> Result<()> {
    let agent = match &args.programs {
        Some(path) => Agent::connect_to(path).await?,
        None => Agent::connect().await?,
    };
    let (service, _) = agent.name(&args.service).await?;
    anyhow::ensure!(
        service.bits >= 96 && service.id.tail().iter().all(|byte| *byte == 0),
        "{} is no service that has partitions; write service.authority, for example cache.shop",
        args.service
    );
    let partitions = Partitions::of(service, args.partitions)?;
    let proxy = Proxy::new(listeners, Servers::new(partitions, agent, args.port))?;
    eprintln!("margay-memcached: {} in {} partitions, at {}", args.service, args.partitions, proxy.address()?);
    proxy.run().await;
    Ok(())
}
