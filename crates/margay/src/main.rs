//! One program: the agent, and the command line that talks to it.

mod agent;
mod allow;
mod cli;
mod config;
mod down;
mod etcd_section;
mod host;
mod listener;
mod log_file;
mod misread;
mod resolver;
mod site;
mod start;
mod up;

use std::process::ExitCode;

fn main() -> ExitCode {
    margay_datapath::arena::share();
    cli::main()
}
