//! `wrong-inputs`: words, files and keys that are wrong, one after another. Each is refused, names what is wrong and
//! where, and changes nothing.

mod commands;
mod keys;

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Findings, Scenario, pair};
use crate::agent::{self, margay};
use crate::fabric::margay_program;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "wrong-inputs",
    summary: "wrong commands, options, keys and files are each refused with what is wrong and where, and change \
        nothing",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("inputs", AtLeast(150.0)),
    bound("unclear", Exactly(0.0)),
    bound("half_applied", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.member]
role = "agent"
links = [{ subnet = "site" }]

[host.bare]
role = "plain"
links = [{ subnet = "site" }]
"#;

/// Whoever waits for longer than a router may take to answer waits for nothing.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Looks at the whole state are dear: so many inputs share one.
const BETWEEN_LOOKS: usize = 16;

/// What `up` could change on a host, and what it leaves on disk.
const HOST_STATE: &str = r#"
    nft list ruleset
    for family in -4 -6; do ip $family -o addr show; ip $family rule show; ip $family route show table all; done
    ip -o link show
    cat /etc/resolv.conf /proc/sys/net/ipv4/ip_local_reserved_ports
    ls -R /etc/margay /var/lib/margay /run/margay 2>/dev/null
    cat /var/lib/margay/*.json /etc/margay/* 2>/dev/null
    pgrep -x margay | wc -l
"#;

/// What an agent has been told, without what changes by itself.
const AGENT_STATE: &str = r#"
    $margay service list --json
    $margay route list --json | grep -v '_ms\|_ago\|"packets"\|"used"'
    $margay id --json
    $margay id token list --json
    $margay id member list --json
    $margay status --json | grep '"epoch"\|"router"\|"joined"\|"zone"\|"services"'
"#;

/// One input.
struct Input {
    /// For people.
    what: String,
    /// For a shell; `$margay` is the program, `$d` a directory.
    line: String,
    /// Words that the message must have.
    words: Vec<String>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    for name in ["inputs", "unclear", "half_applied", "failed"] {
        findings.set(name, 0.0);
    }
    let lab = Lab::build(Topology::parse("wrong-inputs", TOPOLOGY)?, dir)?;
    let (router, bare) = (lab.host("router")?, lab.host("bare")?);
    let files = dir.join("files");
    std::fs::create_dir(&files)?;
    pair::attempt_part("configurations", findings, |findings| {
        refuse_all(bare, &files, HOST_STATE, &configurations(&files)?, findings)
    });
    let _agents = agent::Agents::start(&lab)?;
    margay(router, ["service", "publish", "one.shop", "--listen", "0.0.0.0:9998"])?;
    let whole = format!("{AGENT_STATE}\n{HOST_STATE}");
    pair::attempt_part("commands", findings, |findings| {
        refuse_all(router, &files, &whole, &commands(&files)?, findings)
    });
    pair::attempt_part("commands of a member", findings, |findings| {
        let inputs: Vec<Input> = commands::OF_MEMBER.iter().map(of_line).collect();
        refuse_all(lab.host("member")?, &files, &whole, &inputs, findings)
    });
    pair::attempt_part("joins", findings, |findings| {
        let inputs = joins(router, bare)?;
        refuse_all(bare, &files, HOST_STATE, &inputs, findings)
    });
    pair::attempt_part("reloads", findings, |findings| refuse_reloads(router, &files, &whole, findings));
    Ok(())
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|word| (*word).to_owned()).collect()
}

/// The file and the line, as errors show them.
fn place(path: &Path, line: usize) -> String {
    if line == 0 { path.display().to_string() } else { format!("{}:{line}:", path.display()) }
}

fn configurations(files: &Path) -> Result<Vec<Input>> {
    let mut inputs = Vec::new();
    for (number, keys::Wrong(text, line, named)) in keys::FILES.iter().enumerate() {
        let path = files.join(format!("configuration-{number}.toml"));
        std::fs::write(&path, text)?;
        inputs.push(Input {
            what: text.replace('\n', "; "),
            line: format!("$margay --config {} up", path.display()),
            words: [vec![place(&path, *line)], words(named)].concat(),
        });
    }
    Ok(inputs)
}

fn of_line(commands::Wrong(line, named): &commands::Wrong) -> Input {
    Input { what: (*line).to_owned(), line: format!("$margay {line}"), words: words(named) }
}

fn commands(files: &Path) -> Result<Vec<Input>> {
    let mut inputs: Vec<Input> = commands::LINES.iter().map(of_line).collect();
    for (number, (text, line, named)) in commands::POLICIES.iter().enumerate() {
        let path = files.join(format!("policy-{number}.toml"));
        std::fs::write(&path, text)?;
        let at = if *line == 0 { Vec::new() } else { vec![place(&path, *line)] };
        inputs.push(Input {
            what: format!("policy: {}", text.replace('\n', "; ")),
            line: format!("$margay policy apply {}", path.display()),
            words: [at, words(named)].concat(),
        });
    }
    Ok(inputs)
}

/// Tokens that a router does not take, for a host that has been a member.
fn joins(router: &Host, bare: &Host) -> Result<Vec<Input>> {
    let token = |options: &[&str]| -> Result<String> {
        let all = ["id", "token", "create", "shop"].iter().chain(options).copied();
        Ok(margay(router, all)?.trim().to_owned())
    };
    let used = token(&[])?;
    margay(bare, ["up", "--join", &used])?;
    margay(router, ["id", "member", "remove", "bare"])?;
    agent::down(bare)?;
    let revoked = token(&[])?;
    for id in active_tokens(router)? {
        margay(router, ["id", "token", "revoke", &id])?;
    }
    let expired = token(&["--lifetime", "1s"])?;
    wait_for("the end of the token", ANSWER_LIMIT, || match margay(router, ["id", "token", "list"])? {
        listed if listed.contains("expired") => Ok(()),
        listed => bail!("no token has expired: {listed}"),
    })?;
    let cut = used[..used.len() - 4].to_owned();
    let all = [("used", &used, "used"), ("revoked", &revoked, "revoked"), ("expired", &expired, "expired")];
    let refused = all.map(|(what, token, reason)| Input {
        what: format!("a token that is {what}"),
        line: format!("$margay up --join {token}"),
        words: words(&["10.1.0.1:54324", "refuses", reason, "as it was before"]),
    });
    let damaged = Input {
        what: "a token that is cut".to_owned(),
        line: format!("$margay up --join {cut}"),
        // Whether the rest is a number of whole bytes goes by its last bits.
        words: words(&["join token", "copy"]),
    };
    Ok(refused.into_iter().chain([damaged]).collect())
}

fn active_tokens(router: &Host) -> Result<Vec<String>> {
    let listed: serde_json::Value = serde_json::from_str(&margay(router, ["id", "token", "list", "--json"])?)?;
    let tokens = listed["tokens"].as_array().context("no tokens are listed")?;
    let is_active = |one: &&serde_json::Value| one["state"] == "usable";
    Ok(tokens.iter().filter(is_active).filter_map(|one| one["id"].as_str().map(str::to_owned)).collect())
}

/// An agent that is told to read a wrong file goes on as before.
fn refuse_reloads(host: &Host, files: &Path, state: &str, findings: &mut Findings) -> Result<()> {
    let mut inputs = Vec::new();
    for (number, keys::Wrong(text, line, named)) in keys::FILES.iter().enumerate() {
        let path = files.join(format!("configuration-{number}.toml"));
        // An agent says in one line what is wrong, and does not show what the file says.
        let at = if *line == 0 { path.display().to_string() } else { format!("{}, line {line}", path.display()) };
        inputs.push(Input {
            what: format!("reload: {}", text.replace('\n', "; ")),
            line: format!("$margay --config {} reload", path.display()),
            words: [vec![at, "nothing has changed".to_owned()], words(named)].concat(),
        });
    }
    refuse_all(host, files, state, &inputs, findings)
}

/// Tries each, and compares the state before and after.
fn refuse_all(host: &Host, files: &Path, state: &str, inputs: &[Input], findings: &mut Findings) -> Result<()> {
    let program = margay_program()?;
    let head = format!("margay={}; d={}/empty; mkdir -p $d;", program.display(), files.display());
    let look = || host.shell(&format!("{head}\nset +e\n{state}\ntrue"));
    let mut before = look()?;
    for group in inputs.chunks(BETWEEN_LOOKS) {
        for input in group {
            findings.figures.add("inputs", 1.0);
            let begun = Instant::now();
            let output = host.output(["sh", "-c", &format!("{head} {} </dev/null", input.line)])?;
            if let Err(error) = judge(input, &output, begun.elapsed()) {
                findings.figures.add("unclear", 1.0);
                findings.note(format!("{}: {error:#}", input.what));
            }
        }
        let after = look()?;
        if after != before {
            findings.figures.add("half_applied", 1.0);
            let is_new = |line: &&str| !before.lines().any(|known| known == *line);
            let news: Vec<&str> = after.lines().filter(is_new).take(6).collect();
            let first = group.first().map(|input| input.what.as_str()).unwrap_or_default();
            findings.note(format!("something has changed from `{first}` on: {}", news.join(" | ")));
            before = after;
        }
    }
    Ok(())
}

fn judge(input: &Input, output: &Output, took: Duration) -> Result<()> {
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let code = output.status.code().context("it was ended by a signal")?;
    if code == 0 {
        bail!("accepted: {}", said.trim());
    }
    if said.contains("panicked") {
        bail!("a panic: {}", said.trim());
    }
    if took > ANSWER_LIMIT {
        bail!("it took {took:?}: {}", said.trim());
    }
    match input.words.iter().find(|word| !said.contains(word.as_str())) {
        Some(missing) => bail!("does not say `{missing}`: {}", said.trim()),
        None => Ok(()),
    }
}
