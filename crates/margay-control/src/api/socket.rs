//! The socket: who may open it, and what is said when it cannot be opened.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{Group, chown};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Server};

use super::admission::PAUSE;
use super::client_over;
use super::v1::agent_client::AgentClient;
use super::v1::agent_server::{Agent, AgentServer};

/// Why the API cannot be offered or reached. Each names the socket.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// Nobody listens.
    #[error("no agent runs here: nobody answers at {path}; start one with `margay up`", path = .0.display())]
    NoAgent(PathBuf),
    /// This user may not.
    #[error(
        "{path}: this user may not talk to the agent; run as root, or as a member of the group that [host] group names",
        path = .0.display()
    )]
    Denied(PathBuf),
    /// The group does not exist.
    #[error("there is no group `{0}` on this host; create it, or correct [host] group in the configuration")]
    NoGroup(String),
    /// Something lies in the way.
    #[error("{path} is there and is no socket; move it away, or set another [host] runtime_dir", path = .0.display())]
    InTheWay(PathBuf),
    /// The operating system refused.
    #[error("{path}: cannot {act}: {error}", path = path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        act: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// gRPC failed.
    #[error("the API ended: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// Makes the socket at `path`, for root and the members of `group`. The caller holds the agent's lock: a socket that is
/// there already was left behind.
///
/// # Errors
///
/// The group does not exist, something else lies there, or the system refuses.
pub fn bind(path: &Path, group: Option<&str>) -> Result<UnixListener, ApiError> {
    let io_error = |act| move |error| ApiError::Io { path: path.to_owned(), act, error };
    let owner = group.map(|name| find_group(name, path)).transpose()?;
    match fs::symlink_metadata(path) {
        Ok(about) if about.file_type().is_socket() => {
            fs::remove_file(path).map_err(io_error("remove the old socket"))?
        }
        Ok(_) => return Err(ApiError::InTheWay(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io_error("look at it")(error)),
    }
    let listener = UnixListener::bind(path).map_err(io_error("listen there"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(io_error("set its mode"))?;
    if let Some(owner) = owner {
        chown(path, None, Some(owner.gid)).map_err(|error| io_error("give it to the group")(error.into()))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(io_error("set its mode"))?;
    }
    Ok(listener)
}

fn find_group(name: &str, path: &Path) -> Result<Group, ApiError> {
    let found = Group::from_name(name);
    let found =
        found.map_err(|error| ApiError::Io { path: path.to_owned(), act: "look up its group", error: error.into() })?;
    found.ok_or_else(|| ApiError::NoGroup(name.to_owned()))
}

/// Answers calls until `until` is done.
///
/// # Errors
///
/// The transport fails.
pub async fn serve(listener: UnixListener, agent: impl Agent, until: impl Future<Output = ()>) -> Result<(), ApiError> {
    let service = AgentServer::new(agent);
    Ok(Server::builder().add_service(service).serve_with_incoming_shutdown(accepted(listener), until).await?)
}

/// A listener's connections, until what is given here is dropped. The server would ask again at once for one that an
/// error of the system has kept away.
fn accepted(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                () = sender.closed() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                // Nobody takes it where the agent goes down.
                Ok((stream, _)) => drop(sender.send(Ok(stream)).await),
                Err(error) => {
                    tracing::warn!(%error, "an operator on this host cannot be heard");
                    sleep(PAUSE).await;
                }
            }
        }
    });
    ReceiverStream::new(receiver)
}

/// A client of the agent at `path`.
///
/// # Errors
///
/// No agent runs, or this user may not talk to it.
pub async fn connect(path: &Path) -> Result<AgentClient<Channel>, ApiError> {
    let connected = UnixStream::connect(path).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ApiError::NoAgent(path.to_owned()),
        io::ErrorKind::PermissionDenied => ApiError::Denied(path.to_owned()),
        _ => ApiError::Io { path: path.to_owned(), act: "connect to it", error },
    })?;
    Ok(client_over(connected).await?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use tokio::time::timeout;
    use tokio_stream::StreamExt;

    use super::*;

    /// The limit is the whole process's, so another process lowers it: this test, run once more.
    #[test]
    fn without_a_descriptor_the_next_connection_waits() {
        const VARIABLE: &str = "MARGAY_TEST_LOWERS_LIMIT";
        if std::env::var_os(VARIABLE).is_none() {
            let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
            command.args(["without_a_descriptor_the_next_connection_waits", "--nocapture"]);
            let output = command.env(VARIABLE, "1").output().expect("a process");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            return;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let base = tempfile::tempdir().expect("a directory");
            let path = base.path().join("api.sock");
            let listener = bind(&path, None).expect("made");
            let _client = UnixStream::connect(&path).await.expect("it listens");
            let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
            // Descriptors 0 to 2 are taken.
            setrlimit(Resource::RLIMIT_NOFILE, 3, hard).expect("less is always allowed");
            let mut accepted = std::pin::pin!(accepted(listener));
            let early = timeout(Duration::from_millis(200), accepted.next()).await;
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("as it was");
            assert!(early.is_err(), "the server would ask again at once: {early:?}");
            let next = timeout(Duration::from_secs(5), accepted.next()).await.expect("in time");
            next.expect("it goes on").expect("there are descriptors again");
        });
    }

    #[tokio::test]
    async fn who_may_and_what_is_in_the_way() {
        let base = tempfile::tempdir().expect("a directory");
        let path = base.path().join("api.sock");
        assert!(matches!(connect(&path).await, Err(ApiError::NoAgent(_))));
        drop(bind(&path, None).expect("made"));
        assert!(matches!(connect(&path).await, Err(ApiError::NoAgent(_))), "a socket that was left behind");
        let _again = bind(&path, None).expect("made in its place");
        let mode = fs::metadata(&path).expect("is there").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        assert!(matches!(bind(&path, Some("no-such-group-here")), Err(ApiError::NoGroup(_))));
        let file = base.path().join("file");
        fs::write(&file, "precious").expect("written");
        assert!(matches!(bind(&file, None), Err(ApiError::InTheWay(_))));
        assert_eq!(fs::read(&file).expect("still there"), b"precious");
    }
}
