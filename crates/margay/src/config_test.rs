use std::path::Path;

use miette::Diagnostic;

use super::*;
use crate::agent::active::rule::Source;
use crate::agent::service::Publication;

#[expect(clippy::result_large_err, reason = "made once, and shown")]
fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("margay.toml"))
}

/// The message, the text that it points at, and the advice.
fn wrong(text: &str) -> (String, String, String) {
    let error = parse(text).expect_err("refused");
    let advice = error.help().map(|help| help.to_string()).unwrap_or_default();
    let ConfigError::Wrong(misread) = error else { panic!("{error}") };
    let pointed = misread.pointed().unwrap_or_default().to_owned();
    (misread.to_string(), pointed, advice)
}

#[test]
fn an_empty_file_is_all_defaults() {
    let config = parse("").expect("read");
    assert_eq!(config, Config::default());
    assert_eq!(config.host.port, 54324);
    assert_eq!(config.dns.listen, None);
    assert_eq!(config.socket(), Path::new("/run/margay/api.sock"));
}

#[test]
fn checks_of_a_service_are_read_and_faults_point_at_their_section() {
    let section = |name: &str, more: &str| format!("[[service]]\nname = \"{name}\"\nlisten = \"0.0.0.0:80\"\n{more}\n");
    let text =
        section("web.shop", "health = { http = \"/healthz\", interval = \"5s\" }\n[service.load]\ncommand = [\"/l\"]");
    let config = parse(&text).expect("read");
    let service = config.service[0].get_ref();
    assert_eq!(service.health.as_ref().map(|health| health.interval.as_secs()), Some(5));
    assert_eq!(service.load.as_ref().map(|load| load.command.len()), Some(1));
    for (more, what_has) in [
        ("health = { }", "0 ways"),
        ("health = { connect = true, fall = 0 }", "checks in a row"),
        ("health = { connect = true, interval = \"2\" }", "no time from"),
        ("health = { conect = true }", "unknown field"),
        ("health = { connect = true }\nprotocol = \"udp\"", "datagrams"),
        ("load = { command = [\"load\"] }", "no absolute path"),
        ("load = { cpu = true, command = [\"/load\"] }", "one of them is wanted"),
        ("load = \"cpu\"", "where a table is wanted"),
    ] {
        let (what, pointed, _) = wrong(&section("web.shop", more));
        assert!(what.contains(what_has), "{more}: {what}");
        assert!(!pointed.is_empty(), "{more}");
    }
    let two = |other: &str| {
        let first = section("web.shop", "port = 1\nhealth = { connect = true }");
        format!("{first}{}", section("web.shop", &format!("port = 2\n{other}")))
    };
    assert!(parse(&two("")).is_ok() && parse(&two("health = { connect = true }")).is_ok());
    let (what, _, _) = wrong(&two("health = { http = \"/\" }"));
    assert!(what.contains("do not agree about `health`"), "{what}");
}

#[test]
fn every_field_of_the_book_is_read() {
    let book = include_str!("../../../docs/book/configuration.md");
    let example = book.split("```").nth(1).and_then(|block| block.strip_prefix("toml\n")).expect("an example");
    let config = parse(example).expect("the book's example is right");
    assert!(config.router.enabled && !config.secure);
    assert_eq!(config.secure_names(), [config.service[0].get_ref().name.0.prefix()]);
    assert_eq!(config.service[0].get_ref().service_port(), Some(80));
    assert_eq!(config.service[0].get_ref().terms().partition_bits, 4);
    let policy = config.router.policy().expect("a site");
    assert_eq!((policy.aggregates.len(), policy.scopes.len(), policy.neighbours.len()), (2, 1, 1));
    let [bulk, prefix] = &config.policies()[..] else { panic!("two names") };
    assert_eq!((bulk.1, prefix.0.bits, prefix.1), (Policy::Stripe, 64, Policy::Stripe));
    let resolver = config.resolver[0].get_ref();
    assert_eq!((resolver.names.len(), resolver.publish.len(), resolver.timeout_ms), (1, 1, 1000));
    assert_eq!(config.fallback[0].get_ref().address.to_string(), "192.0.2.7");
    assert_eq!(config.log.level.tracing(), tracing::Level::INFO);
}

