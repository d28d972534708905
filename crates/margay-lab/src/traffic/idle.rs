//! Connections to a server that greets with its name, held open without a word, until they end or the input does.

use std::io::ErrorKind;
use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;

use crate::host::write_line;
use crate::traffic::{now_ms, resolve};

/// One connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Idle {
    /// Its number, from zero.
    pub number: usize,
    /// The server's name; empty where none came.
    pub server: String,
    /// When it ended, as [`now_ms`] has it; none while it is open.
    pub lost_ms: Option<f64>,
    /// Why it ended.
    pub error: String,
    /// The error was a reset.
    pub reset: bool,
}

/// Opens `count` connections. Prints an [`Idle`] as a line of JSON when one is open, and another when it has ended.
pub async fn hold(host: &str, port: u16, count: usize) -> Result<()> {
    let address = resolve(host, port).await?;
    for number in 0..count {
        tokio::spawn(async move {
            let mut idle = Idle { number, ..Idle::default() };
            if let Err(error) = stand(address, &mut idle).await {
                idle.lost_ms = Some(now_ms());
                let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
                idle.reset = kind == Some(ErrorKind::ConnectionReset);
                idle.error = format!("{error:#}");
            }
            say(&idle)
        });
    }
    // Those that are open are closed with this.
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await.map(drop).context("cannot read the input")
}

/// Ends with the connection, and with an error in any case.
async fn stand(address: SocketAddr, idle: &mut Idle) -> Result<()> {
    let stream = TcpStream::connect(address).await.context("cannot connect")?;
    let mut lines = BufReader::new(stream).lines();
    idle.server = lines.next_line().await.context("no greeting")?.context("the server has no name")?;
    say(idle)?;
    match lines.next_line().await.context("it broke off")? {
        Some(line) => bail!("the server says {line:?}"),
        None => bail!("the server has closed it"),
    }
}

fn say(idle: &Idle) -> Result<()> {
    write_line(&serde_json::to_string(idle)?)
}
