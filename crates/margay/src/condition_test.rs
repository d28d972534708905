use super::*;

const HOST: &str = "lap1";

fn fault(text: &str) -> Fault {
    read(text, HOST).expect_err(text)
}

#[test]
fn conditions_of_the_book_are_read() {
    for text in [
        "!path.local.within(\"192.168.7.0/24\")",
        "path.wireless && flow.protocol == \"udp\"",
        "path.interface in [\"wlan0\", \"wwan0\"]",
        "path.interface.startsWith(\"wl\") || path.nat",
        "flow.service == \"web.shop\" && flow.role == 'initiator'",
        "has(fact.lockdown) && fact.lockdown",
        "fact.level >= 2 || fact.place == \"train\"",
        "time.hour >= 22 || time.hour < 6",
        "flow.bytes_per_s * 8 > 5000000",
        "flow.age_s > 60 ? path.rtt_ms > 20.5 : false",
        "path.remote == \"10.0.0.7\" || path.remote in [\"10.0.0.8\", \"fd00::8\"]",
        "host.name == \"lap1\" && -flow.age_s < -1",
        "has(path.rtt_ms) && path.mtu - 40 >= 1400",
        "true",
    ] {
        read(text, HOST).unwrap_or_else(|fault| panic!("{text}: {fault:?}"));
    }
}

#[test]
fn what_is_wrong_is_said_and_pointed_at() {
    for (text, pointed, said) in [
        ("flow.ages > 5", Some("flow.ages"), "no fact"),
        ("rtt > 5", Some("rtt"), "no fact"),
        ("flow.age_s > \"5\"", None, "a text stands where a number is wanted"),
        ("flow.protocol == 6", None, "a number stands where a text is wanted"),
        ("flow.age_s", None, "a number, and neither true nor false"),
        ("flow.age_s && true", None, "a number stands where a truth value is wanted"),
        ("path.local == \"home\"", None, "`home` is no address"),
        ("path.local.within(\"10.0.0.0/99\")", None, "no network"),
        ("path.interface.within(\"10.0.0.0/8\")", None, "a text stands where an address is wanted"),
        ("flow.service == \"web\"", None, "`web` is no name"),
        ("fact.one == fact.other", None, "nobody can tell"),
        ("fact.Big > 1", None, "no name of a fact"),
        ("[1, 2].exists(x, x > 1)", None, "no loops"),
        ("flow.protocol.matches(\"t.*\")", None, "no `matches`"),
        ("flow.age_s % 2 == 0", None, "of this form"),
        ("1", None, "a number, and neither"),
        ("null", None, "compared with nothing"),
        ("", None, "cannot be read"),
        ("flow.age_s >", None, "cannot be read"),
        ("flow.age_s > 5)", None, "cannot be read"),
    ] {
        let fault = fault(text);
        assert!(fault.what.contains(said), "{text}: {fault:?}");
        assert!(!fault.advice.is_empty(), "{text}");
        if let Some(pointed) = pointed {
            let at = fault.at.clone().unwrap_or_else(|| panic!("{text}: no place"));
            assert!(pointed.contains(&text[at.clone()]), "{text}: {:?}", &text[at]);
        }
    }
    assert_eq!(fault("flow.ages > 5").advice, "did you mean `flow.age_s`?");
}

#[test]
fn what_costs_too_much_is_refused() {
    let long = format!("flow.protocol == \"{}\"", "x".repeat(TEXT_MAX));
    assert!(fault(&long).what.contains("bytes"), "{:?}", fault(&long));
    let many = vec!["path.nat"; 100].join("||");
    assert!(fault(&many).what.contains("parts"), "{:?}", fault(&many));
    for deep in [
        format!("{}true{}", "(".repeat(300), ")".repeat(300)),
        format!("{}true", "path.nat ? false : ".repeat(50)),
        "[".repeat(500),
    ] {
        assert!(fault(&deep).what.contains("deeper"), "{:?}", fault(&deep));
    }
    let sum = format!("{}1 > 0", "1+".repeat(200));
    assert!(!fault(&sum).what.is_empty());
}

#[test]
fn what_a_fact_from_outside_is_to_be_follows_from_its_use() {
    let kind = |text: &str, name: &str| read(text, HOST).expect(text).kind_of_outside(name);
    assert_eq!(kind("fact.level >= 2", "level"), Some(Kind::Number));
    assert_eq!(kind("\"train\" == fact.place", "place"), Some(Kind::Text));
    assert_eq!(kind("fact.place in [\"train\", \"bus\"]", "place"), Some(Kind::Text));
    assert_eq!(kind("!fact.lockdown", "lockdown"), Some(Kind::Bool));
    assert_eq!(kind("fact.up == true", "up"), Some(Kind::Bool));
    assert_eq!(kind("has(fact.up)", "up"), None);
}
