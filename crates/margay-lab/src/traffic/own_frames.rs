//! Programs with framed sockets: a client that sends frames all the time, and a server that answers each.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use margay_sdk::{Arrival, Frames, Options, Received, Sending};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::time::{interval, timeout};

use super::now_ms;
use crate::host::write_line;

/// Frames that wait for their answers.
const OPEN_MAX: usize = 32;
/// Keys, each with an order of its own.
const KEYS: u64 = 100;
/// Of so many frames one may be given one server alone.
const UNSAFE_EVERY: u64 = 4;
/// Time between two lines.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// What is open at the end is answered within this time.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What became of frames since the last line.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Framed {
    /// Answers.
    pub answered: u64,
    /// Answers that are not those to their frames, or overtook another one of the same server.
    pub wrong: u64,
    /// Frames that may be given to another server, and that the client was told are lost.
    pub lost_safe: u64,
    /// Others that are.
    pub lost_unsafe: u64,
    /// Frames that nobody has said anything of.
    pub unanswered: u64,
    /// Answers by what the server is called.
    pub by_label: BTreeMap<String, u64>,
    /// The end of this time, in milliseconds since 1970.
    pub at_ms: f64,
}

/// The client.
struct Client {
    frames: Frames,
    sent: u64,
    /// What was sent, by its number.
    open: HashMap<u32, u64>,
    /// The last frame of each key that a server has answered.
    last: HashMap<(u64, String), u64>,
    told: Framed,
}

/// Sends frames to a name until the input ends; prints a [`Framed`] as a line of JSON for each stretch of time.
pub async fn ask(name: &str) -> Result<()> {
    let frames = Options::new().connect_frames(name).await.with_context(|| format!("nobody serves {name}"))?;
    let mut client = Client { frames, sent: 0, open: HashMap::new(), last: HashMap::new(), told: Framed::default() };
    let mut input = tokio::io::stdin();
    let mut ended = Box::pin(async move { input.read_to_end(&mut Vec::new()).await });
    let mut ticks = interval(TELL_EVERY);
    loop {
        while client.open.len() < OPEN_MAX {
            client.send().await?;
        }
        tokio::select! {
            _ = &mut ended => break,
            arrival = client.frames.recv() => client.take(arrival?)?,
            _ = ticks.tick() => client.tell()?,
        }
    }
    let rest = async {
        while !client.open.is_empty() {
            let arrival = client.frames.recv().await?;
            client.take(arrival)?;
        }
        anyhow::Ok(())
    };
    // What is still open then is told below.
    let _ = timeout(END_LIMIT, rest).await;
    client.told.unanswered = client.open.len() as u64;
    client.tell()
}

impl Client {
    async fn send(&mut self) -> Result<()> {
        let key = self.sent % KEYS;
        let how = Sending::new().key(format!("key:{key}").as_bytes()).wants_answer();
        let how = if self.sent.is_multiple_of(UNSAFE_EVERY) { how } else { how.safe() };
        let number = self.frames.send_with(self.sent.to_string().as_bytes(), &how).await?;
        self.open.insert(number, self.sent);
        self.sent += 1;
        Ok(())
    }

    fn take(&mut self, arrival: Option<Arrival>) -> Result<()> {
        match arrival {
            None => bail!("the connection was closed"),
            Some(Arrival::Lost(number)) => match self.open.remove(&number) {
                Some(sent) if sent % UNSAFE_EVERY == 0 => self.told.lost_unsafe += 1,
                Some(_) => self.told.lost_safe += 1,
                None => self.told.wrong += 1,
            },
            Some(Arrival::Frame(Received { number, bytes, is_answer, .. })) => {
                let text = String::from_utf8_lossy(&bytes);
                let sent = self.open.remove(&number);
                let Some((label, answered)) = text.split_once(": ") else {
                    self.told.wrong += 1;
                    return Ok(());
                };
                let is_its = is_answer && sent.is_some() && sent == answered.parse().ok();
                let sent = sent.unwrap_or_default();
                let was = self.last.insert((sent % KEYS, label.to_owned()), sent);
                // What was sent again after a death comes late.
                let is_late = was.is_some_and(|was| was > sent) && sent.is_multiple_of(UNSAFE_EVERY);
                self.told.wrong += u64::from(!is_its || is_late);
                self.told.answered += 1;
                *self.told.by_label.entry(label.to_owned()).or_default() += 1;
            }
        }
        Ok(())
    }

    fn tell(&mut self) -> Result<()> {
        let told = Framed { at_ms: now_ms(), ..std::mem::take(&mut self.told) };
        write_line(&serde_json::to_string(&told)?)
    }
}

/// Serves a name, and answers each frame with a label and the frame.
pub async fn serve(name: &str, label: &str) -> Result<()> {
    let mut listener = Options::new().bind_frames(name, label).await.with_context(|| format!("cannot serve {name}"))?;
    loop {
        let (mut client, _) = listener.accept().await?;
        let label = label.to_owned();
        tokio::spawn(async move {
            while let Ok(Some(arrival)) = client.recv().await {
                let Arrival::Frame(frame) = arrival else { continue };
                let answer = format!("{label}: {}", String::from_utf8_lossy(&frame.bytes));
                if client.answer(&frame, answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
    }
}
