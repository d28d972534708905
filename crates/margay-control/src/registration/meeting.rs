//! How a host's stream begins: it connects, says hello, is welcomed, and makes true here what the router said.

use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::AssociationSetup;
use margay_core::certificate::TrustAnchor;
use margay_core::name::authority_block;
use tokio::net::TcpStream;

use super::VERSION;
use super::host::{End, Shared};
use super::proto::{self, Code, from_host, from_router};
use super::stream::{Reader, StreamError, Writer, open};
use crate::entropy;
use crate::store::Joined;
use crate::token::{TokenHash, TokenSecret};

/// Connects, says hello, and is welcomed.
pub(super) async fn meet(shared: &Arc<Shared>) -> Result<(Reader, Writer, proto::Welcome), End> {
    let config = &shared.config;
    let stream = TcpStream::connect(&config.router_address).await;
    let stream = stream.map_err(|error| End::Broke(format!("{}: {error}", config.router_address)))?;
    let router = stream.peer_addr().map_err(|error| End::Broke(error.to_string()))?;
    let (mut reader, mut writer) = open(stream, &shared.local.host_key, &config.router_key).await?;
    let mut rng = entropy::rng().map_err(|error| End::Broke(error.to_string()))?;
    let association_id = rng.u32().max(1);
    let secret = if *shared.is_member.lock() { None } else { config.secret.as_ref() };
    let hello = proto::Hello {
        version: VERSION,
        secret: secret.map(|secret| secret.as_bytes().to_vec()).unwrap_or_default(),
        authority: authority_block(&config.authority).to_vec(),
        epoch: shared.local.epoch,
        boot_id: shared.local.boot_id.to_vec(),
        association_id,
        sal_port: shared.local.sal_port.into(),
        host_name: shared.local.host_name.clone(),
        software: shared.local.software.clone(),
        traces: true,
    };
    writer.write(&proto::FromHost { body: Some(from_host::Body::Hello(hello)) }).await?;
    let answer: proto::FromRouter = reader.read().await?;
    let welcome = match answer.body {
        Some(from_router::Body::Welcome(welcome)) => welcome,
        Some(from_router::Body::Refusal(refusal)) => return Err(refused(&refusal)),
        _ => return Err(StreamError::Garbage.into()),
    };
    adopt(shared, &welcome, association_id, router)?;
    remember(shared).await?;
    Ok((reader, writer, welcome))
}

pub(super) fn refused(refusal: &proto::Refusal) -> End {
    match refusal.code() {
        // These pass by themselves.
        Code::GoingDown | Code::Superseded | Code::Limit | Code::Store => End::Broke(refusal.text.clone()),
        _ => End::Refused(refusal.text.clone()),
    }
}

/// Makes what the router said true here.
fn adopt(shared: &Shared, welcome: &proto::Welcome, local_id: u32, router: SocketAddr) -> Result<(), End> {
    let garbage = || End::from(StreamError::Garbage);
    let key: [u8; 32] = welcome.association_key[..].try_into().map_err(|_| garbage())?;
    let hop_key: [u8; 16] = welcome.hop_key[..].try_into().map_err(|_| garbage())?;
    let sal_port = u16::try_from(welcome.sal_port).map_err(|_| garbage())?;
    if welcome.version != VERSION || welcome.association_id == 0 {
        return Err(garbage());
    }
    let config = &shared.config;
    let remote = SocketAddr::new(router.ip(), sal_port);
    let authority = authority_block(&config.authority);
    shared.sal.add_trust_anchor(TrustAnchor { authority, key: config.authority_key });
    shared.sal.set_membership(welcome.membership.clone());
    shared.sal.install_association(AssociationSetup {
        host_key: config.router_key.0,
        key,
        local_id,
        remote_id: welcome.association_id,
        peer_epoch: welcome.epoch,
        remote,
        hop_key: Some(hop_key),
        router: true,
        initiator: true,
    });
    shared.lead_to(remote);
    Ok(())
}

/// The token is used: from now on the router knows this host by its key, also after a restart.
async fn remember(shared: &Arc<Shared>) -> Result<(), End> {
    if *shared.is_member.lock() {
        return Ok(());
    }
    let config = &shared.config;
    let joined = Joined {
        router_key: config.router_key,
        router_address: config.router_address.clone(),
        authority: config.authority.clone(),
        authority_key: config.authority_key,
        joined_s: shared.clock.unix_s(),
        token: config.secret.as_ref().map_or(TokenHash([0; 32]), TokenSecret::hash),
    };
    let store = Arc::clone(&shared.store);
    match tokio::task::spawn_blocking(move || store.note_joined(&joined)).await {
        Ok(Ok(())) => *shared.is_member.lock() = true,
        Ok(Err(error)) => return Err(End::Broke(error.to_string())),
        Err(_) => return Err(End::Broke("the store ended badly".to_owned())),
    }
    Ok(())
}
