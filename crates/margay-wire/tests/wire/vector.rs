//! The vectors: files that other languages read too.

use serde_json::Value;

/// One datagram and what is in it.
pub struct Vector {
    pub name: String,
    pub bytes: Vec<u8>,
    /// Whether a writer of this version writes exactly these bytes.
    pub is_canonical: bool,
    /// The fields alone.
    pub fields: Value,
}

/// One datagram that is none.
pub struct Malformed {
    pub name: String,
    pub bytes: Vec<u8>,
    /// Who refuses it: `message`, `data` or `train`.
    pub refused: String,
    /// Why, in the dissector's words.
    pub refusal: String,
}

fn entries(text: &str) -> Vec<serde_json::Map<String, Value>> {
    serde_json::from_str(text).expect("the file is JSON: a list of objects")
}

fn take_text(entry: &mut serde_json::Map<String, Value>, key: &str) -> String {
    match entry.remove(key) {
        Some(Value::String(text)) => text,
        other => panic!("{key} is {other:?}"),
    }
}

fn vectors(text: &str) -> Vec<Vector> {
    let read = |mut entry| {
        let name = take_text(&mut entry, "name");
        assert!(!take_text(&mut entry, "about").is_empty(), "{name}");
        let bytes = unhex(&take_text(&mut entry, "hex"));
        let is_canonical = entry.remove("canonical") == Some(Value::Bool(true));
        Vector { name, bytes, is_canonical, fields: Value::Object(entry) }
    };
    entries(text).into_iter().map(read).collect()
}

/// Messages.
pub fn messages() -> Vec<Vector> {
    vectors(include_str!("../../vectors/messages.json"))
}

/// DATA.
pub fn data() -> Vec<Vector> {
    vectors(include_str!("../../vectors/data.json"))
}

/// What must be refused.
pub fn malformed() -> Vec<Malformed> {
    let read = |mut entry| Malformed {
        name: take_text(&mut entry, "name"),
        bytes: unhex(&take_text(&mut entry, "hex")),
        refused: take_text(&mut entry, "refused"),
        refusal: take_text(&mut entry, "refusal"),
    };
    entries(include_str!("../../vectors/malformed.json")).into_iter().map(read).collect()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).expect("hexadecimal")).collect()
}
