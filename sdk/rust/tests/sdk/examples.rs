//! The examples, as programs, over an agent for tests.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::fake::FakeAgent;

/// An example that cargo has built beside this test, or in a directory of its own for what is not intermediate.
fn example(fake: &FakeAgent, name: &str, args: &[&str]) -> Command {
    let here = std::env::current_exe().expect("a path");
    let beside = here.ancestors().nth(2).expect("target/profile/deps");
    let profile = beside.file_name().expect("target/profile");
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from).filter(|target| target.is_absolute());
    let path = target.map_or(beside.into(), |target| target.join(profile)).join("examples").join(name);
    assert!(path.exists(), "{} is not built; run: cargo test -p margay-sdk", path.display());
    let mut command = Command::new(path);
    command.args(args).env("MARGAY_PROGRAMS", fake.path());
    command
}

/// Ends with the test.
struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Server {
    /// Once it serves.
    fn start(fake: &FakeAgent, name: &str, args: &[&str]) -> Self {
        let mut child = example(fake, name, args).stdout(Stdio::piped()).spawn().expect("started");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut server = Self { child, output };
        let line = server.line();
        assert!(line.starts_with("serving ") || line == "listening\n", "{line}");
        server
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn output(mut command: Command) -> String {
    let output = command.output().expect("started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn the_echo_server_echoes() {
    let fake = FakeAgent::start();
    let _server = Server::start(&fake, "echo_server", &["echo.shop"]);
    assert_eq!(output(example(&fake, "echo_client", &["echo.shop", "hello"])), "hello\n");
}

#[test]
fn the_server_of_frames_answers_each() {
    let fake = FakeAgent::start();
    let _server = Server::start(&fake, "frames_server", &["work.shop", "first"]);
    let said = output(example(&fake, "frames_client", &["work.shop", "k:one", "two"]));
    assert_eq!(said, "first: k:one\nfirst: two\n");
}

#[test]
fn the_prefix_server_greets_by_name() {
    let fake = FakeAgent::start();
    let _server = Server::start(&fake, "prefix_server", &["sid:3f00/8"]);
    let greeting = output(example(&fake, "echo_client", &["sid:3f17", "hello"]));
    assert!(greeting.starts_with("hello sid:000000000000000000000000"), "{greeting}");
}

#[test]
fn datagrams_are_answered() {
    let fake = FakeAgent::start();
    let _server = Server::start(&fake, "datagrams", &["serve", "shout.shop"]);
    let answer = output(example(&fake, "datagrams", &["ask", "shout.shop", "hello"]));
    assert!(answer.ends_with(": HELLO\n"), "{answer}");
}

#[test]
fn events_are_printed_until_the_agent_ends() {
    let mut fake = FakeAgent::start();
    let mut program = Server::start(&fake, "events", &[]);
    fake.event(r#"{"kind":"failed","name":"web.shop","why":"nobody serves it"}"#);
    assert_eq!(program.line(), "Failed None Some(\"nobody serves it\")\n");
    fake.kill();
    assert!(program.line().contains("margay up"));
    assert!(program.child.wait().expect("ended").success());
}

#[test]
fn without_an_agent_a_program_says_so() {
    let fake = FakeAgent::start();
    let mut command = example(&fake, "echo_server", &["echo.shop"]);
    let output = command.env("MARGAY_PROGRAMS", "/nonexistent/programs.sock").output().expect("started");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("AgentDown") && said.contains("/nonexistent/programs.sock"), "{said}");
}
