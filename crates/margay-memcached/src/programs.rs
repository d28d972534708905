//! The agent's socket for programs: a name's bits, and the address that stands for them on this host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use margay_core::name::{Prefix, ServiceId};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send, socket_with,
};

/// Where the agent listens, unless told otherwise.
pub const SOCKET: &str = "/run/margay/programs.sock";
/// The environment variable that tells otherwise.
pub const VARIABLE: &str = "MARGAY_PROGRAMS";

const VERSION: u8 = 1;
const NAME: u8 = 1;
const RESOLVE: u8 = 2;
const REQUEST_FIXED: usize = 56;
const REPLY_FIXED: usize = 60;
const TEXT_MAX: usize = 255;
const REPLY_TEXT_MAX: usize = 1024;
/// The agent answers from memory.
const LIMIT: Duration = Duration::from_secs(2);

/// Why the agent gave no address.
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// It cannot be asked.
    #[error("the agent does not answer at {}: {error}; does it run (`margay status`)?", path.display())]
    Unreachable {
        /// Where.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It says no.
    #[error("the agent refuses: {0}")]
    Refused(String),
    /// It speaks another language.
    #[error("the agent's answer makes no sense; agent and program are of different versions")]
    Garbage,
}

/// The agent of this host. Each question uses a connection of its own: they are few, and an agent that was started again is found.
#[derive(Clone, Debug)]
pub struct Programs(PathBuf);

struct Reply {
    bits: u16,
    id: ServiceId,
    v6: Ipv6Addr,
    v4: Ipv4Addr,
}

impl Programs {
    /// The agent behind a socket; without one that of the environment, or the usual.
    pub fn at(path: Option<&Path>) -> Self {
        let path = path.map(Path::to_owned).or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        Self(path.unwrap_or_else(|| SOCKET.into()))
    }

    /// The bits that a written name stands for.
    ///
    /// # Errors
    ///
    /// The agent cannot be asked, or the name is none.
    pub fn name(&self, written: &str) -> Result<Prefix, ProgramsError> {
        let reply = self.ask(NAME, &Prefix::default(), written)?;
        Ok(Prefix::new(reply.id, reply.bits))
    }

    /// The virtual address that stands for the first name of a prefix; IPv4, where there is one.
    ///
    /// # Errors
    ///
    /// The agent cannot be asked, or has no address.
    pub fn resolve(&self, prefix: &Prefix) -> Result<IpAddr, ProgramsError> {
        let reply = self.ask(RESOLVE, prefix, "")?;
        match (reply.v4.is_unspecified(), reply.v6.is_unspecified()) {
            (false, _) => Ok(reply.v4.into()),
            (true, false) => Ok(reply.v6.into()),
            (true, true) => Err(ProgramsError::Garbage),
        }
    }

    fn ask(&self, kind: u8, prefix: &Prefix, text: &str) -> Result<Reply, ProgramsError> {
        let mut request = vec![VERSION, kind, 0, 0, 0, 0];
        request.extend(prefix.bits.to_be_bytes());
        request.extend(prefix.id.0);
        request.resize(REQUEST_FIXED, 0);
        request.extend(text.as_bytes().iter().take(TEXT_MAX));
        let answer = self.exchange(&request).map_err(|error| {
            let path = self.0.clone();
            ProgramsError::Unreachable { path, error }
        })?;
        parse(kind, &answer)
    }

    fn exchange(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, which, Some(LIMIT))?;
        }
        connect(&socket, &SocketAddrUnix::new(&self.0)?)?;
        send(&socket, request, SendFlags::NOSIGNAL)?;
        let mut answer = vec![0; REPLY_FIXED + REPLY_TEXT_MAX];
        let (length, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
        answer.truncate(length);
        Ok(answer)
    }
}

fn parse(kind: u8, answer: &[u8]) -> Result<Reply, ProgramsError> {
    let (fixed, text) = answer.split_first_chunk::<REPLY_FIXED>().ok_or(ProgramsError::Garbage)?;
    let number = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
    if fixed[0] != VERSION || fixed[1] != kind || number(4) > 256 {
        return Err(ProgramsError::Garbage);
    }
    match number(2) {
        0 => {}
        errno => {
            let said = String::from_utf8_lossy(text).into_owned();
            let system = io::Error::from_raw_os_error(errno.into()).to_string();
            return Err(ProgramsError::Refused(if said.is_empty() { system } else { said }));
        }
    }
    let (mut id, mut v6, mut v4) = ([0; 32], [0; 16], [0; 4]);
    id.copy_from_slice(&fixed[8..40]);
    v6.copy_from_slice(&fixed[40..56]);
    v4.copy_from_slice(&fixed[56..60]);
    Ok(Reply { bits: number(4), id: ServiceId(id), v6: v6.into(), v4: v4.into() })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn answers_that_make_no_sense_are_no_answers() {
        let mut good = vec![0; REPLY_FIXED];
        (good[0], good[1], good[59]) = (VERSION, RESOLVE, 9);
        assert_eq!(parse(RESOLVE, &good).expect("good").v4, Ipv4Addr::new(0, 0, 0, 9));
        assert!(parse(NAME, &good).is_err());
        assert!(parse(RESOLVE, &good[..59]).is_err());
        assert!(parse(RESOLVE, &[]).is_err());
        for (at, value) in [(0, 2), (4, 9)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(matches!(parse(RESOLVE, &bad), Err(ProgramsError::Garbage)), "{at}");
        }
        good[3] = 13;
        assert!(parse(RESOLVE, &good).err().expect("refused").to_string().contains("denied"));
        good.extend(b"not you");
        assert!(matches!(parse(RESOLVE, &good), Err(ProgramsError::Refused(why)) if why == "not you"));
    }

    #[test]
    fn an_agent_that_is_not_there_is_named() {
        let error = Programs::at(Some(Path::new("/nowhere/programs.sock"))).name("cache.shop").expect_err("nobody");
        assert!(error.to_string().contains("/nowhere/programs.sock"), "{error}");
    }
}
