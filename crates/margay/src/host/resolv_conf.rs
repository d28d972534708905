//! `/etc/resolv.conf`: the responder as the one server, those that were there as comments which the responder reads,
//! and back again byte for byte. One of several servers does not work: many resolvers ask any of them (decision 0044).

use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::change::State;

pub(super) const COMMENT: &str =
    "# The next line is margay's; it asks the servers below for all other names. `margay down` restores this file.";
/// Before each line that names another server: what follows is the line as it was.
pub(super) const ASKS: &str = "# asked by margay: ";
const DNS_PORT: u16 = 53;
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

/// Lines with their ends.
fn lines(content: &[u8]) -> impl Iterator<Item = &[u8]> {
    content.split_inclusive(|byte| *byte == b'\n')
}

fn names_server(line: &[u8]) -> bool {
    line.strip_prefix(b"nameserver").is_some_and(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))
}

/// What the file shall hold: our server alone, and what `content` says of all else. A comment at the head stays there:
/// openresolv writes only over files that begin with its own.
pub fn with_server(content: &[u8], server: IpAddr) -> Vec<u8> {
    let ours = format!("{COMMENT}\nnameserver {server}\n").into_bytes();
    let mut wanted = Vec::new();
    let mut rest = lines(content).peekable();
    if let Some(head) = rest.next_if(|line| line.starts_with(b"#") && line.ends_with(b"\n")) {
        wanted.extend_from_slice(head);
    }
    wanted.extend(ours);
    for line in rest {
        if names_server(line) {
            wanted.extend_from_slice(ASKS.as_bytes());
        }
        wanted.extend_from_slice(line);
    }
    wanted
}

/// What the file would hold without us, whatever our server was.
pub fn without_server(content: &[u8]) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut is_ours_next = false;
    for line in lines(content) {
        let is_ours = std::mem::take(&mut is_ours_next) && names_server(line);
        is_ours_next = line.strip_suffix(b"\n").unwrap_or(line) == COMMENT.as_bytes();
        if !is_ours && !is_ours_next {
            kept.extend_from_slice(line.strip_prefix(ASKS.as_bytes()).unwrap_or(line));
        }
    }
    kept
}

/// Whether we have written it.
pub fn is_ours(content: &[u8]) -> bool {
    lines(content).any(|line| line.strip_suffix(b"\n").unwrap_or(line) == COMMENT.as_bytes())
}

/// Whom the responder asks: those that the file named before us, or whoever has written over it since. Where nobody is
/// named, this host itself is.
pub fn upstreams(content: &[u8], own: IpAddr) -> Vec<SocketAddr> {
    let before = without_server(content);
    let named = servers(&before);
    let mut found: Vec<_> = named.iter().filter_map(|server| address(server)).collect();
    found.retain(|server| server.ip() != own);
    if named.is_empty() {
        found.push((Ipv4Addr::LOCALHOST, DNS_PORT).into());
    }
    found
}

/// Whether a zone is in the search list: the last one counts, as for resolvers.
pub fn searches(content: &[u8], zone: &str) -> bool {
    let text = String::from_utf8_lossy(content);
    let mut lists = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        matches!(words.next(), Some("search" | "domain")).then_some(words)
    });
    let zone = zone.trim_end_matches('.');
    lists.next_back().is_some_and(|mut list| list.any(|found| found.trim_end_matches('.').eq_ignore_ascii_case(zone)))
}

/// A server as the file has it: link-local ones with their interface.
fn address(server: &str) -> Option<SocketAddr> {
    if let Ok(ip) = server.parse::<IpAddr>() {
        return Some((ip, DNS_PORT).into());
    }
    let (ip, interface) = server.split_once('%')?;
    let scope = nix::net::if_::if_nametoindex(interface).ok()?;
    Some(SocketAddrV6::new(ip.parse().ok()?, DNS_PORT, 0, scope).into())
}

/// What was there, without what is ours of it.
pub fn cleaned(before: Before) -> Before {
    match before {
        Before::File(content) => Before::File(Content::new(without_server(content.as_bytes()))),
        other => other,
    }
}

/// What a resolver would read without us.
fn source(path: &Path, before: &Before) -> io::Result<Vec<u8>> {
    match before {
        Before::Absent => Ok(Vec::new()),
        Before::File(content) => Ok(content.as_bytes().to_vec()),
        Before::Link(target) => match read(&path.parent().unwrap_or(Path::new("/")).join(target)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other,
        },
    }
}

/// How the file stands to what it shall be.
pub fn state(path: &Path, before: &Before, server: IpAddr) -> io::Result<State> {
    let now = look(path)?;
    let found = servers(&now.effective);
    let is_behind = |source: Vec<u8>| now.effective != with_server(&source, server);
    Ok(match &found[..] {
        _ if !found.contains(&server.to_string()) => State::Absent,
        [_] if !matches!(before, Before::Link(_)) || !is_behind(source(path, before)?) => State::Present,
        [_] => State::Differs("the file behind the link has changed".into()),
        _ => State::Differs("there are other servers beside the responder".into()),
    })
}

/// Writes the file with our server alone.
pub fn apply(path: &Path, before: &Before, server: IpAddr) -> io::Result<()> {
    let wanted = with_server(&source(path, before)?, server);
    match before {
        Before::File(_) => overwrite(path, &wanted),
        Before::Absent | Before::Link(_) => replace(path, |temporary| {
            let mut file = fs::File::create(temporary)?;
            file.write_all(&wanted)?;
            file.sync_all()
        }),
    }
}

/// Whether an interrupted write has left only a part of what [`apply`] writes. Such a file is no memory of what was
/// there.
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
    let is_as_made = match before {
        Before::File(content) => now.effective == with_server(content.as_bytes(), server),
        Before::Absent => now.effective == with_server(b"", server),
        Before::Link(_) => matches!(now.before, Before::File(_)) && is_ours(&now.effective),
    };
    if is_as_made {
        match before {
            Before::Absent => fs::remove_file(path)?,
            Before::File(content) => overwrite(path, content.as_bytes())?,
            Before::Link(target) => replace(path, |temporary| symlink(target, temporary))?,
        }
        return Ok(Undone::Restored);
    }
    let cleaned = without_server(&now.effective);
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
            "the file may be immutable (`lsattr`): `chattr -i` it, or send the zone to the agent in the resolver that \
             you use, or set [dns] enabled = false"
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
