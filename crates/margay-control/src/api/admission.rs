//! Who is let in over TCP: each has to get through a handshake within some seconds, and there is room for so many that
//! have not yet. Without that, whoever reaches the port could have the agent use up its descriptors by saying nothing.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::codegen::tokio_stream::{Stream, wrappers::ReceiverStream};

use crate::permits::{Backlog, UNWELCOMED_MAX};

/// From the first byte to the end of the handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// After an error of the system, which is that there are no more descriptors most often.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// What `shake` makes of a listener's streams, until what is given here is dropped.
pub(super) fn admitted<T, F>(
    listener: TcpListener,
    shake: impl Fn(TcpStream) -> F + Send + 'static,
) -> impl Stream<Item = io::Result<T>>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let (strangers, mut shaking) = (Backlog::new(UNWELCOMED_MAX), JoinSet::new());
        loop {
            let (stream, from) = tokio::select! {
                () = sender.closed() => return,
                Some(_) = shaking.join_next() => continue,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "an operator on another host cannot be heard");
                        sleep(PAUSE).await;
                        continue;
                    }
                },
            };
            let from = from.ip().to_canonical();
            let Ok(mut stranger) = strangers.enter(from) else {
                tracing::debug!(%from, "too many connections at once that have shown no certificate yet");
                continue;
            };
            let (sender, shaken) = (sender.clone(), shake(stream));
            shaking.spawn(async move {
                let shaken = tokio::select! {
                    shaken = timeout(HANDSHAKE_LIMIT, shaken) => shaken,
                    () = stranger.displaced() => {
                        tracing::debug!(%from, "ended for another connection: too many that have shown no certificate");
                        return;
                    }
                };
                drop(stranger);
                match shaken {
                    // Nobody takes it where the agent goes down.
                    Ok(Ok(admitted)) => drop(sender.send(Ok(admitted)).await),
                    Ok(Err(error)) => tracing::debug!(%from, %error, "nobody that may speak to the agent"),
                    Err(_) => tracing::debug!(%from, "no certificate within {HANDSHAKE_LIMIT:?}"),
                }
            });
        }
    });
    ReceiverStream::new(receiver)
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tonic::codegen::tokio_stream::StreamExt;

    use super::*;

    async fn silent(to: SocketAddr, count: usize) -> Vec<TcpStream> {
        let mut streams = Vec::new();
        for _ in 0..count {
            streams.push(TcpStream::connect(to).await.expect("it listens"));
        }
        streams
    }

    #[tokio::test]
    async fn those_that_say_nothing_have_room_for_so_many_and_no_more() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let to = listener.local_addr().expect("bound");
        let mut admitted = Box::pin(admitted(listener, |mut stream| async move { stream.read_u8().await }));
        let waiting = silent(to, 32).await;
        let mut late = silent(to, 1).await;
        assert_eq!(late[0].read(&mut [0]).await.expect("closed in order"), 0, "one more has no room");
        let mut speaker = waiting.into_iter().next().expect("they are there");
        speaker.write_u8(7).await.expect("it is open");
        assert_eq!(admitted.next().await.expect("it goes on").expect("admitted"), 7);
        // The others have gone with `waiting`: there is room again.
        let mut next = silent(to, 1).await;
        next[0].write_u8(8).await.expect("it is open");
        let second = timeout(Duration::from_secs(5), admitted.next()).await.expect("in time");
        assert_eq!(second.expect("it goes on").expect("admitted"), 8);
    }
}