#[test]
fn what_a_site_tells_others_is_read_as_it_is_meant() {
    let text = "[router]\nenabled = true\nsite = \"b\"\nannounce = [\"*.shop\", \"web.club\"]\n\
        [[router.scope]]\nnames = [\"admin.shop\"]\nscope = \"site\"\n\
        [[router.neighbour]]\nsite = \"a\"\nrelation = \"peer\"\nweight = 50\n";
    let policy = parse(text).expect("read").router.policy().expect("a site");
    assert_eq!((policy.site.as_str(), policy.weight), ("b", 100));
    let bits: Vec<u16> = policy.aggregates.iter().map(|prefix| prefix.bits).collect();
    assert_eq!(bits, [64, 96], "all of an authority, and a service with its keys");
    assert_eq!(policy.announced_as(&"admin.shop".parse().expect("a name")), None);
    let peer = policy.preference("a");
    assert_eq!((peer.beside, peer.preference, peer.weight), (true, 100, 50));
    assert!(!policy.preference("c").beside);
    assert_eq!(parse("[router]\nenabled = true\n").expect("read").router.policy(), None);

    let site = "[router]\nsite = \"b\"\n";
    for (text, words) in [
        ("[router]\nsite = \"Berlin 1\"\n".to_owned(), "no name of a site"),
        ("[router]\nannounce = [\"*.shop\"]\n".to_owned(), "not what this one is called"),
        (format!("{site}announce = [\"sid:01/8\"]\n"), "many authorities"),
        (format!("{site}announce = [\"web\"]\n"), "no authority"),
        (format!("{site}site_weight = 70000\n"), "0 to 65535"),
        (format!("{site}[[router.scope]]\nnames = []\nscope = \"site\"\n"), "about no name"),
        (format!("{site}[[router.scope]]\nnames = [\"web.shop\"]\nscope = \"here\"\n"), "unknown variant"),
        (
            format!(
                "{site}[[router.scope]]\nnames = [\"web.shop\", \"web.shop\"]\nscope = \
                 \"site\"\n[[router.scope]]\nnames = [\"web.shop\"]\nscope = \"region\"\n"
            ),
            "two scopes",
        ),
        (format!("{site}[[router.neighbour]]\nsite = \"b\"\n"), "own site"),
        (
            format!("{site}[[router.neighbour]]\nsite = \"a\"\n[[router.neighbour]]\nsite = \"a\"\n"),
            "two [[router.neighbour]]",
        ),
        (format!("{site}[[router.neighbour]]\nsite = \"a\"\nrelation = \"boss\"\n"), "unknown variant"),
    ] {
        let (what, ..) = wrong(&text);
        assert!(what.contains(words), "{text}: {what}");
    }
}

#[test]
fn mistakes_are_pointed_at() {
    let (what, at, advice) = wrong("[host]\nprot = 1\n");
    assert!(what.contains("unknown field `prot`"), "{what}");
    assert_eq!((at.as_str(), advice.as_str()), ("prot", "did you mean `port`?"));

    let (what, at, _) = wrong("[host]\nport = 0\n");
    assert!(what.contains("1 to 65535"), "{what}");
    assert_eq!(at, "0");

    let (what, at, _) = wrong("secure = \"yes\"\n");
    assert_eq!(what, "the text `yes` stands where true or false is wanted");
    assert_eq!(at, "\"yes\"");
    let (what, _, advice) = wrong("sekure = true\n");
    assert!(what.contains("unknown field"), "{what}");
    assert_eq!(advice, "did you mean `secure`?");

    let web = "[[service]]\nname = \"web.shop\"\nlisten_port = 80\n";
    let (what, at, _) = wrong(&format!("{web}partitions = 12\n"));
    assert!(what.contains("a power of two from 2 to 1024"), "{what}");
    assert_eq!(at, "12");
    let (what, ..) = wrong("[[service]]\nname = \"web.shop/key:one\"\nlisten_port = 80\npartitions = 16\n");
    assert!(what.contains("cannot have partitions"), "{what}");
    let other = web.replace("80", "81");
    let (what, ..) = wrong(&format!("{web}exclusive = true\n{other}"));
    assert!(what.contains("do not agree about `exclusive`"), "{what}");
    let (what, _, advice) = wrong(&format!("{web}fence = true\n"));
    assert!(what.contains("several hosts may serve it"), "{what}");
    assert!(advice.contains("exclusive = true"), "{advice}");
    let (what, ..) = wrong(&format!("{web}exclusive = true\nfence = true\n{other}exclusive = true\n"));
    assert!(what.contains("do not agree about `fence`"), "{what}");

    let (what, at, _) = wrong("[[service]]\nname = \"web\"\nlisten = \"0.0.0.0:80\"\n");
    assert!(what.contains("no authority"), "{what}");
    assert_eq!(at, "\"web\"");

    let (what, pointed, advice) = wrong("[[service]]\nname = \"web.shop\"\nlisten = \"127.0.0.1:80\"\n");
    assert!(
        what.contains("loopback") && pointed.contains("[[service]]") && advice.contains("allow"),
        "{what} {pointed}"
    );

    let (what, _, advice) = wrong("[[service]]\nlisten = \"0.0.0.0:80\"\n");
    assert!(what.contains("missing field `name`"), "{what}");
    assert!(advice.contains("name"), "{advice}");

    let (what, ..) = wrong("[dns]\nzone = \"a b\"\n");
    assert!(what.contains("no DNS zone"), "{what}");

    let (_, _, advice) = wrong("[host\n");
    assert!(!advice.is_empty());
}

