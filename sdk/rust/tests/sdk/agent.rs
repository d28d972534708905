//! The agent is absent, restarted, mute, or speaks nonsense; and its events.

use std::io::ErrorKind;
use std::path::Path;

use crate::fake::{EVENTS, FakeAgent, INSTANCES, LOAD, NAME, RESOLVE, reply_head};
use margay_sdk::{Agent, Error, EventKind, Events, Instances, Options, Prefix, Protocol};

#[tokio::test]
async fn an_absent_agent_is_said_to_be_absent() {
    let error = Agent::connect_to(Path::new("/nonexistent/programs.sock")).await.expect_err("absent");
    assert!(matches!(error, Error::AgentDown { .. }));
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let said = error.to_string();
    assert!(said.contains("/nonexistent/programs.sock") && said.contains("margay up"), "{said}");
    let mut fake = FakeAgent::start();
    let options = Options::new().agent(&fake.agent().await);
    fake.kill();
    assert!(matches!(options.bind("web.shop").await, Err(Error::AgentDown { .. })));
    assert!(matches!(options.connect("web.shop").await, Err(Error::AgentDown { .. })));
}

#[tokio::test]
async fn a_restarted_agent_is_found_again() {
    let mut fake = FakeAgent::start();
    let agent = fake.agent().await;
    let options = Options::new().agent(&agent);
    let listener = options.bind("web.shop").await.expect("bound");
    for _ in 0..3 {
        // Some connections that the next agent knows nothing of.
        let (one, two) = tokio::join!(agent.name("a.shop"), agent.name("b.shop"));
        assert!(one.is_ok() && two.is_ok());
        fake.kill();
        fake.listen();
        options.connect("web.shop").await.expect("connected");
        assert!(listener.accept().await.expect("accepted").1.service().is_some());
    }
    // While there is none, what exists goes on: the address is remembered, the peer has no name.
    fake.kill();
    let _client = options.connect("web.shop").await.expect("connected");
    let (served, peer) = listener.accept().await.expect("accepted");
    assert_eq!(peer.service(), None);
    assert!(matches!(served.peer_service().await, Err(Error::AgentDown { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_mute_agent_holds_nobody_for_ever() {
    let fake = FakeAgent::start();
    let agent = fake.agent().await;
    fake.world().silent.insert(NAME);
    let error = agent.name("web.shop").await.expect_err("no answer");
    assert!(matches!(error, Error::AgentDown { .. }));
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[tokio::test]
async fn a_cancelled_request_leaves_nothing_behind() {
    let fake = FakeAgent::start();
    let agent = fake.agent().await;
    fake.world().silent.insert(NAME);
    tokio::select! {
        _ = agent.name("a.shop") => panic!("nobody answered"),
        () = fake.wait_asked(NAME, 1) => {}
    }
    fake.speak();
    let (_, written) = agent.name("B.shop").await.expect("answered");
    assert_eq!(written, "b.shop", "not the answer to the first question");
}

#[tokio::test]
async fn nonsense_is_not_believed() {
    let fake = FakeAgent::start();
    let agent = fake.agent().await;
    let version = [vec![9], reply_head(RESOLVE, 0)[1..].to_vec()].concat();
    for garbage in
        [vec![1, 2, 3], version, reply_head(NAME, 0), [reply_head(RESOLVE, 0), vec![0xff]].concat(), vec![0; 40_000]]
    {
        fake.world().garbage = Some(garbage);
        let error = agent.resolve("web.shop", Protocol::Tcp).await.expect_err("nonsense");
        assert!(matches!(error, Error::Incompatible { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
    fake.world().garbage = None;
    agent.resolve("web.shop", Protocol::Tcp).await.expect("no harm done");
}

#[tokio::test]
async fn an_agent_with_too_many_connections_says_so() {
    let fake = FakeAgent::start();
    fake.world().full = Some("the agent has 1024 connections of programs; close some");
    let agent = fake.agent().await;
    for _ in 0..20 {
        let error = agent.name("web.shop").await.expect_err("refused");
        assert!(matches!(error, Error::Refused { errno: 87, .. }), "{error}");
    }
}

#[tokio::test]
async fn the_agent_reads_names_as_this_library_does() {
    let fake = FakeAgent::start();
    let agent = fake.agent().await;
    for text in ["Web.Shop/key:User42", "sid:ff00/9"] {
        let (prefix, written) = agent.name(text).await.expect("a name");
        assert_eq!(prefix, text.parse::<Prefix>().expect("a name"));
        assert_eq!(written, text.parse::<margay_sdk::Name>().expect("a name").written());
    }
    let error = agent.name("web").await.expect_err("no name");
    assert!(matches!(error, Error::Refused { errno: 22, .. }), "{error}");
    assert!(agent.name(&"x".repeat(300)).await.is_err());
}

#[tokio::test]
async fn events_come_as_they_happen() {
    let mut fake = FakeAgent::start();
    let mut events = Events::of(&fake.agent().await).await.expect("subscribed");
    fake.event(r#"{"kind":"opened","name":"web.shop","session":"17"}"#);
    fake.event(r#"{"kind":"failed","name":"web.shop","why":"nobody serves it"}"#);
    let event = events.next().await.expect("an event").expect("no error");
    assert_eq!((event.kind.clone(), event.session().as_deref()), (EventKind::Opened, Some("17")));
    let event = events.next().await.expect("an event").expect("no error");
    assert_eq!((event.kind.clone(), event.why()), (EventKind::Failed, Some("nobody serves it")));
    fake.kill();
    assert!(matches!(events.next().await, Some(Err(Error::AgentDown { .. }))));
    assert!(events.next().await.is_none());
    assert!(matches!(events.reopen().await, Err(Error::AgentDown { .. })));
    fake.listen();
    events.reopen().await.expect("subscribed again");
    fake.event(r#"{"kind":"closed"}"#);
    let event = events.next().await.expect("an event").expect("no error");
    assert_eq!(event.kind, EventKind::Closed);
    fake.event("{");
    assert!(matches!(events.next().await, Some(Err(Error::Incompatible { .. }))));
    fake.world().refused.insert(EVENTS, (28, "too many programs listen; close some"));
    let error = events.reopen().await.expect_err("refused");
    assert_eq!(error.to_string(), "the Margay agent refused events: too many programs listen; close some");
}

#[tokio::test]
async fn instances_come_as_lists_and_go() {
    let mut fake = FakeAgent::start();
    let mut instances = Instances::of(&fake.agent().await, "cache.shop").await.expect("subscribed");
    fake.instance(r#"{"host":"0b","name":"s2","weight":100,"gone":false}"#, 2);
    fake.instance(r#"{"host":"0a","name":"s1","weight":0}"#, 1);
    fake.instance("", 0);
    let found = instances.next().await.expect("a list");
    let short =
        |instance: &margay_sdk::Instance| (instance.name.clone(), instance.weight, instance.address.to_string());
    assert_eq!(
        found.iter().map(short).collect::<Vec<_>>(),
        [("s1".to_owned(), 0, "127.0.0.1:1".to_owned()), ("s2".to_owned(), 100, "127.0.0.1:2".to_owned())]
    );
    assert_eq!(instances.beyond(), 0);
    fake.instance(r#"{"host":"0a","name":"s1","weight":0,"gone":true}"#, 1);
    fake.instance("", 7);
    assert_eq!(instances.next().await.expect("a list").len(), 1);
    assert_eq!(instances.beyond(), 7, "so many are left out");
    fake.instance(r#"{"host":"0a"}"#, 1);
    assert!(matches!(instances.next().await, Err(Error::Incompatible { .. })));
    fake.kill();
    assert!(matches!(instances.next().await, Err(Error::AgentDown { .. })));
    fake.listen();
    fake.world().refused.insert(INSTANCES, (87, "too many follow names; close some"));
    let error = Instances::of(&fake.agent().await, "cache.shop").await.expect_err("refused");
    assert!(error.to_string().ends_with("too many follow names; close some"), "{error}");
}

#[tokio::test]
async fn loads_are_reported_on_a_connection_that_stays() {
    let mut fake = FakeAgent::start();
    let agent = fake.agent().await;
    let prefix = |text: &str| text.parse::<Prefix>().expect("a name");
    agent.report_load("web.shop", 40).await.expect("taken");
    agent.name("web.shop").await.expect("answered");
    agent.report_load("sid:ff00/9", 0).await.expect("taken");
    let loads = std::mem::take(&mut fake.world().loads);
    let [(web, 40, one), (other, 0, two)] = loads[..] else { panic!("{loads:?}") };
    assert_eq!((web, other, one), (prefix("web.shop"), prefix("sid:ff00/9"), two));
    let error = agent.report_load("web.shop", 101).await.expect_err("too much");
    assert_eq!((error.kind(), fake.asked(LOAD)), (ErrorKind::InvalidInput, 2));
    fake.kill();
    assert!(matches!(agent.report_load("web.shop", 1).await, Err(Error::AgentDown { .. })));
    fake.listen();
    agent.report_load("web.shop", 100).await.expect("taken by the next agent");
    fake.world().refused.insert(LOAD, (2, "web.shop is not served by this process"));
    let error = agent.report_load("web.shop", 1).await.expect_err("refused");
    assert!(matches!(error, Error::Refused { errno: 2, .. }), "{error}");
    fake.world().refused.insert(LOAD, (74, "this is no request"));
    let error = agent.report_load("web.shop", 1).await.expect_err("of an earlier release");
    assert!(error.to_string().contains("takes no reports of load"), "{error}");
}

#[tokio::test]
async fn a_process_that_disconnects_keeps_no_connection_of_its_former_user() {
    let fake = FakeAgent::start();
    let agent = fake.agent().await;
    let (one, two) = tokio::join!(agent.name("a.shop"), agent.name("b.shop"));
    assert!(one.is_ok() && two.is_ok());
    agent.report_load("web.shop", 40).await.expect("taken");
    assert!(fake.open_connections() >= 2, "one for requests, and one for reports");
    agent.disconnect().await;
    assert_eq!(fake.open_connections(), 0);
    agent.name("a.shop").await.expect("a new connection is opened");
    assert_eq!(fake.open_connections(), 1);
}

#[test]
fn runtimes_come_and_go_beneath_one_agent() {
    let fake = FakeAgent::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let agent = runtime().block_on(fake.agent());
    for _ in 0..3 {
        runtime().block_on(agent.name("web.shop")).expect("answered");
    }
}
