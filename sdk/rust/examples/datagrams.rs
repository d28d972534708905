//! Datagrams by name: a server that answers in upper case, and a client that asks it.
//!
//!     cargo run -p margay-sdk --example datagrams -- serve shout.shop
//!     cargo run -p margay-sdk --example datagrams -- ask shout.shop hello
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use std::time::Duration;

use margay_sdk::{Datagrams, Error};
use tokio::time::timeout;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", name] => serve(name).await,
        ["ask", name, text] => ask(name, text).await,
        _ => {
            println!("usage: datagrams serve NAME | ask NAME TEXT");
            Ok(())
        }
    }
}

async fn serve(name: &str) -> Result<(), Error> {
    let socket = Datagrams::bind(name).await?;
    println!("serving {name}");
    let mut buf = [0; 1500];
    loop {
        let (length, peer) = socket.recv_from(&mut buf).await?;
        socket.answer(&peer, &buf[..length].to_ascii_uppercase()).await?;
    }
}

async fn ask(name: &str, text: &str) -> Result<(), Error> {
    let socket = Datagrams::unbound().await?;
    socket.send_to(name, text.as_bytes()).await?;
    let mut buf = [0; 1500];
    // A datagram may be lost, and nobody may be there.
    let answer = timeout(Duration::from_secs(20), socket.recv_from(&mut buf)).await;
    let (length, peer) = answer.map_err(std::io::Error::from)??;
    println!("{peer}: {}", String::from_utf8_lossy(&buf[..length]));
    Ok(())
}
