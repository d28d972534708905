//! What a unit's own files say of its stop. A drain has to come before the unit's own commands, and systemd runs those
//! of a drop-in after them: the drop-in empties the list, and says it anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use miette::{IntoDiagnostic, Result, WrapErr, miette};

use super::DROP_IN;

/// Where a distribution puts units, from the root of its files.
const OF_DISTRIBUTION: [&str; 3] = ["usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"];
/// Where an administrator does.
const OF_ADMINISTRATOR: &str = "etc/systemd/system";

/// How a unit stops without Margay.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OwnStop {
    /// The commands, as they are written.
    pub commands: Vec<String>,
    /// How long systemd waits; none: as long as for any unit.
    pub timeout: Option<Duration>,
}

impl OwnStop {
    /// Reads the unit's file and its drop-ins, in the order in which systemd reads them. The drop-in of `margay enable`
    /// is passed over. A command of the stop is given `least` at least.
    ///
    /// # Errors
    ///
    /// A file cannot be read or understood, or one that systemd reads after that drop-in undoes it.
    pub fn read(files: &[PathBuf], least: Duration) -> Result<Self> {
        let mut stop = Self::default();
        for (at, path) in files.iter().enumerate() {
            let name = path.file_name().unwrap_or_default();
            if name == DROP_IN {
                continue;
            }
            let text = fs::read_to_string(path);
            let text = text.into_diagnostic().wrap_err_with(|| format!("cannot read {}", path.display()))?;
            // The first one is the unit's file. What comes after the drop-in is added to it by systemd itself.
            let comes_after = at > 0 && name.as_encoded_bytes() > DROP_IN.as_bytes();
            for (key, value) in service_settings(&text) {
                match key.as_str() {
                    "ExecStop" if comes_after && value.is_empty() => return Err(undoes(path, &key)),
                    "ExecStop" if comes_after => {}
                    "ExecStop" if value.is_empty() => stop.commands.clear(),
                    "ExecStop" => stop.commands.push(value),
                    // To systemd this is a mistake, which it passes over.
                    "TimeoutStopSec" | "TimeoutSec" if value.is_empty() => {}
                    "TimeoutStopSec" | "TimeoutSec" => {
                        let timeout = time_span(&value).ok_or_else(|| unknown_time(path, &key, &value))?;
                        if comes_after && timeout < least {
                            return Err(undoes(path, &key));
                        }
                        stop.timeout = Some(timeout);
                    }
                    _ => {}
                }
            }
        }
        Ok(stop)
    }
}

fn undoes(path: &Path, key: &str) -> miette::Report {
    miette!(
        help = format!("rename it, so that it comes before {DROP_IN} in the order of names, and enable again"),
        "{} comes after {DROP_IN}, and its {key}= would keep the stop from draining",
        path.display()
    )
}

fn unknown_time(path: &Path, key: &str, value: &str) -> miette::Report {
    miette!(
        help = "write it with units, for example 90s or 5min",
        "{} has {key}={value}, which is not understood, so that it cannot be raised for a drain",
        path.display()
    )
}

/// A span of time of systemd: a number alone counts seconds, and zero is no limit, as `infinity`.
fn time_span(text: &str) -> Option<Duration> {
    if text == "infinity" || text == "0" {
        return Some(Duration::MAX);
    }
    let is_number = text.chars().all(|letter| letter.is_ascii_digit() || letter == '.');
    let with_unit = if is_number { format!("{text}s") } else { text.to_owned() };
    let span = humantime::parse_duration(&with_unit).ok()?;
    Some(if span.is_zero() { Duration::MAX } else { span })
}

/// The keys and values of a unit file's `[Service]`, in their order.
fn service_settings(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut is_service = false;
    let mut begun = String::new();
    for line in text.lines() {
        let line = line.trim_start();
        // Comments do not even end a line that goes on.
        if line.starts_with(['#', ';']) {
            continue;
        }
        // A backslash at the end, which no other one escapes, stands for a blank and the next line.
        if line.chars().rev().take_while(|letter| *letter == '\\').count() % 2 == 1 {
            begun.push_str(&line[..line.len() - 1]);
            begun.push(' ');
            continue;
        }
        let whole = std::mem::take(&mut begun) + line;
        let whole = whole.trim();
        if whole.starts_with('[') {
            is_service = whole == "[Service]";
        } else if is_service && let Some((key, value)) = whole.split_once('=') {
            found.push((key.trim_end().to_owned(), value.trim_start().to_owned()));
        }
    }
    found
}

