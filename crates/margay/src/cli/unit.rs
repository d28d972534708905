//! `margay enable` and `margay disable`: units of systemd serve names, by a drop-in that each of them shows.

mod files;
pub mod stop;

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use miette::{IntoDiagnostic, Result, WrapErr, miette};
use serde_json::json;

use self::files::OwnStop;
use super::output::span;
use super::run::OfferArgs;
use super::{Json, Out};

/// Where an administrator's units and drop-ins are.
const UNITS: &str = "/etc/systemd/system";
/// There where systemd runs.
const SYSTEMD: &str = "/run/systemd/system";
const DROP_IN: &str = "50-margay.conf";

#[derive(Args)]
pub struct EnableArgs {
    #[command(flatten)]
    offer: OfferArgs,
    /// When the unit is told to stop, drain the names first: new connections go elsewhere, those that are there get so
    /// long to end, and then it stops as before. Not of a socket unit
    #[arg(long, value_name = "TIME", value_parser = stop::drain_time)]
    drain: Option<Duration>,
    /// Restart the unit now
    #[arg(long)]
    now: bool,
    /// The unit: nginx.service, or the socket unit that listens for it
    unit: String,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
pub struct DisableArgs {
    /// Restart the unit now
    #[arg(long)]
    now: bool,
    /// The unit
    unit: String,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
struct Place {
    /// Write to this directory of units, and do not talk to systemd: for images
    #[arg(long, value_name = "DIRECTORY")]
    units: Option<PathBuf>,
}

impl Place {
    fn directory(&self, unit: &str) -> Result<PathBuf> {
        if self.units.is_none() && !Path::new(SYSTEMD).is_dir() {
            return Err(miette!(
                help = "`margay run --service NAME -- COMMAND` serves a program by whatever starts it here; --units DIRECTORY writes \
                        the drop-in for another machine",
                "systemd does not run this machine"
            ));
        }
        Ok(self.units.clone().unwrap_or_else(|| UNITS.into()).join(format!("{unit}.d")))
    }

    /// The unit's own file, and then its drop-ins, as systemd reads them.
    fn files(&self, unit: &str) -> Result<Vec<PathBuf>> {
        match &self.units {
            Some(units) => files::of_directory(units, unit),
            None => {
                // Otherwise systemd would tell of the files as they were.
                systemctl(&["daemon-reload"])?;
                files::of_systemd(unit)
            }
        }
    }

