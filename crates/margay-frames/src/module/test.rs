//! Modules, good and bad.

use margay_ensemble::{Config, Joining, Kind, Lsn, Switch};

use super::*;
use crate::protocol::Protocol;
use crate::router::{Policy, Router};

/// What every module has.
const COMMON: &str = r#"
    (memory (export "memory") 1)
    (func (export "alrm_version") (result i32) (i32.const 1))
    (func (export "alrm_frame") (result i32) (i32.const 0))
"#;

/// A module with something beside the common parts. Imports come first.
fn module_of(imports: &str, rest: &str) -> Result<Module, Refused> {
    let text = format!("(module {imports} {COMMON} {rest})");
    Module::new(&wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// One whose `redirect` does this.
fn redirecting(body: &str) -> Result<Module, Refused> {
    redirecting_and(body, "")
}

/// One whose `redirect` does this, with other exports.
fn redirecting_and(body: &str, rest: &str) -> Result<Module, Refused> {
    let counts = r#"(import "margay" "member_at" (func $member_at (param i32) (result i32)))
                    (import "margay" "keep" (func $keep (param i64)))"#;
    let head = "(param $id i32) (param $len i32) (param $source i32) (param $rtx i64) (result i64)";
    let count = "(global $count (mut i32) (i32.const 0))";
    module_of(counts, &format!("{count} (func (export \"redirect\") {head} {body}) {rest}"))
}

/// A module of those that tests of others want.
pub(crate) fn sample(name: &str) -> Module {
    let count = "(global.set $count (i32.add (global.get $count) (i32.const 1)))
                 (i64.extend_i32_u (call $member_at (i32.and (global.get $count) (i32.const 1))))";
    let first = "(i64.extend_i32_u (call $member_at (i32.const 0)))";
    let adopts = |body: &str| format!("(func (export \"adopt\") (param $len i32) (result i32) {body})");
    let leaves = |body: &str| format!("(func (export \"alrm_state\") (result i32) {body})");
    let with_state = match name {
        // One after the other, and where it stands is left to the next.
        "counts" => Some((count, leaves("(i32.store (i32.const 0) (global.get $count)) (i32.const 4)"))),
        "counts-on" => {
            let takes = "(if (local.get $len) (then (global.set $count (i32.load (i32.const 0))))) (i32.const 1)";
            Some((count, adopts(takes)))
        }
        "leaves-too-much" => Some((first, leaves("(i32.const 2049)"))),
        "declines" => Some(("(unreachable)", adopts("(i32.const 0)"))),
        "fails-to-adopt" => Some((first, adopts("(unreachable)"))),
        "answers-nonsense" => Some((first, adopts("(i32.const 2)"))),
        "to-number-one" => Some(("(i64.const 1)", adopts("(i32.const 1)"))),
        _ => None,
    };
    if let Some((body, rest)) = with_state {
        return redirecting_and(body, &rest).expect("sound");
    }
    let body = match name {
        "to-first" => first,
        // Each time the same other letter, and a number that is kept.
        "shouts" => {
            "(if (i64.ne (local.get $rtx) (i64.const 0))
                 (then (if (i64.ne (local.get $rtx) (i64.const 7)) (then (unreachable)))))
             (call $keep (i64.const 7))
             (i32.store8 (i32.const 4) (i32.const 88))
             (i64.extend_i32_u (call $member_at (i32.const 0)))"
        }
        // Every other one goes nowhere.
        "keeps" => {
            "(call $keep (i64.const 7))
             (global.set $count (i32.add (global.get $count) (i32.const 1)))
             (if (i32.and (global.get $count) (i32.const 1)) (then (return (i64.const 0xff))))
             (i64.extend_i32_u (call $member_at (i32.const 0)))"
        }
        "traps" => "(unreachable)",
        "loops" => "(loop $again (br $again)) (i64.const 0)",
        // Each time another letter in place of the first.
        "differs" => {
            "(global.set $count (i32.add (global.get $count) (i32.const 1)))
             (i32.store8 (i32.const 4) (i32.add (i32.const 97) (global.get $count)))
             (i64.extend_i32_u (call $member_at (i32.const 0)))"
        }
        other => panic!("there is no sample {other}"),
    };
    redirecting(body).expect("sound")
}

fn tried(module: &Module, requests: &str) -> Result<Vec<String>, String> {
    let labels = ["a", "b", "images"].map(str::to_owned);
    let trial = Trial::run(module, Protocol::Memcached, &labels, requests.as_bytes())?;
    Ok(trial.answers.into_iter().map(|tried| tried.answer).collect())
}

#[test]
fn a_module_says_whose_a_request_is() {
    let module = sample("to-first");
    assert_eq!(
        tried(&module, "get x\r\nset y 0 0 1\r\nz\r\n"),
        Ok(vec!["a, may be repeated".to_owned(), "a".to_owned()])
    );
    let nobody = redirecting("(i64.const 0xff)").expect("sound");
    assert_eq!(tried(&nobody, "get x\r\n"), Ok(vec!["nobody for now".to_owned()]));
    // Pinned, and never repeated.
    let pinning = redirecting("(i64.const 0x501)").expect("sound");
    assert_eq!(tried(&pinning, "get x\r\n"), Ok(vec!["b, and all that follow".to_owned()]));
    let safe = redirecting("(i64.const 0x201)").expect("sound");
    assert_eq!(tried(&safe, "delete x\r\n"), Ok(vec!["b, may be repeated".to_owned()]));
}

#[test]
fn requests_of_redis_are_tried_as_well() {
    let module = sample("to-first");
    let labels = ["a", "b"].map(str::to_owned);
    let said = b"*2\r\n$3\r\nGET\r\n$1\r\nx\r\n\r\nmset k 1 l 2\r\nHELLO 3\r\nGET y\r\nMULTI\r\n";
    let trial = Trial::run(&module, Protocol::Resp, &labels, said).expect("sound");
    let tried: Vec<String> = trial.answers.iter().map(|one| format!("{}: {}", one.request, one.answer)).collect();
    let safe = "a, may be repeated";
    let expected =
        [&format!("GET x: {safe}"), "mset k 1: a", "mset l 2: a", &format!("HELLO: {safe}"), &format!("GET y: {safe}")];
    assert_eq!(tried[..5], expected);
    assert!(tried[5].starts_with("MULTI: the framer answers: -ERR MULTI is not supported"), "{}", tried[5]);
}

#[test]
fn the_template_sends_a_prefix_elsewhere() {
    let bytes = wat::parse_str(include_str!("../../../../examples/alrm/prefix.wat")).expect("the template");
    let module = Module::new(&bytes).expect("sound");
    let answers = tried(&module, "get img:7\r\nset img:8 0 0 1\r\nx\r\nget foo\r\nget key:1\r\n").expect("sound");
    assert_eq!(answers[..2], ["images, may be repeated", "images"]);
    let ring = crate::router::ketama::Ring::new(["a", "b", "images"]);
    for (answer, key) in answers[2..].iter().zip(["foo", "key:1"]) {
        let label = ["a", "b", "images"][ring.servers_of(key.as_bytes()).next().expect("a server")];
        assert_eq!(*answer, format!("{label}, may be repeated"), "{key}");
    }
}

#[test]
fn the_counter_has_a_part_at_each_member_and_a_part_is_asked_for_by_its_members_name() {
    let bytes = wat::parse_str(include_str!("../../../../examples/alrm/counter.wat")).expect("the module");
    let module = Module::new(&bytes).expect("sound");
    // Each request comes twice, and the second time takes no turn.
    let said = "incr count:x 1\r\nincr count:x 1\r\nincr count:y 1\r\nincr count:x 1\r\n";
    assert_eq!(tried(&module, said).expect("sound"), ["b", "images", "a", "b"]);
    let said = "get count:x@images\r\nset count:x@b 0 0 1\r\n0\r\nget count:x@nobody\r\nget count:\r\nget user@a\r\n";
    let answers = tried(&module, said).expect("sound");
    assert_eq!(answers[..2], ["images, may be repeated; as get count:x", "b; as set count:x 0 0 1"]);
    let ring = crate::router::ketama::Ring::new(["a", "b", "images"]);
    for (answer, key) in answers[2..].iter().zip(["count:x@nobody", "count:", "user@a"]) {
        let label = ["a", "b", "images"][ring.servers_of(key.as_bytes()).next().expect("a server")];
        assert_eq!(*answer, format!("{label}, may be repeated"), "{key}");
    }
}

#[test]
fn the_module_for_speed_prefers_whoever_answers_first() {
    let bytes = wat::parse_str(include_str!("../../../../examples/alrm/speed.wat")).expect("the module");
    let module = Module::new(&bytes).expect("sound");
    // Nobody is known: all have turns.
    assert_eq!(
        tried(&module, "get a\r\nget a\r\nget a\r\nget a\r\n").expect("sound"),
        // Each request comes twice, and takes two turns.
        ["a", "images", "b", "a"].map(|label| format!("{label}, may be repeated"))
    );
    let router = Router::new(Protocol::Memcached, Policy::RoundRobin);
    let mut switch: Switch<Router> = Switch::new(Config::default(), router, 0);
    let mut guest = Guest::start(&module).expect("it starts");
    let joining = Joining { kind: Kind::Margay, to_member: Lsn(0), from_member: Lsn(0), window_bytes: 1 << 20 };
    let ids = ["a", "b", "c"].map(|label| {
        let id = switch.join(&joining).expect("room");
        guest.add_member(id, label);
        id
    });
    let chosen = |guest: &mut Guest| guest.redirect(b"get a\r\n", None, 0).expect("an answer").member;
    // Quick and idle, quick and busy, slow.
    [(0, 100), (9, 100), (0, 900)]
        .into_iter()
        .enumerate()
        .for_each(|(at, (busy, took))| guest.tell_member(at, busy, took));
    assert_eq!([chosen(&mut guest), chosen(&mut guest)], [Some(ids[0]); 2]);
    // The first has more to do than the others need for it.
    guest.tell_member(0, 20, 100);
    guest.tell_member(1, 9, 100);
    assert_eq!(chosen(&mut guest), Some(ids[2]));
    // One that nobody knows is asked before all others.
    guest.tell_member(1, 30, -1);
    assert_eq!(chosen(&mut guest), Some(ids[1]));
}

#[test]
fn a_module_may_change_a_request_in_the_same_way_each_time() {
    let shouting = redirecting(
        "(i32.store8 (i32.const 4) (i32.const 88)) (call $keep (i64.const 7))
         (i64.extend_i32_u (call $member_at (i32.const 0)))",
    );
    let answers = tried(&shouting.expect("sound"), "get a\r\n").expect("the same each time");
    assert_eq!(answers, ["a, may be repeated; as get X"]);
    let longer = redirecting("(i64.store (i32.const 4) (i64.const 0x0a0d626161)) (i64.const 0x0000000900000000)");
    assert_eq!(tried(&longer.expect("sound"), "get a\r\n"), Ok(vec!["a, may be repeated; as get aab".to_owned()]));
}

#[test]
fn what_a_module_does_wrong_is_said_with_the_request() {
    let fault = |module: Result<Module, Refused>| tried(&module.expect("it loads"), "get a\r\n").expect_err("a fault");
    for (body, expected) in [
        ("(unreachable)", "redirect fails: "),
        ("(loop $again (br $again)) (i64.const 0)", "redirect took more than its fuel"),
        ("(i64.load (i32.const 65536))", "redirect fails: out of bounds memory access"),
        ("(i64.const 9)", "redirect names member 9, and there is none"),
        ("(i64.const 0x7fffffff00000000)", "redirect makes a request of 2147483647 bytes"),
        ("(i64.const 0x0000000300000000)", "redirect makes of a request what is no single request"),
        ("(i32.store8 (i32.const 0) (i32.const 0)) (i64.const 0)", "what is no single request"),
    ] {
        let said = fault(redirecting(body));
        assert!(said.contains(expected) && said.ends_with("with the request get a"), "{body}: {said}");
    }
    let said = tried(&sample("differs"), "get a\r\n").expect_err("a fault");
    assert!(said.contains("something else of a request that is repeated"), "{said}");
}

#[test]
fn memory_is_bounded_and_tables_too() {
    // As far as it may, and no further: what is refused it is told.
    let growing = redirecting(
        "(local $pages i32) (local.set $pages (memory.grow (i32.const 15)))
         (if (i32.eq (memory.grow (i32.const 1)) (i32.const -1)) (then (return (i64.const 1)))) (i64.const 0)",
    );
    assert_eq!(tried(&growing.expect("sound"), "get x\r\n"), Ok(vec!["b, may be repeated".to_owned()]));
    let text = format!(
        "(module {} (func (export \"redirect\") (param i32 i32 i32 i64) (result i64) (i64.const 0)))",
        COMMON.replace("\"memory\") 1", "\"memory\") 17")
    );
    let refused = Module::new(&wat::parse_str(&text).expect("text"));
    assert!(matches!(refused, Err(Refused::Start(_))), "{refused:?}");
}

#[test]
fn what_is_no_module_is_refused_in_words() {
    let said = |module: Result<Module, Refused>| module.expect_err("refused").to_string();
    assert!(said(Module::new(b"no module")).contains("no module that a switch runs"));
    assert!(said(Module::new(&vec![0; MODULE_MAX + 1])).contains("has more than"));
    let redirect = r#"(func (export "redirect") (param i32 i32 i32 i64) (result i64) (i64.const 0))"#;
    let clock = r#"(import "wasi_snapshot_preview1" "clock_time_get" (func (param i32 i64 i32) (result i32)))"#;
    assert!(said(module_of(clock, redirect)).contains("wasi_snapshot_preview1.clock_time_get"));
    let other = r#"(import "margay" "ring" (func (param i32) (result i32)))"#;
    assert!(said(module_of(other, redirect)).contains("margay.ring"));
    assert!(said(module_of("", "")).contains("exports no function redirect"));
    assert!(said(module_of("", r#"(func (export "redirect") (result i64) (i64.const 0))"#)).contains("redirect"));
    let float = r#"(func (export "f") (param f32) (result f32) (f32.add (local.get 0) (local.get 0)))"#;
    assert!(said(module_of("", &format!("{redirect} {float}"))).contains("no module that a switch runs"));
    let text = format!("(module {} {redirect})", COMMON.replace("i32.const 1)", "i32.const 2)"));
    assert!(said(Module::new(&wat::parse_str(&text).expect("text"))).contains("is of interface 2"));
    let text = format!("(module {} {redirect})", COMMON.replace("(i32.const 0)", "(i32.const 65000)"));
    assert!(said(Module::new(&wat::parse_str(&text).expect("text"))).contains("alrm_frame"));
    let init = r#"(func (export "alrm_init") (unreachable))"#;
    assert!(said(module_of("", &format!("{redirect} {init}"))).contains("does not start"));
    let start = "(func $begin) (start $begin)";
    module_of("", &format!("{redirect} {start}")).expect_err("what runs before it is asked");
    let adopt = r#"(func (export "adopt") (param i32 i32) (result i32) (i32.const 1))"#;
    assert!(said(module_of("", &format!("{redirect} {adopt}"))).contains("exports no function adopt"));
}

/// Of ten thousand calls the instructions alone cost less than the fuel that there is.
#[test]
fn what_the_switch_does_for_a_module_costs_fuel() {
    let imports: String = IMPORTS
        .iter()
        .map(|(name, params, results)| {
            let params = if *name == "keep" { " (param i64)".to_owned() } else { " (param i32)".repeat(params.len()) };
            let results = " (result i32)".repeat(results.len());
            format!("(import \"margay\" \"{name}\" (func ${name}{params}{results}))")
        })
        .collect();
    let head = "(param $id i32) (param $len i32) (param $source i32) (param $rtx i64) (result i64) (local $n i32)";
    let said = |body: &str| {
        let module = module_of(&imports, &format!("(func (export \"redirect\") {head} {body} (i64.const 0))"));
        tried(&module.expect("sound"), "get a\r\n")
    };
    let often = |call: &str, count: u32| {
        said(&format!(
            "(loop $again {call} (local.set $n (i32.add (local.get $n) (i32.const 1)))
               (br_if $again (i32.lt_u (local.get $n) (i32.const {count}))))"
        ))
    };
    for (name, ..) in IMPORTS {
        let call = match name {
            "keep" => "(call $keep (i64.const 0))".to_owned(),
            "member_count" => "(drop (call $member_count))".to_owned(),
            "label" => "(drop (call $label (i32.const 0) (i32.const 4096) (i32.const 64)))".to_owned(),
            "ring" => "(drop (call $ring (i32.const 0) (i32.const 1)))".to_owned(),
            _ => format!("(drop (call ${name} (i32.const 0)))"),
        };
        assert_eq!(often(&call, 1000), Ok(vec!["a, may be repeated".to_owned()]), "{name}");
        let why = often(&call, 10_000).expect_err("there is not so much fuel");
        assert!(why.contains("took more than its fuel"), "{name}: {why}");
    }
    // A key of all the memory that there may be.
    let why = said("(drop (memory.grow (i32.const 15))) (drop (call $ring (i32.const 0) (i32.const 1048576)))");
    assert!(why.expect_err("it is too long").contains("took more than its fuel"));
}

#[test]
fn a_file_that_is_not_there_or_too_large_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("module.wasm");
    let missing = Module::bytes_of(&path).expect_err("there is none");
    assert!(missing.to_string().contains("module.wasm cannot be read"), "{missing}");
    std::fs::write(&path, vec![0; 2 * MODULE_MAX]).expect("written");
    let bytes = Module::bytes_of(&path).expect("its beginning");
    assert_eq!(bytes.len(), MODULE_MAX + 1);
    assert!(matches!(Module::new(&bytes), Err(Refused::TooLarge)));
}
