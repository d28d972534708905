//! `margay enable` and `margay disable`: units of systemd serve names, by a drop-in that each of them shows.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use miette::{IntoDiagnostic, Result, WrapErr, miette};
use serde_json::json;

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
    for (flag, is_set) in [("--exclusive", offer.exclusive), ("--sticky", offer.sticky)] {
        if is_set {
            words.push(flag.to_owned());
        }
    }
    if let Some(patience) = offer.give_up_after {
        // One word: the text may have spaces.
        words.push(format!("--give-up-after={}", patience.to_string().replace(' ', "")));
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

pub fn enable(args: &EnableArgs, out: &mut Out) -> Result<()> {
    let (unit, section) = whole(&args.unit)?;
    let directory = args.place.directory(&unit)?;
    let program = std::env::current_exe().into_diagnostic().wrap_err("cannot find the path of this program")?;
    let path = directory.join(DROP_IN);
    let refuse = || format!("cannot write {}", path.display());
    fs::create_dir_all(&directory).into_diagnostic().wrap_err_with(refuse)?;
    fs::write(&path, text(section, &program, &words(&args.offer)?)).into_diagnostic().wrap_err_with(refuse)?;
    args.place.reload(&unit, args.now)?;
    let names: Vec<_> = args.offer.service.iter().map(|wanted| wanted.name.written()).collect();
    let when = if args.now { "now" } else { "from its next start" };
    let sentence = format!("{unit} serves {} {when} ({})", names.join(", "), path.display());
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
            "--service web.shop:80:8000 --service adm.shop --allow any --weight 5 --protocol tcp nginx --units {at}"
        ));
        enable(&args.expect("good words"), &mut Out::new()).expect("written");
        let path = units.path().join("nginx.service.d/50-margay.conf");
        let text = fs::read_to_string(&path).expect("it is there");
        let line = "run --unit --service web.shop:80:8000 --service adm.shop --protocol tcp --allow any --weight 5\n";
        assert!(text.contains("[Service]\n") && text.ends_with(line), "{text}");
        let place = || Place { units: Some(units.path().to_owned()) };
        let args = DisableArgs { now: false, unit: "nginx".into(), place: place(), json: Json { json: false } };
        disable(&args, &mut Out::new()).expect("removed");
        assert!(!path.parent().expect("a directory").exists());
        assert!(disable(&args, &mut Out::new()).expect_err("it is gone").to_string().contains("was not enabled"));
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
        for words in ["nginx", "--service web.shop:0 nginx", "--service web..shop nginx", "--service web.shop"] {
            assert!(enable_args(words).is_err(), "{words}");
        }
    }
}
