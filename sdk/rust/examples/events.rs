//! Prints what happens to this user's flows, until the agent ends.
//!
//!     cargo run -p margay-sdk --example events
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use margay_sdk::{Error, Events};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut events = Events::open().await?;
    println!("listening");
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => println!("{:?} {:?} {:?}", event.kind, event.service(), event.why()),
            Err(error) => println!("{error}"),
        }
    }
    Ok(())
}
