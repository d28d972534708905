//! The same with Redis.

use margay_frames::protocol::Protocol;

use crate::site::{Client, Site, wait_until};
use crate::{key, owner};

const REFUSED: &str = "-ERR the server died with this request; it may be done, or not\r\n";

async fn start(names: &[&str]) -> Site {
    Site::start_of(Protocol::Resp, names).await
}

async fn expect(client: &mut Client, said: &str, answer: &str) {
    client.send(said).await;
    assert_eq!(client.hear(answer.len()).await, answer, "{said}");
}

fn array(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
    format!("*{}\r\n{}", words.len(), words.concat())
}

fn of_member(labels: &[&str], label: &str) -> String {
    (0..60).map(key).find(|key| owner(labels, key) == label).expect("it has some")
}

#[tokio::test]
async fn keys_are_where_the_ring_has_them_and_many_are_split_and_joined() {
    let site = start(&["s1", "s2", "s3"]).await;
    let mut client = site.connect().await;
    let keys: Vec<String> = (0..30).map(key).collect();
    let mut words = vec!["MSET".to_owned()];
    words.extend(keys.iter().flat_map(|key| [key.clone(), format!("value of {key}")]));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    expect(&mut client, &array(&words), "+OK\r\n").await;
    for key in &keys {
        assert_eq!(site.holders(key), [owner(&["s1", "s2", "s3"], key)], "{key}");
    }
    let values: String = keys[..9].iter().map(|key| array(&[&format!("value of {key}")])[4..].to_owned()).collect();
    let mut words = vec!["MGET", "none"];
    words.extend(keys[..9].iter().map(String::as_str));
    let said = format!("{}PING\r\nEXISTS key:1 none key:2 key:3\r\nSELECT 0\r\ndel key:1 none\r\n", array(&words));
    expect(&mut client, &said, &format!("*10\r\n$-1\r\n{values}+PONG\r\n:3\r\n+OK\r\n:1\r\n")).await;
}

#[tokio::test]
async fn keys_with_a_tag_are_at_one_server_and_others_may_not_be_asked_together() {
    let site = start(&["s1", "s2", "s3"]).await;
    let mut client = site.connect().await;
    for name in ["{t}a", "x{t}", "{t}"] {
        expect(&mut client, &array(&["SET", name, "1"]), "+OK\r\n").await;
        assert_eq!(site.holders(name), [owner(&["s1", "s2", "s3"], "t")], "{name}");
    }
    // The script is longer than what a switch sees of a request.
    let script = "-- ".to_owned() + &"x".repeat(9000);
    for number in 0..20 {
        let key = key(number);
        expect(&mut client, &array(&["SET", &key, "1"]), "+OK\r\n").await;
        let answer = format!("${}\r\n1 {key}\r\n", key.len() + 2);
        expect(&mut client, &array(&["EVAL", &script, "1", &key]), &answer).await;
    }
    client.send("RENAME a b\r\n").await;
    assert!(client.hear_line().await.starts_with("-CROSSSLOT "));
}

#[tokio::test]
async fn each_connection_has_the_version_that_its_client_has_asked_for() {
    let mut site = start(&["s1", "s2"]).await;
    let mut new = site.connect().await;
    let mut old = site.connect().await;
    // What follows the greeting is read when that was answered.
    expect(&mut new, "HELLO 3\r\nGET none\r\nMGET none other\r\n", "*2\r\n+proto\r\n:3\r\n_\r\n*2\r\n_\r\n_\r\n").await;
    expect(&mut old, "GET none\r\n", "$-1\r\n").await;
    expect(&mut new, "HELLO 4\r\n", "-NOPROTO unsupported protocol version\r\n").await;
    expect(&mut new, "GET none\r\n", "_\r\n").await;
    site.add("s3").await;
    let its = of_member(&["s1", "s2", "s3"], "s3");
    wait_until("it is used", async || {
        expect(&mut new, &array(&["SET", &its, "1"]), "+OK\r\n").await;
        site.holders(&its).contains(&"s3")
    })
    .await;
    expect(&mut new, &array(&["DEL", &its]), ":1\r\n").await;
    expect(&mut new, &array(&["GET", &its]), "_\r\n").await;
    expect(&mut new, "RESET\r\nGET none\r\n", "+RESET\r\n$-1\r\n").await;
    expect(&mut new, &array(&["GET", &its]), "$-1\r\n").await;
}

