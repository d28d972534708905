//! `margay audit`.

use clap::Subcommand;
use margay_control::api::v1::*;
use miette::Result;

use super::output::moment;
use super::{Client, Json, Out, refused};

#[derive(Subcommand)]
pub enum AuditVerb {
    /// Who was given what on this router, who asked and was refused and why; the newest first
    List {
        /// How many entries
        #[arg(long, value_name = "NUMBER", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
        #[command(flatten)]
        json: Json,
    },
}

pub async fn audit(mut client: Client, verb: AuditVerb, out: &mut Out) -> Result<()> {
    let AuditVerb::List { limit, json } = verb;
    let reply = client.audit_list(AuditListRequest { limit }).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    let row =
        |entry: AuditInfo| vec![moment(entry.unix_s), entry.act, entry.count.to_string(), entry.subject, entry.detail];
    let header = ["WHEN", "ACT", "TIMES", "WHO", "WHAT"];
    out.table(&header, reply.entries.into_iter().map(row).collect(), "nothing is in the log of this host")
}
