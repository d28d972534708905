//! The commands of `margay-lab`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};

use crate::fabric::{self, Privilege};
use crate::report::Report;
use crate::scenario::{self, Scenario};
use crate::{cgroup, demo, figure, host, standing, traffic};

/// Exit status for a wrong command line, as clap has it.
const USAGE: u8 = 2;

/// What `margay-lab` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build the hosts of a topology file and leave them running
    Up {
        /// Topology (TOML)
        file: PathBuf,
        /// Name of this lab
        #[arg(long, default_value = "lab")]
        name: String,
    },
    /// Run a command on a host of the running lab
    Exec {
        /// Host in the topology
        host: String,
        /// Name of the lab
        #[arg(long, default_value = "lab")]
        name: String,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// End the running lab
    Down {
        /// Name of the lab
        #[arg(long, default_value = "lab")]
        name: String,
    },
    /// Build a scenario's lab, do its work, check the outcome, tear it down
    Run {
        /// Scenario; see `list`
        scenario: String,
        /// Print one JSON object and nothing else
        #[arg(long)]
        json: bool,
        /// Keep the lab's files (logs) also when it passed
        #[arg(long)]
        keep: bool,
    },
    /// Name the scenarios
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run scenarios and write their results as JSON and SVG
    Figures {
        /// Directory for the results
        #[arg(long, default_value = "docs/figures")]
        out: PathBuf,
        /// Only these scenarios
        scenarios: Vec<String>,
    },
    /// Show the main job with real programs, and say what happens
    Demo {
        /// One part alone
        part: Option<demo::Part>,
    },
    /// First process of a lab
    #[command(hide = true)]
    Inside {
        /// Stay when the starter ends
        #[arg(long)]
        outlive: bool,
        /// What the worker shall do
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        work: Vec<OsString>,
    },
    /// Worker of a lab
    #[command(hide = true, subcommand)]
    Work(Work),
    /// Holder of a host's namespaces
    #[command(hide = true)]
    Hold {
        /// Host name
        name: String,
        /// The host's files
        #[arg(long)]
        dir: PathBuf,
        /// The host's cgroup
        #[arg(long)]
        cgroup: Option<PathBuf>,
        /// Forward IP
        #[arg(long)]
        forwarding: bool,
    },
    /// Traffic programs of the scenarios
    #[command(hide = true, subcommand)]
    Traffic(traffic::Traffic),
}

/// What a worker does inside the lab's namespaces.
#[derive(Debug, Subcommand)]
pub enum Work {
    /// Build a topology and stay
    Up {
        /// Topology file
        file: PathBuf,
        /// The lab's files
        dir: PathBuf,
    },
    /// Run a scenario and print its report as JSON
    Run {
        /// Its name
        scenario: String,
        /// The lab's files
        dir: PathBuf,
    },
    /// The demonstration
    Demo {
        /// What is shown
        part: demo::Part,
        /// The lab's files
        dir: PathBuf,
    },
}

#[derive(Parser)]
#[command(
    name = "margay-lab",
    about = "Hosts as network namespaces on this machine: demonstration, scenarios, topologies of your own"
)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

/// Parses and executes the words after `margay-lab`. One thread only may run in this process: the kernel wants that for
/// user namespaces.
pub fn run(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    match Line::try_parse_from(std::iter::once(OsString::from("margay-lab")).chain(words)) {
        Ok(line) => execute(line.command),
        Err(error) => {
            // Nothing can be done when even this cannot be printed.
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { USAGE } else { 0 })
        }
    }
}

