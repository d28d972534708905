//! The keys of the configuration, as the comments of its structures describe them.

use std::collections::BTreeMap;

use crate::config::Config;

/// Where the structures are.
const SOURCES: [&str; 8] = [
    include_str!("../config.rs"),
    include_str!("../config/service.rs"),
    include_str!("../config/stack_rule.rs"),
    include_str!("../config/ensemble.rs"),
    include_str!("../agent/health/spec.rs"),
    include_str!("../etcd_section.rs"),
    include_str!("../resolver.rs"),
    include_str!("../site.rs"),
];

/// A section of the file.
pub struct Section {
    /// `[host]`, `[[service]]`.
    pub heading: String,
    /// Its keys, in the order of the structure.
    pub keys: Vec<Key>,
}

/// A key.
pub struct Key {
    /// As it is written.
    pub name: String,
    /// What its value is, and the default.
    pub form: String,
    /// What it does.
    pub text: String,
}

/// A field of a structure.
struct Field {
    name: String,
    of: String,
    doc: String,
    has_default: bool,
}

/// A structure or an enumeration.
struct Item {
    name: String,
    doc: String,
    has_defaults: bool,
    fields: Vec<Field>,
    words: Vec<String>,
}

/// All sections: the keys before all sections first.
pub fn sections() -> Vec<Section> {
    let items: Vec<Item> = SOURCES.iter().flat_map(|source| items(source)).collect();
    let words: BTreeMap<&str, &[String]> =
        items.iter().filter(|item| !item.words.is_empty()).map(|item| (&*item.name, &*item.words)).collect();
    let is_section = |item: &&Item| item.doc.starts_with("`[");
    let top = items.iter().filter(|item| item.name == "Config");
    let sections = top.chain(items.iter().filter(is_section)).map(|item| {
        let heading = if item.name == "Config" { "Before all sections".to_owned() } else { item.doc.clone() };
        let is_key = |field: &&Field| !items.iter().filter(is_section).any(|section| field.of.contains(&section.name));
        let keys = item.fields.iter().filter(is_key).map(|field| Key {
            name: field.name.clone(),
            form: form(item, field, &words),
            text: field.doc.clone(),
        });
        Section { heading, keys: keys.collect() }
    });
    sections.collect()
}

/// What a value is, and what it is unless it is given.
fn form(item: &Item, field: &Field, words: &BTreeMap<&str, &[String]>) -> String {
    let inner = field.of.trim_start_matches("Option<").trim_start_matches("Vec<").trim_end_matches('>');
    let one = match inner {
        "bool" => "true or false".to_owned(),
        "u8" | "u16" | "u32" | "u64" | "i32" => "number".to_owned(),
        "PathBuf" => "path".to_owned(),
        "SocketAddr" | "SocketAddrV4" => "address:port".to_owned(),
        "IpAddr" => "address".to_owned(),
        "ServiceName" | "Names" => "name".to_owned(),
        other => words.get(other).map_or_else(|| "text".to_owned(), |words| words.join(", ")),
    };
    let value = if field.of.contains("Vec<") { format!("list of {one}") } else { one };
    match default(item, field) {
        Some(default) => format!("{value}; default: {default}"),
        None if field.of.starts_with("Option<") || field.has_default || item.has_defaults => value,
        None => format!("{value}; required"),
    }
}

/// What the program says itself; `None`: nothing, or the text says what happens without it.
fn default(item: &Item, field: &Field) -> Option<String> {
    let written = match (item.name.as_str(), item.has_defaults) {
        (_, true) => format!("{:?}", Config::default()),
        ("ServiceSection", _) => of_example("[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\""),
        ("HealthSection", _) => {
            of_example("[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\nhealth = { http = \"/\" }")
        }
        ("LoadSection", _) => {
            of_example("[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\nload = { command = [\"/a\"] }")
        }
        ("StackRuleSection", _) => {
            of_example("[[stack_rule]]\nnames = [\"web.shop\"]\nwhen = \"true\"\nuse = \"secure\"")
        }
        ("EnsembleSection", _) => of_example("[[ensemble]]\nname = \"a.shop\"\nmembers = \"b.shop\""),
        ("ResolverSection", _) => {
            of_example("[[resolver]]\nname = \"a\"\nkind = \"static\"\nfile = \"/a\"\nnames = [\"web.shop\"]")
        }
        ("NeighbourSection", _) => {
            of_example("[router]\nenabled = true\nsite = \"a\"\n[[router.neighbour]]\nsite = \"b\"")
        }
        ("EtcdSection", _) => {
            of_example("[router]\nenabled = true\n[router.etcd]\nendpoints = [\"http://10.0.0.1:2379\"]")
        }
        _ => return None,
    };
    if !item.has_defaults && !field.has_default {
        return None;
    }
    let of_item = written.split_once(&format!("{} {{ ", item.name))?.1;
    let value = of_item.split_once(&format!("{}: ", field.name))?.1;
    // Lists and structures are shown where they are not empty, which no default is.
    let value = value.split([',', '}']).next()?.trim();
    let is_nothing = value == "None"
        || value.starts_with("Some(")
        || value.starts_with('[') && !value.contains("]:")
        || value == "0";
    (!is_nothing).then(|| format!("`{}`", value.trim_matches('"').to_lowercase()))
}

fn of_example(text: &str) -> String {
    format!("{:?}", toml::from_str::<Config>(text).expect("an example that the program reads"))
}

/// The structures and enumerations of a source.
fn items(source: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let (mut doc, mut attributes) = (String::new(), String::new());
    let mut open: Option<Item> = None;
    for line in source.lines() {
        let code = line.trim();
        if let Some(text) = code.strip_prefix("///") {
            doc = [doc.trim(), text.trim()].join(" ").trim().to_owned();
        } else if code.starts_with("#[") {
            attributes.push_str(code);
        } else if line == "}" {
            items.extend(open.take());
        } else if let Some(item) = &mut open {
            item.fields.extend(field(code, &doc, &attributes));
            if item.fields.is_empty() && code.ends_with(',') {
                item.words.push(kebab(code.trim_end_matches(',')));
            }
            (doc, attributes) = (String::new(), String::new());
        } else {
            let kind = ["pub struct ", "pub enum "].into_iter().find_map(|kind| code.strip_prefix(kind));
            if let Some(name) = kind.and_then(|rest| rest.strip_suffix(" {")) {
                let has_defaults = attributes.contains("deny_unknown_fields, default)");
                let (name, doc) = (name.to_owned(), doc.clone());
                open = Some(Item { name, doc, has_defaults, fields: Vec::new(), words: Vec::new() });
            }
            (doc, attributes) = (String::new(), String::new());
        }
    }
    items
}

fn field(code: &str, doc: &str, attributes: &str) -> Option<Field> {
    let (name, of) = code.strip_prefix("pub ")?.strip_suffix(',')?.split_once(": ")?;
    let of = of.replace("Spanned<", "").replace(">>", ">");
    let has_default = attributes.contains("default");
    // A word of Rust's.
    let name = name.trim_start_matches("r#");
    Some(Field { name: name.to_owned(), of, doc: doc.to_owned(), has_default })
}

/// A variant as the file has it.
fn kebab(variant: &str) -> String {
    let mut word = String::new();
    for (at, letter) in variant.char_indices() {
        if letter.is_uppercase() && at > 0 {
            word.push('-');
        }
        word.extend(letter.to_lowercase());
    }
    word
}
