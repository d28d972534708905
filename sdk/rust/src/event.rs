//! What happens to the flows of this user's programs.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use margay_core::name::ServiceId;
use serde_json::{Map, Value};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::agent::{Agent, receive, send, watched};
use crate::error::Error;
use crate::wire::{Kind, Reply, Request};

/// What happened to a flow.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKind {
    /// It carries data.
    Opened,
    /// It ended.
    Closed,
    /// It could not be opened, or was lost.
    Failed,
    /// What this version of the library has no word for; `missed`: this program was too slow, and so many events
    /// (`count`) are lost.
    Other(String),
}

/// Something that happened to a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub kind: EventKind,
    /// All that the agent says, as it says it.
    pub fields: Map<String, Value>,
}

impl Event {
    fn parse(line: &str) -> Result<Self, String> {
        let Ok(Value::Object(fields)) = serde_json::from_str(line) else {
            return Err("an event that is not an object in JSON".to_owned());
        };
        let kind = match fields.get("kind").and_then(Value::as_str) {
            Some("opened") => EventKind::Opened,
            Some("closed") => EventKind::Closed,
            Some("failed") => EventKind::Failed,
            Some(other) => EventKind::Other(other.to_owned()),
            None => return Err("an event without a kind".to_owned()),
        };
        Ok(Self { kind, fields })
    }

    /// The service's name as it is written, where it is known.
    pub fn name(&self) -> Option<&str> {
        self.text("name")
    }

    /// The service.
    pub fn service(&self) -> Option<ServiceId> {
        let name: margay_core::name::Name = self.text("service")?.parse().ok()?;
        Some(name.service_id())
    }

    /// The flow, as `margay flow` lists it.
    pub fn session(&self) -> Option<String> {
        match self.fields.get("session")? {
            Value::String(session) => Some(session.clone()),
            Value::Number(session) => Some(session.to_string()),
            _ => None,
        }
    }

    /// The reason.
    pub fn why(&self) -> Option<&str> {
        self.text("why")
    }

    fn text(&self, field: &str) -> Option<&str> {
        self.fields.get(field).and_then(Value::as_str).filter(|text| !text.is_empty())
    }
}

/// How far a subscription has come.
#[derive(Debug)]
enum State {
    /// The agent was told what is wanted, and has not answered yet.
    Asked(UnixStream),
    Running(UnixStream),
    /// The connection is gone.
    Ended,
}

/// What happens to the flows of this user's programs (of all programs, for root), as it happens. Also a
/// [`Stream`](futures_core::Stream).
#[derive(Debug)]
pub struct Events {
    agent: Agent,
    state: State,
}

impl Events {
    /// Events from now on.
    ///
    /// # Errors
    /// [`Error::AgentDown`]; [`Error::Refused`]; [`Error::Incompatible`].
    pub async fn open() -> Result<Self, Error> {
        Self::of(&Agent::shared()).await
    }

    /// As [`open`](Self::open), of another agent than that of this process.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn of(agent: &Agent) -> Result<Self, Error> {
        let mut events = Self { agent: agent.clone(), state: State::Ended };
        events.reopen().await?;
        Ok(events)
    }

    /// Events from now on, after an error ended them. What happened meanwhile is not told.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn reopen(&mut self) -> Result<(), Error> {
        self.state = State::Ended;
        let connection = self.agent.open().await.map_err(|source| self.agent.down(source))?;
        let request = Request::new(Kind::Events).to_bytes().map_err(|why| self.agent.incompatible(why))?;
        // The first message on a new connection always finds room.
        send(&connection, &request, &[]).map_err(|source| self.agent.down(source))?;
        self.state = State::Asked(watched(connection)?);
        poll_fn(|cx| self.poll_started(cx)).await
    }

    fn poll_started(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let State::Asked(connection) = &self.state else { return Poll::Ready(Ok(())) };
        let message = ready!(poll_message(connection, cx));
        let State::Asked(connection) = std::mem::replace(&mut self.state, State::Ended) else {
            return Poll::Ready(Ok(()));
        };
        let message = message.map_err(|source| self.agent.down(source))?;
        self.agent.read_reply("events", Kind::Events, message)??;
        self.state = State::Running(connection);
        Poll::Ready(Ok(()))
    }

    /// The next event. A call that is cancelled loses none. After an error there is no other one: `None`, until
    /// [`reopen`](Self::reopen).
    ///
    /// # Errors
    /// [`Error::AgentDown`] where the agent ended; [`Error::Incompatible`].
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        poll_fn(|cx| self.poll_event(cx)).await
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Event, Error>>> {
        let State::Running(connection) = &self.state else { return Poll::Ready(None) };
        let event = match ready!(poll_message(connection, cx)) {
            Err(source) => Err(self.agent.down(source)),
            Ok(Err(why)) => Err(self.agent.incompatible(why)),
            Ok(Ok(reply)) if reply.kind == Some(Kind::Event) => {
                Event::parse(&reply.text).map_err(|why| self.agent.incompatible(why))
            }
            Ok(Ok(reply)) => Err(self.agent.incompatible(format!("a message of kind {:?} among events", reply.kind))),
        };
        if event.is_err() {
            self.state = State::Ended;
        }
        Poll::Ready(Some(event))
    }
}

impl futures_core::Stream for Events {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_event(cx)
    }
}

fn poll_message(connection: &UnixStream, cx: &mut Context<'_>) -> Poll<io::Result<Result<Reply, String>>> {
    loop {
        ready!(connection.poll_read_ready(cx))?;
        match connection.try_io(Interest::READABLE, || receive(connection)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            message => return Poll::Ready(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_read_and_what_is_none_is_refused() {
        let line =
            r#"{"kind":"failed","name":"web.shop","service":"sid:01","session":7,"why":"nobody serves it","new":1}"#;
        let event = Event::parse(line).expect("an event");
        assert_eq!(event.kind, EventKind::Failed);
        assert_eq!((event.name(), event.why()), (Some("web.shop"), Some("nobody serves it")));
        assert_eq!(event.service().map(|service| service.0[0]), Some(1));
        assert_eq!(event.session().as_deref(), Some("7"));
        let moved = Event::parse(r#"{"kind":"moved","service":"nonsense"}"#).expect("an event");
        assert_eq!((moved.kind.clone(), moved.service()), (EventKind::Other("moved".to_owned()), None));
        assert!(Event::parse("{}").is_err() && Event::parse("[]").is_err() && Event::parse("{").is_err());
    }
}
