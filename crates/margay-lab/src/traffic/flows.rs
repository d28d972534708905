//! Many connections held open, each sending now and then.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use tokio::io::AsyncBufReadExt;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};

use crate::host::write_line;
use crate::pump::Dice;
use crate::traffic::{echo, resolve};

/// Connections that are being set up at once.
const OPENING_MAX: usize = 128;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(20);
/// Exchanges at once.
const TALKING_MAX: usize = 64;
const MESSAGE_MAX: usize = 200;

#[derive(Default)]
struct Tally {
    exchanges: AtomicU64,
    failed: AtomicU64,
    resets: AtomicU64,
}

impl Tally {
    fn line(&self, event: &str, open: usize) -> String {
        let of = |number: &AtomicU64| number.load(Ordering::Relaxed);
        json!({
            "event": event, "open": open, "exchanges": of(&self.exchanges), "failed": of(&self.failed),
            "resets": of(&self.resets)
        })
        .to_string()
    }

    fn fail(&self, kind: Option<ErrorKind>) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if kind == Some(ErrorKind::ConnectionReset) {
            self.resets.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Opens `count` connections and says so; then, for each line of input, exchanges some bytes once on every connection,
/// in a random order, and says so. Ends with the input.
pub async fn hold(host: &str, port: u16, count: usize) -> Result<()> {
    let address = resolve(host, port).await?;
    let tally = Arc::new(Tally::default());
    let slots = Arc::new(Semaphore::new(OPENING_MAX));
    let (opened, mut arrivals) = mpsc::channel(count.max(1));
    for _ in 0..count {
        let (slot, tally, opened) = (slots.clone().acquire_owned().await?, tally.clone(), opened.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
                // There is room for all of them.
                Ok(Ok(stream)) => drop(opened.send(stream).await),
                Ok(Err(error)) => tally.fail(Some(error.kind())),
                Err(_) => tally.fail(None),
            }
            drop(slot);
        });
    }
    drop(opened);
    let mut streams = Vec::with_capacity(count);
    while let Some(stream) = arrivals.recv().await {
        streams.push(stream);
    }
    write_line(&tally.line("open", streams.len()))?;
    let mut orders = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    let mut dice = Dice::new(count as u64);
    while orders.next_line().await?.is_some() {
        streams = round(streams, &tally, &mut dice).await?;
        write_line(&tally.line("round", streams.len()))?;
    }
    write_line(&tally.line("end", streams.len()))
}

/// One exchange on each; those that fail are closed.
async fn round(streams: Vec<TcpStream>, tally: &Arc<Tally>, dice: &mut Dice) -> Result<Vec<TcpStream>> {
    let mut order = streams;
    for index in (1..order.len()).rev() {
        order.swap(index, dice.below(index + 1));
    }
    let slots = Arc::new(Semaphore::new(TALKING_MAX));
    let (done, mut back) = mpsc::channel(order.len().max(1));
    for mut stream in order {
        let message: Vec<u8> = (0..1 + dice.below(MESSAGE_MAX)).map(|_| dice.roll() as u8).collect();
        let (slot, tally, done) = (slots.clone().acquire_owned().await?, tally.clone(), done.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(EXCHANGE_TIMEOUT, echo::exchange(&mut stream, &message)).await {
                Ok(Ok(true)) => {
                    tally.exchanges.fetch_add(1, Ordering::Relaxed);
                    // There is room for all of them.
                    drop(done.send(stream).await);
                }
                Ok(Err(error)) => tally.fail(Some(error.kind())),
                Ok(Ok(false)) | Err(_) => tally.fail(None),
            }
            drop(slot);
        });
    }
    drop(done);
    let mut alive = Vec::new();
    while let Some(stream) = back.recv().await {
        alive.push(stream);
    }
    Ok(alive)
}
