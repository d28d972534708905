//! What operators ask a switch: one line of JSON each way on a Unix socket.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use margay_core::Instant;
use margay_ensemble::Csn;
use margay_ensemble::Serial as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::member::{Member, Reach};
use super::placed::{Loaded, Placed};
use super::served::{Key, Served};
use super::worker::Worker;
use crate::module::{MODULE_MAX, Module};

/// Longest question, in bytes; and of root's, which have a module in them, each byte as a decimal number.
const QUESTION_MAX: u64 = 4096;
const QUESTION_OF_ROOT_MAX: u64 = QUESTION_MAX + 4 * MODULE_MAX as u64;
/// A question has so long to come, and its answer to be taken.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// A switch has so long to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// Pause where no question can be taken: mostly there are no more descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections that are listed; the number of all is told.
const LISTED_MAX: usize = 1000;
/// Bytes of a switch's answer.
const ANSWER_LEN_MAX: u64 = 4 << 20;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Question {
    /// What there is.
    Show,
    /// A member takes no new frames from now on, or again.
    Drain {
        /// The name of its host.
        member: String,
        /// It takes frames again.
        #[serde(default)]
        undo: bool,
    },
    /// A module divides the requests of connections that begin from now on: root alone may say so.
    Load {
        /// Its file, with its whole path, for lists: the switch is nobody's, and may not be able to read it.
        file: String,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// None does, and the policy holds again: root alone may say so.
    Unload,
}

/// A question on its way to the switch.
#[derive(Debug)]
pub struct Command {
    question: Question,
    /// What is to be loaded.
    module: Option<Loaded>,
    answer: oneshot::Sender<Value>,
}

impl Command {
    pub(super) fn carry_out(self, worker: &mut Worker, now: Instant) {
        let answer = match self.question {
            Question::Show => show(worker, now),
            Question::Drain { member, undo } if worker.drain(now, &member, !undo) => json!({}),
            Question::Drain { member, .. } => {
                json!({"error": format!("no member of {} is called {member}", worker.config.members)})
            }
            Question::Unload if worker.module.is_none() => json!({"error": "the switch has no module"}),
            Question::Load { .. } | Question::Unload => {
                worker.place(now, self.module);
                json!({})
            }
        };
        // Nobody may wait for it any more.
        let _ = self.answer.send(answer);
    }
}

/// Answers at a socket.
pub async fn serve(listener: UnixListener, commands: mpsc::Sender<Command>) -> Infallible {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let commands = commands.clone();
        tokio::spawn(async move {
            let answered = timeout(ASK_LIMIT, answer(stream, &commands)).await;
            if let Err(error) = answered.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                tracing::debug!(%error, "an operator's question was not answered");
            }
        });
    }
}

async fn answer(stream: UnixStream, commands: &mpsc::Sender<Command>) -> io::Result<()> {
    let is_root = stream.peer_cred()?.uid() == 0;
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    let len_max = if is_root { QUESTION_OF_ROOT_MAX } else { QUESTION_MAX };
    BufReader::new(reader.take(len_max)).read_line(&mut line).await?;
    let answer = match serde_json::from_str(&line) {
        Ok(question) => match check_module(question, is_root).await? {
            Ok((question, module)) => {
                let (sender, receiver) = oneshot::channel();
                let gone = |_| io::Error::other("the switch ends");
                let command = Command { question, module, answer: sender };
                commands.send(command).await.map_err(|_| gone(()))?;
                receiver.await.map_err(|_| gone(()))?
            }
            Err(why) => json!({"error": why}),
        },
        Err(error) => json!({"error": format!("this is no question: {error}")}),
    };
    writer.write_all(format!("{answer}\n").as_bytes()).await
}

/// [`module_of`] on a thread of its own: frames do not wait until a module is translated.
async fn check_module(question: Question, is_root: bool) -> io::Result<Result<(Question, Option<Loaded>), String>> {
    let checked = tokio::task::spawn_blocking(move || module_of(&question, is_root).map(|module| (question, module)));
    checked.await.map_err(io::Error::other)
}

/// The module that a question wants to be loaded, if it is one of those and may be asked.
fn module_of(question: &Question, is_root: bool) -> Result<Option<Loaded>, String> {
    match question {
        Question::Load { .. } | Question::Unload if !is_root => Err("modules are loaded by root alone".to_owned()),
        Question::Load { file, bytes } => {
            let module = Module::new(bytes).map_err(|error| error.to_string())?;
            Ok(Some(Loaded { module: Arc::new(module), file: file.clone() }))
        }
        Question::Show | Question::Drain { .. } | Question::Unload => Ok(None),
    }
}

/// Asks the switch that answers at a socket.
///
/// # Errors
///
/// Nobody answers there, or not in time, or the answer says what is wrong.
pub async fn ask(path: &Path, question: &Question) -> io::Result<Value> {
    let answered = timeout(ANSWER_LIMIT, ask_patiently(path, question)).await;
    answered.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "the switch is there, and says nothing")))
}

async fn ask_patiently(path: &Path, question: &Question) -> io::Result<Value> {
    let mut stream = UnixStream::connect(path).await?;
    let line = serde_json::to_string(question).map_err(io::Error::other)?;
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    let mut answer = String::new();
    // Its process has no privileges, for it reads what strangers send: it may be theirs.
    stream.take(ANSWER_LEN_MAX).read_to_string(&mut answer).await?;
    let answer: Value = serde_json::from_str(&answer).map_err(io::Error::other)?;
    match answer["error"].as_str() {
        Some(error) => Err(io::Error::other(error.to_owned())),
        None => Ok(answer),
    }
}

