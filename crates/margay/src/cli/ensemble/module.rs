//! Modules of switches: loaded, unloaded, tried.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use margay_control::api::v1::ModuleNoteRequest;
use margay_frames::module::{Module, Trial};
use margay_frames::switch::Loaded;
use margay_frames::switch::control::Question;
use miette::{IntoDiagnostic, Result, WrapErr, miette};
use nix::unistd::geteuid;
use serde_json::{Value, json};

use super::{ask, text};
use crate::cli::{Json, Out, connect, output, refused};
use crate::config::{Config, ProgramProtocol};

/// Bytes of requests that are tried at most.
const REQUESTS_MAX: u64 = 64 << 20;
/// Digits of a hash that lists have.
const HASH_SHOWN: usize = 12;

#[derive(Args)]
pub struct LoadArgs {
    /// The ensemble's name
    name: String,
    /// The module
    file: PathBuf,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
pub struct UnloadArgs {
    /// The ensemble's name
    name: String,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
pub struct TryArgs {
    /// The module
    file: PathBuf,
    /// The members, by what they are called
    #[arg(long, value_name = "LABEL,…", value_delimiter = ',', default_value = "a,b,c")]
    members: Vec<String>,
    /// What the requests are of
    #[arg(long, value_enum, default_value_t = ProgramProtocol::Memcached)]
    protocol: ProgramProtocol,
    /// Requests as clients send them: a file, or `-` for standard input
    #[arg(long, value_name = "FILE", default_value = "-")]
    requests: PathBuf,
    #[command(flatten)]
    json: Json,
}

fn demand_root() -> Result<()> {
    if geteuid().is_root() {
        return Ok(());
    }
    Err(miette!("modules are loaded by root alone: they see all requests, and may change them"))
}

/// Reads a module, and notes in the audit log that it is loaded: before it is. With its bytes.
pub async fn loaded(config: &Config, ensemble: &str, file: &Path) -> Result<(Loaded, Vec<u8>)> {
    demand_root()?;
    let bytes = Module::bytes_of(file).into_diagnostic()?;
    let module = Module::new(&bytes).into_diagnostic()?;
    note(config, ensemble, module.hash()).await?;
    Ok((Loaded { module: Arc::new(module), file: file.display().to_string() }, bytes))
}

async fn note(config: &Config, ensemble: &str, hash: &str) -> Result<()> {
    let mut client = connect(config, None).await?;
    let request = ModuleNoteRequest { ensemble: ensemble.to_owned(), hash: hash.to_owned() };
    client.module_note(request).await.map_err(refused)?;
    Ok(())
}

/// `margay ensemble load`.
pub async fn load(config: &Config, args: LoadArgs, out: &mut Out) -> Result<()> {
    let file = args.file.canonicalize().into_diagnostic();
    let file = file.wrap_err_with(|| format!("{} cannot be read", args.file.display()))?;
    // The switch must be there before anything is noted of it.
    ask(config, &args.name, &Question::Show).await?;
    let (loaded, bytes) = loaded(config, &args.name, &file).await?;
    let hash = loaded.module.hash().to_owned();
    ask(config, &args.name, &Question::Load { file: loaded.file, bytes }).await?;
    let done = json!({"name": args.name, "file": file.display().to_string(), "hash": hash});
    out.done(args.json.json, &done, "it divides the requests of connections that begin from now on")
}

/// `margay ensemble unload`.
pub async fn unload(config: &Config, args: UnloadArgs, out: &mut Out) -> Result<()> {
    demand_root()?;
    let shown = ask(config, &args.name, &Question::Show).await?;
    if shown["module"].is_null() {
        return Err(miette!("the switch of {} has no module", args.name));
    }
    note(config, &args.name, "").await?;
    ask(config, &args.name, &Question::Unload).await?;
    out.done(args.json.json, &json!({"name": args.name}), "connections that begin from now on have no module")
}

/// A module in a list of switches.
pub fn of_row(module: &Value) -> String {
    let hash = module["hash"].as_str().unwrap_or_default();
    hash.get(..HASH_SHOWN).unwrap_or(hash).to_owned()
}

/// A module where one switch is shown.
pub fn line_of(module: &Value) -> Option<String> {
    module.as_object()?;
    let fault = module["last_fault"].as_str().map(|why| format!(", the last one: {why}")).unwrap_or_default();
    Some(format!(
        "module {} ({}): {}, {}, {}{fault}",
        text(&module["file"]),
        of_row(module),
        text(&module["state"]),
        output::count(module["connection_count"].as_u64().unwrap_or_default(), "connection"),
        output::count(module["faults"].as_u64().unwrap_or_default(), "fault"),
    ))
}

/// `margay ensemble try`.
pub fn attempt(args: TryArgs, out: &mut Out) -> Result<()> {
    let module = Module::read(&args.file).into_diagnostic()?;
    let mut requests = Vec::new();
    let read = if args.requests == Path::new("-") {
        std::io::stdin().take(REQUESTS_MAX).read_to_end(&mut requests)
    } else {
        std::fs::File::open(&args.requests).and_then(|file| file.take(REQUESTS_MAX).read_to_end(&mut requests))
    };
    read.into_diagnostic().wrap_err_with(|| format!("{} cannot be read", args.requests.display()))?;
    let trial = Trial::run(&module, args.protocol.into(), &args.members, &requests).map_err(|why| miette!("{why}"))?;
    if args.json.json {
        let answers: Vec<Value> =
            trial.answers.iter().map(|one| json!({"request": one.request, "answer": one.answer})).collect();
        return out.json(&json!({"hash": module.hash(), "median_ns": trial.median_ns, "answers": answers}));
    }
    let rows = trial.answers.iter().map(|one| vec![one.request.clone(), one.answer.clone()]).collect();
    out.table(&["REQUEST", "MEMBER"], rows, "there was no request")?;
    out.line(&format!("{} ns for each call of redirect (the middle one)", trial.median_ns))
}