#[tokio::test]
async fn values_of_a_megabyte_pass_and_larger_ones_than_can_be_are_refused_alone() {
    let site = start(&["s1", "s2"]).await;
    let mut client = site.connect().await;
    let value = "0123456789abcdef".repeat(1 << 16);
    expect(&mut client, &array(&["SET", "large", &value]), "+OK\r\n").await;
    let expected = format!("${}\r\n{value}\r\n", value.len());
    client.send("GET large\r\n").await;
    assert!(client.hear(expected.len()).await == expected);
    let huge = "x".repeat(9 << 20);
    client.send(&(array(&["SET", "huge", &huge]) + "EXISTS huge\r\n")).await;
    assert!(client.hear_line().await.starts_with("-ERR the request is larger than an ensemble carries"));
    assert_eq!(client.hear_line().await, ":0\r\n");
    site.put(&owner(&["s1", "s2"], "huge"), "huge", huge);
    client.send("GET huge\r\nEXISTS huge\r\n").await;
    assert_eq!(client.hear_line().await, "-ERR the value is larger than an ensemble carries\r\n");
    assert_eq!(client.hear_line().await, ":1\r\n");
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody_else() {
    const COUNT: usize = 60;
    let site = start(&["s1", "s2"]).await;
    let mut slow = site.connect().await;
    let value = "0123456789abcdef".repeat(1 << 16);
    expect(&mut slow, &array(&["SET", "large", &value]), "+OK\r\n").await;
    slow.send(&"GET large\r\n".repeat(COUNT)).await;
    site.await_asked(&owner(&["s1", "s2"], "large"), 8).await;
    let mut other = site.connect().await;
    expect(&mut other, "INCR large:count\r\n", ":1\r\n").await;
    let answer = format!("${}\r\n{value}\r\n", value.len());
    for _ in 0..COUNT {
        assert!(slow.hear(answer.len()).await == answer);
    }
}

#[tokio::test]
async fn a_server_that_dies_costs_what_is_unsafe_and_no_connection() {
    let mut site = start(&["s1", "s2", "s3"]).await;
    let mut client = site.connect().await;
    let its = of_member(&["s1", "s2", "s3"], "s2");
    let other = of_member(&["s1", "s2", "s3"], "s1");
    expect(&mut client, &(array(&["SET", &its, "1"]) + &array(&["SET", &other, "2"])), "+OK\r\n+OK\r\n").await;
    // It takes requests, and does not answer: they are under way when it dies.
    site.hold("s2");
    let said = [
        array(&["GET", &its]),
        array(&["INCR", &its]),
        array(&["MGET", &other, &its]),
        array(&["MSET", &other, "3", &its, "4"]),
    ];
    client.send(&said.concat()).await;
    site.await_asked("s2", 4).await;
    site.kill("s2");
    let expected = format!("$-1\r\n{REFUSED}*2\r\n$1\r\n2\r\n$-1\r\n{REFUSED}");
    assert_eq!(client.hear(expected.len()).await, expected);
    expect(&mut client, &array(&["MGET", &other, &its]), "*2\r\n$1\r\n3\r\n$-1\r\n").await;
    assert_eq!(site.show().await["connection_count"], 1);
}

#[tokio::test]
async fn what_is_not_understood_ends_the_connection_with_the_protocols_own_error() {
    let site = start(&["s1"]).await;
    let mut client = site.connect().await;
    client.send("SUBSCRIBE a\r\nDANCE\r\nPING\r\n*1\r\n+PING\r\n").await;
    assert!(client.hear_line().await.starts_with("-ERR SUBSCRIBE is not supported by an ensemble"));
    assert!(client.hear_line().await.starts_with("-ERR unknown command 'DANCE'"));
    assert_eq!(client.hear_line().await, "+PONG\r\n");
    assert_eq!(client.hear_line().await, "-ERR Protocol error: expected '$', got '+'\r\n");
    client.hear_end().await;
}

#[tokio::test]
async fn without_members_clients_are_told_so_also_behind_a_greeting() {
    let site = start(&[]).await;
    let mut client = site.connect().await;
    client.send("HELLO 3\r\nGET a\r\n").await;
    for _ in 0..2 {
        let line = client.hear_line().await;
        assert!(line.starts_with("-ERR cache.test: no switch answers"), "{line}");
    }
}

#[tokio::test]
async fn ends_that_speak_other_protocols_are_refused_in_words() {
    let mut site = start(&["s1"]).await;
    let mut stranger = site.connect_by(Protocol::Memcached).await;
    stranger.send("get a\r\n").await;
    let line = stranger.hear_line().await;
    assert!(line.contains("this end speaks resp, and the other one memcached"), "{line}");
    let mut client = site.connect().await;
    site.add_of(Protocol::Memcached, "s2").await;
    wait_until("the switch says why", async || {
        let shown = site.show().await;
        let members = shown["members"].as_array().cloned().unwrap_or_default();
        members.iter().any(|member| {
            let why = member["why"].as_str().unwrap_or_default();
            member["name"] == "s2" && why.contains("this end speaks memcached, and the other one resp")
        })
    })
    .await;
    expect(&mut client, "SET a 1\r\n", "+OK\r\n").await;
}
