//! `margay ensemble socket`: a framed socket for a program of another language than Rust (docs/decisions/0087, 0091).
//! The program starts this one with a Unix socket as its standard input, and says there what is to be sent: see
//! [`packet`]. The end of that socket is the end of the connection, either way.

mod packet;

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::pin::pin;

use clap::{Args, Subcommand};
use margay_sdk::{
    Agent, Arrival, Error, Frames, FramesListener, FramesReceiver, FramesSender, Options, Order, Received, Sending,
};
use miette::{IntoDiagnostic, Result};
use nix::errno::Errno;
use tokio::task::JoinSet;

use super::{agent_of, give_up_privileges};
use crate::config::Config;
use packet::{IS_ANSWER, Packet, Packets, SAFE, UNORDERED, WANTS_ANSWER};

/// Where programs say which agent they mean, as the SDKs do.
const PROGRAMS_VARIABLE: &str = "MARGAY_PROGRAMS";

#[derive(Subcommand)]
pub enum SocketVerb {
    /// Connect to a server of frames, or to an ensemble
    Connect(NameArgs),
    /// Serve a name with frames
    Listen(NameArgs),
}

#[derive(Args)]
pub struct NameArgs {
    /// The service or ensemble, as `frames.shop`
    name: String,
    /// What a member is called where keys are divided
    #[arg(long = "as", value_name = "LABEL", default_value = "")]
    label: String,
}

/// Does what a verb says, for the program at standard input.
pub async fn socket(config: &Config, verb: SocketVerb) -> Result<()> {
    let program = io::stdin().as_fd().try_clone_to_owned().and_then(Packets::new).into_diagnostic()?;
    let opened = Packet::new(b'O');
    match verb {
        SocketVerb::Connect(args) => match open(config, &args).await {
            Ok(frames) => match program.send(&opened, None).await {
                Ok(()) => carry(frames, program).await,
                gone => gone,
            },
            Err(error) => program.send(&over(&error), None).await,
        },
        SocketVerb::Listen(args) => match listen(config, &args).await {
            Ok(listener) => match program.send(&opened, None).await {
                Ok(()) => accept(listener, program).await,
                gone => gone,
            },
            Err(error) => program.send(&over(&error), None).await,
        },
    }
    .into_diagnostic()
}

async fn agent_of_program(config: &Config) -> Result<Agent, Error> {
    match std::env::var_os(PROGRAMS_VARIABLE) {
        Some(_) => Ok(Agent::shared()),
        None => agent_of(config).await,
    }
}

async fn open(config: &Config, args: &NameArgs) -> Result<Frames, Error> {
    let agent = agent_of_program(config).await?;
    let frames = Options::new().agent(&agent).connect_frames(&*args.name).await?;
    give_up_privileges(&agent).await.map_err(Error::Io)?;
    Ok(frames)
}

async fn listen(config: &Config, args: &NameArgs) -> Result<FramesListener, Error> {
    let agent = agent_of_program(config).await?;
    let listener = Options::new().agent(&agent).bind_frames(&*args.name, &args.label).await?;
    give_up_privileges(&agent).await.map_err(Error::Io)?;
    Ok(listener)
}

fn over(error: &Error) -> Packet {
    let of_kind = || match error.kind() {
        ErrorKind::TimedOut => Errno::ETIMEDOUT,
        ErrorKind::ConnectionRefused => Errno::ECONNREFUSED,
        ErrorKind::ConnectionReset => Errno::ECONNRESET,
        ErrorKind::InvalidInput => Errno::EINVAL,
        _ => Errno::EIO,
    };
    let errno = error.raw_os_error().unwrap_or_else(|| of_kind() as i32);
    // Those of Linux are small and positive.
    Packet { number: errno.unsigned_abs(), payload: error.to_string().into_bytes(), ..Packet::new(b'E') }
}

/// What the program wants to be sent.
#[derive(Debug, PartialEq, Eq)]
struct Send {
    how: Sending,
    /// Of an answer, what it answers.
    answers: Option<u32>,
    payload: Vec<u8>,
}