/// The files of a unit that this host's systemd knows: its own, and its drop-ins in their order.
pub(super) fn of_systemd(unit: &str) -> Result<Vec<PathBuf>> {
    let words = ["show", "--property=FragmentPath,DropInPaths", unit];
    let output = Command::new("systemctl").args(words).output();
    let output = output.into_diagnostic().wrap_err("cannot start systemctl")?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(miette!(
            help = "of a template, name an instance: not web@.service, but web@one.service",
            "`systemctl {}` failed: {}",
            words.join(" "),
            why.trim()
        ));
    }
    files_shown(&String::from_utf8_lossy(&output.stdout)).ok_or_else(|| {
        miette!(
            help = "`systemctl list-unit-files` shows the units of this host",
            "systemd has no file of {unit}, so that nothing can be put before its stop"
        )
    })
}

fn files_shown(text: &str) -> Option<Vec<PathBuf>> {
    let value_of = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    let unit = Some(value_of("FragmentPath=")).filter(|path| !path.is_empty())?;
    let drop_ins = value_of("DropInPaths=").split_whitespace();
    Some(std::iter::once(unit).chain(drop_ins).map(PathBuf::from).collect())
}

/// The same of a directory of units, where no systemd can be asked. In an image (`…/etc/systemd/system`), the image's
/// own units are found, too.
pub(super) fn of_directory(units: &Path, unit: &str) -> Result<Vec<PathBuf>> {
    let mut directories = vec![units.to_owned()];
    if units.ends_with(OF_ADMINISTRATOR)
        && let Some(root) = units.ancestors().nth(Path::new(OF_ADMINISTRATOR).components().count())
    {
        directories.extend(OF_DISTRIBUTION.iter().map(|directory| root.join(directory)));
    }
    // An instance is described by its template.
    let template = unit.split_once('@').map(|(prefix, _)| format!("{prefix}@.service"));
    let names: Vec<&str> = std::iter::once(unit).chain(template.as_deref()).collect();
    let paths = |ending: &str| -> Vec<PathBuf> {
        let of_name = |name: &&str| directories.iter().map(|at| at.join(format!("{name}{ending}"))).collect::<Vec<_>>();
        names.iter().flat_map(of_name).collect()
    };
    let file = paths("").into_iter().find(|path| path.is_file()).ok_or_else(|| {
        let help = format!("put {unit} there first, or leave out --drain and drain by `margay drain` before a stop");
        miette!(help = help, "{} has no {unit}, so that nothing can be put before its stop", units.display())
    })?;
    let mut drop_ins = BTreeMap::new();
    for directory in paths(".d") {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if Path::new(&name).extension().is_some_and(|ending| ending == "conf") {
                drop_ins.entry(name).or_insert(entry.path());
            }
        }
    }
    Ok(std::iter::once(file).chain(drop_ins.into_values()).collect())
}

#[cfg(test)]
mod test {
    use super::*;

    const LEAST: Duration = Duration::from_secs(40);

    /// Files of a directory of units, and what is read of `web.service` there.
    fn read(files: &[(&str, &str)]) -> Result<OwnStop> {
        let image = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = image.path().join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        OwnStop::read(&of_directory(&image.path().join("etc/systemd/system"), "web.service")?, LEAST)
    }

    fn stop(commands: &[&str], timeout: Option<Duration>) -> OwnStop {
        OwnStop { commands: commands.iter().map(|command| (*command).to_owned()).collect(), timeout }
    }

    const UNIT: &str = "lib/systemd/system/web.service";
    const DROP_INS: &str = "etc/systemd/system/web.service.d";

