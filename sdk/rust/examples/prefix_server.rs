//! Serves every name under a prefix with one socket, and greets whoever comes by the name that it goes by.
//!
//!     cargo run -p margay-sdk --example prefix_server -- sid:3f00/8
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use margay_sdk::{Listener, Prefix};
use tokio::io::{AsyncWriteExt, copy, sink};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let prefix: Prefix = std::env::args().nth(1).unwrap_or_else(|| "sid:3f00/8".to_owned()).parse()?;
    let listener = Listener::bind_prefix(prefix).await?;
    println!("serving {prefix}");
    loop {
        let (mut stream, peer) = listener.accept().await?;
        tokio::spawn(async move {
            stream.write_all(format!("hello {peer}, this is {prefix}\n").as_bytes()).await?;
            stream.shutdown().await?;
            // To close with something unread would reset the connection, and the greeting with it.
            copy(&mut stream, &mut sink()).await
        });
    }
}
