//! Somebody who speaks the registration protocol and may not register: strangers with all kinds of tokens, and a member
//! that wants more than it was given. It counts what a router grants it, and should not.

mod session;

use std::collections::BTreeMap;
use std::io::BufRead;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::Args;
use margay_control::keyring::{Authority, ServiceKey};
use margay_control::registration::proto::{self, from_host};
use margay_control::token::JoinToken;
use margay_control::{entropy, issue};
use margay_core::key::{HostSecret, SigningKey};
use margay_core::name::{Name, Prefix, ServiceId, self_certifying_tail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use self::session::{Answer, Session, Target, stranger};
use crate::host::write_line;
use crate::traffic::request::registration;

/// Each kind is tried so often at the least.
const ROUNDS: usize = 10;
/// Streams at once of one address that say nothing.
const STREAMS: usize = 300;
const HOLD: Duration = Duration::from_millis(500);
/// As the router's bound for a host's names.
const NAMES_MAX: usize = 1000;
const BEYOND: usize = 50;
const ENDED_LIMIT: Duration = Duration::from_secs(20);

/// What it is given.
#[derive(Args, Debug)]
pub struct Plan {
    /// A token that is good for one host, which may serve insider.shop and nothing else
    #[arg(long)]
    pub insider: JoinToken,
    /// Good for one host, which may serve outcast.shop and is put out when its host-ID has been printed; then a line of
    /// input is expected
    #[arg(long)]
    pub outcast: JoinToken,
    /// Whose time is over
    #[arg(long)]
    pub expired: JoinToken,
    /// Which was taken back
    #[arg(long)]
    pub revoked: JoinToken,
    /// Of another authority
    #[arg(long)]
    pub foreign: JoinToken,
    /// A name that an honest host serves
    #[arg(long = "name")]
    pub target: String,
}

/// What became of one kind of attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// The act by which the router's audit log must have them.
    pub act: String,
    /// How many.
    pub attempts: u64,
    /// How many the router granted.
    pub accepted: u64,
    /// What it said to the last.
    pub said: String,
}

struct Intruder {
    target: Target,
    tallies: BTreeMap<&'static str, Tally>,
    insider: HostSecret,
}

const STREAM: &str = "stream-refused";
const HOST: &str = "host-refused";
const REGISTER: &str = "register-refused";
const MESSAGE: &str = "message-refused";

