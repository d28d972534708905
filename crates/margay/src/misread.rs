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
    /// Something in `text`, which came from `path`, is wrong at these bytes.
    pub fn new(text: &str, path: &Path, what: String, at: Option<Range<usize>>, advice: String) -> Self {
        let source_code = NamedSource::new(path.display().to_string(), text.to_owned()).with_language("toml");
        Self { what, source_code, at: at.map(SourceSpan::from), advice }
    }

    /// Its words that are pointed at.
    #[cfg(test)]
    pub fn pointed(&self) -> Option<&str> {
        self.at.and_then(|at| self.source_code.inner().get(at.offset()..at.offset() + at.len()))
    }
}

/// Reads `text`, which came from `path`. `book` says where people find what may stand there.
///
/// # Errors
///
/// It is no TOML, or says something that a `T` has not.
#[expect(clippy::result_large_err, reason = "made once, and shown")]
pub fn read<T: DeserializeOwned>(text: &str, path: &Path, book: &str) -> Result<T, Misread> {
    toml::from_str(text).map_err(|error| {
        let what = error.message().to_owned();
        let advice = advise(&what, book);
        Misread::new(text, path, what, error.span(), advice)
    })
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
