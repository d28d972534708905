//! Flows of a framer: several connections share one, and what they say at a time goes in few datagrams.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use margay_wire::Framed;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;

use super::Reach;
use crate::Table;
use crate::batch::{self, Outlet};

/// Connections that share a flow. A flow is one switch's: where there are several switches of the name, more flows
/// spread over them.
const SHARED_MAX: usize = 64;
/// Messages of one connection that wait; others are lost, as on the way.
const MESSAGES_MAX: usize = 512;

/// A flow to one switch.
#[derive(Debug)]
struct Flow {
    socket: UdpSocket,
    outlet: Outlet,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where what comes goes, by the number of the connection.
    known: Table<u64, mpsc::Sender<Vec<u8>>>,
    /// No further connection may use it.
    is_spent: bool,
    /// Why it has ended.
    error: Option<String>,
}

impl Flow {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection, if there is one.
    fn join(self: &Arc<Self>, number: u64) -> Option<Place> {
        let mut state = self.state();
        if state.is_spent || state.known.len() >= SHARED_MAX || state.known.contains_key(&number) {
            return None;
        }
        let (sender, messages) = mpsc::channel(MESSAGES_MAX);
        state.known.insert(number, sender);
        Some(Place { flow: Arc::clone(self), number, messages })
    }

    fn take(&self, message: &[u8]) {
        let Ok((number, _)) = Framed::parse(message) else { return };
        if let Some(known) = self.state().known.get(&number) {
            // One that is behind: the switch repeats what is lost.
            let _ = known.try_send(message.to_vec());
        }
    }

    /// Carries what comes and goes until there is no connection any more, or the socket fails.
    async fn carry(self: Arc<Self>) {
        loop {
            let is_over = {
                let mut state = self.state();
                state.is_spent |= state.known.is_empty();
                state.known.is_empty()
            };
            let mut outcome = self.outlet.send(&self.socket);
            if is_over {
                return;
            }
            if outcome.is_ok() {
                outcome = tokio::select! {
                    received = batch::receive(&self.socket, |_, message| self.take(message)) => received,
                    () = self.outlet.wait() => Ok(()),
                };
            }
            if let Err(error) = outcome {
                let mut state = self.state();
                (state.is_spent, state.error) = (true, Some(error.to_string()));
                // Each connection finds out by this.
                return state.known.clear();
            }
        }
    }
}

/// A connection's place in a flow.
#[derive(Debug)]
pub(super) struct Place {
    flow: Arc<Flow>,
    number: u64,
    messages: mpsc::Receiver<Vec<u8>>,
}

impl Place {
    /// The next message; none: the flow has ended.
    pub(super) async fn receive(&mut self) -> Option<Vec<u8>> {
        self.messages.recv().await
    }

    /// The next message, if one has come.
    pub(super) fn receive_now(&mut self) -> Option<Vec<u8>> {
        self.messages.try_recv().ok()
    }

    pub(super) fn send(&self, message: &[u8]) {
        self.flow.outlet.push(None, message);
    }

    /// Why the flow has ended.
    pub(super) fn why(&self) -> String {
        self.flow.state().error.clone().unwrap_or_else(|| "its flow has ended".to_owned())
    }

    /// What the flow leads to does not answer: the next connection begins another flow.
    pub(super) fn spend(&self) {
        self.flow.state().is_spent = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.flow.state().known.remove(&self.number);
        // It may have been the last one.
        self.flow.outlet.wake();
    }
}

/// All flows of a framer.
#[derive(Debug, Default)]
pub(super) struct Flows {
    open: tokio::sync::Mutex<Vec<Weak<Flow>>>,
}