/// Tries everything; prints the host-ID of the outcast, and in the end all tallies by kind, as lines of JSON.
pub async fn intrude(plan: &Plan) -> Result<()> {
    let mut intruder = Intruder { target: Target::of(&plan.insider), tallies: BTreeMap::new(), insider: stranger()? };
    intruder.try_tokens(plan).await?;
    intruder.try_names(&plan.target).await?;
    intruder.try_proofs().await?;
    intruder.try_messages().await?;
    intruder.try_garbage().await?;
    intruder.replay().await?;
    intruder.be_put_out(&plan.outcast).await?;
    intruder.flood_streams().await?;
    intruder.flood_names().await?;
    write_line(&serde_json::to_string(&intruder.tallies)?)
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Intruder {
    fn count(&mut self, kind: &'static str, act: &str, answer: &Answer) {
        let tally = self.tallies.entry(kind).or_default();
        tally.act = act.to_owned();
        tally.attempts += 1;
        match answer {
            Answer::Yes => tally.accepted += 1,
            Answer::No(why) => tally.said.clone_from(why),
        }
    }

    async fn try_hello(&mut self, kind: &'static str, key: &HostSecret, secret: &[u8]) -> Result<()> {
        let mut session = Session::open(&self.target, key).await?;
        let answer = session.hello(&self.target, secret).await;
        self.count(kind, HOST, &answer);
        Ok(())
    }

    async fn try_tokens(&mut self, plan: &Plan) -> Result<()> {
        let mut session = Session::open(&self.target, &self.insider).await?;
        let answer = session.hello(&self.target, plan.insider.secret.as_bytes()).await;
        ensure!(answer == Answer::Yes, "the insider is not let in: {answer:?}");
        for _ in 0..ROUNDS {
            let forged = entropy::rng()?.bytes::<16>();
            for (kind, secret) in [
                ("no-token", &[][..]),
                ("forged-token", &forged),
                ("used-token", plan.insider.secret.as_bytes()),
                ("expired-token", plan.expired.secret.as_bytes()),
                ("revoked-token", plan.revoked.secret.as_bytes()),
                ("foreign-token", plan.foreign.secret.as_bytes()),
            ] {
                self.try_hello(kind, &stranger()?, secret).await?;
            }
        }
        Ok(())
    }

    /// A stream of the member, which may do what its grant says.
    async fn member(&self) -> Result<Session> {
        let mut session = Session::open(&self.target, &self.insider).await?;
        let answer = session.hello(&self.target, &[]).await;
        ensure!(answer == Answer::Yes, "the insider is not let in again: {answer:?}");
        Ok(session)
    }

    /// Asks for a registration, and for its certificate alone.
    async fn try_register(&mut self, kind: &'static str, session: &mut Session, wanted: &proto::Register) {
        for certificate_only in [false, true] {
            let wanted = proto::Register { certificate_only, ..wanted.clone() };
            let answer = session.ask(Some(from_host::Body::Register(wanted))).await;
            self.count(kind, REGISTER, &answer);
        }
    }

    /// Names that its grant does not cover, and bits that are not those of the name.
    async fn try_names(&mut self, target: &str) -> Result<()> {
        let of = |name: &str| -> Result<Name> { Ok(name.parse()?) };
        let (own, theirs) = (of("insider.shop")?, of(target)?);
        let block = Prefix::new(own.service_id(), 64);
        let mut wanted = vec![
            registration(target, theirs.prefix()),
            registration(target, own.prefix()),
            registration("insider.shop", theirs.prefix()),
            registration("insider.shop", block),
            registration(&block.to_string(), block),
            registration("web.other", of("web.other")?.prefix()),
            registration(&format!("{target}/key:one"), of(&format!("{target}/key:one"))?.prefix()),
        ];
        let divided = registration(target, theirs.service_prefix());
        wanted.push(proto::Register { partition_bits: 4, ..divided });
        for wanted in &wanted {
            let mut session = self.member().await?;
            for _ in 0..ROUNDS / 2 {
                self.try_register("wrong-prefix", &mut session, wanted).await;
            }
        }
        Ok(())
    }

    /// Proofs that do not prove: for names of the insider's own service that certify themselves.
    async fn try_proofs(&mut self) -> Result<()> {
        let mut rng = entropy::rng()?;
        let (right, wrong) = (SigningKey::generate(&mut rng), SigningKey::generate(&mut rng));
        let mut service = "insider.shop".parse::<Name>()?.service_id();
        let head: [u8; 12] = service.0[..12].try_into()?;
        service.0[12..].copy_from_slice(&self_certifying_tail(&right.public(), &head));
        let by = |key: &SigningKey| ServiceKey { name: "insider.shop".to_owned(), key: key.clone(), service };
        let other =
            Authority { name: "other".to_owned(), key: wrong.clone(), warrant: None, revoked: None, next: None };
        let (own, now) = (self.insider.public(), unix_s());
        let proofs = [
            ("wrong-key", issue::service_by_key(&by(&wrong), &own, now).0),
            ("no-key", Vec::new()),
            ("stolen-certificate", issue::service_by_key(&by(&right), &stranger()?.public(), now).0),
            ("expired-certificate", issue::service_by_key(&by(&right), &own, now - 2 * issue::LIFETIME_S).0),
            ("foreign-certificate", issue::service(&other, Prefix::from(service), &own, now).0),
            ("membership-as-proof", issue::membership(&other, &own, &[], now).0),
            ("malformed-certificate", vec![1, 0, 0, 0, 0, 9, 9]),
        ];
        let mut session = self.member().await?;
        for (kind, proof) in proofs {
            let wanted =
                proto::Register { proof, ..registration(&ServiceId::to_string(&service), Prefix::from(service)) };
            for _ in 0..ROUNDS / 2 {
                self.try_register(kind, &mut session, &wanted).await;
            }
        }
        Ok(())
    }

    /// Messages of the protocol that make no sense.
    async fn try_messages(&mut self) -> Result<()> {
        let good = registration("insider.shop", "insider.shop".parse::<Name>()?.prefix());
        let bad_registers = [
            proto::Register { service_id: vec![1; 31], ..good.clone() },
            proto::Register { bits: 300, ..good.clone() },
            proto::Register { bits: 8, ..good.clone() },
            proto::Register { weight: u32::MAX, ..good.clone() },
            proto::Register { partition_bits: 99, ..good.clone() },
            proto::Register { partition_bits: 4, ..good.clone() },
            proto::Register { name: String::new(), ..good.clone() },
            proto::Register { name: "\u{1b}[2J..//".to_owned(), ..good.clone() },
            proto::Register { name: "a".repeat(60_000), ..good.clone() },
        ];
        let mut session = self.member().await?;
        for wanted in &bad_registers {
            self.try_register("malformed-registration", &mut session, wanted).await;
        }
        let (service_id, request) = (vec![1; 5], 1);
        for _ in 0..ROUNDS {
            for body in [
                None,
                Some(from_host::Body::Hello(proto::Hello::default())),
                Some(from_host::Body::Withdraw(proto::Withdraw { request, service_id: service_id.clone(), bits: 40 })),
                Some(from_host::Body::Resolve(proto::Resolve { request, service_id: service_id.clone() })),
                Some(from_host::Body::Watch(proto::Watch {
                    request,
                    service_id: service_id.clone(),
                    bits: 1,
                    ends: false,
                })),
            ] {
                let answer = session.ask(body).await;
                self.count("malformed-message", MESSAGE, &answer);
            }
        }
        for _ in 0..ROUNDS {
            let mut session = self.member().await?;
            session.say_nonsense().await?;
            let answer = session.hear().await;
            self.count("undecodable-message", MESSAGE, &answer);
        }
        Ok(())
    }

    /// Bytes that are no handshake.
    async fn try_garbage(&mut self) -> Result<()> {
        let mut noise = entropy::rng()?.bytes::<128>().to_vec();
        noise.splice(..2, [0, 126]);
        for bytes in [
            vec![0, 0],
            vec![0xff; 70_000],
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            vec![0, 32, 1, 2, 3],
            noise,
            [&[0, 32][..], &[0; 32], &[1, 0], &[9; 256]].concat(),
        ] {
            for _ in 0..ROUNDS {
                let answer = throw(self.target.connect().await?, &bytes).await;
                self.count(if bytes.len() > 1000 { "oversized-stream" } else { "malformed-stream" }, STREAM, &answer);
            }
        }
        Ok(())
    }

    /// The bytes of a stream that was welcomed and registered a name, sent again as they were.
    async fn replay(&mut self) -> Result<()> {
        let relay = TcpListener::bind("127.0.0.1:0").await?;
        let by_relay = Target { address: relay.local_addr()?.to_string(), ..self.target.clone() };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (to, recorded) = (self.target.clone(), Arc::clone(&seen));
        let relaying = tokio::spawn(async move { pass_on(&relay, &to, &recorded).await });
        let mut session = Session::open(&by_relay, &self.insider).await?;
        ensure!(session.hello(&self.target, &[]).await == Answer::Yes, "the insider is not let in");
        let wanted = registration("insider.shop", "insider.shop".parse::<Name>()?.prefix());
        let answer = session.ask(Some(from_host::Body::Register(wanted))).await;
        ensure!(answer == Answer::Yes, "the insider's own name is refused: {answer:?}");
        drop(session);
        relaying.await??;
        let bytes = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for _ in 0..ROUNDS {
            let answer = throw(self.target.connect().await?, &bytes).await;
            self.count("replayed-stream", STREAM, &answer);
        }
        Ok(())
    }

    /// Joins by right, is put out, and comes back.
    async fn be_put_out(&mut self, token: &JoinToken) -> Result<()> {
        let outcast = stranger()?;
        let mut session = Session::open(&self.target, &outcast).await?;
        let answer = session.hello(&self.target, token.secret.as_bytes()).await;
        ensure!(answer == Answer::Yes, "the outcast is not let in: {answer:?}");
        let name = "outcast.shop";
        let wanted = registration(name, name.parse::<Name>()?.prefix());
        let answer = session.ask(Some(from_host::Body::Register(wanted))).await;
        ensure!(answer == Answer::Yes, "the outcast's name is refused: {answer:?}");
        write_line(&serde_json::to_string(&outcast.public().id().to_string())?)?;
        session.stay(ENDED_LIMIT).await?;
        let told = tokio::task::spawn_blocking(|| std::io::stdin().lock().lines().next());
        told.await?.context("nobody says that the outcast is put out")??;
        for _ in 0..ROUNDS {
            self.try_hello("revoked-host", &outcast, &[]).await?;
            self.try_hello("revoked-host", &outcast, token.secret.as_bytes()).await?;
        }
        Ok(())
    }

    /// Many streams at once that say nothing.
    async fn flood_streams(&mut self) -> Result<()> {
        let mut held = Vec::new();
        for _ in 0..STREAMS {
            held.push(self.target.connect().await?);
        }
        sleep(HOLD).await;
        for stream in held {
            let said = stream.try_read(&mut [0; 1]).unwrap_or_default();
            let answer = if said == 0 { Answer::No("silence".to_owned()) } else { Answer::Yes };
            self.count("stream-flood", STREAM, &answer);
        }
        Ok(())
    }

    /// More names than a host may have. Those within the bound are its own.
    async fn flood_names(&mut self) -> Result<()> {
        let mut session = self.member().await?;
        let mut granted = 0;
        for number in 0..NAMES_MAX + BEYOND {
            let name = format!("insider.shop/key:{number}");
            let wanted = registration(&name, name.parse::<Name>()?.prefix());
            let answer = session.ask(Some(from_host::Body::Register(wanted))).await;
            if answer == Answer::Yes && granted < NAMES_MAX {
                granted += 1;
            } else {
                self.count("name-flood", REGISTER, &answer);
            }
        }
        Ok(())
    }
}

/// Throws bytes at a router. It answers the first of a handshake, and nothing beyond that.
async fn throw(mut stream: TcpStream, bytes: &[u8]) -> Answer {
    // It may have hung up already.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut said = Vec::new();
    let _ = timeout(ENDED_LIMIT, stream.read_to_end(&mut said)).await;
    let first = said.first_chunk().map_or(0, |length| 2 + usize::from(u16::from_be_bytes(*length)));
    if said.len() > first { Answer::Yes } else { Answer::No(format!("{} bytes", said.len())) }
}

/// Passes one stream on to a router, and keeps what goes there.
async fn pass_on(relay: &TcpListener, to: &Target, seen: &Mutex<Vec<u8>>) -> Result<()> {
    let (near, _) = relay.accept().await?;
    let (mut from_host, mut to_host) = near.into_split();
    let (mut from_router, mut to_router) = to.connect().await?.into_split();
    let back = tokio::spawn(async move { tokio::io::copy(&mut from_router, &mut to_host).await });
    let mut buffer = [0; 4096];
    loop {
        let length = from_host.read(&mut buffer).await?;
        if length == 0 {
            break;
        }
        seen.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&buffer[..length]);
        to_router.write_all(&buffer[..length]).await?;
    }
    back.abort();
    Ok(())
}