fn execute(command: Command) -> ExitCode {
    match perform(command) {
        Ok(status) => ExitCode::from(status),
        // Whoever read our output has had enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            progress(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// One line about what goes on, on standard error.
pub fn progress(text: &str) {
    // Nobody may be reading.
    let _ = writeln!(std::io::stderr(), "lab: {text}");
}

fn perform(command: Command) -> Result<u8> {
    match command {
        Command::Up { file, name } => standing::up(&file, &name).map(|()| 0),
        Command::Exec { host, name, argv } => standing::exec(&name, &host, &argv).map(|()| 0),
        Command::Down { name } => standing::down(&name).map(|()| 0),
        Command::Run { scenario, json, keep } => run_scenario(&scenario, json, keep),
        Command::List { json } => list(json).map(|()| 0),
        Command::Figures { out, scenarios } => figure::write_all(&out, &scenarios),
        Command::Demo { part: Some(part) } => show(part),
        Command::Demo { part: None } => demo(),
        Command::Inside { outlive, work } => fabric::be_init(outlive, &work),
        Command::Work(Work::Up { file, dir }) => standing::work(&file, &dir).map(|()| 0),
        Command::Work(Work::Run { scenario, dir }) => scenario::work(&scenario, &dir),
        Command::Work(Work::Demo { part, dir }) => demo::perform(part, &dir),
        Command::Hold { name, dir, cgroup, forwarding } => {
            host::hold(&name, &dir, cgroup.as_deref(), forwarding).map(|()| 0)
        }
        Command::Traffic(traffic) => traffic::perform(traffic).map(|()| 0),
    }
}

/// A fresh directory for a lab's files.
///
/// # Errors
///
/// It cannot be made.
pub fn fresh_dir(name: &str) -> Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("margay-lab-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Runs a scenario in a lab of its own. Its files stay when it failed, or shall.
///
/// # Errors
///
/// The lab cannot be started at all.
fn run_in_lab(scenario: &Scenario, keep: bool) -> Result<Report> {
    let name = scenario.name;
    let dir = fresh_dir(name)?;
    progress(&format!("{name}: {} ({})", scenario.summary, Privilege::of_this_process().sentence()));
    let init = fabric::start([OsString::from("run"), name.into(), dir.clone().into()], false, |command| {
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    })?;
    let output = init.wait_with_output().context("cannot wait for the lab")?;
    let report = Report::from_json(&output.stdout).unwrap_or_else(|error| Report::broken(name, &format!("{error:#}")));
    tidy(&dir, keep || !report.pass);
    Ok(report)
}

fn run_scenario(name: &str, json: bool, keep: bool) -> Result<u8> {
    let scenario = scenario::find(name)?;
    let report = run_in_lab(scenario, keep)?;
    if json {
        host::write_line(&serde_json::to_string(&report)?)?;
    } else {
        host::write_line(&report.table(scenario.bounds))?;
    }
    Ok(u8::from(!report.pass))
}

/// Each part in a process of its own: a process makes namespaces for one lab.
fn demo() -> Result<u8> {
    let mut went_well = true;
    for part in demo::PARTS_ALL {
        let mut of_part = fabric::own_command()?;
        of_part.args(["demo", &name_of(part)?]);
        went_well &= of_part.status().context("a part cannot be started")?.success();
    }
    demo::conclude(went_well)?;
    Ok(u8::from(!went_well))
}

fn name_of(part: demo::Part) -> Result<String> {
    Ok(part.to_possible_value().context("the part has no name")?.get_name().to_owned())
}

fn show(part: demo::Part) -> Result<u8> {
    let dir = fresh_dir("demo")?;
    let words = [OsString::from("demo"), name_of(part)?.into(), dir.clone().into()];
    let status = fabric::finish(fabric::start(words, false, |_| {})?)?;
    tidy(&dir, status != 0);
    Ok(status)
}

/// Removes a lab's files, or says where they are.
pub fn tidy(dir: &Path, keep: bool) {
    cgroup::remove_ended();
    if keep {
        progress(&format!("logs are in {}", dir.display()));
    } else {
        // Files that stay behind in the temporary directory harm nobody.
        let _ = std::fs::remove_dir_all(dir);
    }
}

fn list(json: bool) -> Result<()> {
    if json {
        let names: Vec<_> = scenario::ALL.iter().map(|scenario| scenario.name).collect();
        return host::write_line(&serde_json::to_string(&names)?);
    }
    for scenario in scenario::ALL {
        host::write_line(&format!("{:18} {}", scenario.name, scenario.summary))?;
    }
    Ok(())
}
