//! `margay fact`.

use std::time::Duration;

use clap::Subcommand;
use margay_control::api::v1::*;
use miette::Result;

use super::output::span;
use super::{Client, Json, Out, refused};
use crate::fields;

const TTL_MIN: Duration = Duration::from_secs(1);
const TTL_MAX: Duration = Duration::from_secs(24 * 3600);

#[derive(Subcommand)]
pub enum FactVerb {
    /// Say something of the world that rules of stacks look at, for a while
    Set {
        /// What rules call it, after `fact.`
        name: String,
        /// true, false, a number, or else a text
        #[arg(allow_hyphen_values = true)]
        value: String,
        /// For how long it holds, up to a day
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = ttl)]
        ttl: Duration,
        #[command(flatten)]
        json: Json,
    },
    /// The facts that are set
    List {
        #[command(flatten)]
        json: Json,
    },
    /// Take a fact back
    Clear {
        /// As `list` shows it
        name: String,
        #[command(flatten)]
        json: Json,
    },
}

fn ttl(text: &str) -> Result<Duration, String> {
    fields::time(text, TTL_MIN, TTL_MAX)
}

pub async fn fact(mut client: Client, verb: FactVerb, out: &mut Out) -> Result<()> {
    match verb {
        FactVerb::Set { name, value, ttl, json } => {
            let ttl_s = u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX);
            let request = FactSetRequest { name, value, ttl_s };
            let reply = client.fact_set(request).await.map_err(refused)?.into_inner();
            let looks = rules(&reply);
            let left = span(Duration::from_secs(ttl_s.into()));
            let sentence = format!("fact.{} is {} for {left}; {looks}", reply.name, reply.value);
            out.done(json.json, &reply, &sentence)
        }
        FactVerb::List { json } => {
            let reply = client.fact_list(FactListRequest {}).await.map_err(refused)?.into_inner();
            if json.json { out.json(&reply) } else { table(&reply.facts, out) }
        }
        FactVerb::Clear { name, json } => {
            let request = FactClearRequest { name: name.clone() };
            let reply = client.fact_clear(request).await.map_err(refused)?.into_inner();
            out.done(json.json, &reply, &format!("fact.{name} is not set any more"))
        }
    }
}

fn rules(fact: &FactInfo) -> String {
    match &*fact.rules {
        [] => "no rule looks at it".to_owned(),
        rules => {
            let numbers: Vec<String> = rules.iter().map(ToString::to_string).collect();
            format!("looked at by rule {}", numbers.join(", "))
        }
    }
}

fn table(facts: &[FactInfo], out: &mut Out) -> Result<()> {
    let rows = facts.iter().map(|fact| {
        vec![
            fact.name.clone(),
            fact.value.clone(),
            fact.kind.clone(),
            span(Duration::from_millis(fact.since_ms)),
            span(Duration::from_millis(fact.left_ms)),
            rules(fact),
        ]
    });
    out.table(&["FACT", "VALUE", "KIND", "SINCE", "LEFT", "RULES"], rows.collect(), "no facts are set")
}