    #[test]
    fn commands_are_read_as_they_are_written() {
        let text = "[Unit]\nExecStop=/no\n[Service]\n# ExecStop=/no\nExecStart=/bin/web -a\nExecStop = -/bin/web \\\n\
                    # between\n  -s \"a b\" %i\nExecStop=/bin/kill $MAINPID ; /bin/true\nTimeoutStopSec=5\n[Install]\n\
                    ExecStop=/no\n";
        let wanted = ["-/bin/web  -s \"a b\" %i", "/bin/kill $MAINPID ; /bin/true"];
        assert_eq!(read(&[(UNIT, text)]).expect("read"), stop(&wanted, Some(Duration::from_secs(5))));
        assert_eq!(read(&[(UNIT, "[Service]\nExecStart=/bin/web\n")]).expect("read"), stop(&[], None));
    }

    #[test]
    fn drop_ins_count_in_the_order_of_their_names_and_ones_own_does_not() {
        let unit = (UNIT, "[Service]\nExecStop=/bin/old\nTimeoutSec=10\n");
        let early_path = format!("{DROP_INS}/10-stop.conf");
        let own_path = format!("{DROP_INS}/{DROP_IN}");
        let early = (early_path.as_str(), "[Service]\nExecStop=\nExecStop=/bin/new\nTimeoutStopSec=infinity\n");
        let own = (own_path.as_str(), "[Service]\nExecStop=/bin/margay\nTimeoutStopSec=1\n");
        let elsewhere = ("usr/lib/systemd/system/web.service.d/10-stop.conf", "[Service]\nExecStop=/hidden\n");
        let found = read(&[unit, early, own, elsewhere]).expect("read");
        assert_eq!(found, stop(&["/bin/new"], Some(Duration::MAX)));
    }

    #[test]
    fn what_undoes_the_drain_is_named() {
        let unit = (UNIT, "[Service]\nExecStop=/bin/old\n");
        let path = format!("{DROP_INS}/override.conf");
        let read = |text: &str| read(&[unit, (path.as_str(), text)]);
        let added = read("[Service]\nExecStop=/bin/more\nTimeoutStopSec=40\n").expect("in nobody's way");
        assert_eq!(added, stop(&["/bin/old"], Some(LEAST)));
        for (text, wanted) in [
            ("[Service]\nExecStop=\nExecStop=/bin/new\n", "its ExecStop="),
            ("[Service]\nTimeoutStopSec=39\n", "its TimeoutStopSec="),
            ("[Service]\nTimeoutStopSec=soon\n", "TimeoutStopSec=soon"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains("override.conf") && error.contains(wanted), "{error}");
        }
        assert!(OwnStop::read(&["/no/such.service".into()], LEAST).is_err());
    }

    #[test]
    fn spans_are_those_of_systemd() {
        let seconds = |text| time_span(text).map(|span| span.as_secs());
        assert_eq!([seconds("90"), seconds("1min 30s"), seconds("1.5min")], [Some(90); 3]);
        assert_eq!([time_span("infinity"), time_span("0"), time_span("0s")], [Some(Duration::MAX); 3]);
        assert_eq!([time_span("soon"), time_span("-1"), time_span("")], [None; 3]);
    }

    #[test]
    fn what_systemctl_shows_is_the_unit_first() {
        let paths = files_shown("DropInPaths=/etc/b.conf /etc/a.conf\nFragmentPath=/lib/web.service\n");
        let wanted = ["/lib/web.service", "/etc/b.conf", "/etc/a.conf"].map(PathBuf::from);
        assert_eq!(paths.expect("a file"), wanted);
        assert!(files_shown("FragmentPath=\nDropInPaths=/etc/b.conf\n").is_none());
    }

    #[test]
    fn an_instance_is_described_by_its_template() {
        let units = tempfile::tempdir().expect("a directory");
        let path = units.path().join("web@.service");
        fs::write(&path, "").expect("written");
        assert_eq!(of_directory(units.path(), "web@one.service").expect("found"), [path]);
        let error = of_directory(units.path(), "other.service").expect_err("no such unit").to_string();
        assert!(error.contains("has no other.service"), "{error}");
    }
}
