//! Sends frames to a server of frames, or to an ensemble, and prints the answers. A word with a colon has a key before
//! it.
//!
//!     cargo run -p margay-sdk --example frames_client -- work.shop user1:hello user2:hello
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use margay_sdk::{Arrival, Error, Frames, Sending};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut words = std::env::args().skip(1);
    let name = words.next().unwrap_or_else(|| "work.shop".to_owned());
    let mut server = Frames::connect(&name).await?;
    let mut open = 0;
    for word in words {
        let key = word.split_once(':').map_or("", |(key, _)| key);
        // Nothing that would harm if two servers did it.
        server.send_with(word.as_bytes(), &Sending::new().key(key.as_bytes()).wants_answer().safe()).await?;
        open += 1;
    }
    while open > 0 {
        match server.recv().await? {
            Some(Arrival::Frame(frame)) => println!("{}", String::from_utf8_lossy(&frame.bytes)),
            Some(Arrival::Lost(number)) => println!("nobody says what has become of frame {number}"),
            None => break,
        }
        open -= 1;
    }
    server.close().await;
    Ok(())
}