#[test]
fn mistakes_in_policies_are_pointed_at() {
    let several = "[[multihoming]]\nnames = [\"web.shop\"]\n";
    let (what, at, _) = wrong(&format!("{several}policy = \"strip\"\n"));
    assert!(what.contains("unknown variant `strip`"), "{what}");
    assert_eq!(at, "\"strip\"");
    let (what, at, _) = wrong(&format!("{several}policy = \"pin\"\n"));
    assert!(what.contains("needs an address"), "{what}");
    assert!(at.starts_with("[[multihoming]]"), "{at}");
    let (what, ..) = wrong(&format!("{several}policy = \"stripe\"\naddress = \"192.0.2.1\"\n"));
    assert!(what.contains("only `pin` takes an address"), "{what}");
    for (policy, weights, words) in [
        ("weighted", "", "needs weights"),
        ("weighted", "weights = { \"192.0.2.1\" = 0 }", "weight of 192.0.2.1 is 0"),
        ("weighted", "weights = { \"192.0.2.1\" = 256 }", "1 to 255"),
        ("weighted", "weights = { eth0 = 2 }", "invalid IP address syntax"),
        ("redundant", "weights = { \"192.0.2.1\" = 2 }", "only `weighted` takes weights"),
        ("weighted", "weights = { \"192.0.2.1\" = 2 }\nstacks = { \"192.0.2.1\" = \"plain\" }", "only `stripe` takes"),
        ("stripe", "stacks = { \"192.0.2.1\" = \"secure\" }", "no place that is `plain`"),
        ("stripe", "stacks = { \"192.0.2.1\" = \"fec\", \"192.0.2.2\" = \"secure\" }", "no place that is `plain`"),
        ("stripe", "stacks = { \"192.0.2.1\" = \"direct\" }", "unknown variant `direct`"),
    ] {
        let (what, ..) = wrong(&format!("{several}policy = \"{policy}\"\n{weights}\n"));
        assert!(what.contains(words), "{what}");
    }
    for (stacks, shown) in [
        ("{ \"192.0.2.1\" = \"plain\", \"198.51.100.1\" = \"secure\" }", "stripe 192.0.2.1=plain"),
        ("{ \"192.0.2.1\" = \"plain\", \"192.0.2.9\" = \"fec\" }", "stripe 192.0.2.1=plain 192.0.2.9=fec"),
        ("{ \"192.0.2.9\" = \"fec\" }", "stripe 192.0.2.9=fec"),
    ] {
        let config = parse(&format!("{several}policy = \"stripe\"\nstacks = {stacks}\n")).expect("stacks");
        assert_eq!(config.policies()[0].1.to_string(), shown);
    }
    let two = "weights = { \"192.0.2.1\" = 2, \"192.0.2.9\" = 1 }";
    let config = parse(&format!("{several}policy = \"weighted\"\n{two}\n")).expect("weights");
    assert_eq!(config.policies()[0].1.to_string(), "weighted 192.0.2.1=2 192.0.2.9=1");
    let (what, ..) = wrong(&format!("{several}policy = \"stripe\"\n{several}policy = \"fail-over\"\n"));
    assert!(what.contains("two policies"), "{what}");
    let (what, ..) = wrong("[[multihoming]]\nnames = []\npolicy = \"stripe\"\n");
    assert!(what.contains("no name"), "{what}");
}

