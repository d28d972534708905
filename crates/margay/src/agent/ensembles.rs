//! Switches of ensembles that run while the agent does, as the configuration says: each a process of its own
//! (docs/decisions/0075), which is started again when it ends.
//!
//! A switch ends with the agent: its standard input does. What a changed section costs is data ([`Step`]): another
//! module is loaded by the switch that runs, anything else needs another switch, and ends its connections.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use parking_lot::Mutex;
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::config::{Config, EnsembleSection};

/// Pause before a switch that has ended is started again, and before a module is offered again; doubled each time, up
/// to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// One that ran for so long has started well.
const WELL_AFTER: Duration = Duration::from_secs(10);
/// A switch that is told to end has so long to say so to its peers.
const END_LIMIT: Duration = Duration::from_secs(2);

/// What leads from one section to another of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// They are the same.
    Nothing,
    /// The switch that runs takes another module, or none.
    Module,
    /// The switch ends, and another process takes its place.
    Restart,
}

impl Step {
    fn between(from: &EnsembleSection, to: &EnsembleSection) -> Self {
        let without_module = |section: &EnsembleSection| EnsembleSection { module: None, ..section.clone() };
        // A module stands in the router's place; the router returns as it was.
        let router = |section: &EnsembleSection| section.router.unwrap_or_default();
        let comparable =
            |section: &EnsembleSection| EnsembleSection { router: Some(router(section)), ..without_module(section) };
        if comparable(from) != comparable(to) {
            Self::Restart
        } else if from.module != to.module {
            Self::Module
        } else {
            Self::Nothing
        }
    }
}

/// A switch that is kept running.
struct Running {
    wanted: watch::Sender<EnsembleSection>,
    task: JoinHandle<()>,
}

/// The switches of this agent.
#[derive(Default)]
pub struct Ensembles {
    by_name: Mutex<BTreeMap<String, Running>>,
}

impl Ensembles {
    /// Runs those that the configuration names, and no others. `config_path` is the file that it came from.
    pub fn configure(&self, config: &Config, config_path: Option<PathBuf>) {
        let mut by_name = self.by_name.lock();
        let sections: BTreeMap<String, &EnsembleSection> =
            config.ensembles().map(|section| (section.name.to_string(), section)).collect();
        // Whose sender is gone ends.
        by_name.retain(|name, _| sections.contains_key(name));
        for (name, section) in sections {
            match by_name.get(&name) {
                Some(running) => drop(running.wanted.send_replace(section.clone())),
                None => {
                    let (wanted, receiver) = watch::channel(section.clone());
                    let switch = Switch { name: name.clone(), config_path: config_path.clone(), wanted: receiver };
                    by_name.insert(name, Running { wanted, task: tokio::spawn(switch.keep()) });
                }
            }
        }
    }

    /// Ends all of them. Returns when they are gone, or do not end.
    pub async fn end(&self) {
        let all = std::mem::take(&mut *self.by_name.lock());
        let tasks: Vec<JoinHandle<()>> = all.into_values().map(|running| running.task).collect();
        for task in tasks {
            // Its sender is gone with what it stood in. Nothing more can be done for one that has failed.
            let _ = task.await;
        }
    }
}

/// What one task keeps.
struct Switch {
    name: String,
    config_path: Option<PathBuf>,
    wanted: watch::Receiver<EnsembleSection>,
}

/// Why a switch runs no more.
enum Ended {
    /// Its process has exited, and nobody had asked for that.
    Itself(io::Result<ExitStatus>),
    /// Another one is wanted.
    Restart,
    /// None is wanted.
    Withdrawn,
}

impl Switch {
    async fn keep(mut self) {
        let mut pause = PAUSE;
        loop {
            let section = self.wanted.borrow_and_update().clone();
            let started = Instant::now();
            let ended = match self.start(&section) {
                Ok(child) => self.follow(child, section).await,
                Err(error) => Ended::Itself(Err(error)),
            };
            let how = match ended {
                Ended::Withdrawn => return,
                Ended::Restart => {
                    pause = PAUSE;
                    continue;
                }
                Ended::Itself(how) => how,
            };
            if started.elapsed() >= WELL_AFTER {
                pause = PAUSE;
            }
            let how = how.map_or_else(|error| error.to_string(), |status| status.to_string());
            tracing::warn!(name = self.name, how, again_in = ?pause, "the switch of an ensemble has ended");
            tokio::select! {
                () = sleep(pause) => pause = (pause * 2).min(PAUSE_MAX),
                changed = self.wanted.changed() => match changed {
                    Ok(()) => pause = PAUSE,
                    Err(_) => return,
                },
            }
        }
    }

    /// This program as a command of this ensemble's.
    fn command(&self, words: impl IntoIterator<Item = OsString>) -> Command {
        // The same program, also where another one has its path by now.
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        if let Some(path) = &self.config_path {
            command.arg("--config").arg(path);
        }
        command.arg("ensemble").args(words);
        // Whoever waits for the agent's word is not to hear it from a switch. A group of its own: what interrupts the
        // agent in a terminal has it end in order.
        command.env_remove("NOTIFY_SOCKET").current_dir("/").stdout(Stdio::null()).process_group(0);
        command
    }

