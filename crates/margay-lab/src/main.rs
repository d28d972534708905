//! `margay-lab`: hosts as network namespaces on this machine: demonstration, scenarios, topologies of your own.

use std::process::ExitCode;

fn main() -> ExitCode {
    margay_lab::run(std::env::args_os().skip(1))
}