#[test]
fn virtual_addresses_are_two_ranges_that_no_other_host_can_have() {
    assert_eq!(parse("").expect("good").ranges(), Ranges::USUAL);
    let other = parse("[ranges]\nipv4 = \"10.66.0.0/15\"\nipv6 = \"fdaa:1::/32\"\n").expect("good").ranges();
    assert_eq!(other.to_string(), "10.66.0.0/15 and fdaa:1::/32");
    let half = parse("[ranges]\nipv6 = \"fdaa:1::/32\"\n").expect("good").ranges();
    assert_eq!(half, Ranges { v4: Ranges::USUAL.v4, v6: other.v6 });
    for (key, value, word) in [
        ("ipv4", "10.66.0.0/16", "length"),
        ("ipv4", "10.67.0.0/15", "10.66.0.0"),
        ("ipv4", "8.8.0.0/15", "a /15 of 10.0.0.0/8"),
        ("ipv6", "2001:db8::/32", "a /32 of fc00::/7"),
    ] {
        let (what, at, _) = wrong(&format!("[ranges]\n{key} = \"{value}\"\n"));
        assert!(what.contains(value) && what.contains(word), "{what}");
        assert_eq!(at, format!("\"{value}\""));
    }
    // What is virtual here decides where a socket can be.
    let service = |ranges: &str, at: &str| format!("{ranges}[[service]]\nname = \"web.shop\"\nlisten = \"{at}:80\"\n");
    let other = "[ranges]\nipv4 = \"10.66.0.0/15\"\n";
    assert!(wrong(&service(other, "10.66.9.9")).0.contains("10.66.9.9:80"));
    assert!(wrong(&service("", "198.18.9.9")).0.contains("198.18.9.9:80"));
    for (ranges, at) in [(other, "198.18.9.9"), (other, "10.66.0.1"), ("", "10.66.9.9")] {
        parse(&service(ranges, at)).expect("good");
    }
}

#[test]
fn what_no_field_alone_can_know() {
    let twice = "[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\n";
    let (what, at, _) = wrong(&format!("{twice}{twice}"));
    assert!(what.contains("twice"), "{what}");
    assert!(!at.is_empty());
    let (what, pointed, _) = wrong("[join]\ntoken = \"x\"\ntoken_file = \"/y\"\n");
    assert!(what.contains("join token") && pointed == "\"x\"", "{what} {pointed}");
    let fallback = "[[fallback]]\nname = \"web.shop\"\naddress = \"192.0.2.1\"\n";
    let (what, ..) = wrong(&format!("{fallback}{fallback}"));
    assert!(what.contains("two plain addresses"), "{what}");
    let rule = "[[stack_rule]]\nnames = [\"web.shop\"]\nwhen = \"path.rtt_ms < 5\"\nuse = \"secure\"\n";
    for demand in ["secure = true\n".to_owned() + fallback, format!("{fallback}{rule}floor = true\n")] {
        let (what, at, _) = wrong(&demand);
        assert!(what.contains("demands that it is encrypted") && !at.is_empty(), "{what}");
    }
    parse(&format!("{fallback}{rule}")).expect("a rule without a floor demands nothing");
}

#[test]
fn a_service_follows_a_program_or_has_a_listener() {
    let section = |lines: &str| format!("[[service]]\nname = \"web.shop\"\n{lines}");
    let config = parse(&section("executable = \"/usr/sbin/nginx\"\nport = 80\n")).expect("good");
    let service = config.service[0].get_ref();
    assert!(Publication::of_section(service).is_none(), "nothing is published while nothing listens");
    let rule = service.rule().expect("it follows a program");
    assert_eq!((rule.source, rule.offer.port), (Source::Host(Some("/usr/sbin/nginx".into())), Some(80)));
    let config = parse(&section("listen_port = 8080\n")).expect("good");
    assert_eq!(config.service[0].get_ref().rule().expect("it follows a port").source, Source::Host(None));
    for (lines, word) in [
        ("", "which sockets"),
        ("listen = \"0.0.0.0:80\"\nlisten_port = 80\n", "as well"),
        ("executable = \"nginx\"\n", "absolute path"),
        ("listen_port = 0\n", "1 to 65535"),
    ] {
        let (what, _, advice) = wrong(&section(lines));
        assert!(what.contains(word) && !advice.is_empty(), "{lines}: {what}");
    }
    let twice = section("listen_port = 80\n");
    assert!(wrong(&format!("{twice}{twice}")).0.contains("twice"));
}