impl Send {
    fn of(packet: Packet) -> Option<Self> {
        let Packet { kind: b'S', flags, order, number, key, payload } = packet else { return None };
        let order = match order {
            0 => Order::Member,
            UNORDERED => Order::None,
            stream => Order::Stream(stream),
        };
        let mut how = Sending::new().order(order).key(&key);
        how = if flags & SAFE != 0 { how.safe() } else { how };
        how = if flags & WANTS_ANSWER != 0 { how.wants_answer() } else { how };
        Some(Self { how, answers: (flags & IS_ANSWER != 0).then_some(number), payload })
    }
}

fn said(arrival: Arrival) -> Packet {
    let Received { number, is_answer, wants_answer, order, key, bytes } = match arrival {
        Arrival::Lost(number) => return Packet { number, ..Packet::new(b'L') },
        Arrival::Frame(frame) => frame,
    };
    let flags = if is_answer { IS_ANSWER } else { 0 } | if wants_answer { WANTS_ANSWER } else { 0 };
    let order = match order {
        Order::Member => 0,
        Order::None => UNORDERED,
        Order::Stream(stream) => stream,
    };
    Packet { kind: b'F', flags, order, number, key, payload: bytes }
}

/// Sends what the program says, until it says no more.
async fn from_program(program: &Packets, frames: FramesSender) -> Result<(), Error> {
    while let Some(packet) = program.receive().await.map_err(Error::Io)? {
        let none = || Error::Io(io::Error::new(ErrorKind::InvalidInput, "this is no packet of a program"));
        match Send::of(packet).ok_or_else(none)? {
            Send { how, answers: None, payload } => drop(frames.send_with(&payload, &how).await?),
            Send { answers: Some(number), payload, .. } => frames.answer_number(number, &payload).await?,
        }
    }
    Ok(())
}

/// Gives the program what arrives, until the connection is over.
async fn to_program(program: &Packets, mut frames: FramesReceiver) -> io::Result<()> {
    loop {
        let packet = match frames.recv().await {
            Ok(Some(arrival)) => said(arrival),
            Ok(None) => return Ok(()),
            Err(error) => return program.send(&over(&error), None).await,
        };
        if let Err(error) = program.send(&packet, None).await {
            // Who takes nothing any more may have sent something that is under way.
            while let Ok(Some(_)) = frames.recv().await {}
            return Err(error);
        }
    }
}

/// Carries one connection until either end is over. Neither way waits for the other one: a program that takes nothing
/// while it sends would else stop for ever with an end that does the same.
async fn carry(frames: Frames, program: Packets) -> io::Result<()> {
    let (sender, receiver) = frames.split();
    let mut receiving = pin!(to_program(&program, receiver));
    let ended = tokio::select! {
        ended = from_program(&program, sender) => ended,
        ended = &mut receiving => return ended,
    };
    match ended {
        Err(error) if error.kind() == ErrorKind::InvalidInput => program.send(&over(&error), None).await,
        // The receiving half knows why the connection is over, or waits until all that was sent has arrived.
        Ok(()) | Err(_) => receiving.await,
    }
}

/// Whether there are no more descriptors, or no memory for one, of this process, its user or the whole host. Those that
/// are there go on.
fn is_exhausted(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM | Errno::ETOOMANYREFS))
}

/// Gives the program a socket for a connection of a peer.
async fn give(program: &Packets, peer: String) -> io::Result<Packets> {
    let (ours, theirs) = Packets::pair()?;
    let packet = Packet { payload: peer.into_bytes(), ..Packet::new(b'A') };
    program.send(&packet, Some(theirs.as_fd())).await?;
    Ok(ours)
}