    fn start(&self, section: &EnsembleSection) -> io::Result<Child> {
        self.command(words_of(section)).stdin(Stdio::piped()).kill_on_drop(false).spawn()
    }

    /// Until a switch ends, or is told to.
    async fn follow(&mut self, mut child: Child, mut current: EnsembleSection) -> Ended {
        let mut pause = PAUSE;
        // Whoever waits for a child closes its standard input, if that is still the child's.
        let attends = child.stdin.take();
        loop {
            let wanted = self.wanted.borrow_and_update().clone();
            let step = Step::between(&current, &wanted);
            if step == Step::Restart {
                end(child, attends).await;
                return Ended::Restart;
            }
            let is_behind = step == Step::Module;
            if is_behind {
                match self.change_module(&wanted).await {
                    Ok(()) => {
                        (current, pause) = (wanted, PAUSE);
                        continue;
                    }
                    // One that has just started may not hear yet.
                    Err(why) if pause > PAUSE => tracing::warn!(name = self.name, why, "the module is not loaded yet"),
                    Err(why) => tracing::debug!(name = self.name, why, "the module is not loaded yet"),
                }
            } else {
                current = wanted;
            }
            tokio::select! {
                status = child.wait() => return Ended::Itself(status),
                changed = self.wanted.changed() => match changed {
                    Ok(()) => pause = PAUSE,
                    Err(_) => {
                        end(child, attends).await;
                        return Ended::Withdrawn;
                    }
                },
                () = sleep(pause), if is_behind => pause = (pause * 2).min(PAUSE_MAX),
            }
        }
    }

    /// Has the switch that runs load another module, or none. It is noted in the audit log as any other.
    async fn change_module(&self, wanted: &EnsembleSection) -> Result<(), String> {
        let words: Vec<OsString> = match &wanted.module {
            Some(module) => vec!["load".into(), self.name.clone().into(), module.clone().into_os_string()],
            None => vec!["unload".into(), self.name.clone().into()],
        };
        let output = self.command(words).stdin(Stdio::null()).kill_on_drop(true).output().await;
        let output = output.map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        // Whoever has unloaded it by hand has done what is wanted.
        let is_none_already = wanted.module.is_none() && said.contains("has no module");
        if output.status.success() || is_none_already { Ok(()) } else { Err(said) }
    }
}

/// A value as the command line has it.
fn word(value: impl ValueEnum) -> OsString {
    value.to_possible_value().map(|value| value.get_name().into()).unwrap_or_default()
}

/// The words after `margay ensemble` that serve what a section says.
fn words_of(section: &EnsembleSection) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["serve".into(), section.name.to_string().into()];
    words.extend(["--members".into(), section.members.to_string().into()]);
    words.extend(["--protocol".into(), word(section.protocol)]);
    words.extend(["--window".into(), section.window.to_string().into(), "--attended".into()]);
    match &section.module {
        Some(module) => words.extend(["--module".into(), module.clone().into_os_string()]),
        None => words.extend(["--router".into(), word(section.router.unwrap_or_default())]),
    }
    words
}

/// Tells a switch to end, and waits for that; one that does not is killed.
async fn end(mut child: Child, attends: Option<ChildStdin>) {
    drop(attends);
    if timeout(END_LIMIT, child.wait()).await.is_err() {
        // It may end in this moment.
        let _ = child.kill().await;
    }
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    fn sections(lines: &str) -> EnsembleSection {
        let text = format!("[[ensemble]]\nname = \"cache.shop\"\nmembers = \"members.shop\"\n{lines}\n");
        let config = Config::parse(&text, Path::new("margay.toml")).expect("a configuration");
        config.ensembles().next().expect("one section").clone()
    }

    #[test]
    fn another_module_is_loaded_and_anything_else_needs_another_switch() {
        let files = [
            "",
            "router = \"ketama\"",
            "router = \"round-robin\"",
            "module = \"/a.wasm\"",
            "module = \"/b.wasm\"",
            "protocol = \"resp\"",
            "window = 16",
        ];
        let letter = |step| match step {
            Step::Nothing => '.',
            Step::Module => 'm',
            Step::Restart => 'R',
        };
        let row = |from: &&str| {
            let steps = files.iter().map(|to| letter(Step::between(&sections(from), &sections(to))));
            steps.collect::<String>()
        };
        let matrix: Vec<String> = files.iter().map(row).collect();
        let expected = ["..RmmRR", "..RmmRR", "RR.RRRR", "mmR.mRR", "mmRm.RR", "RRRRR.R", "RRRRRR."];
        assert_eq!(matrix, expected);
    }

    #[test]
    fn a_section_is_the_words_of_a_command() {
        let words = |lines: &str| {
            let words = words_of(&sections(lines));
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let common = |protocol, window| {
            format!("serve cache.shop --members members.shop --protocol {protocol} --window {window} --attended")
        };
        assert_eq!(words(""), common("memcached", 384) + " --router ketama");
        assert_eq!(
            words("protocol = \"resp\"\nwindow = 16\nrouter = \"round-robin\""),
            common("resp", 16) + " --router round-robin"
        );
        assert_eq!(words("module = \"/a.wasm\""), common("memcached", 384) + " --module /a.wasm");
    }
}
