//! A host's end of the registration protocol, without its manners.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use margay_control::entropy;
use margay_control::registration::proto::{self, from_host, from_router};
use margay_control::registration::stream::{self, Reader, Writer};
use margay_control::token::JoinToken;
use margay_core::key::{HostPublic, HostSecret};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::traffic::request::hello;

const PATIENCE: Duration = Duration::from_secs(8);

/// What became of something that was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was granted.
    Yes,
    /// It was not, or the router has hung up.
    No(String),
}

/// Where a router is, and who it is.
#[derive(Clone, Debug)]
pub struct Target {
    /// `host:port`.
    pub address: String,
    /// Its key.
    pub key: HostPublic,
    /// The authority's block.
    pub authority: [u8; 8],
}

impl Target {
    /// What a token says.
    pub fn of(token: &JoinToken) -> Self {
        Self { address: token.router_address.clone(), key: token.router_key, authority: token.authority_block() }
    }

    /// A plain connection.
    pub async fn connect(&self) -> Result<TcpStream> {
        TcpStream::connect(&self.address).await.with_context(|| format!("{} cannot be reached", self.address))
    }
}

/// A stream whose ends know each other's keys.
pub struct Session {
    reader: Reader,
    writer: Writer,
}

impl Session {
    /// Up to the hello.
    pub async fn open(target: &Target, key: &HostSecret) -> Result<Self> {
        Self::open_by(target.connect().await?, target, key).await
    }

    /// The same over a connection that is there.
    pub async fn open_by(stream: TcpStream, target: &Target, key: &HostSecret) -> Result<Self> {
        let (reader, writer) = stream::open(stream, key, &target.key).await?;
        Ok(Self { reader, writer })
    }

    /// Says hello: with the secret of a token, or as a member.
    pub async fn hello(&mut self, target: &Target, secret: &[u8]) -> Answer {
        let hello = hello(target.authority, secret, "intruder".to_owned());
        self.ask(Some(from_host::Body::Hello(hello))).await
    }

    /// Sends something, and hears what the router says to it.
    pub async fn ask(&mut self, body: Option<from_host::Body>) -> Answer {
        match self.say(body).await {
            Ok(()) => self.hear().await,
            Err(error) => Answer::No(format!("{error:#}")),
        }
    }

    /// Sends something.
    pub async fn say(&mut self, body: Option<from_host::Body>) -> Result<()> {
        Ok(self.writer.write(&proto::FromHost { body }).await?)
    }

    /// Sends what no message of a host looks like.
    pub async fn say_nonsense(&mut self) -> Result<()> {
        Ok(self.writer.write(&proto::Welcome { version: 1, ..proto::Welcome::default() }).await?)
    }

    /// The next answer to a question.
    pub async fn hear(&mut self) -> Answer {
        match timeout(PATIENCE, self.hear_any()).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Answer::No(format!("{error:#}")),
            Err(_) => Answer::No(format!("no answer in {PATIENCE:?}")),
        }
    }

    async fn hear_any(&mut self) -> Result<Answer> {
        use from_router::Body;
        loop {
            let answer: proto::FromRouter = self.reader.read().await?;
            match answer.body.context("an answer without words")? {
                Body::Welcome(_) | Body::Registered(_) | Body::Withdrawn(_) => return Ok(Answer::Yes),
                Body::Resolved(_) | Body::Membership(_) => return Ok(Answer::Yes),
                Body::Refusal(refusal) => return Ok(Answer::No(refusal.text)),
                // Nobody asked for these.
                Body::Heartbeat(_) | Body::Watched(_) | Body::Revoked(_) | Body::Granted(_) => {}
                Body::Trace(_) | Body::Traced(_) | Body::Routers(_) | Body::Keys(_) => {}
                Body::Announce(_) | Body::Retract(_) | Body::Declined(_) | Body::Chains(_) | Body::Order(_) => {}
            }
        }
    }

    /// Gives signs of life until the router ends the stream.
    pub async fn stay(&mut self, limit: Duration) -> Result<()> {
        let staying = async {
            while self.say(Some(from_host::Body::Heartbeat(proto::Heartbeat::default()))).await.is_ok() {
                let read = timeout(Duration::from_millis(100), self.hear_any()).await;
                if matches!(read, Ok(Ok(Answer::No(_)) | Err(_))) {
                    return;
                }
            }
        };
        if timeout(limit, staying).await.is_err() { bail!("the stream has not ended within {limit:?}") } else { Ok(()) }
    }
}

/// A host that nobody knows.
pub fn stranger() -> Result<HostSecret> {
    Ok(HostSecret::generate(&mut entropy::rng()?))
}