/// Gives the program a socket for each connection, until it wants no more of them, and carries those that there are.
/// One for which there is no descriptor is refused.
async fn accept(mut listener: FramesListener, program: Packets) -> io::Result<()> {
    let mut connections = JoinSet::new();
    let mut has_refused = false;
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (frames, peer) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => return program.send(&over(&error), None).await,
                };
                let who = peer.service().map(|service| service.to_string()).unwrap_or_default();
                // How one ends is its own affair.
                while connections.try_join_next().is_some() {}
                match give(&program, who).await {
                    Ok(ours) => drop(connections.spawn(carry(frames, ours))),
                    // Without its frames the connection is closed.
                    Err(error) if is_exhausted(&error) => {
                        if !std::mem::replace(&mut has_refused, true) {
                            eprintln!(
                                "margay: a framed connection is refused, and so are others while there are no \
                                 descriptors for them ({error}); raise the hard limit of descriptors (ulimit -Hn)"
                            );
                        }
                    }
                    Err(_) => break,
                }
            }
            _ = program.receive() => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    Ok(())
}

#[cfg(test)]
mod test {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    /// The limit is the whole process's, so another process lowers it: this test, run once more.
    #[test]
    fn a_connection_for_which_there_is_no_descriptor_is_refused_alone() {
        const VARIABLE: &str = "MARGAY_TEST_LOWERS_LIMIT";
        if std::env::var_os(VARIABLE).is_none() {
            let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
            command.args(["a_connection_for_which_there_is_no_descriptor_is_refused_alone", "--nocapture"]);
            let output = command.env(VARIABLE, "1").output().expect("a process");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            return;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (program, theirs) = Packets::pair().expect("sockets");
            let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
            // Descriptors 0 to 2 are taken.
            setrlimit(Resource::RLIMIT_NOFILE, 3, hard).expect("less is always allowed");
            let refused = give(&program, "peer.shop".to_owned()).await.expect_err("there is no descriptor");
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("as it was");
            assert!(is_exhausted(&refused), "{refused}");
            give(&program, "peer.shop".to_owned()).await.expect("there are descriptors again");
            let mut told = [0; 512];
            let len = nix::unistd::read(&theirs, &mut told).expect("a packet");
            assert!(told[0] == b'A' && told[..len].ends_with(b"peer.shop"));
            drop(theirs);
            let gone = give(&program, String::new()).await.expect_err("the program is gone");
            assert!(!is_exhausted(&gone), "{gone}");
        });
    }

    #[test]
    fn what_a_program_says_is_read() {
        let packet = Packet {
            kind: b'S',
            flags: SAFE | WANTS_ANSWER,
            order: 5,
            number: 0,
            key: b"k".to_vec(),
            payload: b"data".to_vec(),
        };
        let how = Sending::new().order(Order::Stream(5)).key(b"k").safe().wants_answer();
        assert_eq!(Send::of(packet.clone()), Some(Send { how, answers: None, payload: b"data".to_vec() }));
        let answer = Packet { flags: IS_ANSWER, order: UNORDERED, number: 258, key: vec![], ..packet.clone() };
        let answer = Send::of(answer).expect("an answer");
        assert_eq!((answer.answers, answer.how), (Some(258), Sending::new().order(Order::None)));
        assert_eq!(Send::of(Packet { kind: b'X', ..packet }), None);
    }

    #[test]
    fn a_program_is_told_of_frames_losses_and_ends() {
        let frame = Received {
            number: 7,
            is_answer: true,
            wants_answer: false,
            order: Order::Stream(2),
            key: b"k".to_vec(),
            bytes: b"x".to_vec(),
        };
        let told =
            Packet { kind: b'F', flags: IS_ANSWER, order: 2, number: 7, key: b"k".to_vec(), payload: b"x".to_vec() };
        assert_eq!(said(Arrival::Frame(frame)), told);
        assert_eq!(said(Arrival::Lost(258)), Packet { number: 258, ..Packet::new(b'L') });
        let error = Error::Io(io::Error::new(ErrorKind::TimedOut, "late"));
        assert_eq!(over(&error), Packet { number: 110, payload: b"late".to_vec(), ..Packet::new(b'E') });
    }
}