#[test]
fn a_missing_file_is_an_error_only_when_it_was_named() {
    let error = Config::load(Some(Path::new("/nowhere/margay.toml"))).expect_err("refused");
    assert!(error.to_string().contains("/nowhere/margay.toml"));
    assert!(error.help().is_some());
}

#[test]
fn who_may_bind_is_said_for_one_user_or_group_and_for_some_names() {
    let config = parse("[[bind]]\ngroup = \"www\"\nnames = [\"web.shop\", \"sid:0011/16\"]\n").expect("read");
    assert_eq!(config.bind[0].get_ref().names[1].0.prefix().bits, 16);
    for (text, word) in [
        ("[[bind]]\nnames = [\"web.shop\"]\n", "one user, or about one group"),
        ("[[bind]]\nuser = \"a\"\ngroup = \"b\"\nnames = [\"web.shop\"]\n", "one user, or about one group"),
        ("[[bind]]\nuser = \"a\"\nnames = []\n", "grants no name"),
        ("[[bind]]\nuser = \"a\"\nnames = [\"web.shop\"]\ntakes_from = [\"b\", \"b\"]\n", "has `b` twice"),
    ] {
        let (what, pointed, advice) = wrong(text);
        assert!(what.contains(word) && pointed.contains("[[bind]]") && !advice.is_empty(), "{what} {pointed}");
    }
    let (what, pointed, _) = wrong("[[bind]]\nuser = \"a\"\nnames = [\"web\"]\n");
    assert!(what.contains("no authority") && pointed.contains("\"web\""), "{what} {pointed}");
}

#[test]
fn a_resolver_has_what_its_kind_needs_and_nothing_else() {
    let hosts = "[[resolver]]\nname = \"hosts\"\nkind = \"static\"\n";
    let file = format!("{hosts}file = \"/etc/margay/names\"\n");
    let config = parse(&format!("{file}names = [\"web.shop\"]\n")).expect("right");
    let section = config.resolver[0].get_ref();
    assert_eq!((section.priority, section.timeout_ms, section.names.len()), (100, 1000, 1));
    let dns = "[[resolver]]\nname = \"corp\"\nkind = \"dns\"\nzone = \"Example.ORG.\"\n";
    let config = parse(&format!("{dns}servers = [\"10.1.0.53\", \"[fd01::1]:5353\"]\n")).expect("right");
    let section = config.resolver[0].get_ref();
    let servers: Vec<String> = section.servers.iter().map(ToString::to_string).collect();
    assert_eq!(
        (servers.join(" ").as_str(), section.zone.as_deref()),
        ("10.1.0.53:53 [fd01::1]:5353", Some("example.org"))
    );
    let dht = "[[resolver]]\nname = \"dht\"\nkind = \"dht\"\nbootstrap = [\"10.1.0.1:6881\"]\n";
    let config = parse(&format!("{dht}port = 6881\npublish = [\"web.shop\"]\n")).expect("right");
    assert_eq!((config.resolver[0].get_ref().port, config.resolver[0].get_ref().publish.len()), (Some(6881), 1));
    for (text, part) in [
        (hosts.to_owned(), "is `static`, and has no `file`"),
        (format!("{file}zone = \"example.org\"\n"), "is `static`, which has no `zone`"),
        (format!("{file}{file}"), "two resolvers are called `hosts`"),
        (file.replace("hosts", "Corp DNS"), "no name of a resolver"),
        (file.replace("/etc/", "etc/"), "no absolute path"),
        (format!("{file}timeout_ms = 5000\n"), "timeout_ms is 50 to 2000"),
        (format!("{file}priority = 4294967295\n"), "the highest priority that there is"),
        (file.replace("static", "statik"), "unknown variant `statik`"),
        (format!("{dns}servers = [\"ns.example.org\"]\n"), "no address of a server"),
        (dns.to_owned(), "is `dns`, and has no `servers`"),
        (format!("{dns}servers = [\"10.1.0.53\"]\npublish = [\"web.shop\"]\n"), "only one of `publish` and `key_file`"),
        (dht.replace("10.1.0.1", "fd01::1"), "no IPv4 address with a port"),
        (format!("{dht}keys = [\"abc\"]\n"), "`abc` is no public key"),
        (format!("{dht}key_file = \"/etc/margay/tsig\"\n"), "is `dht`, which has no `key_file`"),
    ] {
        let (what, ..) = wrong(&text);
        assert!(what.contains(part), "{what}");
    }
}

