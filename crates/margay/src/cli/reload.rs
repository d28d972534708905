//! `margay reload`: the agent reads its configuration again.

use std::path::Path;

use clap::Args;
use margay_control::api::v1::{ReloadReply, ReloadRequest};
use miette::{IntoDiagnostic, Result, WrapErr, miette};

use super::{Client, Json, Out};

#[derive(Args)]
pub struct ReloadArgs {
    #[command(flatten)]
    json: Json,
}

/// What is asked of an agent: to read the file that `--config` names from now on, or its own again.
///
/// # Errors
///
/// There is no such file.
pub fn request(config_path: Option<&Path>) -> Result<ReloadRequest> {
    let absolute = |path: &Path| {
        let found = path.canonicalize().into_diagnostic();
        Ok::<_, miette::Report>(
            found.wrap_err_with(|| format!("cannot read {}", path.display()))?.display().to_string(),
        )
    };
    let config_path = config_path.map(absolute).transpose()?.unwrap_or_default();
    Ok(ReloadRequest { config_path, ..ReloadRequest::default() })
}

/// Has the agent do it.
///
/// # Errors
///
/// The file is wrong, or cannot be followed; nothing has changed then.
pub async fn ask(client: &mut Client, request: ReloadRequest) -> Result<ReloadReply> {
    let reply = client.reload(request).await.map_err(|status| match status.code() {
        tonic::Code::Unimplemented => miette!(
            help = "end it and start the new one: `systemctl restart margay`, or `margay down` and `margay up`",
            "the agent that runs is older than this program, and cannot read its configuration again"
        ),
        _ => miette!(help = "nothing has changed", "{}", status.message()),
    })?;
    Ok(reply.into_inner())
}

/// In sentences.
pub fn sentences(reply: &ReloadReply) -> Vec<String> {
    let mut said = Vec::new();
    if !reply.changed.is_empty() {
        said.push(format!("changed: {}", reply.changed.join(", ")));
    }
    if !reply.need_restart.is_empty() && !reply.restarts {
        said.push(format!(
            "not yet: {}; `margay up --restart` starts the agent again, and connections stay",
            reply.need_restart.join(", ")
        ));
    }
    if !reply.need_down.is_empty() {
        said.push(format!(
            "not yet: {}; `margay down`, then `margay up`, and connections of this host end",
            reply.need_down.join(", ")
        ));
    }
    said
}

pub async fn reload(mut client: Client, config_path: Option<&Path>, args: ReloadArgs, out: &mut Out) -> Result<()> {
    let reply = ask(&mut client, request(config_path)?).await?;
    if args.json.json {
        return out.json(&reply);
    }
    let said = sentences(&reply);
    if said.is_empty() {
        return out.line(&format!("{} says what the agent does already", reply.config_path));
    }
    said.iter().try_for_each(|sentence| out.line(sentence))
}
