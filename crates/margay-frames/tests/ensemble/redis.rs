//! A Redis that knows a few commands, in both versions of its protocol.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::watch;

use crate::program::{Content, locked};

pub async fn serve(stream: TcpStream, content: Arc<Mutex<Content>>, mut is_held: watch::Receiver<bool>) -> Option<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let mut answers = Vec::new();
    let mut null = "$-1\r\n";
    loop {
        let words = read(&mut reader).await?;
        if words[0] == "PING" {
            writer.write_all(b"+PONG\r\n").await.ok()?;
            continue;
        }
        answers.push(match words[0].as_str() {
            "HELLO" => {
                if let Some(version) = words.get(1) {
                    null = if version == "3" { "_\r\n" } else { "$-1\r\n" };
                }
                // Version 3 says something unasked now and then.
                let unasked = if null == "_\r\n" { ">1\r\n+hello\r\n" } else { "" };
                format!("{unasked}*2\r\n+proto\r\n:{}\r\n", if null == "_\r\n" { 3 } else { 2 })
            }
            _ => carry_out(&mut locked(&content), &words, null),
        });
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

async fn line(reader: &mut BufReader<OwnedReadHalf>) -> Option<String> {
    let mut line = String::new();
    if reader.read_line(&mut line).await.ok()? == 0 {
        return None;
    }
    Some(line.trim_end().to_owned())
}

async fn read(reader: &mut BufReader<OwnedReadHalf>) -> Option<Vec<String>> {
    let first = line(reader).await?;
    let Some(count) = first.strip_prefix('*') else { return Some(vec![first]) };
    let mut words = Vec::new();
    for _ in 0..count.parse::<usize>().ok()? {
        let len: usize = line(reader).await?.strip_prefix('$')?.parse().ok()?;
        let mut bytes = vec![0; len + 2];
        reader.read_exact(&mut bytes).await.ok()?;
        bytes.truncate(len);
        words.push(String::from_utf8(bytes).ok()?);
    }
    Some(words)
}

fn string(value: &str) -> String {
    format!("${}\r\n{value}\r\n", value.len())
}

fn carry_out(content: &mut Content, words: &[String], null: &str) -> String {
    content.asked.send_modify(|asked| *asked += 1);
    let key = words[1].clone();
    let found = content.values.get(&key).map_or_else(|| null.to_owned(), |value| string(value));
    match words[0].to_ascii_uppercase().as_str() {
        "GET" => found,
        "MGET" => format!("*1\r\n{found}"),
        "SET" | "MSET" => {
            content.values.insert(key, words[2].clone());
            "+OK\r\n".to_owned()
        }
        "DEL" => format!(":{}\r\n", u8::from(content.values.remove(&key).is_some())),
        "EXISTS" => format!(":{}\r\n", u8::from(content.values.contains_key(&key))),
        "INCR" => {
            let value = content.values.entry(key).or_insert_with(|| "0".to_owned());
            *value = (value.parse::<u64>().unwrap_or_default() + 1).to_string();
            format!(":{value}\r\n")
        }
        "EVAL" => string(&format!("{} {}", words[2], words[3])),
        other => format!("-ERR unknown command '{other}'\r\n"),
    }
}