#[test]
fn quiet_connections_are_ended_where_the_service_says_so() {
    let service = |rest: &str| format!("[[service]]\nname = \"kv.shop\"\nlisten = \"0.0.0.0:6379\"\n{rest}");
    let quiet_ms = |rest: &str| parse(&service(rest)).expect("read").service[0].get_ref().terms().quiet_ms;
    assert_eq!(quiet_ms(""), None);
    assert_eq!(quiet_ms("on_drain = \"finish\"\n"), None);
    assert_eq!(quiet_ms("on_drain = \"quiet\"\n"), Some(1000));
    assert_eq!(quiet_ms("on_drain = \"quiet\"\nquiet_ms = 50\n"), Some(50));
    let (what, _, advice) = wrong(&service("quiet_ms = 50\n"));
    assert!(what.contains("kv.shop has `quiet_ms`") && advice.contains("on_drain"), "{what}: {advice}");
    for bad in
        ["on_drain = \"quiet\"\nquiet_ms = 9\n", "on_drain = \"quiet\"\nquiet_ms = 600001\n", "on_drain = \"no\"\n"]
    {
        assert!(parse(&service(bad)).is_err(), "{bad}");
    }
}

#[test]
fn connections_move_by_themselves_where_the_service_says_so_and_may() {
    let service = |rest: &str| format!("[[service]]\nname = \"chat.shop\"\nlisten = \"0.0.0.0:81\"\n{rest}");
    let rebalance = |rest: &str| parse(&service(rest)).expect("read").service[0].get_ref().rebalance;
    assert_eq!(rebalance(""), Rebalance::ByOrder);
    assert_eq!(rebalance("rebalance = \"by-order\"\npartitions = 16\n"), Rebalance::ByOrder);
    assert_eq!(rebalance("rebalance = \"auto\"\n"), Rebalance::Auto);
    for more in ["partitions = 16\n", "exclusive = true\n"] {
        let (what, _, advice) = wrong(&service(&format!("rebalance = \"auto\"\n{more}")));
        assert!(what.contains("chat.shop cannot go") && advice.contains("remove `rebalance`"), "{what}: {advice}");
    }
    assert!(parse(&service("rebalance = \"always\"\n")).is_err());
}

#[test]
fn what_is_wrong_with_a_stack_rule_is_pointed_at() {
    let section = |lines: &str| format!("[host]\n[[stack_rule]]\nnames = [\"web.shop\"]\n{lines}\n");
    let wrong = |text: &str| match Config::parse(text, Path::new("margay.toml")) {
        Err(ConfigError::Wrong(misread)) => (misread.brief(), misread.pointed().unwrap_or_default().to_owned()),
        other => panic!("{text}: {other:?}"),
    };
    for (lines, pointed, said) in [
        (
            "when = 'flow.ages > 5'\nuse = \"plain\"",
            "flow.ages",
            "line 4: `flow.ages` is no fact; did you mean `flow.age_s`?",
        ),
        ("when = \"flow.age_s > 'x'\"\nuse = \"plain\"", "'x'", "line 4: a text stands where a number is wanted"),
        ("when = \"flow.age_s\"\nuse = \"plain\"", "flow.age_s", "neither true nor false"),
        ("when = \"true\"\nuse = \"quic\"", "\"quic\"", "quic"),
        ("when = \"true\"\nuse = \"fec\"\nfloor = true", "", "`use` is \"fec\""),
        ("when = \"true\"\nuse = \"plain\"\nfloor = true", "", "`floor` demands"),
        ("when = \"true\"\nuse = \"secure\"\nhold_s = 4000", "", "hold_s is 4000"),
        ("when = \"true\"\nuse = \"secure\"\nhold = 4", "hold", "unknown field `hold`"),
        ("use = \"secure\"", "", "missing field `when`"),
    ] {
        let (brief, at) = wrong(&section(lines));
        assert!(brief.contains(said), "{lines}: {brief}");
        assert!(pointed.is_empty() || at.contains(pointed) || pointed.contains(&at), "{lines}: {at}");
    }
    let two = |one: &str, other: &str| format!("{}{}", section(one), section(other).replace("[host]", ""));
    let (brief, _) = wrong(&two("when = 'path.nat'\nuse = 'plain'", "when = 'path.nat'\nuse = 'secure'"));
    assert!(brief.contains("contradict each other"), "{brief}");
    let (brief, _) = wrong(&two("when = 'fact.a > 1'\nuse = 'plain'", "when = 'fact.a'\nuse = 'plain'"));
    assert!(brief.contains("fact.a is a truth value here, and a number in rule 1"), "{brief}");
    let (brief, _) = wrong("[[stack_rule]]\nnames = []\nwhen = 'true'\nuse = 'plain'");
    assert!(brief.contains("about no name"), "{brief}");
}