    /// Makes systemd read its files again.
    fn reload(&self, unit: &str, restart: bool) -> Result<()> {
        if self.units.is_some() {
            return Ok(());
        }
        systemctl(&["daemon-reload"])?;
        if restart { systemctl(&["restart", unit]) } else { Ok(()) }
    }
}

fn systemctl(words: &[&str]) -> Result<()> {
    let status = Command::new("systemctl").args(words).status().into_diagnostic().wrap_err("cannot start systemctl")?;
    if status.success() { Ok(()) } else { Err(miette!("`systemctl {}` failed", words.join(" "))) }
}

/// The unit's whole name, and the section that what prepares it belongs to.
fn whole(unit: &str) -> Result<(String, &'static str)> {
    if unit.is_empty() || unit.contains('/') || is_special(unit) {
        return Err(miette!("`{unit}` is no unit's name; write for example nginx.service"));
    }
    match Path::new(unit).extension().and_then(|kind| kind.to_str()) {
        Some("service") => Ok((unit.to_owned(), "Service")),
        Some("socket") => Ok((unit.to_owned(), "Socket")),
        Some("target" | "timer" | "path" | "mount" | "slice" | "scope" | "device" | "swap" | "automount") => {
            Err(miette!("{unit} has no programs that listen; name a .service or a .socket"))
        }
        _ => Ok((format!("{unit}.service"), "Service")),
    }
}

/// Characters that mean something to systemd, or that end a word there.
fn is_special(text: &str) -> bool {
    text.chars().any(|letter| letter.is_whitespace() || letter == '%' || letter == '"' || letter == '\\')
}

/// The words that make another `margay run` of these.
fn words(offer: &OfferArgs) -> Result<Vec<String>> {
    let mut words = Vec::new();
    for wanted in &offer.service {
        let ports = [wanted.port, wanted.listen_port].into_iter().flatten().map(|port| format!(":{port}"));
        words.extend(["--service".to_owned(), format!("{}{}", wanted.name.written(), ports.collect::<String>())]);
    }
    for name in &offer.middlebox {
        words.extend(["--middlebox".to_owned(), name.0.written().to_owned()]);
    }
    if let Some(kind) = offer.kind {
        words.extend(["--kind".to_owned(), kind.label().to_owned()]);
    }
    if let Some(protocol) = offer.protocol {
        words.extend(["--protocol".to_owned(), protocol.label().to_owned()]);
    }
    for who in &offer.allow {
        words.extend(["--allow".to_owned(), who.clone()]);
    }
    for (flag, number) in
        [("--weight", offer.weight), ("--priority", offer.priority), ("--partitions", offer.partitions)]
    {
        if let Some(number) = number {
            words.extend([flag.to_owned(), number.to_string()]);
        }
    }
    for (flag, is_set) in [("--exclusive", offer.exclusive), ("--fence", offer.fence), ("--sticky", offer.sticky)] {
        if is_set {
            words.push(flag.to_owned());
        }
    }
    if let Some(patience) = offer.give_up_after {
        // One word: the text may have spaces.
        words.push(format!("--give-up-after={}", patience.to_string().replace(' ', "")));
    }
    if let Some(quiet_ms) = offer.drained.quiet_ms()? {
        words.extend(["--on-drain=quiet".to_owned(), format!("--quiet-ms={quiet_ms}")]);
    }
    match words.iter().find(|word| is_special(word)) {
        Some(word) => Err(miette!("`{word}` has a character that a unit file cannot hold")),
        None => Ok(words),
    }
}

/// The drop-in's text.
fn text(section: &str, program: &Path, words: &[String]) -> String {
    format!(
        "# Written by `margay enable`; `margay disable` removes it.\n\
         [Unit]\n\
         Wants=margay.service\n\
         After=margay.service\n\
         \n\
         [{section}]\n\
         # `+`: only root may say what is served. `-`: without an agent the unit starts all the same, unserved.\n\
         ExecStartPre=-+{} run --unit {}\n",
        program.display(),
        words.join(" ")
    )
}

/// The lines by which a stop of the unit drains first. Nothing of Margay's is the unit's main process, as it is of
/// `margay run --drain`: systemd itself has to run the drain, and before all else that the unit does to stop.
fn draining(args: &EnableArgs, unit: &str, section: &str, program: &Path, deadline: Duration) -> Result<String> {
    if section == "Socket" {
        return Err(miette!(
            help = "leave out --drain, and run `margay drain NAME` before the program is stopped",
            "{unit} listens on while the program behind it stops, so that it has no stop to drain before"
        ));
    }
    let own = OwnStop::read(&args.place.files(unit)?, stop::least_timeout(deadline))?;
    // A name is there once for each of its ports.
    let names: BTreeSet<_> = args.offer.names().into_iter().collect();
    Ok(stop::lines(program, &names.into_iter().collect::<Vec<_>>(), deadline, &own))
}

pub fn enable(args: &EnableArgs, out: &mut Out) -> Result<()> {
    let (unit, section) = whole(&args.unit)?;
    let directory = args.place.directory(&unit)?;
    let program = std::env::current_exe().into_diagnostic().wrap_err("cannot find the path of this program")?;
    let path = directory.join(DROP_IN);
    let mut drop_in = text(section, &program, &words(&args.offer)?);
    if let Some(deadline) = args.drain {
        drop_in += &draining(args, &unit, section, &program, deadline)?;
    }
    let refuse = || format!("cannot write {}", path.display());
    fs::create_dir_all(&directory).into_diagnostic().wrap_err_with(refuse)?;
    fs::write(&path, drop_in).into_diagnostic().wrap_err_with(refuse)?;
    args.place.reload(&unit, args.now)?;
    let names = args.offer.names();
    let when = if args.now { "now" } else { "from its next start" };
    let drained = args.drain.map(|deadline| format!(", and drains for {} at most before it stops", span(deadline)));
    let drained = drained.unwrap_or_default();
    let sentence = format!("{unit} serves {} {when}{drained} ({})", names.join(", "), path.display());
    out.done(args.json.json, &json!({ "unit": unit, "names": names, "drop_in": path }), &sentence)
}

pub fn disable(args: &DisableArgs, out: &mut Out) -> Result<()> {
    let (unit, _) = whole(&args.unit)?;
    let directory = args.place.directory(&unit)?;
    let path = directory.join(DROP_IN);
    match fs::remove_file(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(miette!("{unit} was not enabled: there is no {}", path.display()));
        }
        Err(error) => {
            return Err(error).into_diagnostic().wrap_err_with(|| format!("cannot remove {}", path.display()));
        }
    }
    // Other people's drop-ins keep it.
    let _ = fs::remove_dir(&directory);
    args.place.reload(&unit, args.now)?;
    let when = if args.now { "any more" } else { "after its next restart" };
    let sentence = format!("{unit} serves no names {when}");
    out.done(args.json.json, &json!({ "unit": unit, "drop_in": path }), &sentence)
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Enable {
        #[command(flatten)]
        args: EnableArgs,
    }

    fn enable_args(words: &str) -> Result<EnableArgs, clap::Error> {
        Enable::try_parse_from(std::iter::once("enable").chain(words.split(' '))).map(|parsed| parsed.args)
    }

