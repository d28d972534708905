//! A memcached or Redis that knows a few verbs, can be asked what it has, and can be held back.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use margay_frames::protocol::Protocol;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::redis;

/// Bytes of the largest value that one takes from a client.
pub const ITEM_MAX: usize = 2 << 20;

/// What one knows.
#[derive(Default)]
pub struct Content {
    pub values: HashMap<String, String>,
    /// Requests about keys that have come.
    pub asked: watch::Sender<usize>,
}

pub struct Program {
    pub address: SocketAddr,
    content: Arc<Mutex<Content>>,
    is_held: watch::Sender<bool>,
    task: AbortHandle,
}

pub fn locked(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Program {
    pub async fn start(protocol: Protocol) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let content = Arc::new(Mutex::new(Content::default()));
        let is_held = watch::Sender::new(false);
        let of_task = Arc::clone(&content);
        let held = is_held.subscribe();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let content = Arc::clone(&of_task);
                match protocol {
                    Protocol::Memcached => connections.spawn(serve(stream, content, held.clone())),
                    Protocol::Resp => connections.spawn(redis::serve(stream, content, held.clone())),
                };
            }
        });
        Self { address, content, is_held, task: task.abort_handle() }
    }

    pub fn hold(&self, is_held: bool) {
        self.is_held.send_replace(is_held);
        locked(&self.content).asked.send_replace(0);
    }

    pub fn has(&self, key: &str) -> bool {
        locked(&self.content).values.contains_key(key)
    }

    pub fn put(&self, key: &str, value: String) {
        locked(&self.content).values.insert(key.to_owned(), value);
    }

    pub fn count(&self) -> usize {
        locked(&self.content).values.len()
    }

    /// Requests about keys that have come.
    pub fn asked(&self) -> usize {
        *locked(&self.content).asked.borrow()
    }

    /// Waits until so many requests about keys have come.
    pub async fn await_asked(&self, count: usize) {
        let mut asked = locked(&self.content).asked.subscribe();
        asked.wait_for(|asked| *asked >= count).await.expect("the content has the sender");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, content: Arc<Mutex<Content>>, mut is_held: watch::Receiver<bool>) -> Option<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let mut answers = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if words == ["version"] {
            writer.write_all(b"VERSION fake\r\n").await.ok()?;
            continue;
        }
        if words == ["quit"] {
            return None;
        }
        let mut value = String::new();
        if matches!(words[0], "set" | "append") {
            let mut bytes = vec![0; words[4].parse::<usize>().ok()? + 2];
            reader.read_exact(&mut bytes).await.ok()?;
            bytes.truncate(bytes.len() - 2);
            value = String::from_utf8(bytes).ok()?;
        }
        answers.push(carry_out(&mut locked(&content), &words, value));
        // What was asked meanwhile is done, and answered later.
        if *is_held.borrow() && reader.buffer().is_empty() {
            tokio::select! {
                changed = is_held.wait_for(|is_held| !is_held) => drop(changed.ok()?),
                more = reader.fill_buf() => drop(more.ok()?),
            }
        }
        if !*is_held.borrow() {
            for answer in answers.drain(..) {
                writer.write_all(answer.as_bytes()).await.ok()?;
            }
        }
    }
}

fn carry_out(content: &mut Content, words: &[&str], value: String) -> String {
    content.asked.send_modify(|asked| *asked += 1);
    let key = words[1].to_owned();
    match words[0] {
        // As memcached, by the limit that it was started with.
        "set" if value.len() > ITEM_MAX => "SERVER_ERROR object too large for cache\r\n".to_owned(),
        "set" => {
            content.values.insert(key, value);
            "STORED\r\n".to_owned()
        }
        "append" => match content.values.get_mut(&key) {
            Some(known) => {
                known.push_str(&value);
                "STORED\r\n".to_owned()
            }
            None => "NOT_STORED\r\n".to_owned(),
        },
        "get" => match content.values.get(&key) {
            Some(value) => format!("VALUE {key} 0 {}\r\n{value}\r\nEND\r\n", value.len()),
            None => "END\r\n".to_owned(),
        },
        "delete" if content.values.remove(&key).is_some() => "DELETED\r\n".to_owned(),
        "incr" => match content.values.get_mut(&key).and_then(|value| Some((value.parse::<u64>().ok()? + 1, value))) {
            Some((sum, value)) => {
                *value = sum.to_string();
                format!("{sum}\r\n")
            }
            None => "NOT_FOUND\r\n".to_owned(),
        },
        _ => "NOT_FOUND\r\n".to_owned(),
    }
}
