//! Says something to a service, under a name of its own, and prints what comes back.
//!
//!     cargo run -p margay-sdk --example echo_client -- echo.shop hello
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use margay_sdk::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "echo.shop".to_owned());
    let text = args.next().unwrap_or_else(|| "hello".to_owned());
    let mut stream = Options::new().own_source().connect(&name).await?;
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    println!("{answer}");
    Ok(())
}
