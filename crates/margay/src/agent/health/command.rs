//! Programs that are asked how a service is. Each runs in a process group of its own, which ends with it: nothing that
//! it has started stays, unless that has left the group.

use std::convert::Infallible;
use std::future::pending;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::probe::Failure;

/// More of what it prints is read, and dropped.
const OUTPUT_MAX_BYTES: usize = 4096;
/// For what is left in its pipes, and for its end after it was killed.
const REST_LIMIT: Duration = Duration::from_millis(100);

/// The processes of a command; they are killed with this.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // Where nobody is left, there is nothing to kill.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// One of the two pipes of a command, and what came by it.
struct Pipe<R> {
    reader: Option<R>,
    kept: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Pipe<R> {
    fn new(reader: Option<R>) -> Self {
        Self { reader, kept: Vec::new() }
    }

    /// Reads until nobody holds the other end any more.
    async fn read(&mut self) {
        let Some(reader) = &mut self.reader else { return };
        let mut chunk = [0; OUTPUT_MAX_BYTES];
        while let Ok(count @ 1..) = reader.read(&mut chunk).await {
            let room = OUTPUT_MAX_BYTES.saturating_sub(self.kept.len());
            self.kept.extend_from_slice(&chunk[..count.min(room)]);
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}

/// Runs a program with its arguments. Gives what it has printed, when its exit status is 0.
///
/// # Errors
///
/// It cannot be started, has another exit status or was killed, or takes longer than `limit`.
pub async fn run(words: &[String], limit: Duration) -> Result<String, Failure> {
    let (program, arguments) = words.split_first().ok_or_else(|| Failure::failed("no program is given"))?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Should it be dropped while it runs, the group below kills it, and this makes sure that it is waited for.
    command.process_group(0).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| Failure::failed(format!("{program} cannot be run: {error}")))?;
    let group = Group::of(&child);
    let mut output = Pipe::new(child.stdout.take());
    let mut errors = Pipe::new(child.stderr.take());
    let ended = {
        // A pipe that nobody reads would stop the program.
        let reading = async {
            tokio::join!(output.read(), errors.read());
            pending::<Infallible>().await
        };
        tokio::select! {
            ended = timeout(limit, child.wait()) => ended,
            never = reading => match never {},
        }
    };
    // Also after its own end: what it has left behind holds its pipes open.
    drop(group);
    let Ok(ended) = ended else {
        // Killed; what cannot end now, in the kernel, is waited for by the runtime.
        let _ = timeout(REST_LIMIT, child.wait()).await;
        return Err(Failure::TimedOut(format!("{program} has not ended within {}", humantime::format_duration(limit))));
    };
    let _ = timeout(REST_LIMIT, async { tokio::join!(output.read(), errors.read()) }).await;
    let status = ended.map_err(|error| Failure::failed(format!("{program} cannot be waited for: {error}")))?;
    if status.success() {
        return Ok(output.text());
    }
    Err(Failure::failed(format!("{program} {}{}", fate(status), said(&output.text(), &errors.text()))))
}

fn fate(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The first line that it has printed, as far as there is one.
fn said(output: &str, errors: &str) -> String {
    let mut lines = output.lines().chain(errors.lines()).map(str::trim);
    lines.find(|line| !line.is_empty()).map(|line| format!(": {line}")).unwrap_or_default()
}

#[cfg(test)]
mod test {
    use std::time::Instant;

    use nix::sys::signal::kill;

    use super::*;

    /// Longer than what ends by itself takes.
    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(200);

    fn shell(script: &str) -> Vec<String> {
        ["/bin/sh", "-c", script].map(str::to_owned).into()
    }

    fn reason(result: Result<String, Failure>) -> String {
        result.expect_err("a failure").reason().to_owned()
    }

    #[tokio::test]
    async fn what_it_prints_is_given_and_its_status_counts() {
        assert_eq!(run(&shell("echo 40; echo noise >&2"), LONG).await.expect("well"), "40\n");
        assert_eq!(
            reason(run(&shell("echo; echo too few workers; exit 2"), LONG).await),
            "/bin/sh ended with exit status 2: too few workers"
        );
        assert_eq!(reason(run(&shell("echo why >&2; exit 1"), LONG).await), "/bin/sh ended with exit status 1: why");
        assert_eq!(reason(run(&shell("kill -9 $$"), LONG).await), "/bin/sh was ended by signal 9");
        let missing = reason(run(&["/nowhere/check".to_owned()], LONG).await);
        assert!(missing.starts_with("/nowhere/check cannot be run: No such file"), "{missing}");
    }

    #[tokio::test]
    async fn what_it_prints_is_bounded() {
        let text = run(&shell("head -c 1000000 /dev/zero | tr '\\0' x"), LONG).await.expect("it ends");
        assert_eq!(text.len(), OUTPUT_MAX_BYTES);
        let endless = run(&shell("exec yes"), SHORT).await.expect_err("it never ends");
        assert!(matches!(endless, Failure::TimedOut(_)));
    }

    /// Waits until a process is gone, or nobody's but init's to wait for.
    async fn await_end(pid: i32) {
        let is_there = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            kill(Pid::from_raw(pid), None).is_ok() && !stat.contains(") Z ")
        };
        while is_there() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn nothing_that_it_has_started_stays() {
        let begun = Instant::now();
        let child = run(&shell("sleep 1000 & echo $!"), LONG).await.expect("well");
        await_end(child.trim().parse().expect("a number")).await;

        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let hangs = run(&shell(&script), Duration::from_secs(2)).await.expect_err("it hangs");
        assert!(matches!(&hangs, Failure::TimedOut(why) if why.contains("within 2s")), "{hangs:?}");
        let child = std::fs::read_to_string(&file).expect("it was written");
        await_end(child.trim().parse().expect("a number")).await;
        assert!(begun.elapsed() < Duration::from_secs(900), "nothing was waited for to its end");
    }

    #[tokio::test]
    async fn it_ends_with_whoever_wanted_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("pid");
        let words = shell(&format!("echo $$ > {}; sleep 1000", file.display()));
        let task = tokio::spawn(async move { run(&words, Duration::from_secs(900)).await.is_ok() });
        let pid = loop {
            match std::fs::read_to_string(&file).unwrap_or_default().trim().parse() {
                Ok(pid) => break pid,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        task.abort();
        assert!(task.await.expect_err("it was told to end").is_cancelled());
        await_end(pid).await;
    }
}
