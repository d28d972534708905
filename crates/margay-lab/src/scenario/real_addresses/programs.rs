//! The servers: as they are packaged, or a few lines in each language.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Protocol;
use crate::host::Host;

/// A kind of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As it is packaged.
    Nginx,
    /// A static binary, whose listeners are of MPTCP.
    Go,
    /// On a virtual machine that has sockets of IPv6 alone.
    Java,
    /// An event loop.
    Node,
    /// A few lines.
    Python,
}

/// All of them.
pub const KINDS: [Kind; 5] = [Kind::Nginx, Kind::Go, Kind::Java, Kind::Node, Kind::Python];

impl Kind {
    /// Its name, and the first part of its services' names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Go => "go",
            Self::Java => "java",
            Self::Node => "node",
            Self::Python => "python",
        }
    }

    /// What it serves by.
    pub const fn protocols(self) -> &'static [Protocol] {
        match self {
            Self::Nginx => &[Protocol::Tcp],
            _ => &[Protocol::Tcp, Protocol::Udp],
        }
    }

    /// Whether the host that this runs on has what it needs.
    pub fn is_here(self) -> bool {
        let program = match self {
            Self::Python => "python3",
            // Its compiler, too.
            Self::Java => "javac",
            other => other.name(),
        };
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]).any(|dir| dir.join(program).is_file())
    }

    /// The command line that serves `addresses` on a port, a socket each.
    ///
    /// # Errors
    ///
    /// Its files cannot be written.
    pub fn argv(
        self,
        dir: &Path,
        host: &Host,
        protocol: Protocol,
        port: u16,
        addresses: &[String],
    ) -> Result<Vec<String>> {
        let file = |name: &str| dir.join(name).display().to_string();
        let mut argv = match self {
            Self::Nginx => return nginx(host, port, addresses),
            Self::Go => vec![file("go/server")],
            // Compiled no further than it must: it lives for a second.
            Self::Java => ["java", "-XX:TieredStopAtLevel=1", "-cp", &file("."), "Server"].map(str::to_owned).into(),
            Self::Node => vec!["node".to_owned(), file("server.js")],
            Self::Python => vec!["python3".to_owned(), file("server.py")],
        };
        argv.extend([protocol.name().to_owned(), port.to_string()]);
        argv.extend_from_slice(addresses);
        Ok(argv)
    }
}

/// Writes the servers and the client, and builds what has to be built.
///
/// # Errors
///
/// There is no room, or the Go server does not build.
pub fn write_all(dir: &Path) -> Result<()> {
    let files = [
        ("server.py", include_str!("server.py")),
        ("client.py", include_str!("client.py")),
        ("Server.java", include_str!("Server.java")),
        ("server.js", include_str!("server.js")),
    ];
    for (name, text) in files {
        fs::write(dir.join(name), text)?;
    }
    if Kind::Java.is_here() {
        build(Command::new("javac").arg("Server.java").current_dir(dir))?;
    }
    if !Kind::Go.is_here() {
        return Ok(());
    }
    let go = dir.join("go");
    fs::create_dir_all(&go)?;
    fs::write(go.join("server.go"), include_str!("server.go"))?;
    // From this version of the language on, listeners are of MPTCP.
    fs::write(go.join("go.mod"), "module server\n\ngo 1.24\n")?;
    let mut command = Command::new("go");
    command.args(["build", "-o", "server"]).current_dir(&go).env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local");
    build(command.env("GOCACHE", dir.join("go-cache")))
}

fn build(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

fn nginx(host: &Host, port: u16, addresses: &[String]) -> Result<Vec<String>> {
    let dir = host.dir.join(format!("nginx-{port}"));
    fs::create_dir_all(&dir)?;
    let listen = |text: &String| match text.split_once('|') {
        Some((_, only)) => format!("listen [{only}]:{port} ipv6only=on;"),
        None if text.contains(':') => format!("listen [{text}]:{port} ipv6only=off;"),
        None => format!("listen {text}:{port};"),
    };
    let listens: Vec<String> = addresses.iter().map(listen).collect();
    let at = dir.display();
    let config = format!(
        "user root root;\ndaemon off;\nmaster_process off;\npid {at}/nginx.pid;\nevents {{}}\n\
         http {{\n  access_log off;\n  client_body_temp_path {at}/body;\n  proxy_temp_path {at}/proxy;\n  \
         fastcgi_temp_path {at}/fastcgi;\n  uwsgi_temp_path {at}/uwsgi;\n  scgi_temp_path {at}/scgi;\n  \
         server {{ {} location / {{ return 200 \"$remote_addr\"; }} }}\n}}\n",
        listens.join(" ")
    );
    fs::write(dir.join("nginx.conf"), config)?;
    Ok(["nginx", "-e", "stderr", "-c", &format!("{at}/nginx.conf")].map(str::to_owned).into())
}
