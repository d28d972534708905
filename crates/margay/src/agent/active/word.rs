//! A word to whoever started a program, on the program's own terminal: that its name is refused is nothing that the
//! program could see.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// Writes a line to the standard error of a process, if that is a terminal or a pipe. A file is the program's own: what
/// others write there it would write over.
pub fn say(pid: u32, text: &str) {
    // Neither waits for a reader nor takes the terminal.
    let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).bits();
    let path = Path::new("/proc").join(pid.to_string()).join("fd/2");
    // It may have ended, or have closed it.
    let Ok(mut stream) = OpenOptions::new().write(true).custom_flags(flags).open(path) else { return };
    let is_pipe = stream.metadata().is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe || stream.is_terminal() {
        // A pipe that is full has no reader who would miss it.
        let _ = stream.write_all(format!("margay: {text}\n").as_bytes());
    }
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_line_reaches_a_pipe_and_no_file() {
        let mut child = Command::new("sleep").arg("1000").stderr(Stdio::piped()).spawn().expect("a program");
        say(child.id(), "web.shop is refused");
        let mut line = String::new();
        BufReader::new(child.stderr.take().expect("piped")).read_line(&mut line).expect("a line");
        assert_eq!(line, "margay: web.shop is refused\n");
        child.kill().expect("it runs");
        child.wait().expect("it ends");

        let file = tempfile::NamedTempFile::new().expect("a file");
        let stderr = file.reopen().expect("the same");
        let mut child = Command::new("sleep").arg("1000").stderr(stderr).spawn().expect("a program");
        say(child.id(), "web.shop is refused");
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert_eq!(fs::read_to_string(file.path()).expect("readable"), "");
        say(child.id(), "to nobody");
    }
}
