//! What agents of instances of a name ask each other about its connections (docs/decisions/0071), by the streams that
//! connections go by. Only a host that may answer for all of the name is told, or has a say.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use margay_control::relocation::VERSION;
use margay_control::relocation::proto::{Count, Counted, Order};
use margay_core::key::{HostId, HostPublic};
use margay_core::name::{Prefix, ServiceId};
use tokio::time::timeout;

use super::transfer::Outgoing;
use crate::agent::Agent;
use crate::agent::rebalance::{self, Question};

/// Until another host has answered, the way to it included.
const ASK_LIMIT: Duration = Duration::from_secs(4);
const BITS_MAX: u16 = 256;

/// Asks the agent of an instance on `host`, which hears SAL at `at`, about the connections of a name.
///
/// # Errors
///
/// The agent does not say; why, as a sentence.
pub async fn ask(
    agent: &Agent,
    prefix: &Prefix,
    host: HostId,
    at: SocketAddr,
    question: &Question,
) -> Result<Counted, String> {
    let asked = timeout(ASK_LIMIT, ask_whole(agent, prefix, host, at, question)).await;
    asked.unwrap_or_else(|_| Err(format!("it has not answered within {} seconds", ASK_LIMIT.as_secs())))
}

async fn ask_whole(
    agent: &Agent,
    prefix: &Prefix,
    host: HostId,
    at: SocketAddr,
    question: &Question,
) -> Result<Counted, String> {
    let service = prefix.id;
    let chain = agent.core.0.with_sal(|sal, _| sal.certificate_for(&service));
    let order = question.order.map(|order| Order { id: order.id.to_vec(), max_per_s: order.max_per_s });
    let (bits, rehearsed) = (u32::from(prefix.bits), question.is_rehearsed);
    let message = Count { version: VERSION, service: service.0.to_vec(), bits, chain, order, rehearsed };
    let idle = agent.connections.relocations.idle.take(host, &service);
    if let Some(mut stream) = idle {
        // It may have ended just now.
        if let Ok(counted) = stream.count(message.clone()).await {
            agent.connections.relocations.idle.keep(host, service, stream);
            return Ok(counted);
        }
    }
    let mut stream = Outgoing::open(agent, &service, host, at).await?;
    let counted = stream.count(message).await?;
    agent.connections.relocations.idle.keep(host, service, stream);
    Ok(counted)
}

/// Answers another host.
///
/// # Errors
///
/// It is told nothing; why, as a sentence.
pub(super) async fn answer(agent: &Arc<Agent>, asker: &HostPublic, message: &Count) -> Result<Counted, String> {
    let (prefix, question) = read(message).ok_or("the question makes no sense")?;
    for service in [prefix.id, last(&prefix)] {
        // Certificates are for prefixes: one for the first and the last name is for all between them.
        if !agent.core.0.with_sal(|sal, _| sal.may_serve(&service, asker, &message.chain))? {
            return Err("this host trusts no authority of the name, so that nobody may ask".to_owned());
        }
    }
    let by = agent.names.naming.name_of(asker.id()).unwrap_or_else(|| asker.id().to_string());
    rebalance::answer(agent, &prefix, &question, &by).await
}

fn read(message: &Count) -> Option<(Prefix, Question)> {
    let bits = u16::try_from(message.bits).ok().filter(|bits| (1..=BITS_MAX).contains(bits))?;
    let id = ServiceId(message.service.clone().try_into().ok()?);
    let prefix = Prefix::new(id, bits);
    let order = match &message.order {
        Some(order) => {
            let id = order.id.clone().try_into().ok()?;
            let max_per_s = Some(order.max_per_s).filter(|rate| rebalance::RATES.contains(rate))?;
            Some(rebalance::Order { id, max_per_s })
        }
        None => None,
    };
    (prefix.id == id).then_some((prefix, Question { order, is_rehearsed: message.rehearsed }))
}

/// The last name under a prefix.
fn last(prefix: &Prefix) -> ServiceId {
    let mut id = prefix.id;
    for at in prefix.bits..BITS_MAX {
        id.0[usize::from(at / 8)] |= 0x80 >> (at % 8);
    }
    id
}

#[cfg(test)]
mod test {
    use super::*;

    fn message() -> Count {
        let mut service = vec![0xab, 0xc0];
        service.resize(32, 0);
        let order = Some(Order { id: vec![7; 16], max_per_s: 50 });
        Count { version: VERSION, service, bits: 12, chain: vec![1], order, rehearsed: true }
    }

    #[test]
    fn a_question_is_checked() {
        let (prefix, question) = read(&message()).expect("in order");
        assert_eq!((prefix.bits, prefix.id.0[..2].to_vec()), (12, vec![0xab, 0xc0]));
        assert_eq!(question.order.map(|order| (order.id, order.max_per_s)), Some(([7; 16], 50)));
        assert!(question.is_rehearsed && read(&Count { order: None, ..message() }).is_some());
        let order = |id: usize, max_per_s| Some(Order { id: vec![7; id], max_per_s });
        for wrong in [
            Count { bits: 0, ..message() },
            Count { bits: 257, ..message() },
            Count { bits: 8, ..message() },
            Count { service: vec![0; 31], ..message() },
            Count { order: order(15, 50), ..message() },
            Count { order: order(16, 0), ..message() },
            Count { order: order(16, 1001), ..message() },
        ] {
            assert!(read(&wrong).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn the_last_name_has_all_other_bits() {
        let (prefix, _) = read(&message()).expect("in order");
        let last = last(&prefix);
        assert_eq!(last.0[..3], [0xab, 0xcf, 0xff]);
        assert!(prefix.contains(&last) && last.0[31] == 0xff);
        assert_eq!(super::last(&Prefix::from(prefix.id)), prefix.id, "of a single name it is that name");
    }
}
