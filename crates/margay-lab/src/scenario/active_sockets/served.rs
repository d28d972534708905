//! The programs of the scenario: as they are packaged, or a few lines that could be anybody's.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::host::Host;

const PYTHON_SERVER: &str = include_str!("server.py");
const GO_SERVER: &str = include_str!("server.go");

/// How a program stops to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It is asked to end.
    Stop,
    /// It has no time to do anything.
    Kill,
    /// It closes its socket and lives on.
    Close,
    /// It becomes another program, which does not get the socket.
    Exec,
}

impl End {
    /// The signal that makes it do so.
    pub const fn signal(self) -> Signal {
        match self {
            Self::Stop => Signal::SIGTERM,
            Self::Kill => Signal::SIGKILL,
            Self::Close => Signal::SIGUSR1,
            Self::Exec => Signal::SIGUSR2,
        }
    }
}

/// A kind of program that serves a name.
pub struct Kind {
    /// The first part of its service's name.
    pub name: &'static str,
    /// Its port.
    pub port: u16,
    /// How it is made to stop listening.
    pub ends: &'static [End],
    /// What a client says to learn who answers.
    pub ask: &'static str,
    /// Processes on the same port.
    pub processes: usize,
    /// In a network namespace of its own.
    pub in_box: bool,
    argv: fn(&Files, &Host, u16) -> Result<Vec<String>>,
}

const HTTP: &str = "GET /host HTTP/1.0\\r\\n\\r\\n";
const STOP_OR_KILL: &[End] = &[End::Stop, End::Kill];

/// All of them.
pub const KINDS: [Kind; 7] = [
    Kind { name: "nginx", port: 8081, ends: STOP_OR_KILL, ask: HTTP, processes: 1, in_box: false, argv: nginx },
    Kind { name: "python", port: 8082, ends: STOP_OR_KILL, ask: HTTP, processes: 1, in_box: false, argv: python },
    Kind { name: "go", port: 8083, ends: STOP_OR_KILL, ask: HTTP, processes: 1, in_box: false, argv: go },
    Kind {
        name: "memcached",
        port: 8084,
        ends: STOP_OR_KILL,
        ask: "get who\\r\\n",
        processes: 1,
        in_box: false,
        argv: memcached,
    },
    Kind {
        name: "script",
        port: 8085,
        ends: &[End::Close, End::Exec],
        ask: HTTP,
        processes: 1,
        in_box: false,
        argv: script,
    },
    Kind { name: "pair", port: 8086, ends: &[End::Kill], ask: HTTP, processes: 2, in_box: false, argv: script },
    Kind { name: "box", port: 8087, ends: STOP_OR_KILL, ask: HTTP, processes: 1, in_box: true, argv: boxed },
];

impl Kind {
    /// The name that clients use.
    pub fn service(&self) -> String {
        format!("{}.shop", self.name)
    }

    /// The command line that serves it.
    ///
    /// # Errors
    ///
    /// Its files cannot be written.
    pub fn argv(&self, files: &Files, host: &Host) -> Result<Vec<String>> {
        let mut argv: Vec<String> = ["margay", "run", "--service"].map(str::to_owned).into();
        argv.extend([format!("{}:80", self.service()), "--".to_owned()]);
        argv.extend((self.argv)(files, host, self.port)?);
        Ok(argv)
    }
}

/// What the programs are made of.
pub struct Files {
    dir: PathBuf,
    /// Processes in the network namespaces inside of hosts, by the host's name.
    boxes: BTreeMap<String, u32>,
}

impl Files {
    /// Writes and builds them.
    ///
    /// # Errors
    ///
    /// There is no room, or no Go compiler.
    pub fn make(dir: &Path, boxes: [(&str, u32); 2]) -> Result<Self> {
        fs::write(dir.join("server.py"), PYTHON_SERVER)?;
        fs::write(dir.join("server.go"), GO_SERVER)?;
        let mut go = Command::new("go");
        go.args(["build", "-o", "go-server", "server.go"])
            .current_dir(dir)
            .env("CGO_ENABLED", "0")
            .env("GO111MODULE", "off");
        go.env("GOCACHE", dir.join("go-cache"));
        let output = go.output().context("cannot run go, which the package golang-go has")?;
        if !output.status.success() {
            bail!("the Go server does not build: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let boxes = boxes.into_iter().map(|(host, pid)| (host.to_owned(), pid)).collect();
        Ok(Self { dir: dir.to_owned(), boxes })
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    /// The command line of the server of a few lines.
    pub fn script(&self, host: &Host, port: u16, more: &[&str]) -> Vec<String> {
        let words = ["python3", &self.path("server.py"), &port.to_string(), host.name()];
        words.iter().chain(more).map(|word| (*word).to_owned()).collect()
    }
}

fn nginx(_: &Files, host: &Host, port: u16) -> Result<Vec<String>> {
    let dir = host.dir.join("active-nginx");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("host"), format!("{}\n", host.name()))?;
    let at = dir.display();
    let config = format!(
        "user root root;\ndaemon off;\nmaster_process off;\npid {at}/nginx.pid;\nevents {{}}\n\
         http {{\n  access_log off;\n  client_body_temp_path {at}/body;\n  proxy_temp_path {at}/proxy;\n  \
         fastcgi_temp_path {at}/fastcgi;\n  uwsgi_temp_path {at}/uwsgi;\n  scgi_temp_path {at}/scgi;\n  \
         server {{ listen 0.0.0.0:{port}; root {at}; }}\n}}\n"
    );
    fs::write(dir.join("nginx.conf"), config)?;
    Ok(["nginx", "-e", "stderr", "-c", &format!("{at}/nginx.conf")].map(str::to_owned).into())
}

fn python(_: &Files, host: &Host, port: u16) -> Result<Vec<String>> {
    let dir = host.dir.join("active-python");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("host"), format!("{}\n", host.name()))?;
    let (port, dir) = (port.to_string(), dir.display().to_string());
    Ok(["python3", "-m", "http.server", &port, "--directory", &dir].map(str::to_owned).into())
}

fn go(files: &Files, host: &Host, port: u16) -> Result<Vec<String>> {
    Ok(vec![files.path("go-server"), port.to_string(), host.name().to_owned()])
}

fn memcached(_: &Files, _: &Host, port: u16) -> Result<Vec<String>> {
    let port = port.to_string();
    Ok(["memcached", "-u", "root", "-l", "0.0.0.0", "-p", &port, "-U", &port].map(str::to_owned).into())
}

fn script(files: &Files, host: &Host, port: u16) -> Result<Vec<String>> {
    Ok(files.script(host, port, &[]))
}

fn boxed(files: &Files, host: &Host, port: u16) -> Result<Vec<String>> {
    let inner = files.script(host, port, &[]);
    let pid = files.boxes.get(host.name()).context("the host has no namespace inside")?.to_string();
    Ok(["nsenter", "--target", &pid, "--net", "--"].map(str::to_owned).into_iter().chain(inner).collect())
}
