//! A framer, a switch, members' framers and servers of their own, over the loopback: no agent is needed.

mod program;
mod redis;
mod resp;
mod site;

use std::collections::BTreeSet;
use std::time::Duration;

use margay_frames::module::Module;
use margay_frames::router::ketama::Ring;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use program::ITEM_MAX;
use site::{Client, Site, wait_until};

const KEYS: usize = 60;

fn key(number: usize) -> String {
    format!("key:{number}")
}

/// Which of the labels a key belongs to.
fn owner(labels: &[&str], key: &str) -> String {
    let at = Ring::new(labels.iter().copied()).servers_of(key.as_bytes()).next().expect("there are servers");
    labels[at].to_owned()
}

async fn fill(client: &mut Client) {
    for number in 0..KEYS {
        let key = key(number);
        let answer = client.say(&format!("set {key} 0 0 {}\r\n{key}\r\n", key.len())).await;
        assert_eq!(answer, "STORED\r\n", "{key}");
    }
}

fn value(key: &str) -> String {
    format!("VALUE {key} 0 {}\r\n{key}\r\n", key.len())
}

#[tokio::test]
async fn each_key_is_where_the_ring_has_it_and_answers_come_in_order() {
    let site = Site::start(&["s1", "s2", "s3"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    for number in 0..KEYS {
        let key = key(number);
        let holders: Vec<&str> = site.holders(&key);
        assert_eq!(holders, [owner(&["s1", "s2", "s3"], &key)], "{key}");
    }
    let all: Vec<String> = (0..KEYS).map(key).collect();
    client.send(&format!("get nothing {}\r\nmn\r\nincr none 1\r\nversion\r\n", all.join(" "))).await;
    let expected: String = all.iter().map(|key| value(key)).collect();
    let expected = expected + "END\r\nMN\r\nNOT_FOUND\r\nVERSION fake\r\n";
    assert_eq!(client.hear(expected.len()).await, expected);
}

#[tokio::test]
async fn a_request_overtakes_none_that_its_client_has_sent_before() {
    let site = Site::start(&["s1", "s2", "s3"]).await;
    let mut client = site.connect().await;
    client.say("set n 0 0 1\r\n0\r\n").await;
    let mut expected = String::new();
    let mut said = String::new();
    for round in 1..=300 {
        said += &format!("incr n 1\r\nset other:{round} 0 0 1 noreply\r\nx\r\nget n\r\n");
        let text = round.to_string();
        expected += &format!("{text}\r\nVALUE n 0 {}\r\n{text}\r\nEND\r\n", text.len());
    }
    client.send(&said).await;
    assert_eq!(client.hear(expected.len()).await, expected);
}

#[tokio::test]
async fn a_value_of_a_megabyte_goes_both_ways() {
    let site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    let value = "0123456789abcdef".repeat(1 << 16);
    assert_eq!(client.say(&format!("set large 0 0 {}\r\n{value}\r\n", value.len())).await, "STORED\r\n");
    let expected = format!("VALUE large 0 {}\r\n{value}\r\nEND\r\n", value.len());
    client.send("get large\r\n").await;
    assert!(client.hear(expected.len()).await == expected);
}

#[tokio::test]
async fn a_value_beyond_the_programs_own_limit_gets_the_programs_own_error_which_show_names() {
    let site = Site::start(&["s1"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    let huge = "x".repeat(ITEM_MAX + 1);
    let said = format!("set huge 0 0 {}\r\n{huge}\r\nget key:1\r\n", huge.len());
    client.send(&said).await;
    let error = "SERVER_ERROR object too large for cache\r\n";
    assert_eq!(client.hear_line().await, error);
    assert_eq!(client.hear_values().await, value("key:1") + "END\r\n", "the next request is as ever");
    let shown = site.show().await;
    let member = &shown["members"][0];
    assert_eq!((&member["errors"], &member["last_error"]), (&1.into(), &error.trim_end().into()), "{member}");
    assert_eq!((&member["holes"], &member["patches"], &shown["failed"]), (&0.into(), &0.into(), &0.into()));
    assert!(member["window_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{member}");
    let connection = &shown["connections"][0];
    assert_eq!((&connection["holes"], &connection["members"][0]["holes"]), (&0.into(), &0.into()), "{connection}");
}

#[tokio::test]
async fn a_value_that_is_too_large_is_refused_and_nothing_else() {
    let site = Site::start(&["s1"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    site.put("s1", "huge", "x".repeat(10 << 20));
    client.send("get key:1\r\nget huge\r\nget key:2 huge\r\nget key:3\r\n").await;
    assert_eq!(client.hear_values().await, value("key:1") + "END\r\n");
    for _ in 0..2 {
        assert_eq!(client.hear_line().await, "SERVER_ERROR the value is larger than an ensemble carries\r\n");
    }
    assert_eq!(client.hear_values().await, value("key:3") + "END\r\n");
    assert_eq!(client.say("delete huge\r\n").await, "DELETED\r\n");
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody_else_and_loses_nothing() {
    // More than sockets, framers and windows hold.
    const COUNT: usize = 80;
    let site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    let large = "0123456789abcdef".repeat(1 << 16);
    let its = owner(&["s1", "s2"], "large");
    site.put(&its, "large", large.clone());
    let mut deaf = site.connect().await;
    let before = site.asked(&its);
    deaf.send(&"get large\r\n".repeat(COUNT)).await;
    for number in 0..KEYS {
        let key = key(number);
        assert_eq!(client.get(&key).await, value(&key) + "END\r\n", "{key}");
    }
    // Until the server is asked no more: the other server's keys do not ask it.
    let others: Vec<String> = (0..KEYS).map(key).filter(|key| owner(&["s1", "s2"], key) != its).collect();
    let mut asked = 0;
    while asked != site.asked(&its) {
        asked = site.asked(&its);
        for key in &others {
            assert_eq!(client.get(key).await, value(key) + "END\r\n", "{key}");
        }
    }
    let of_deaf = asked - before - (KEYS - others.len());
    assert!((1..COUNT - 16).contains(&of_deaf), "{of_deaf} of {COUNT} answers were made, and nobody read one");
    let expected = format!("VALUE large 0 {}\r\n{large}\r\nEND\r\n", large.len());
    for at in 0..COUNT {
        assert!(deaf.hear(expected.len()).await == expected, "{at}");
    }
    assert_eq!(site.show().await["failed"], 0);
}

#[tokio::test]
async fn a_member_that_joins_gets_its_keys_on_connections_that_there_are() {
    let mut site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    site.add("s3").await;
    let moved: Vec<String> = (0..KEYS).map(key).filter(|key| owner(&["s1", "s2", "s3"], key) == "s3").collect();
    assert!(moved.len() > KEYS / 6);
    site::wait_until("a key moves", async || client.get(&moved[0]).await == "END\r\n").await;
    for number in 0..KEYS {
        let key = key(number);
        let answer = client.get(&key).await;
        let expected = if moved.contains(&key) { "END\r\n".to_owned() } else { value(&key) + "END\r\n" };
        assert_eq!(answer, expected, "{key}");
    }
}

#[tokio::test]
async fn a_member_that_dies_costs_what_is_unsafe_and_no_connection() {
    let mut site = Site::start(&["s1", "s2", "s3"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    // It takes requests, and does not answer: they are under way when it dies.
    site.hold("s2");
    let its = (0..KEYS).map(key).find(|key| owner(&["s1", "s2", "s3"], key) == "s2").expect("it has some");
    client.send(&format!("get {its}\r\nincr {its} 1\r\nget key:0 {its}\r\n")).await;
    site.await_asked("s2", 2).await;
    site.kill("s2");
    assert_eq!(client.hear(5).await, "END\r\n", "another was asked");
    let refused = "SERVER_ERROR the server died with this request; it may be done, or not\r\n";
    assert_eq!(client.hear(refused.len()).await, refused);
    let others = client.hear_values().await;
    assert!(others.ends_with("END\r\n") && !others.contains("ERROR"), "{others}");
    for number in 0..KEYS {
        let key = key(number);
        let was = owner(&["s1", "s2", "s3"], &key);
        let expected = if was == "s2" { "END\r\n".to_owned() } else { value(&key) + "END\r\n" };
        assert_eq!(client.get(&key).await, expected, "{key} of {was}");
    }
    assert_eq!(site.show().await["connection_count"], 1);
}

#[tokio::test]
async fn another_framer_in_a_members_place_does_not_hide_what_the_one_before_owed() {
    let mut site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    site.hold("s2");
    let its = (0..KEYS).map(key).find(|key| owner(&["s1", "s2"], key) == "s2").expect("it has some");
    client.send(&format!("incr {its} 1\r\nget {its}\r\n")).await;
    site.await_asked("s2", 2).await;
    site.release("s2");
    site.replace("s2").await;
    let first = client.hear_line().await;
    let refused = "SERVER_ERROR the server died with this request; it may be done, or not\r\n";
    assert_eq!(first, refused);
    let answer = client.hear_values().await;
    assert!(answer == value(&its) + "END\r\n" || answer == "END\r\n", "of the one that is there again, or another");
    assert_eq!(site.show().await["member_deaths"], 1);
    site::wait_until("it is a member again", async || client.get(&its).await == value(&its) + "END\r\n").await;
}

#[tokio::test]
async fn a_member_that_leaves_answers_what_it_has_been_asked() {
    let mut site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    site.hold("s2");
    let its = (0..KEYS).map(key).find(|key| owner(&["s1", "s2"], key) == "s2").expect("it has some");
    client.send(&format!("append {its} 0 0 1\r\n!\r\n")).await;
    site.await_asked("s2", 1).await;
    site.leave("s2");
    site::wait_until("it is known", async || {
        site.show().await["members"].as_array().is_some_and(|all| all.iter().any(|one| one["state"] == "leaving"))
    })
    .await;
    site.release("s2");
    assert_eq!(client.hear(8).await, "STORED\r\n");
    site.await_gone("s2").await;
    assert_eq!(client.get(&its).await, "END\r\n", "another has the key, and no value");
    let all: BTreeSet<String> = (0..KEYS).map(key).filter(|key| owner(&["s1", "s2"], key) == "s1").collect();
    assert_eq!(client.get(all.first().expect("it has some")).await.lines().count(), 3);
}

#[tokio::test]
async fn another_switch_takes_over_what_is_safe() {
    let mut site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    fill(&mut client).await;
    site.hold("s1");
    let its = (0..KEYS).map(key).find(|key| owner(&["s1", "s2"], key) == "s1").expect("it has some");
    client.send(&format!("get {its}\r\ndelete {its}\r\n")).await;
    site.await_asked("s1", 2).await;
    site.restart_switch().await;
    site.release("s1");
    let expected = value(&its) + "END\r\n";
    let answer = client.hear_values().await;
    // The first delete may be done before the get comes a second time.
    assert!(answer == expected || answer == "END\r\n", "{answer}");
    let refused = client.hear_line().await;
    assert!(refused.starts_with("SERVER_ERROR the connection with the ensemble ended"), "{refused}");
    assert_eq!(client.say("set again 0 0 1\r\nx\r\n").await, "STORED\r\n");
}

#[tokio::test]
async fn without_members_clients_are_told_so() {
    let mut site = Site::start(&[]).await;
    let mut client = site.connect().await;
    client.send("get a\r\nset b 0 0 1\r\nx\r\n").await;
    for _ in 0..2 {
        let line = tokio::time::timeout(Duration::from_secs(20), client.hear_line()).await.expect("an answer");
        assert!(line.starts_with("SERVER_ERROR cache.test: no switch answers"), "{line}");
    }
    site.add("s1").await;
    site::wait_until("the member is used", async || client.say("set b 0 0 1\r\nx\r\n").await == "STORED\r\n").await;
}

#[tokio::test]
async fn a_drained_member_gets_nothing_until_that_is_undone() {
    let site = Site::start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    site.drain("s2", false).await.expect("there is one");
    assert!(site.drain("s9", false).await.is_err());
    fill(&mut client).await;
    assert_eq!(site.count("s2"), 0);
    site.drain("s2", true).await.expect("there is one");
    site::wait_until("it is used", async || {
        fill(&mut client).await;
        site.count("s2") > 0
    })
    .await;
}

/// The switch and the members hear of a client's reset at once, and not after the time in which a silent framer is
/// given up.
#[tokio::test]
async fn a_client_that_resets_leaves_no_connection_behind() {
    let site = Site::start(&["s1", "s2"]).await;
    for asks in [true, false] {
        let mut stream = site.connect_bare().await;
        if asks {
            // The connection is held back as long as this has no answer.
            site.hold("s1");
            site.hold("s2");
            let many: String = (0..300).map(|number| format!("get k{number}\r\n")).collect();
            stream.write_all(many.as_bytes()).await.expect("the framer reads");
        } else {
            stream.write_all(b"set k 0 0 1\r\nx\r\n").await.expect("the framer reads");
            stream.read_exact(&mut [0; 8]).await.expect("an answer");
        }
        let counts = async || {
            let shown = site.show().await;
            let all = shown["members"].as_array().cloned().unwrap_or_default();
            let of_members: u64 = all.iter().filter_map(|member| member["connection_count"].as_u64()).sum();
            (shown["connection_count"].as_u64(), of_members)
        };
        wait_until("the connection is there", async || counts().await == (Some(1), 2)).await;
        stream.set_zero_linger().expect("a socket");
        drop(stream);
        wait_until("nothing is left", async || counts().await == (Some(0), 0)).await;
        site.release("s1");
        site.release("s2");
    }
}

/// Whoever is not root hears so.
#[tokio::test]
async fn a_module_is_loaded_for_connections_to_come_and_by_root_alone() {
    let site = Site::start(&["images", "s2"]).await;
    let mut old = site.connect().await;
    let file = site.path("prefix.wasm");
    // The template takes over connections that run, unless it does not say so.
    let text = include_str!("../../../../examples/alrm/prefix.wat").replace("(export \"adopt\")", "");
    let bytes = wat::parse_str(text).expect("the template");
    std::fs::write(&file, bytes).expect("written");
    let hash = Module::read(&file).expect("sound").hash().to_owned();
    let loaded = site.load(&file).await;
    if !nix::unistd::geteuid().is_root() {
        let error = loaded.expect_err("root alone may").to_string();
        return assert!(error.contains("root alone"), "{error}");
    }
    loaded.expect("it is taken");
    assert_eq!(site.show().await["module"]["hash"], hash);
    let none = site.path("none.wasm");
    std::fs::write(&none, b"text").expect("written");
    let refused = site.load(&none).await.expect_err("it is none");
    assert!(refused.to_string().contains("no module that a switch runs"), "{refused}");
    assert_eq!(site.show().await["module"]["hash"], hash);
    let mut client = site.connect().await;
    for number in 0..20 {
        let key = format!("img:{number}");
        assert_eq!(old.say(&format!("set {key} 0 0 1\r\nx\r\n")).await, "STORED\r\n");
        assert_eq!(site.holders(&key), [owner(&["images", "s2"], &key)], "the connection has no module");
        assert_eq!(client.say(&format!("set {key} 0 0 1\r\nx\r\n")).await, "STORED\r\n");
        assert!(site.holders(&key).contains(&"images"), "{key}");
    }
    assert_eq!(site.show().await["module"]["connection_count"], 1);
    site.unload().await.expect("there is one");
    let error = site.unload().await.expect_err("there is none");
    assert!(error.to_string().contains("no module"), "{error}");
}
