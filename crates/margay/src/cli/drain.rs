//! `margay drain` and `margay undrain`.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::{Args, ValueEnum};
use margay_control::api::v1::*;
use margay_core::quiet::QUIET_MS_DEFAULT;
use miette::{Result, miette};

use super::output::{count, span};
use super::{Client, Json, Out, refused};
use crate::config::OnDrain;
use crate::fields;
use crate::listener::ServiceName;

/// What becomes of flows that are there.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// They may end by themselves until the deadline, and are reset then
    Finish,
    /// Besides, TCP connections that carry nothing are ended in order
    Quiet,
    /// They are reset at once
    Now,
}

#[derive(Args)]
pub struct DrainArgs {
    #[command(flatten)]
    target: Target,
    /// How long flows may go on
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    deadline: Duration,
    /// What becomes of flows that are there; unless given, what each service says (`on_drain`), or finish
    #[arg(long, value_enum)]
    when: Option<When>,
    /// With --when quiet: after how many milliseconds without data a connection is quiet (10 to 600000); 1000 unless
    /// given. For protocols in which a client that waits for nothing says nothing: Redis, memcached, HTTP keep-alive
    #[arg(long, value_name = "NUMBER", value_parser = fields::quiet_ms_word, requires = "when")]
    quiet_ms: Option<u32>,
    /// Hosts, by name or host-ID, that programs give their connections to, each program to the next one in turn; unless
    /// given, to any other host that serves the name
    #[arg(long, value_name = "HOST[,HOST]", value_delimiter = ',')]
    to: Vec<String>,
    /// Also where no other host serves the name: connects are refused then
    #[arg(long)]
    last: bool,
    /// Change nothing, and say what would be drained
    #[arg(long)]
    dry_run: bool,
    /// End the drain when the agent starts again; otherwise `margay undrain` alone ends it
    #[arg(long)]
    until_restart: bool,
    #[command(flatten)]
    json: Json,
}

/// What a drain does with a service's connections, where services are described.
#[derive(Args, Clone, Copy, Debug)]
pub struct DrainTermsArgs {
    /// What a drain without --when does with connections that are there: finish unless given
    #[arg(long, value_enum)]
    on_drain: Option<OnDrain>,
    /// With --on-drain quiet: after how many milliseconds without data a connection is quiet (10 to 600000); 1000
    /// unless given
    #[arg(long, value_name = "NUMBER", value_parser = fields::quiet_ms_word, requires = "on_drain")]
    quiet_ms: Option<u32>,
}

impl DrainTermsArgs {
    /// After how many milliseconds of quiet a drain ends connections, if it does.
    pub fn quiet_ms(&self) -> Result<Option<u32>> {
        match (self.on_drain, self.quiet_ms) {
            (Some(OnDrain::Quiet), given) => Ok(Some(given.unwrap_or(QUIET_MS_DEFAULT))),
            (_, Some(_)) => Err(miette!("--quiet-ms is for --on-drain quiet alone; leave it out")),
            (_, None) => Ok(None),
        }
    }
}

