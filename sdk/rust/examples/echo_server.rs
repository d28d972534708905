//! Serves a name: says back what it hears.
//!
//!     cargo run -p margay-sdk --example echo_server -- echo.shop
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use margay_sdk::Listener;
use tokio::io::{copy, split};

#[tokio::main]
async fn main() -> Result<(), margay_sdk::Error> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "echo.shop".to_owned());
    let listener = Listener::bind(&name).await?;
    println!("serving {name}");
    loop {
        let (stream, peer) = listener.accept().await?;
        tokio::spawn(async move {
            let (mut reader, mut writer) = split(stream);
            let said = copy(&mut reader, &mut writer).await;
            println!("{peer}: {said:?}");
        });
    }
}
