//! Who may connect, as people write it: `authority`, `any`, `host:<id>`, `group:<name>`, `authority:<name>`.

use margay_core::name::{authority_block, group_number};
use margay_core::table::{Allow, AllowItem};

/// Reads an allow list; an empty one is the default, the service's own authority.
///
/// # Errors
///
/// A word is none of the forms; the message lists them.
pub fn parse<S: AsRef<str>>(words: &[S]) -> Result<Allow, String> {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match &words[..] {
        [] | ["authority"] => return Ok(Allow::Authority),
        ["any"] => return Ok(Allow::Any),
        _ => {}
    }
    words.into_iter().map(item).collect::<Result<_, _>>().map(Allow::List)
}

fn item(word: &str) -> Result<AllowItem, String> {
    match word.split_once(':') {
        Some(("host", id)) => id
            .parse()
            .map(AllowItem::Host)
            .map_err(|error| format!("`{word}`: {error}; `margay id` on that host shows it")),
        Some(("group", name)) if !name.is_empty() => Ok(AllowItem::Group(group_number(name))),
        Some(("authority", name)) if !name.is_empty() => Ok(AllowItem::Authority(authority_block(name))),
        _ if word == "any" || word == "authority" => {
            Err(format!("`{word}` stands alone in an allow list; beside it nothing else has a meaning"))
        }
        _ => Err(format!("`{word}` is not authority, any, host:<id>, group:<name> or authority:<name>")),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn forms() {
        assert_eq!(parse::<&str>(&[]), Ok(Allow::Authority));
        assert_eq!(parse(&["any"]), Ok(Allow::Any));
        let list = parse(&["group:ops", "host:00112233445566778899aabbccddeeff", "authority:shop"]);
        let Ok(Allow::List(items)) = list else { panic!("{list:?}") };
        assert_eq!(items[0], AllowItem::Group(group_number("ops")));
        assert!(matches!(items[1], AllowItem::Host(host) if host.0[1] == 0x11));
        assert_eq!(items[2], AllowItem::Authority(authority_block("shop")));
    }

    #[test]
    fn mistakes() {
        for (word, part) in [("everybody", "is not authority"), ("host:12", "32 hexadecimal"), ("group:", "is not")] {
            let error = parse(&[word]).expect_err("refused");
            assert!(error.contains(part), "{error}");
        }
        assert!(parse(&["any", "group:ops"]).expect_err("refused").contains("stands alone"));
    }
}
