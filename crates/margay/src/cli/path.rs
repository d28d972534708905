//! `margay path`.

use std::time::Duration;

use clap::Subcommand;
use margay_control::api::v1::*;
use miette::Result;
use serde_json::json;

use super::flow::{milliseconds, percent};
use super::output::{count, span};
use super::{Client, Json, Out, refused};

#[derive(Subcommand)]
pub enum PathVerb {
    /// Peers of this host, and by which addresses they and this host find each other
    List {
        #[command(flatten)]
        json: Json,
    },
    /// Move all flows with a peer to another address: one of this host, or one of the peer
    Migrate {
        /// The peer: its name, its host-ID or the first letters of that, or its address
        peer: String,
        /// Where to
        #[arg(long, value_name = "ADDRESS")]
        to: String,
        #[command(flatten)]
        json: Json,
    },
}

pub async fn path(mut client: Client, verb: PathVerb, out: &mut Out) -> Result<()> {
    match verb {
        PathVerb::List { json } => {
            let reply = client.path_list(PathListRequest {}).await.map_err(refused)?.into_inner();
            if json.json {
                return out.json(&reply);
            }
            table(&reply.paths, out)?;
            for path in reply.paths.iter().filter(|path| !path.striped.is_empty()) {
                out.line(&format!("striped flows with {}:", called(path)))?;
                path.striped.iter().try_for_each(|place| out.line(&format!("  {}", super::flow::describe(place))))?;
            }
            Ok(())
        }
        PathVerb::Migrate { peer, to, json } => {
            let request = PathMigrateRequest { peer: peer.clone(), to: to.clone() };
            client.path_migrate(request).await.map_err(refused)?;
            let sentence =
                format!("flows with {peer} are moving to {to}; `margay path list` shows when they are there");
            out.done(json.json, &json!({ "peer": peer, "to": to }), &sentence)
        }
    }
}

/// The name of a peer, or else the first digits of its host-ID.
fn called(path: &PathInfo) -> String {
    if path.peer_name.is_empty() { path.peer.chars().take(12).collect() } else { path.peer_name.clone() }
}

fn state(path: &PathInfo) -> String {
    let word = match (path.state.as_str(), path.passage.as_str()) {
        _ if path.flapping_ms > 0 => "moves too often",
        (_, "void") => "looking for the peer",
        ("asking" | "closing", _) => "moving",
        (_, "held") => "encapsulated for now",
        _ if path.trouble == "unanswered" => "data unanswered",
        _ if path.trouble == "other-host" => "another host is there",
        _ if path.suspected => "silent",
        _ => "well",
    };
    word.to_owned()
}

fn table(paths: &[PathInfo], out: &mut Out) -> Result<()> {
    let rows = paths.iter().map(|path| {
        let moved = if path.moves == 0 {
            "-".to_owned()
        } else {
            let ago = span(Duration::from_millis(path.moved_ms_ago));
            format!("{}, {ago} ago: {}", count(path.moves.into(), "time"), path.moved_why)
        };
        let round_trip = match path.round_trip_us {
            0 => "-".to_owned(),
            us => format!("{:.1} ms", us as f64 / 1000.0),
        };
        let unknown = || "-".to_owned();
        let lost = path.lost_ppm.map_or_else(unknown, percent);
        let jitter = path.jitter_us.map_or_else(unknown, milliseconds);
        let reordered = path.reordered_ppm.map_or_else(unknown, percent);
        vec![
            called(path),
            if path.local.is_empty() { "?".to_owned() } else { path.local.clone() },
            path.remote.clone(),
            if path.router { "router".to_owned() } else { path.flows.to_string() },
            round_trip,
            lost,
            jitter,
            reordered,
            state(path),
            moved,
        ]
    });
    let head = ["PEER", "FROM", "TO", "FLOWS", "ROUND TRIP", "LOST", "JITTER", "REORDERED", "STATE", "MOVED"];
    out.table(&head, rows.collect(), "no peers")
}
