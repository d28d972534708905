//! The C library, the shim, and the two programs of `sdk/c/test`, compiled as they stand.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::LIMIT;
use crate::host::Host;
use crate::program::{Program, tail, wait_for};

macro_rules! sdk {
    ($($file:literal),* $(,)?) => {
        [$(($file, include_str!(concat!("../../../../../sdk/c/", $file)))),*]
    };
}

const FILES: [(&str, &str); 27] = sdk!(
    "Makefile",
    "margay.pc.in",
    "include/margay.h",
    "src/address.c",
    "src/agent.c",
    "src/carrier.c",
    "src/common.c",
    "src/datagram.c",
    "src/frames.c",
    "src/handover.c",
    "src/internal.h",
    "src/load.c",
    "src/margay.map",
    "src/name.c",
    "src/next.c",
    "src/preload.c",
    "src/real.h",
    "src/relay.c",
    "src/socket.c",
    "src/splice.c",
    "src/table.c",
    "examples/frames-client.c",
    "examples/frames-server.c",
    "test/client.c",
    "test/program.h",
    "test/server.c",
    "man/margay.3",
);

/// How a program comes to sockets of AF_SERVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// As it stands, under the shim.
    Shim,
    /// Against the library.
    Library,
}

/// What a program said at its end.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Calls that it made, and those that gave something else than they should.
    pub calls: f64,
    /// See there.
    pub failed: f64,
    /// What it is called, in hexadecimal.
    pub own: String,
    /// All that it said.
    pub log: String,
}

/// The compiled programs.
pub struct Programs {
    dir: PathBuf,
}

impl Programs {
    /// Writes the sources and compiles them with the host's C compiler.
    ///
    /// # Errors
    ///
    /// There is no compiler, or it does not take them.
    pub fn make(dir: &Path) -> Result<Self> {
        let dir = dir.join("sdk");
        for (name, text) in FILES {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().context("a file without a directory")?)?;
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let strict = "cc -std=gnu11 -Wall -Wextra -Werror -O2 -Iinclude";
        let mut script = "make --silent all\n".to_owned();
        for program in ["server", "client"] {
            script += &format!("{strict} -o build/{program}-shim test/{program}.c\n");
            script +=
                &format!("{strict} -DMARGAY_BSD_NAMES -o build/{program}-library test/{program}.c -Lbuild -lmargay\n");
        }
        for program in ["frames-client", "frames-server"] {
            script += &format!("{strict} -pthread -o build/{program} examples/{program}.c -Lbuild -lmargay\n");
        }
        let output = Command::new("sh").args(["-ec", &script]).current_dir(&dir).env_remove("MAKEFLAGS").output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sdk/c does not compile; a C compiler and make are needed: {}", tail(&said));
        // Programs of other users are run from here.
        for path in dir.ancestors().take(2).map(Path::to_owned).chain([dir.join("build")]) {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(Self { dir: dir.join("build") })
    }

    /// The shim.
    pub fn shim(&self) -> PathBuf {
        self.dir.join("libmargay-preload.so")
    }

    /// The command line of a program.
    pub fn argv(&self, door: Door, program: &str, args: &[&str]) -> Vec<OsString> {
        let (variable, value, file) = match door {
            Door::Shim => ("LD_PRELOAD", self.dir.join("libmargay-preload.so"), format!("{program}-shim")),
            Door::Library => ("LD_LIBRARY_PATH", self.dir.clone(), format!("{program}-library")),
        };
        let mut argv: Vec<OsString> = ["env", "MARGAY_ERRORS=1"].map(OsString::from).into();
        argv.push(format!("{variable}={}", value.display()).into());
        argv.push(self.dir.join(file).into());
        argv.extend(args.iter().map(OsString::from));
        argv
    }

    /// The command line of an example, against the library.
    pub fn example(&self, program: &str, args: &[&str]) -> Vec<OsString> {
        let mut argv: Vec<OsString> = vec!["env".into(), format!("LD_LIBRARY_PATH={}", self.dir.display()).into()];
        argv.push(self.dir.join(program).into());
        argv.extend(args.iter().map(OsString::from));
        argv
    }

    /// Starts a server; returns when it is ready.
    ///
    /// # Errors
    ///
    /// It is not, in time.
    pub fn serve(&self, host: &Host, door: Door, log: &str, args: &[&str]) -> Result<Program> {
        let mut program = host.spawn(log, self.argv(door, "server", args))?;
        wait_for(&format!("the server of {args:?}"), LIMIT, || {
            if program.ended()?.is_some() {
                bail!("it has ended: {}", tail(&program.log()));
            }
            let is_ready = program.log().lines().any(|line| line == "ready" || line == "bound");
            if is_ready { Ok(()) } else { bail!("it is not ready") }
        })?;
        Ok(program)
    }

    /// Runs a client to its end.
    ///
    /// # Errors
    ///
    /// It says no outcome.
    pub fn ask(&self, host: &Host, door: Door, args: &[&str]) -> Result<Outcome> {
        let output = host.output(self.argv(door, "client", args))?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        outcome(&said.concat())
    }
}

/// Waits for the end of a server, and gives what it said.
///
/// # Errors
///
/// It does not end, or says no outcome.
pub fn finish(mut program: Program) -> Result<Outcome> {
    wait_for("the end of a server", LIMIT, || {
        if program.ended()?.is_some() { Ok(()) } else { bail!("it runs: {}", tail(&program.log())) }
    })?;
    outcome(&program.log())
}

fn outcome(log: &str) -> Result<Outcome> {
    let line = log.lines().find(|line| line.starts_with('{')).with_context(|| format!("no outcome: {}", tail(log)))?;
    let value: Value = serde_json::from_str(line).context("the outcome is not JSON")?;
    let number = |field: &str| value[field].as_f64().unwrap_or_default();
    Ok(Outcome {
        calls: number("calls"),
        failed: number("failed"),
        own: value["own"].as_str().unwrap_or_default().to_owned(),
        log: log.to_owned(),
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_lab_has_all_sources_of_the_library() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/c/src");
        for entry in fs::read_dir(sources).expect("a directory") {
            let name = format!("src/{}", entry.expect("an entry").file_name().to_string_lossy());
            assert!(FILES.iter().any(|(file, _)| *file == name), "{name} is missing");
        }
    }
}
