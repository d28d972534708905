//! Who serves a name: each instance has an address of its own.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::agent::{Agent, receive, send, watched};
use crate::error::Error;
use crate::target::ToTarget;
use crate::wire::{Kind, Reply, Request};

/// An instance of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The host-ID of its host, in hexadecimal.
    pub host: String,
    /// What its host is called.
    pub name: String,
    /// Where it is reached from this host, as long as it serves the name: what is sent there goes to this very
    /// instance. One that does not answer is a hint and no more: then it goes to another.
    pub address: SocketAddr,
    /// Its share of what comes by the name; zero: it takes nothing new.
    pub weight: u32,
}

/// Who serves a name, now and whenever that changes.
#[derive(Debug)]
pub struct Instances {
    agent: Agent,
    connection: UnixStream,
    known: BTreeMap<String, Instance>,
    beyond: u16,
}

impl Instances {
    /// Follows who serves a name, or the first name of a prefix.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::AgentDown`]; [`Error::Refused`] with `EUSERS` (the user has 16 of these already);
    /// [`Error::Incompatible`], also where the agent is of an earlier release.
    pub async fn of(agent: &Agent, name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        let prefix = name.to_target()?.prefix;
        let connection = agent.open().await.map_err(|source| agent.down(source))?;
        let request = Request { prefix, ..Request::new(Kind::Instances) };
        let request = request.to_bytes().map_err(|why| agent.incompatible(why))?;
        // The first message on a new connection always finds room.
        send(&connection, &request, &[]).map_err(|source| agent.down(source))?;
        let connection = watched(connection).map_err(|source| agent.down(source))?;
        let mut this = Self { agent: agent.clone(), connection, known: BTreeMap::new(), beyond: 0 };
        let message = this.receive().await?;
        agent.read_reply("who serves the name", Kind::Instances, Ok(message))??;
        Ok(this)
    }

    /// How many instances there are that the last list does not have: an agent tells of 64 at most, and of fewer where
    /// it has no virtual address left.
    #[must_use]
    pub const fn beyond(&self) -> u16 {
        self.beyond
    }

    async fn receive(&mut self) -> Result<Reply, Error> {
        let message = self.connection.async_io(Interest::READABLE, || receive(&self.connection)).await;
        message.map_err(|source| self.agent.down(source))?.map_err(|why| self.agent.incompatible(why))
    }

    /// All instances, by their host-IDs: at first as soon as the agent knows them, and then after each change. A call
    /// that is cancelled loses none.
    ///
    /// # Errors
    /// [`Error::AgentDown`] where the agent has ended; [`Error::Incompatible`]. Then there is no more of it.
    pub async fn next(&mut self) -> Result<Vec<Instance>, Error> {
        loop {
            let reply = self.receive().await?;
            if reply.kind != Some(Kind::Instance) {
                return Err(self.agent.incompatible(format!("a message of kind {:?} among instances", reply.kind)));
            }
            if reply.text.is_empty() {
                self.beyond = reply.port;
                return Ok(self.known.values().cloned().collect());
            }
            let (instance, is_gone) = read(&reply).map_err(|why| self.agent.incompatible(why))?;
            if is_gone {
                self.known.remove(&instance.host);
            } else {
                self.known.insert(instance.host.clone(), instance);
            }
        }
    }
}

/// An instance, and whether it is gone.
fn read(reply: &Reply) -> Result<(Instance, bool), String> {
    let fields: Value = serde_json::from_str(&reply.text).map_err(|_| "an instance that is not JSON".to_owned())?;
    let text = |field: &str| fields[field].as_str().map(str::to_owned).ok_or(format!("an instance without {field}"));
    let weight = fields["weight"].as_u64().and_then(|weight| u32::try_from(weight).ok());
    let instance = Instance {
        host: text("host")?,
        name: text("name")?,
        address: SocketAddr::new(IpAddr::V4(reply.v4), reply.port),
        weight: weight.ok_or("an instance without weight")?,
    };
    Ok((instance, fields["gone"].as_bool().unwrap_or_default()))
}
