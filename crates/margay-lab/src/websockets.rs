//! WebSockets beside a scenario, of a library that is in use (python3-websockets): the server of the Python SDK's
//! examples, which gives its connections to other hosts, and clients that ask all the time.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::host::Host;
use crate::program::Program;
use crate::server::await_listener;
use crate::sessions::Sessions;

const SERVER: &str = include_str!("../../../sdk/python/examples/websocket.py");
const CLIENT: &str = include_str!("websocket_sessions.py");
/// Debian's, which has the library.
const PYTHON: &str = "/usr/bin/python3";

fn python(host: &Host, file: &str, script: &str, words: &[&str]) -> Result<Command> {
    let path = host.dir.join(file);
    std::fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = host.command([Path::new(PYTHON), &path]);
    command.args(words).env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}

/// Starts a server on a port of a host. Returns when it listens; that it serves the name is said by others.
///
/// # Errors
///
/// It does not listen in time; the library may be missing.
pub fn serve(host: &Host, service: &str, port: u16) -> Result<Program> {
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/python/src");
    let port = port.to_string();
    let mut command = python(host, "websocket.py", SERVER, &[service, &port])?;
    command.env("PYTHONPATH", sdk);
    let mut program = Program::start(command, &host.dir.join("websocket.log"))?;
    await_listener(host, &mut program, &port)?;
    Ok(program)
}

/// Opens so many to a name, each of which asks ten times a second. Returns when each was answered.
///
/// # Errors
///
/// One of them does not open, or is not answered.
pub fn open(client: &Host, to: &str, port: u16, count: usize) -> Result<Sessions> {
    let mut command = python(client, "websocket_sessions.py", CLIENT, &[])?;
    command.env("URI", format!("ws://{to}:{port}/")).env("COUNT", count.to_string()).env("EVERY_MS", "100");
    Sessions::start(command, count)
}
