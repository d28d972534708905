//! WebSockets beside a scenario, of a library that is in use (python3-websockets): the server of the Python SDK's
//! examples, which gives its connections to other hosts, and clients that ask all the time.

use anyhow::Result;

use crate::host::Host;
use crate::program::Program;
use crate::python;
use crate::server::await_listener;
use crate::sessions::Sessions;

const SERVER: &str = include_str!("../../../sdk/python/examples/websocket.py");
const CLIENT: &str = include_str!("websocket_sessions.py");

/// Starts a server on a port of a host. Returns when it listens; that it serves the name is said by others.
///
/// # Errors
///
/// It does not listen in time; the library may be missing.
pub fn serve(host: &Host, service: &str, port: u16) -> Result<Program> {
    let port = port.to_string();
    let mut program = python::sdk(host, "websocket.py", SERVER, &[service, &port])?;
    await_listener(host, &mut program, &port)?;
    Ok(program)
}

/// Opens so many to a name, each of which asks ten times a second. Returns when each was answered.
///
/// # Errors
///
/// One of them does not open, or is not answered.
pub fn open(client: &Host, to: &str, port: u16, count: usize) -> Result<Sessions> {
    let mut command = python::command(client, "websocket_sessions.py", CLIENT, &[])?;
    command.env("URI", format!("ws://{to}:{port}/")).env("COUNT", count.to_string()).env("EVERY_MS", "100");
    Sessions::start(command, count)
}
