//! The stop of a unit drains its names first: what `margay enable --drain` writes for that, and the verbs that systemd
//! runs by it. The drain is that of `margay run --drain`, but no process of Margay's is there from its beginning to its
//! end: which names this stop has drained, and no operator before it, is noted in a file.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use miette::{IntoDiagnostic, Result, WrapErr};

use super::files::OwnStop;
use super::whole;
use crate::agent::drain::{DEADLINE_MAX, DrainError};
use crate::cli::Client;
use crate::cli::drainer::{self, Drainer};
use crate::listener::ServiceName;

/// What a drain may take beyond its deadline: routers and flows are asked, and the answer is awaited.
const MARGIN: Duration = Duration::from_secs(10);
/// What systemd gives a unit that says nothing (`DefaultTimeoutStopSec`).
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(90);

#[derive(Subcommand)]
pub enum StopVerb {
    /// Drain the names of a unit before its program is told to stop
    Drain {
        /// How long connections that are there get to end
        #[arg(long, value_name = "TIME", value_parser = drain_time)]
        deadline: Duration,
        /// The unit
        unit: String,
        /// Its names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<ServiceName>,
    },
    /// End what the stop of a unit has drained
    Undrain {
        /// The unit
        unit: String,
    },
}

/// How long a drain may take. Checked where it is written: what the agent refused later would be seen by nobody.
pub(super) fn drain_time(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time.as_millis() == 0 {
        return Err("connections that are there get no time to end; without --drain a unit stops at once".to_owned());
    }
    if time > DEADLINE_MAX {
        return Err(DrainError::TooLong.to_string());
    }
    Ok(time)
}

/// The time that a command of the stop has to be given.
pub(super) fn least_timeout(deadline: Duration) -> Duration {
    deadline + MARGIN
}

/// The lines of the drop-in's `[Service]`.
pub(super) fn lines(program: &Path, names: &[&str], deadline: Duration, own: &OwnStop) -> String {
    let program = program.display();
    // One word: the text may have spaces.
    let time = humantime::format_duration(deadline).to_string().replace(' ', "");
    let mut before = String::new();
    let mut after = String::new();
    if !own.commands.is_empty() {
        before.push_str("# The unit's own commands are said anew, after the drain.\nExecStop=\n");
        after.extend(own.commands.iter().map(|command| format!("ExecStop={command}\n")));
    }
    let least = least_timeout(deadline);
    if own.timeout.is_none_or(|timeout| timeout < least) {
        let timeout = own.timeout.unwrap_or(DEFAULT_TIMEOUT).max(least);
        let timeout_s = timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0);
        after.push_str(&format!(
            "# Each command of the stop gets so long, and then the program.\nTimeoutStopSec={timeout_s}\n"
        ));
    }
    format!(
        "# The names are drained before the program is told to stop. `-`: it stops all the same where they cannot be.\n\
         {before}\
         ExecStop=-+{program} unit drain --deadline {time} %n {names}\n\
         {after}\
         # The drain is over when the program has stopped, and when it starts at the latest.\n\
         ExecStopPost=-+{program} unit undrain %n\n\
         ExecStartPre=-+{program} unit undrain %n\n",
        names = names.join(" ")
    )
}

