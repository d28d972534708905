//! One program: the agent, and the command line that talks to it.

mod agent;
mod allow;
mod cli;
mod condition;
mod config;
mod config_changes;
mod down;
mod etcd_section;
mod fields;
mod host;
mod joining;
mod listener;
mod log;
mod log_file;
mod misread;
#[cfg(test)]
mod reference;
mod resolver;
mod responder;
mod site;
mod start;
mod up;

use std::panic;
use std::process::{self, ExitCode};

/// An agent without one of its threads would look alive and do half of its work. One that is dead is started again, and
/// takes its flows over.
fn die_of_panics() {
    let say = panic::take_hook();
    panic::set_hook(Box::new(move |what| {
        say(what);
        process::abort();
    }));
}

fn main() -> ExitCode {
    die_of_panics();
    margay_datapath::arena::share();
    cli::main()
}

#[cfg(test)]
mod test {
    use std::env;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::thread;

    use nix::sys::signal::Signal;

    const INSIDE: &str = "MARGAY_TEST_PANIC";

    #[test]
    fn a_panic_of_any_thread_ends_the_program() {
        if env::var_os(INSIDE).is_some() {
            super::die_of_panics();
            let _ = thread::spawn(|| panic!("on purpose")).join();
            return;
        }
        let own = env::current_exe().expect("it runs");
        let mut inside = Command::new(own);
        inside.args(["--exact", "test::a_panic_of_any_thread_ends_the_program"]).env(INSIDE, "1");
        let output = inside.output().expect("it starts");
        assert_eq!(output.status.signal(), Some(Signal::SIGABRT as i32));
    }
}
