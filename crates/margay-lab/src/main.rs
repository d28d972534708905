//! The lab as a program of its own, for the tests of the lab; users call `margay lab`.

use std::process::ExitCode;

fn main() -> ExitCode {
    margay_lab::run(std::env::args_os().skip(1))
}
