//! The rooms of the core, and the arrows between them: a room imports only rooms that stand before it, so that types
//! and tables know no behaviour and no cycle can close.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Every room of `margay-core`; each may import those before it.
const ROOMS: [&str; 10] =
    ["types", "trust", "leg", "table", "association", "cache", "session", "resolve", "act", "machine"];

/// The one type through which acts reach each other and the state: acts are its methods.
const MACHINE_TYPE: &str = "machine::sal::Sal";

/// Methods of the machine, of all rooms. What touches up to three parts of the state is a method of the first of them,
/// with the others as arguments. The number may only fall; the aim is 60.
const MACHINE_METHODS: usize = 779;

/// Imports of a later room that stand today: a file, and what it imports. Each goes when the type moves to the room of
/// the file; none may be added without a reason beside it.
const BACKWARDS: [(&str, &str); 8] = [
    // What lists and events show of acts.
    ("session/event.rs", "act::chain"),
    ("session/event.rs", "act::reconfiguration"),
    ("session/event.rs", "act::stack_change"),
    // The state that an act keeps in a flow.
    ("session/flow.rs", "act::chain"),
    ("session/flow.rs", "act::path::direct"),
    ("session/flow.rs", "act::path::striping"),
    ("session/flow.rs", "act::setup"),
    ("session/flow.rs", "act::stack_change"),
];

fn core_sources() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/margay is two below");
    root.join("crates/margay-core/src")
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("an entry can be read").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Paths after `crate::` in a file's code, without its comments and tests: `room::module::Name`.
fn imports(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let mut found = Vec::new();
    for line in lines {
        for rest in line.split("crate::").skip(1) {
            let is_part = |character: char| character.is_alphanumeric() || character == '_' || character == ':';
            let path = rest.split(|character| !is_part(character)).next().unwrap_or_default();
            found.push(path.trim_end_matches(':').to_owned());
        }
    }
    found
}

fn place(room: &str) -> Option<usize> {
    ROOMS.iter().position(|known| *known == room)
}

/// What points backwards: the file, and what it imports.
fn backwards() -> BTreeSet<(String, String)> {
    let sources = core_sources();
    let mut files = Vec::new();
    rust_files(&sources, &mut files);
    let mut found = BTreeSet::new();
    for file in files {
        let name = file.strip_prefix(&sources).expect("it was found there").to_string_lossy().into_owned();
        let room = name.split(['/', '.']).next().unwrap_or_default();
        // `lib.rs` is the face of the crate, and names every room.
        let Some(own) = place(room).filter(|_| !name.ends_with("test.rs")) else { continue };
        for import in imports(&fs::read_to_string(&file).expect("it can be read")) {
            let other = import.split("::").next().and_then(place);
            if other.is_some_and(|other| other > own) && import != MACHINE_TYPE {
                found.insert((name.clone(), import));
            }
        }
    }
    found
}

#[test]
fn rooms_import_only_rooms_before_them() {
    let is_known = |file: &str, import: &str| {
        BACKWARDS
            .iter()
            .any(|(known, start)| *known == file && (import == *start || import.starts_with(&format!("{start}::"))))
    };
    let found = backwards();
    let new: Vec<String> = found
        .iter()
        .filter(|(file, import)| !is_known(file, import))
        .map(|(file, import)| format!("{file} imports {import}, which is in a later room"))
        .collect();
    assert!(new.is_empty(), "\n{}", new.join("\n"));
    let gone: Vec<String> = BACKWARDS
        .iter()
        .filter(|(file, start)| !found.iter().any(|(other, import)| other == file && import.starts_with(start)))
        .map(|(file, start)| format!("{file} imports {start} no more: take it from the list"))
        .collect();
    assert!(gone.is_empty(), "\n{}", gone.join("\n"));
}

#[test]
fn every_file_of_the_core_is_in_a_room() {
    let entries = fs::read_dir(core_sources()).expect("the core is there");
    let names = entries.map(|entry| entry.expect("an entry can be read").file_name().to_string_lossy().into_owned());
    let strays: Vec<String> =
        names.filter(|name| name != "lib.rs" && place(name.trim_end_matches(".rs")).is_none()).collect();
    assert!(strays.is_empty(), "not in a room: {}", strays.join(", "));
}

/// Methods in blocks `impl Sal`, which all stand at the left margin.
fn machine_methods(text: &str) -> usize {
    let mut is_inside = false;
    let mut count = 0;
    for line in text.lines() {
        match line {
            "impl Sal {" => is_inside = true,
            "}" => is_inside = false,
            _ => {}
        }
        let item = line.strip_prefix("    ").filter(|item| is_inside && !item.starts_with(' '));
        let is_method = item.is_some_and(|item| item.starts_with("fn ") || item.contains(" fn "));
        count += usize::from(is_method && !item.is_some_and(|item| item.starts_with("//")));
    }
    count
}

#[test]
fn the_machine_has_no_new_methods() {
    let mut files = Vec::new();
    rust_files(&core_sources(), &mut files);
    let count: usize =
        files.iter().map(|file| machine_methods(&fs::read_to_string(file).expect("it can be read"))).sum();
    assert!(
        count <= MACHINE_METHODS,
        "`Sal` has {count} methods, {MACHINE_METHODS} before: give a new one to the part that it touches"
    );
    assert_eq!(count, MACHINE_METHODS, "`Sal` has fewer methods: write the new number into MACHINE_METHODS");
}
