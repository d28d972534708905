//! What is wrong with a TOML file that somebody wrote, and where in it.

use std::ops::Range;
use std::path::Path;

use miette::{Diagnostic, NamedSource, SourceSpan};
use serde::de::DeserializeOwned;

/// It is shown with the line that it is about.
#[derive(Debug, thiserror::Error, Diagnostic)]
#[error("{what}")]
pub struct Misread {
    what: String,
    #[source_code]
    source_code: NamedSource<String>,
    #[label("here")]
    at: Option<SourceSpan>,
    #[help]
    advice: String,
}

impl Misread {
    /// Something in `text`, which came from `path`, is wrong at these bytes; without any, in the section whose heading
    /// `what` begins with.
    pub fn new(text: &str, path: &Path, what: String, at: Option<Range<usize>>, advice: String) -> Self {
        let at = at.or_else(|| heading(text, &what));
        let source_code = NamedSource::new(path.display().to_string(), text.to_owned()).with_language("toml");
        Self { what, source_code, at: at.map(SourceSpan::from), advice }
    }

    /// In one line, without what the file says there.
    pub fn brief(&self) -> String {
        let Self { what, source_code, at, advice } = self;
        let line = |at: &SourceSpan| {
            let before = source_code.inner().get(..at.offset()).unwrap_or_default();
            format!(", line {}", before.matches('\n').count() + 1)
        };
        let line = at.as_ref().map(line).unwrap_or_default();
        format!("{}{line}: {}; {advice}", source_code.name(), what.replace('\n', " "))
    }

    /// Its words that are pointed at.
    #[cfg(test)]
    pub fn pointed(&self) -> Option<&str> {
        self.at.and_then(|at| self.source_code.inner().get(at.offset()..at.offset() + at.len()))
    }
}

/// Where in a file the section stands that a message begins with.
fn heading(text: &str, what: &str) -> Option<Range<usize>> {
    let heading = &what[..=what.starts_with('[').then(|| what.find(']'))??];
    let begin = text.match_indices(heading).map(|(at, _)| at);
    let is_first = |at: &usize| text[..*at].chars().next_back().is_none_or(|before| before == '\n');
    begin.into_iter().find(is_first).map(|at| at..at + heading.len())
}

/// Reads `text`, which came from `path`. `book` says where people find what may stand there.
///
/// # Errors
///
/// It is no TOML, or says something that a `T` has not.
#[expect(clippy::result_large_err, reason = "made once, and shown")]
pub fn read<T: DeserializeOwned>(text: &str, path: &Path, book: &str) -> Result<T, Misread> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().and_then(|at| text.get(at.start..)).and_then(|rest| rest.lines().next());
        let what = plain(error.message(), line.unwrap_or_default());
        let advice = advise(&what, book);
        Misread::new(text, path, what, error.span(), advice)
    })
}

/// What the reader says of types, in words of TOML. `line` is what it points at.
fn plain(message: &str, line: &str) -> String {
    let range = message.strip_prefix("invalid value: integer `").and_then(|rest| rest.split_once("`, expected "));
    if let Some((number, wanted)) = range {
        let most = match wanted {
            "u8" => u8::MAX.to_string(),
            "u16" => u16::MAX.to_string(),
            "u32" => u32::MAX.to_string(),
            _ => return format!("{number} is no number that is wanted here"),
        };
        return format!("{number} is no number from 0 to {most}");
    }
    if message == "wanted string or table" {
        return "a word in quotes is wanted here".to_owned();
    }
    let types = message.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected "));
    let Some((found, wanted)) = types else { return message.to_owned() };
    let found = match found.split_once(' ') {
        None if found == "map" => "a table".to_owned(),
        None => format!("a list ({found})").replace("a list (sequence)", "a list"),
        Some(("string", text)) => {
            format!("the text {}", text.trim_matches('"')).replace("the text ", "the text `") + "`"
        }
        Some(("integer", number)) => format!("the number {}", number.trim_matches('`')),
        Some(("floating", rest)) => format!("the number {}", rest.trim_start_matches("point ").trim_matches('`')),
        Some(("boolean", word)) => format!("the word {}", word.trim_matches('`')),
        Some(_) => found.to_owned(),
    };
    let wanted = match wanted {
        "a sequence" => "a list",
        "a string" | "string" | "path string" => "a text in quotes",
        "a boolean" => "true or false",
        "u8" | "u16" | "u32" | "u64" | "i64" => "a number without quotes, 0 or more",
        other if other.starts_with("struct ") => "a table",
        other => other,
    };
    let header = line.trim().strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(name, _)| name);
    match header.filter(|name| wanted == "a list" && !name.starts_with('[')) {
        Some(name) => format!("[{name}] may stand there several times: write [[{name}]]"),
        None => format!("{found} stands where {wanted} is wanted"),
    }
}

/// What to do about a message of the TOML reader.
fn advise(what: &str, book: &str) -> String {
    let quoted: Vec<&str> = what.split('`').skip(1).step_by(2).collect();
    if what.starts_with("unknown field")
        && let [unknown, known @ ..] = &quoted[..]
    {
        let near = known.iter().map(|word| (strsim::damerau_levenshtein(unknown, word), word)).min();
        return match near {
            Some((distance, word)) if distance <= 2 => format!("did you mean `{word}`?"),
            _ => format!("remove it, or write one of: {}", known.join(", ")),
        };
    }
    if let Some(field) = what.strip_prefix("missing field ") {
        return format!("add a line for {field}");
    }
    format!("correct this line; {book}")
}
