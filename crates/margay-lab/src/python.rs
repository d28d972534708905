//! Programs in Python beside a scenario.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::host::Host;
use crate::program::Program;

/// Debian's, which has the libraries.
const PYTHON: &str = "/usr/bin/python3";

/// A script with these words, on a host.
///
/// # Errors
///
/// The script cannot be written.
pub fn command(host: &Host, file: &str, script: &str, words: &[&str]) -> Result<Command> {
    let path = host.dir.join(file);
    std::fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = host.command([Path::new(PYTHON), &path]);
    command.args(words).env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}

/// Starts a script that uses the SDK, with these words.
///
/// # Errors
///
/// It does not start.
pub fn sdk(host: &Host, file: &str, script: &str, words: &[&str]) -> Result<Program> {
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/python/src");
    let mut command = command(host, file, script, words)?;
    command.env("PYTHONPATH", sdk);
    Program::start(command, &host.dir.join(file).with_extension("log"))
}