#[derive(Args)]
pub struct UndrainArgs {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Target {
    /// The name
    name: Option<ServiceName>,
    /// All names of this host, those that are served later among them
    #[arg(long)]
    host: bool,
}

impl Target {
    fn name(&self) -> String {
        self.name.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    /// How the target is called in sentences, and in the command.
    fn words(&self) -> [String; 2] {
        match &self.name {
            Some(name) => [name.to_string(), name.to_string()],
            None => ["this host".to_owned(), "--host".to_owned()],
        }
    }
}

pub async fn drain(mut client: Client, args: DrainArgs, out: &mut Out) -> Result<()> {
    let [what, word] = args.target.words();
    let request = DrainRequest {
        name: args.target.name(),
        deadline_ms: u64::try_from(args.deadline.as_millis()).unwrap_or(u64::MAX),
        when: match args.when {
            None => "",
            Some(When::Finish) => "finish",
            Some(When::Quiet) => "quiet",
            Some(When::Now) => "now",
        }
        .to_owned(),
        quiet_ms: args.quiet_ms,
        last: args.last,
        dry_run: args.dry_run,
        until_restart: args.until_restart,
        to: args.to,
    };
    let mut reports = client.drain(request).await.map_err(refused)?.into_inner();
    let mut last = DrainReport::default();
    let is_told = std::io::stderr().is_terminal() && !args.json.json;
    while let Some(report) = reports.message().await.map_err(refused)? {
        if is_told && report.phase == "emptying" {
            tell(&report);
        }
        last = report;
    }
    if is_told {
        // Nobody may be reading.
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    match last.phase.as_str() {
        "over" | "dry-run" if args.json.json => out.json(&last),
        "over" => say(&last, &what, &word, out),
        "dry-run" => rehearsed(&last, out),
        "ended" => Err(miette!("the drain of {what} was ended by `margay undrain {word}`")),
        _ => Err(miette!(
            help = "`margay status` shows when it is over",
            "the agent has stopped; the drain of {what} goes on when it starts again"
        )),
    }
}

/// How it goes, in one line that the next one replaces.
fn tell(report: &DrainReport) {
    let open = report.services.iter().map(|service| service.open).sum();
    let left = span(Duration::from_secs(report.left_ms.div_ceil(1000)));
    // Nobody may be reading.
    let _ = write!(std::io::stderr(), "\r\x1b[K{} open, {left} until they are reset", count(open, "flow"));
}

fn say(report: &DrainReport, what: &str, word: &str, out: &mut Out) -> Result<()> {
    for router in &report.silent_routers {
        out.line(&format!("router {router} has not acknowledged: connects that it sends here go elsewhere"))?;
    }
    let row = |service: &DrainCount| {
        let numbers = [service.finished, service.handed_over, service.quiet, service.elsewhere, service.reset];
        std::iter::once(service.name.clone()).chain(numbers.map(|number| number.to_string())).collect()
    };
    let rows = report.services.iter().map(row).collect();
    let head = ["NAME", "FINISHED", "HANDED OVER", "QUIET", "ELSEWHERE", "RESET"];
    out.table(&head, rows, "nothing was served")?;
    for service in report.services.iter().filter(|service| service.reset > 0 && !service.why_open.is_empty()) {
        out.line(&format!(
            "{}: not all ended when they were quiet; a client's host: {}",
            service.name, service.why_open
        ))?;
    }
    out.line(&format!("{what} is drained; `margay undrain {word}` lets new flows come again"))
}

fn rehearsed(report: &DrainReport, out: &mut Out) -> Result<()> {
    let row = |service: &DrainCount| {
        let stays = service.open - service.elsewhere;
        let numbers = [stays, service.quiet, service.elsewhere, service.giving_programs];
        std::iter::once(service.name.clone()).chain(numbers.map(|number| number.to_string())).collect()
    };
    out.table(
        &["NAME", "FINISH OR RESET", "OF THESE QUIET", "ELSEWHERE", "PROGRAMS THAT GIVE"],
        report.services.iter().map(row).collect(),
        "nothing is served: a drain would keep away what is served later",
    )
}

pub async fn undrain(mut client: Client, args: UndrainArgs, out: &mut Out) -> Result<()> {
    let reply = client.undrain(UndrainRequest { name: args.target.name() }).await.map_err(refused)?.into_inner();
    let sentence = match &reply.names[..] {
        [] => format!("{} is drained no more; nothing is served", args.target.words()[0]),
        names => format!("new flows come again to {}", names.join(", ")),
    };
    out.done(args.json.json, &reply, &sentence)
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        args: DrainArgs,
    }

    #[test]
    fn a_name_or_the_host_is_drained() {
        let parse = |words: &str| Words::try_parse_from(std::iter::once("drain").chain(words.split_whitespace()));
        let args = parse("web.shop --deadline 90s --when now").expect("good words").args;
        assert_eq!((args.target.name().as_str(), args.deadline.as_secs()), ("web.shop", 90));
        assert!(args.when == Some(When::Now) && !args.last && !args.dry_run);
        let quiet = parse("web.shop --when quiet --quiet-ms 50").expect("good words").args;
        assert_eq!((quiet.when == Some(When::Quiet), quiet.quiet_ms), (true, Some(50)));
        assert!(parse("web.shop").expect("good words").args.when.is_none(), "as the service says");
        assert_eq!(parse("web.shop --to one,two --to three").expect("good words").args.to, ["one", "two", "three"]);
        assert!(parse("web.shop").expect("good words").args.to.is_empty(), "programs choose");
        assert_eq!(parse("--host").expect("good words").args.target.words()[1], "--host");
        for bad in [
            "",
            "web.shop --host",
            "web..shop",
            "web.shop --deadline -5s",
            "web.shop --when later",
            "web.shop --quiet-ms 50",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for bad in ["9", "600001", "soon"] {
            assert!(parse(&format!("web.shop --when quiet --quiet-ms {bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn quiet_needs_no_time_and_finish_takes_none() {
        let terms = |on_drain, quiet_ms| DrainTermsArgs { on_drain, quiet_ms }.quiet_ms().ok();
        assert_eq!(terms(None, None), Some(None));
        assert_eq!(terms(Some(OnDrain::Quiet), None), Some(Some(QUIET_MS_DEFAULT)));
        assert_eq!(terms(Some(OnDrain::Quiet), Some(50)), Some(Some(50)));
        assert_eq!(terms(Some(OnDrain::Finish), Some(50)), None);
    }
}
