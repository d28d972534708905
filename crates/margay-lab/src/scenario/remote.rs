//! `remote`: an operator looks after an agent from another host, over TLS; and those that may not, do not.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario};
use crate::agent::{self, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "remote",
    summary: "an operator on another host uses the API over TLS; strangers, other authorities and expired certificates \
              get nothing",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("calls", AtLeast(4.0)),
    bound("accepted", Exactly(0.0)),
    bound("unexplained", Exactly(0.0)),
    bound("audited", AtLeast(1.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
[host.router]
role = "plain"
links = [{ subnet = "site" }]
[host.desk]
role = "plain"
links = [{ subnet = "site" }]
"#;
const PORT: u16 = 54_326;

/// Certificates by the program that operators use for it.
struct Office {
    dir: PathBuf,
}

impl Office {
    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn openssl(&self, host: &Host, words: &str) -> Result<()> {
        self.at(host, "now", words)
    }

    /// As if it were another day.
    fn at(&self, host: &Host, day: &str, words: &str) -> Result<()> {
        host.shell(&format!("cd {} && faketime '{day}' openssl {words} 2>&1", self.dir.display())).map(drop)
    }

    fn authority(&self, host: &Host, name: &str) -> Result<()> {
        self.openssl(
            host,
            &format!(
                "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN={name} \
                 -keyout {name}.key -out {name}.crt"
            ),
        )
    }

    /// A certificate by an authority, made on a day, which holds for a week.
    fn sign(&self, host: &Host, name: &str, (by, day): (&str, &str), more: &str) -> Result<()> {
        self.openssl(
            host,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
            ),
        )?;
        std::fs::write(self.dir.join("more"), format!("subjectAltName={more}\n"))?;
        self.at(
            host,
            day,
            &format!(
                "x509 -req -in {name}.csr -CA {by}.crt -CAkey {by}.key -CAcreateserial -days 7 -extfile more -out \
                 {name}.crt"
            ),
        )
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let (router, desk) = (lab.host("router")?, lab.host("desk")?);
    for figure in ["calls", "accepted", "unexplained", "failed"] {
        findings.set(figure, 0.0);
    }
    let office = Office { dir: dir.join("office") };
    std::fs::create_dir_all(&office.dir)?;
    let address = router.plan.address().context("the router has no address")?.to_string();
    for authority in ["site", "operators", "others"] {
        office.authority(desk, authority)?;
    }
    office.sign(desk, "agent", ("site", "now"), &format!("IP:{address}"))?;
    office.sign(desk, "alice", ("operators", "now"), "DNS:alice")?;
    office.sign(desk, "mallory", ("others", "now"), "DNS:mallory")?;
    office.sign(desk, "bob", ("operators", "10 days ago"), "DNS:bob")?;
    let config = format!(
        "[api]\nlisten = \"0.0.0.0:{PORT}\"\ncertificate = \"{}\"\nkey = \"{}\"\noperators = \"{}\"\n",
        office.file("agent.crt"),
        office.file("agent.key"),
        office.file("operators.crt")
    );
    let file = dir.join("margay.toml");
    std::fs::write(&file, config)?;
    margay(router, ["--config", file.to_str().context("a path that is no text")?, "up", "--router"])?;

    let desk = Desk { host: desk, office: &office, address: format!("{address}:{PORT}") };
    for words in [
        &["id", "authority", "create", "shop"][..],
        &["route", "add", "web.shop", "forward", "10.1.0.99"],
        &["route", "list", "--json"],
        &["status", "--json"],
        &["audit", "list"],
    ] {
        match desk.ask("alice", "site", words) {
            Ok(_) => findings.figures.add("calls", 1.0),
            Err(error) => {
                findings.note(format!("{words:?}: {error:#}"));
                findings.figures.add("failed", 1.0);
            }
        }
    }
    declare(&desk, dir)?;
    let log = margay(router, ["audit", "list"])?;
    findings.set("audited", log.lines().filter(|line| line.contains("remote-call")).count() as f64);
    turn_away(&desk, findings);
    let nobody = Desk { address: format!("{address}:{}", PORT + 1), ..desk };
    let told = nobody.ask("alice", "site", &["status"]).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(told.contains("Connection refused"), "where nobody listens, it is said that {told}");
    // In the clear nothing is said, and the agent still answers.
    desk.host
        .shell(&format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 2 socat - TCP:{} || true", desk.address))?;
    ensure!(desk.ask("alice", "site", &["status"]).is_ok(), "the agent answers no more");
    agent::down(router)
}

/// Who may not ask is told why.
fn turn_away(desk: &Desk<'_>, findings: &mut Findings) {
    for (who, trusts, explained) in [
        // Signed by another authority; the agent's is another's; the agent's own is no operator's; one whose time is
        // over.
        ("mallory", "site", "UnknownCA"),
        ("alice", "others", "UnknownIssuer"),
        ("agent", "site", "UnknownCA"),
        ("bob", "site", "CertificateExpired"),
    ] {
        match desk.ask(who, trusts, &["status"]) {
            Ok(_) => findings.figures.add("accepted", 1.0),
            Err(error) if format!("{error:#}").contains(explained) => {}
            Err(error) => {
                findings.note(format!("{who} with {trusts}: {error:#}"));
                findings.figures.add("unexplained", 1.0);
            }
        }
    }
}

/// A policy from the operator's desk: looked at first, then made so, and no change the second time.
fn declare(desk: &Desk<'_>, dir: &Path) -> Result<()> {
    let file = dir.join("policy.toml");
    let policy = "[[route]]\nname = \"api.shop\"\naction = \"forward\"\nto = [\"10.1.0.98\"]\nweight = 7\n";
    std::fs::write(&file, policy)?;
    let file = file.to_str().context("a path that is no text")?;
    let looked = desk.ask("alice", "site", &["policy", "apply", file, "--dry-run"])?;
    ensure!(looked.contains("+ route api.shop") && looked.contains("- route rule"), "the difference is {looked}");
    let listed = || desk.ask("alice", "site", &["route", "list"]);
    ensure!(listed()?.contains("10.1.0.99"), "looking has changed something");
    desk.ask("alice", "site", &["policy", "apply", file])?;
    let now = listed()?;
    ensure!(now.contains("10.1.0.98") && !now.contains("10.1.0.99"), "the rules are {now}");
    let again = desk.ask("alice", "site", &["policy", "apply", file])?;
    ensure!(again.contains("nothing to change"), "the second time it says {again}");
    Ok(())
}

/// Where the operator sits.
struct Desk<'a> {
    host: &'a Host,
    office: &'a Office,
    address: String,
}

impl Desk<'_> {
    fn ask(&self, who: &str, trusts: &str, words: &[&str]) -> Result<String> {
        let files = [
            self.office.file(&format!("{trusts}.crt")),
            self.office.file(&format!("{who}.crt")),
            self.office.file(&format!("{who}.key")),
        ];
        let options =
            ["--remote", &self.address, "--tls-ca", &files[0], "--tls-certificate", &files[1], "--tls-key", &files[2]];
        margay(self.host, options.into_iter().chain(words.iter().copied()))
    }
}