impl Flows {
    /// A place for a connection: in a flow that there is, or in a new one.
    ///
    /// # Errors
    ///
    /// There is no further flow.
    pub(super) async fn join<R: Reach>(&self, reach: &R, number: u64) -> io::Result<Place> {
        // Whoever comes meanwhile may share the flow that is opened now.
        let mut open = self.open.lock().await;
        open.retain(|flow| flow.strong_count() > 0);
        if let Some(place) = open.iter().filter_map(Weak::upgrade).find_map(|flow| flow.join(number)) {
            return Ok(place);
        }
        let flow = Arc::new(Flow { socket: reach.open().await?, outlet: Outlet::default(), state: Mutex::default() });
        // Nobody has it but this.
        let place = flow.join(number).ok_or_else(|| io::Error::other("a new flow takes no connection"))?;
        open.push(Arc::downgrade(&flow));
        tokio::spawn(flow.carry());
        Ok(place)
    }
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::batch::bytes_of;

    const LIMIT: Duration = Duration::from_secs(20);

    struct To(std::net::SocketAddr);

    impl Reach for To {
        async fn open(&self) -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind("127.0.0.1:0").await?;
            socket.connect(self.0).await?;
            Ok(socket)
        }

        fn name(&self) -> &'static str {
            "cache.test"
        }
    }

    async fn heard(socket: &UdpSocket) -> Vec<(std::net::SocketAddr, Vec<u8>)> {
        let mut all = Vec::new();
        let take =
            |from: Option<std::net::SocketAddr>, message: &[u8]| all.extend(from.map(|at| (at, message.to_vec())));
        timeout(LIMIT, batch::receive(socket, take)).await.expect("datagrams").expect("received");
        all
    }

    #[tokio::test]
    async fn connections_share_a_flow_and_each_hears_its_own() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let to = To(socket.local_addr().expect("bound"));
        let flows = Flows::default();
        let mut first = flows.join(&to, 1).await.expect("a flow");
        let mut second = flows.join(&to, 2).await.expect("a flow");
        let [ping, pong] = [Framed::Ping, Framed::Pong].map(|says| [bytes_of(1, &says), bytes_of(2, &says)]);
        first.send(&ping[0]);
        second.send(&ping[1]);
        let come = heard(&socket).await;
        assert_eq!(come.iter().map(|(_, message)| message).collect::<Vec<_>>(), [&ping[0], &ping[1]]);
        assert_eq!(come[0].0, come[1].0, "both by one datagram");
        for message in &pong {
            socket.send_to(message, come[0].0).await.expect("sent");
        }
        assert_eq!(timeout(LIMIT, first.receive()).await.expect("in time").as_ref(), Some(&pong[0]));
        assert_eq!(timeout(LIMIT, second.receive()).await.expect("in time").as_ref(), Some(&pong[1]));
    }

    #[tokio::test]
    async fn a_flow_that_is_full_or_spent_is_followed_by_another() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let to = To(socket.local_addr().expect("bound"));
        let flows = Flows::default();
        let mut places = Vec::new();
        for number in 0..=SHARED_MAX as u64 {
            places.push(flows.join(&to, number).await.expect("a flow"));
        }
        assert!(places[..SHARED_MAX].iter().all(|place| Arc::ptr_eq(&place.flow, &places[0].flow)));
        let last = &places[SHARED_MAX];
        assert!(!Arc::ptr_eq(&last.flow, &places[0].flow), "it was full");
        last.spend();
        let next = flows.join(&to, 1000).await.expect("a flow");
        assert!(!Arc::ptr_eq(&last.flow, &next.flow), "it was spent");
        drop(places.remove(0));
        let again = flows.join(&to, 1001).await.expect("a flow");
        assert!(Arc::ptr_eq(&places[0].flow, &again.flow), "there is room again");
    }

    #[tokio::test]
    async fn a_flow_ends_for_all_when_nobody_is_there() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let to = To(socket.local_addr().expect("bound"));
        drop(socket);
        let flows = Flows::default();
        let mut places = [flows.join(&to, 1).await.expect("a flow"), flows.join(&to, 2).await.expect("a flow")];
        places[0].send(&bytes_of(1, &Framed::Ping));
        for place in &mut places {
            assert_eq!(timeout(LIMIT, place.receive()).await.expect("an end"), None);
            assert!(!place.why().is_empty());
        }
        let next = flows.join(&to, 3).await.expect("a flow");
        assert!(!Arc::ptr_eq(&next.flow, &places[0].flow));
    }
}
