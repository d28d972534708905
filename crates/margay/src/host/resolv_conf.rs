//! `/etc/resolv.conf`: the agent's responder first, everything that was there after it, and back again byte for byte.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

const COMMENT: &str = "# The next line is margay's: it answers its own zone only. `margay down` restores this file.";
/// Resolvers take no more servers than this.
const SERVERS_MAX: usize = 3;
/// Larger than any such file.
const FILE_MAX_BYTES: u64 = 64 * 1024;

/// What was there before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Before {
    /// Nothing.
    Absent,
    /// A file with this content. It is rewritten in place, so that owner, mode and a bind mount stay as they are.
    File(Content),
    /// A link to this place. The link gives way to a file and comes back; what it points to is not touched, since that
    /// belongs to another program.
    Link(PathBuf),
}

/// Bytes that are mostly text: as such in the journal, or as numbers when they are none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// UTF-8.
    Text(String),
    /// Anything else.
    Bytes(Vec<u8>),
}

impl Content {
    fn new(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|error| Self::Bytes(error.into_bytes()), Self::Text)
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// How the file looks now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// What it is.
    pub before: Before,
    /// What a resolver reads there; empty when there is nothing.
    pub effective: Vec<u8>,
}

/// Looks at the file.
pub fn look(path: &Path) -> io::Result<Present> {
    let about = match fs::symlink_metadata(path) {
        Ok(about) => about,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Present { before: Before::Absent, effective: Vec::new() });
        }
        Err(error) => return Err(error),
    };
    if about.is_symlink() {
        let effective = match read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            other => other?,
        };
        return Ok(Present { before: Before::Link(fs::read_link(path)?), effective });
    }
    let effective = read(path)?;
    Ok(Present { before: Before::File(Content::new(effective.clone())), effective })
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let about = fs::metadata(path)?;
    if !about.is_file() || about.len() > FILE_MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file, or too large to be one of servers"));
    }
    fs::read(path)
}

/// The servers that a resolver would ask, in order.
pub fn servers(content: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(content)
        .lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next() == Some("nameserver")).then(|| words.next().map(str::to_owned)).flatten()
        })
        .collect()
}

/// What the file shall hold: ours first, then all of `content`.
pub fn with_server(content: &[u8], server: IpAddr) -> Vec<u8> {
    let mut wanted = format!("{COMMENT}\nnameserver {server}\n").into_bytes();
    wanted.extend_from_slice(content);
    if servers(content).is_empty() {
        // Without any, resolvers ask this host; the agent's responder must never be the only one.
        if !matches!(wanted.last(), Some(b'\n')) {
            wanted.push(b'\n');
        }
        wanted.extend_from_slice(b"nameserver 127.0.0.1\n");
    }
    wanted
}

/// A remark where the last server falls off the end of what resolvers read.
pub fn remark(content: &[u8]) -> Option<String> {
    let servers = servers(content);
    (servers.len() >= SERVERS_MAX).then(|| {
        format!("resolvers read {SERVERS_MAX} servers: {} is no longer asked", servers[SERVERS_MAX - 1..].join(", "))
    })
}

/// Writes the file with our server first.
pub fn apply(path: &Path, before: &Before, server: IpAddr) -> io::Result<()> {
    let content = match before {
        Before::Absent => Vec::new(),
        Before::File(content) => content.as_bytes().to_vec(),
        Before::Link(_) => match read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            other => other?,
        },
    };
    let wanted = with_server(&content, server);
    match before {
        Before::File(_) => overwrite(path, &wanted),
        Before::Absent | Before::Link(_) => replace(path, |temporary| {
            let mut file = fs::File::create(temporary)?;
            file.write_all(&wanted)?;
            file.sync_all()
        }),
    }
}

/// Whether an interrupted write has left only a part of what [`apply`] writes. Such a file is no memory of what was there.
pub fn is_torn(path: &Path, before: &Before, server: IpAddr) -> io::Result<bool> {
    // The other two are put in place whole.
    let Before::File(content) = before else { return Ok(false) };
    let (now, ours) = (look(path)?.effective, with_server(content.as_bytes(), server));
    Ok(now.len() < ours.len() && ours.starts_with(&now))
}

/// Puts back what was there. A file that somebody else has written since is left to them, but for our lines.
pub fn undo(path: &Path, before: &Before, server: IpAddr) -> io::Result<Undone> {
    remove_left_over(&temporary(path))?;
    let now = look(path)?;
    if now.before == *before {
        return Ok(Undone::NothingToDo);
    }
    let is_ours = match before {
        Before::File(content) => now.effective == with_server(content.as_bytes(), server),
        Before::Absent => now.effective == with_server(b"", server),
        Before::Link(_) => matches!(now.before, Before::File(_)) && now.effective.starts_with(COMMENT.as_bytes()),
    };
    if is_ours {
        match before {
            Before::Absent => fs::remove_file(path)?,
            Before::File(content) => overwrite(path, content.as_bytes())?,
            Before::Link(target) => replace(path, |temporary| symlink(target, temporary))?,
        }
        return Ok(Undone::Restored);
    }
    let cleaned = without_server(&now.effective, server);
    // What another program wrote over a half-written file of ours is theirs; a torn write of ours is a prefix of ours.
    if let Before::File(content) = before
        && with_server(content.as_bytes(), server).starts_with(&now.effective)
    {
        overwrite(path, content.as_bytes())?;
        return Ok(Undone::Restored);
    }
    if cleaned != now.effective && matches!(now.before, Before::File(_)) {
        overwrite(path, &cleaned)?;
        return Ok(Undone::OnlyOurs);
    }
    Ok(Undone::Foreign)
}

/// What undoing came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undone {
    /// It was as before already.
    NothingToDo,
    /// It is as before.
    Restored,
    /// Somebody has changed it since; only our lines were taken out.
    OnlyOurs,
    /// Somebody has replaced it since; nothing of ours is in it.
    Foreign,
}

fn without_server(content: &[u8], server: IpAddr) -> Vec<u8> {
    let line = format!("nameserver {server}");
    content
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|found| {
            let found = found.strip_suffix(b"\n").unwrap_or(found);
            found != line.as_bytes() && found != COMMENT.as_bytes()
        })
        .flatten()
        .copied()
        .collect()
}

/// In place: the same inode, owner, mode and mount. The journal has the old content, should this be torn.
fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).truncate(true).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Makes something beside `path` and moves it there at once.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path);
    remove_left_over(&temporary)?;
    make(&temporary).and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        // What was half-made is of no use; the first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    })
}

fn temporary(path: &Path) -> PathBuf {
    path.with_extension("conf.margay-new")
}

fn remove_left_over(temporary: &Path) -> io::Result<()> {
    match fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What to do when the file refuses.
pub fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "the file may be immutable (`lsattr`): `chattr -i` it, or send the zone to the agent in the resolver that you \
             use, or set [dns] enabled = false"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "the file system is read-only: send the zone to the agent in your resolver"
        }
        _ => "names of the zone will not be found by this host's programs; `margay service resolve` still works",
    }
}

#[cfg(test)]
#[path = "resolv_conf_test.rs"]
mod test;