fn show(worker: &Worker, now: Instant) -> Value {
    let Worker { config, members, connections, totals, .. } = worker;
    let dropped: serde_json::Map<String, Value> =
        totals.dropped.all().map(|(name, count)| (name.to_owned(), count.into())).collect();
    let listed = connections.iter().take(LISTED_MAX);
    let has_module =
        |placed: &Placed| connections.values().filter(|served| served.module == Some(placed.number)).count();
    json!({
        "name": config.name,
        "members_name": config.members,
        "protocol": config.content.name(),
        "window": config.window,
        "module": worker.module.as_ref().map(|placed| placed.show(now, has_module(placed))),
        "connection_count": connections.len(),
        "accepted": totals.accepted,
        "failed": totals.failed,
        "last_failure": totals.last_failure,
        "member_deaths": totals.deaths,
        "lost_requests": totals.lost_requests,
        "dropped": dropped,
        "members": members.values().map(|member| show_member(member, connections.values())).collect::<Vec<_>>(),
        "connections": listed.map(|(key, served)| show_connection(worker, *key, served, now)).collect::<Vec<_>>(),
    })
}

fn show_member<'a>(member: &Member, connections: impl Iterator<Item = &'a Served>) -> Value {
    let (state, why) = match &member.reach {
        _ if member.is_drained => ("drained", ""),
        _ if member.is_leaving => ("leaving", ""),
        Reach::New => ("new", ""),
        Reach::Down(why) => ("dead", why.as_str()),
        Reach::Up if member.at.weight == 0 || !member.is_listed => ("drained", ""),
        Reach::Up => ("up", ""),
    };
    let mut count = 0_usize;
    let mut in_flight = 0;
    let mut holes = 0;
    let mut patches = 0;
    let mut window_bytes = None::<u32>;
    for served in connections {
        let Some(id) = served.legs.get(&member.at.host).and_then(super::served::Leg::member) else { continue };
        let members = served.switch.members();
        count += 1;
        in_flight += members.in_flight(id).unwrap_or_default();
        holes += served.switch.holes_of(id).unwrap_or_default();
        patches += members.patches(id).unwrap_or_default();
        window_bytes = window_bytes.into_iter().chain(members.window_bytes(id)).min();
    }
    json!({
        "name": member.at.name,
        "address": member.at.address.to_string(),
        "weight": member.at.weight,
        "state": state,
        "why": why,
        "connection_count": count,
        "frames_in_flight": in_flight,
        "holes": holes,
        "patches": patches,
        "window_bytes": window_bytes,
        "requests": member.tally.requests,
        "answers": member.tally.answers,
        "errors": member.tally.errors,
        "last_error": member.tally.last_error,
        "deaths": member.deaths,
    })
}

fn show_connection(worker: &Worker, (client, number): Key, served: &Served, now: Instant) -> Value {
    let (oldest, next): (Csn, Csn) = served.switch.inbound();
    let of_member = |(host, id): (&super::member::Host, margay_ensemble::MemberId)| {
        let members = served.switch.members();
        json!({
            "name": worker.members.get(host).map(|member| member.at.name.as_str()),
            "window_bytes": members.window_bytes(id),
            "frames_in_flight": members.in_flight(id),
            "holes": served.switch.holes_of(id),
            "patches": members.patches(id),
            "round_trip_us": members.round_trip(id).map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX)),
            "is_draining": !members.is_active(id),
        })
    };
    json!({
        "client": client.to_string(),
        "number": format!("{number:016x}"),
        "age_ms": u64::try_from(now.since(served.began).as_millis()).unwrap_or(u64::MAX),
        "oldest_chunk": oldest.0,
        "chunks_unacknowledged": next.since(oldest),
        "holes": served.switch.holes(),
        "window_bytes": served.switch.peer_window_bytes(),
        "module_calls": served.switch.plugin().module_calls(),
        "open_requests": served.switch.plugin().open_requests(),
        "lost_requests_untold": served.lost.len(),
        "members": served.joined().map(of_member).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn questions_are_as_they_are_written() {
        let read = |text: &str| serde_json::from_str::<Question>(text);
        assert_eq!(read(r#"{"command":"show"}"#).expect("a question"), Question::Show);
        let drain = Question::Drain { member: "s1".to_owned(), undo: false };
        assert_eq!(read(r#"{"command":"drain","member":"s1"}"#).expect("a question"), drain);
        assert!(read(r#"{"command":"dance"}"#).is_err());
    }

    #[tokio::test]
    async fn what_is_no_question_is_refused_in_words() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("switch.sock");
        let listener = UnixListener::bind(&path).expect("bound");
        let (sender, mut receiver) = mpsc::channel::<Command>(1);
        tokio::spawn(serve(listener, sender));
        let mut stream = UnixStream::connect(&path).await.expect("connected");
        stream.write_all(b"nonsense\n").await.expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        assert!(answer.contains("no question"), "{answer}");
        let answering = async {
            let command = receiver.recv().await.expect("a question");
            assert_eq!(command.question, Question::Show);
            command.answer.send(json!({"name": "cache.shop"})).expect("somebody waits");
        };
        let (shown, ()) = tokio::join!(ask(&path, &Question::Show), answering);
        assert_eq!(shown.expect("an answer")["name"], "cache.shop");
    }

    #[tokio::test(start_paused = true)]
    async fn a_switch_that_says_nothing_is_not_waited_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("switch.sock");
        let _listener = UnixListener::bind(&path).expect("bound");
        let error = ask(&path, &Question::Show).await.expect_err("nobody answers");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