#[test]
fn stack_rules_are_read_with_their_defaults() {
    let text = "[[stack_rule]]\nnames = [\"web.shop\"]\nwhen = 'host.name == \"lap\"'\nuse = 'secure'";
    let config = Config::parse(text, Path::new("margay.toml")).expect("a configuration");
    let rules = config.stack_rules("lap");
    let rule = &rules[0];
    assert_eq!((rules.len(), rule.number, rule.priority, rule.is_floor), (1, 1, 0, false));
    assert_eq!((rule.hold.as_secs(), rule.release.as_secs(), rule.uses), (3, 10, margay_core::Stack::Secure));
    assert_ne!(rules, config.stack_rules("other"), "the host's name stands in the condition");
}

#[test]
fn what_is_wrong_with_an_ensemble_is_pointed_at() {
    let section =
        |name: &str, lines: &str| format!("[[ensemble]]\nname = \"{name}\"\nmembers = \"members.shop\"\n{lines}\n");
    for (lines, pointed, said) in [
        ("window = 8", "8", "8 is no window; it is 16 to 4096"),
        ("window = 70000", "70000", "70000 is no window"),
        ("module = \"prefix.wasm\"", "\"prefix.wasm\"", "no absolute path"),
        ("protocol = \"http\"", "\"http\"", "http"),
        ("router = \"random\"", "\"random\"", "random"),
        ("modul = \"/a\"", "modul", "unknown field `modul`"),
        ("router = \"ketama\"\nmodule = \"/a.wasm\"", "[[ensemble]]", "in the router's place"),
    ] {
        let (what, at, _) = wrong(&section("cache.shop", lines));
        assert!(what.contains(said), "{lines}: {what}");
        assert!(at.contains(pointed), "{lines}: {at}");
    }
    let (what, _, advice) = wrong(&section("members.shop", ""));
    assert!(what.contains("are not apart") && advice.contains("a name of their own"), "{what}: {advice}");
    let (what, _, _) = wrong(&format!("{}{}", section("cache.shop", ""), section("cache.shop", "window = 16")));
    assert!(what.contains("two switches"), "{what}");
    let (what, _, _) = wrong("[[ensemble]]\nname = \"cache.shop\"");
    assert!(what.contains("missing field `members`"), "{what}");
}

#[test]
fn ensembles_are_read_with_their_defaults() {
    let config = parse("[[ensemble]]\nname = \"cache.shop\"\nmembers = \"members.shop\"").expect("a configuration");
    let section = config.ensembles().next().expect("one section");
    assert_eq!((section.protocol, section.router), (EnsembleProtocol::Memcached, None));
    assert_eq!((section.window, &section.module), (384, &None));
}

#[test]
fn a_module_that_no_switch_would_take_is_found_when_the_file_was_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let module = dir.path().join("a.wasm");
    let path = dir.path().join("margay.toml");
    let text = format!("[[ensemble]]\nname = \"a.shop\"\nmembers = \"b.shop\"\nmodule = \"{}\"", module.display());
    std::fs::write(&path, text).expect("written");
    assert!(Config::load(Some(&path)).is_ok(), "an agent starts without the module");
    let refused = Config::load_written(Some(&path)).expect_err("there is no module");
    assert!(refused.to_string().contains("the module of a.shop is not taken"), "{refused}");
    std::fs::write(&module, "no module").expect("written");
    let refused = Config::load_written(Some(&path)).expect_err("it is none");
    assert!(refused.to_string().contains("no module that a switch runs"), "{refused}");
}