/// Does what systemd wants around the stop of a unit. `connect` gives a client of the agent.
pub async fn perform(
    connect: impl AsyncFn() -> Result<Client>,
    runtime_dir: &Path,
    verb: StopVerb,
) -> Result<ExitCode> {
    match verb {
        StopVerb::Drain { deadline, unit, names } => {
            if has_failed(env::var("EXIT_STATUS").ok().as_deref()) {
                return Ok(ExitCode::SUCCESS);
            }
            let note = note(runtime_dir, &unit)?;
            let names = names.iter().map(ToString::to_string).collect();
            Drainer::new(connect().await?, names, deadline).noting(note).drain().await;
        }
        StopVerb::Undrain { unit } => {
            let note = note(runtime_dir, &unit)?;
            let names = drainer::take_note(&note);
            let names = names.into_diagnostic().wrap_err_with(|| format!("cannot take {}", note.display()))?;
            // An agent that does not run has no such drain any more: it lasts until a restart.
            if !names.is_empty() {
                drainer::undrain(connect().await?, names).await;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the unit's main process has ended by itself, and not well. systemd performs the stop of such a unit as of
/// any other, and says here how it has ended: nothing is left to drain, and what starts it again shall not wait. One
/// that has ended well may have left programs that serve on.
fn has_failed(exit_status: Option<&str>) -> bool {
    exit_status.is_some_and(|status| status != "0")
}

fn note(runtime_dir: &Path, unit: &str) -> Result<PathBuf> {
    let (unit, _) = whole(unit)?;
    Ok(runtime_dir.join(format!("drained-by-{unit}")))
}

#[cfg(test)]
mod test {
    use super::*;

    fn stop(commands: &[&str], timeout_s: Option<u64>) -> OwnStop {
        let commands = commands.iter().map(|command| (*command).to_owned()).collect();
        OwnStop { commands, timeout: timeout_s.map(Duration::from_secs) }
    }

    #[test]
    fn a_unit_gets_time_to_drain_and_no_less_than_it_had() {
        let timeout = |deadline_s, own| {
            let text = lines(Path::new("/bin/margay"), &["web.shop"], Duration::from_secs(deadline_s), &stop(&[], own));
            text.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).map(str::to_owned)
        };
        assert_eq!(timeout(30, None).as_deref(), Some("90"), "systemd's own");
        assert_eq!(timeout(120, None).as_deref(), Some("130"));
        assert_eq!(timeout(30, Some(5)).as_deref(), Some("40"));
        assert_eq!(timeout(30, Some(40)), None, "the unit's own is enough");
        assert_eq!(timeout(30, Some(u64::MAX)), None);
    }

    #[test]
    fn the_drain_comes_before_the_units_own_commands_and_resets_no_empty_list() {
        let path = Path::new("/bin/margay");
        let text = |commands: &[&str]| {
            lines(path, &["web.shop", "adm.shop"], Duration::from_millis(90_500), &stop(commands, Some(200)))
        };
        let of_stop = |text: &str| -> Vec<String> {
            text.lines().filter(|line| line.starts_with("ExecStop=")).map(str::to_owned).collect()
        };
        let drain = "ExecStop=-+/bin/margay unit drain --deadline 1m30s500ms %n web.shop adm.shop";
        assert_eq!(
            of_stop(&text(&["/bin/a", "-/bin/b %i"])),
            ["ExecStop=", drain, "ExecStop=/bin/a", "ExecStop=-/bin/b %i"]
        );
        assert_eq!(of_stop(&text(&[])), [drain]);
        assert_eq!(drain_time("1m30s500ms"), Ok(Duration::from_millis(90_500)), "what is written is read");
    }

    #[test]
    fn no_time_and_too_much_of_it_are_refused() {
        for (bad, wanted) in [("0s", "no time"), ("1us", "no time"), ("25h", "24 hours"), ("30", "unit"), ("x", "")] {
            let error = drain_time(bad).expect_err(bad);
            assert!(error.contains(wanted), "{bad}: {error}");
        }
        assert_eq!(drain_time("24h"), Ok(DEADLINE_MAX));
    }

    #[test]
    fn a_program_that_has_died_is_not_drained() {
        assert!(has_failed(Some("1")) && has_failed(Some("KILL")));
        assert!(!has_failed(Some("0")) && !has_failed(None));
    }

    #[test]
    fn each_unit_has_a_note_of_its_own() {
        let of = |unit| note(Path::new("/run/margay"), unit);
        assert_eq!(of("web.service").expect("a unit"), Path::new("/run/margay/drained-by-web.service"));
        assert!(of("../../etc/passwd").is_err());
    }
}
