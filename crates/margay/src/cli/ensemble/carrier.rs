//! A member in two processes, where root has started it: `margay ensemble member` keeps the right to bind the members'
//! name, and `margay ensemble carry` parses what switches and the program say, without any right.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{ExitCode, Stdio};

use clap::{Args, ValueEnum};
use margay_core::key::HostId;
use margay_frames::member::{self, Config, End};
use margay_frames::process::{drop_privileges, raise_descriptor_limit};
use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid, getppid};
use tokio::io::AsyncReadExt;
use tokio::net::UdpSocket;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::ProgramProtocol;

/// Exit code of a carrier whose program does not answer any more; why, it has written to standard output.
const PROGRAM_GONE: u8 = 3;
/// Bytes of that text that are read.
const WHY_MAX: u64 = 4096;

/// Arguments of a carrier.
#[derive(Args)]
pub struct CarryArgs {
    /// What the program speaks
    #[arg(long, value_enum)]
    protocol: ProgramProtocol,
    /// Where the program is
    #[arg(long)]
    to: SocketAddr,
    /// What the member is called where keys are divided
    #[arg(long = "as")]
    label: String,
    /// This host
    #[arg(long)]
    host: HostId,
    /// The process that has started this one
    #[arg(long)]
    parent: i32,
}

/// As [`member::serve`], in another process.
///
/// # Errors
///
/// The process cannot be started, or fails.
pub async fn serve(
    protocol: ProgramProtocol,
    socket: UdpSocket,
    set_up: Config,
    mut leave: watch::Receiver<bool>,
) -> io::Result<End> {
    let mut child = {
        // The same program, also where another one has its path by now.
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        let protocol = protocol.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        command.args(["ensemble", "carry", "--protocol", &protocol, "--to", &set_up.to.to_string()]);
        // A label may begin as a flag does.
        command.arg(format!("--as={}", set_up.label));
        command.args(["--host", &HostId(set_up.host).to_string(), "--parent", &getpid().to_string()]);
        // What interrupts this process in a terminal has that one leave in order. The name is served until that one
        // ends: nothing else keeps the socket.
        command.stdin(OwnedFd::from(socket.into_std()?)).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        command.spawn()?
    };
    let told = child.stdout.take();
    let id = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let mut is_leaving = false;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            // Nobody can say so any more: then it is time as well.
            _ = leave.wait_for(|is_leaving| *is_leaving), if !is_leaving => {
                is_leaving = true;
                match id.map(|id| kill(id, Signal::SIGTERM)) {
                    // It may end in this moment.
                    None | Some(Ok(()) | Err(Errno::ESRCH)) => {}
                    // It is another user's, and dies with this process.
                    Some(Err(error)) => {
                        let why = "the process that carries its frames cannot be told to leave; root without CAP_KILL?";
                        return Err(io::Error::other(format!("{why} ({error})")));
                    }
                }
            }
        }
    };
    if status.success() {
        return Ok(End::Left);
    }
    if status.code() != Some(PROGRAM_GONE.into()) {
        return Err(io::Error::other(format!("the process that carries its frames has ended: {status}")));
    }
    let mut why = String::new();
    if let Some(told) = told {
        told.take(WHY_MAX).read_to_string(&mut why).await?;
    }
    Ok(End::ProgramGone(why))
}

/// Carries frames at the socket that is standard input, until the member leaves.
pub fn main(args: CarryArgs) -> ExitCode {
    match run(args) {
        Ok(End::Left) => ExitCode::SUCCESS,
        Ok(End::ProgramGone(why)) => {
            // The member's other process may be gone.
            let _ = io::stdout().write_all(why.as_bytes());
            PROGRAM_GONE.into()
        }
        Err(error) => {
            tracing::error!(%error, "the process that carries a member's frames ends");
            ExitCode::FAILURE
        }
    }
}

fn run(args: CarryArgs) -> io::Result<End> {
    raise_descriptor_limit();
    drop_privileges()?;
    // After the privileges: another user forgets it. A member that is killed is gone as a whole, and at once.
    set_pdeathsig(Signal::SIGKILL)?;
    if getppid().as_raw() != args.parent {
        return Err(io::Error::other("this verb is for members alone, or the member is gone"));
    }
    let socket = std::net::UdpSocket::from(io::stdin().as_fd().try_clone_to_owned()?);
    socket.set_nonblocking(true)?;
    let CarryArgs { protocol, to, label, host, .. } = args;
    let set_up = Config { protocol: protocol.into(), to, label, host: host.0 };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let leave = watch::Sender::new(false);
        let serving = member::serve(UdpSocket::from_std(socket)?, set_up, leave.subscribe());
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::pin!(serving);
        tokio::select! {
            ended = &mut serving => return ended,
            _ = terminate.recv() => drop(leave.send_replace(true)),
        }
        serving.await
    })
}
