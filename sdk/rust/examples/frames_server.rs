//! Serves a name with frames, alone or as a member of an ensemble: answers each with what it is called and the frame.
//!
//!     cargo run -p margay-sdk --example frames_server -- work-members.shop first
#![expect(clippy::print_stdout, reason = "an example tells what it does")]

use margay_sdk::{Arrival, Error, Frames, Options};

async fn serve(mut client: Frames, label: &str) -> Result<(), Error> {
    while let Some(arrival) = client.recv().await? {
        if let Arrival::Frame(frame) = arrival
            && frame.wants_answer
        {
            let answer = format!("{label}: {}", String::from_utf8_lossy(&frame.bytes));
            client.answer(&frame, answer.as_bytes()).await?;
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut words = std::env::args().skip(1);
    let name = words.next().unwrap_or_else(|| "work.shop".to_owned());
    let label = words.next().unwrap_or_default();
    let mut listener = Options::new().bind_frames(&name, &label).await?;
    println!("serving {name}");
    loop {
        let (client, peer) = listener.accept().await?;
        let label = label.clone();
        tokio::spawn(async move {
            let ended = serve(client, &label).await;
            println!("{peer}: {ended:?}");
        });
    }
}
