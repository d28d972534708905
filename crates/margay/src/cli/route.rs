//! `margay route`.

use std::time::Duration;

use clap::Subcommand;
use margay_control::api::v1::*;
use miette::Result;

use super::output::span;
use super::{Client, Json, Out, refused};

#[derive(Subcommand)]
pub enum RouteVerb {
    /// The service table: what is done with first packets, where each rule is from, and how often it was used
    List {
        /// Only the rules that cover this name, in the order in which they are asked
        name: Option<String>,
        #[command(flatten)]
        json: Json,
    },
}

pub async fn route(mut client: Client, verb: RouteVerb, out: &mut Out) -> Result<()> {
    let RouteVerb::List { name, json } = verb;
    let request = RouteListRequest { name: name.unwrap_or_default() };
    let reply = client.route_list(request).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    let rows = reply.routes.iter().map(row).collect();
    let header = ["FOR", "ACTION", "TO", "HOST", "PRIORITY", "WEIGHT", "FROM", "AGE", "PACKETS", "LAST"];
    out.table(&header, rows, "no rules: nothing is published here, and no router is known")
}

fn row(route: &RouteInfo) -> Vec<String> {
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let of = match (route.name.as_str(), route.prefix.as_str()) {
        ("", prefix) => shortened(prefix),
        (name, _) => name.to_owned(),
    };
    let port = match (route.service_port, route.protocol.as_str()) {
        (0, "") => String::new(),
        (0, protocol) => format!(" ({protocol})"),
        (port, "") => format!(" (port {port})"),
        (port, protocol) => format!(" ({protocol} port {port})"),
    };
    let host =
        if route.host_name.is_empty() { route.host_id.chars().take(12).collect() } else { route.host_name.clone() };
    vec![
        of,
        route.action.clone(),
        format!("{}{port}", or_dash(&route.to)),
        or_dash(&host),
        route.priority.to_string(),
        route.weight.to_string(),
        route.origin.clone(),
        span(Duration::from_millis(route.age_ms)),
        route.packets.to_string(),
        route.used_ms_ago.map_or_else(|| "never".to_owned(), |ago| format!("{} ago", span(Duration::from_millis(ago)))),
    ]
}

/// The digits that say something: a prefix has 64, most of them zero or more than anybody reads.
fn shortened(prefix: &str) -> String {
    let Some((digits, bits)) = prefix.split_once('/') else { return prefix.chars().take(20).collect() };
    match bits {
        "0" => "everything".to_owned(),
        _ => format!("{}…/{bits}", digits.chars().take(20).collect::<String>()),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_rule_in_one_line() {
        let route = RouteInfo {
            prefix: format!("sid:{}/256", "ab".repeat(32)),
            action: "demux".to_owned(),
            to: "0.0.0.0:80".to_owned(),
            service_port: 80,
            protocol: "tcp".to_owned(),
            priority: 100,
            weight: 1,
            origin: "published".to_owned(),
            age_ms: 61_000,
            packets: 7,
            used_ms_ago: Some(2_000),
            ..RouteInfo::default()
        };
        let cells = row(&route).join("|");
        let wanted = "sid:abababababababab…/256|demux|0.0.0.0:80 (tcp port 80)|-|100|1|published|1m 1s|7|2s ago";
        assert_eq!(cells, wanted);
        let default = RouteInfo { prefix: "sid:/0".to_owned(), name: String::new(), used_ms_ago: None, ..route };
        assert_eq!((row(&default)[0].as_str(), row(&default)[9].as_str()), ("everything", "never"));
    }
}