    #[test]
    fn a_drop_in_says_what_is_served_and_goes_again() {
        let units = tempfile::tempdir().expect("a directory");
        let at = units.path().display();
        let args = enable_args(&format!(
            "--service web.shop:80:8000 --service adm.shop --allow any --weight 5 --protocol tcp \
             --on-drain quiet nginx --units {at}"
        ));
        enable(&args.expect("good words"), &mut Out::new()).expect("written");
        let path = units.path().join("nginx.service.d/50-margay.conf");
        let text = fs::read_to_string(&path).expect("it is there");
        let line = "run --unit --service web.shop:80:8000 --service adm.shop --protocol tcp --allow any --weight 5 \
                    --on-drain=quiet --quiet-ms=1000\n";
        assert!(text.contains("[Service]\n") && text.ends_with(line), "{text}");
        let place = || Place { units: Some(units.path().to_owned()) };
        let args = DisableArgs { now: false, unit: "nginx".into(), place: place(), json: Json { json: false } };
        disable(&args, &mut Out::new()).expect("removed");
        assert!(!path.parent().expect("a directory").exists());
        assert!(disable(&args, &mut Out::new()).expect_err("it is gone").to_string().contains("was not enabled"));
    }

    #[test]
    fn a_unit_that_is_a_box_says_so_again() {
        let args = enable_args("--middlebox ids.shop --kind sniff --weight 7 suricata").expect("good words");
        let wanted = ["--middlebox", "ids.shop", "--kind", "sniff", "--weight", "7"];
        assert_eq!(words(&args.offer).expect("no special characters"), wanted);
        assert_eq!(args.offer.names(), ["ids.shop"]);
    }

    #[test]
    fn a_unit_that_is_drained_first_stops_as_before_then() {
        let units = tempfile::tempdir().expect("a directory");
        let at = units.path().display();
        let unit = "[Service]\nExecStart=/usr/sbin/nginx\nExecStop=-/usr/bin/stop --retry QUIT/5\nTimeoutStopSec=5\n";
        fs::write(units.path().join("nginx.service"), unit).expect("written");
        let line = format!("--service web.shop:80 --service web.shop:443 --drain 90s nginx --units {at}");
        // Again, as after a change of the unit: the drop-in of before does not count as the unit's own.
        for _ in 0..2 {
            enable(&enable_args(&line).expect("good words"), &mut Out::new()).expect("written");
        }
        let text = fs::read_to_string(units.path().join("nginx.service.d/50-margay.conf")).expect("it is there");
        let program = std::env::current_exe().expect("it runs");
        let program = program.display();
        let wanted = format!(
            "# Written by `margay enable`; `margay disable` removes it.\n\
             [Unit]\n\
             Wants=margay.service\n\
             After=margay.service\n\
             \n\
             [Service]\n\
             # `+`: only root may say what is served. `-`: without an agent the unit starts all the same, unserved.\n\
             ExecStartPre=-+{program} run --unit --service web.shop:80 --service web.shop:443\n\
             # The names are drained before the program is told to stop. `-`: it stops all the same where they cannot \
             be.\n\
             # The unit's own commands are said anew, after the drain.\n\
             ExecStop=\n\
             ExecStop=-+{program} unit drain --deadline 1m30s %n web.shop\n\
             ExecStop=-/usr/bin/stop --retry QUIT/5\n\
             # Each command of the stop gets so long, and then the program.\n\
             TimeoutStopSec=100\n\
             # The drain is over when the program has stopped, and when it starts at the latest.\n\
             ExecStopPost=-+{program} unit undrain %n\n\
             ExecStartPre=-+{program} unit undrain %n\n"
        );
        assert_eq!(text, wanted);
    }

    #[test]
    fn what_cannot_be_drained_first_is_refused_and_nothing_is_written() {
        let units = tempfile::tempdir().expect("a directory");
        let at = units.path().display();
        for (unit, wanted) in [("nginx.socket", "listens on"), ("no-such", "has no no-such.service")] {
            let args = enable_args(&format!("--service web.shop --drain 30s {unit} --units {at}"));
            let error = enable(&args.expect("good words"), &mut Out::new()).expect_err(unit).to_string();
            assert!(error.contains(wanted), "{error}");
        }
        assert_eq!(fs::read_dir(units.path()).expect("a directory").count(), 0);
    }

    #[test]
    fn a_socket_unit_is_prepared_in_its_own_section() {
        assert_eq!(whole("nginx.socket").expect("a unit").1, "Socket");
        assert_eq!(whole("nginx").expect("a unit"), ("nginx.service".to_owned(), "Service"));
        for bad in ["", "a/b.service", "a b.service", "%i.service", "multi-user.target"] {
            assert!(whole(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_words_are_refused() {
        let no_offer = ["nginx", "--service web.shop:0 nginx", "--service web..shop nginx", "--service web.shop"];
        // A unit that serves nothing has nothing to drain.
        let no_drain =
            ["--drain 30s nginx", "--service web.shop --drain 0s nginx", "--service web.shop --drain x nginx"];
        let no_box =
            ["--middlebox ids.shop suricata", "--service web.shop --kind sniff nginx", "--kind sniff suricata"];
        for words in no_offer.into_iter().chain(no_drain).chain(no_box) {
            assert!(enable_args(words).is_err(), "{words}");
        }
    }
}
