//! One program: the agent, and the command line that talks to it.

mod agent;
mod allow;
mod cli;
mod config;
mod down;
mod host;
mod listener;
mod resolver;
mod start;
mod up;

use std::process::ExitCode;

fn main() -> ExitCode {
    margay_datapath::arena::share();
    cli::main()
}
