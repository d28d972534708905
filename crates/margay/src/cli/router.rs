//! `margay router`.

use std::time::Duration;

use clap::Subcommand;
use margay_control::api::v1::*;
use miette::Result;

use super::output::{moment, span};
use super::{Client, Json, Out, refused, route};

#[derive(Subcommand)]
pub enum RouterVerb {
    /// Routers of other sites: what each is to this one, how it stands with it, and how much is announced
    List {
        #[command(flatten)]
        json: Json,
    },
    /// One of them, and all that is announced to it and by it
    Show {
        /// A site, or the host-ID of its router or the first letters of it
        #[arg(value_name = "SITE")]
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// Take a router that is gone for good out of this one's cluster; hosts leave it, and it is no member any more
    Remove {
        /// Its name in `margay status`, or its host-ID or the first letters of it
        #[arg(value_name = "ROUTER")]
        name: String,
        #[command(flatten)]
        json: Json,
    },
}

pub async fn router(mut client: Client, verb: RouterVerb, out: &mut Out) -> Result<()> {
    let (name, json) = match &verb {
        RouterVerb::List { json } => (String::new(), json),
        RouterVerb::Show { name, json } => (name.clone(), json),
        RouterVerb::Remove { name, json } => return remove(client, name.clone(), json, out).await,
    };
    let reply = client.router_list(RouterListRequest { name }).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    if matches!(verb, RouterVerb::List { .. }) {
        out.line(&format!("this site is {}", reply.site))?;
    }
    neighbours(&reply.neighbours, out)?;
    if matches!(verb, RouterVerb::List { .. }) {
        return Ok(());
    }
    for neighbour in &reply.neighbours {
        out.line("")?;
        announcements("announced to it:", &neighbour.announced_to, out)?;
        announcements("announced by it:", &neighbour.heard_from, out)?;
    }
    Ok(())
}

async fn remove(mut client: Client, name: String, json: &Json, out: &mut Out) -> Result<()> {
    let reply = client.router_remove(RouterRemoveRequest { name }).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    let ClusterRouterInfo { name, host_id, .. } = reply.router.unwrap_or_default();
    out.line(&format!("{name} ({host_id}) is out of the cluster, and hosts leave it; its warrant holds until it ends, or `margay id authority revoke`"))
}

fn neighbours(neighbours: &[NeighbourInfo], out: &mut Out) -> Result<()> {
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let row = |one: &NeighbourInfo| {
        vec![
            or_dash(&one.site),
            one.host_id.chars().take(12).collect(),
            one.address.clone(),
            or_dash(&one.relation),
            if one.why.is_empty() { one.state.clone() } else { format!("{}: {}", one.state, one.why) },
            moment(one.since_unix_s),
            or_dash(&one.authority),
            one.preference.to_string(),
            one.weight.to_string(),
            one.told.to_string(),
            one.heard.to_string(),
        ]
    };
    let header =
        ["SITE", "HOST", "AT", "RELATION", "STATE", "SINCE", "AUTHORITY", "PREFERENCE", "WEIGHT", "TOLD", "HEARD"];
    out.table(
        &header,
        neighbours.iter().map(row).collect(),
        "no router of another site is known: none has joined this one",
    )
}

fn announcements(title: &str, all: &[AnnouncementInfo], out: &mut Out) -> Result<()> {
    out.line(title)?;
    let row = |one: &AnnouncementInfo| {
        let shown = RouteInfo { prefix: one.prefix.clone(), name: one.name.clone(), ..RouteInfo::default() };
        let age = if one.age_ms == 0 { "-".to_owned() } else { span(Duration::from_millis(one.age_ms)) };
        let scope = if one.passed_on { "world" } else { "region" };
        let state = if one.declined.is_empty() { "taken".to_owned() } else { format!("declined: {}", one.declined) };
        vec![route::of(&shown), scope.to_owned(), one.sites.join(" > "), one.weight.to_string(), age, state]
    };
    out.table(&["FOR", "SCOPE", "PATH", "WEIGHT", "AGE", "STATE"], all.iter().map(row).collect(), "nothing")
}
