//! What a command of a client becomes: parts for servers, or an answer.

use super::command::{self, Command, Own, Refusal, What};
use super::{KEY_IN_FRONT, KEY_MAX, SEEN_MIN, Version, error, place_of, plain_error};
use crate::protocol::{Asked, Join, Part};

/// Most keys of one request that are asked for one by one.
const PARTS_MAX: usize = 1 << 14;
/// Longest word of a client that an error repeats, in characters.
const SHOWN_MAX: usize = 128;

/// What a client has said, and the version that it speaks from then on.
pub(super) struct Said {
    pub(super) asked: Asked,
    pub(super) version: Version,
    /// Another version, once a server has answered.
    pub(super) greeting: Option<Version>,
}

/// What a command with its arguments becomes.
pub(super) fn ask(args: &[&[u8]], version: Version) -> Said {
    let said = |asked| Said { asked, version, greeting: None };
    let Some(command) = command::find(args) else { return said(unknown(args)) };
    match command.what {
        What::Keys(keys) => match command::refusal_of(keys, args) {
            Some(refusal) => said(refused(args, refusal)),
            None => match command::keys_of(keys, args, args.len()) {
                Some(keys) => said(together(args, &keys, command, version)),
                None => said(wrong_number(args)),
            },
        },
        What::Each { len, join } => said(each(args, len, join, command, version)),
        What::Any => {
            let part = Part { bytes: request(version, args, None), is_safe: true };
            said(Asked::Servers { parts: vec![part], join: Join::Only })
        }
        What::Refused(refusal) => said(refused(args, refusal)),
        What::Own(Own::Hello) => hello(args, version),
        What::Own(Own::Reset) => {
            Said { asked: Asked::Answer(b"+RESET\r\n".to_vec()), version: Version::Two, greeting: None }
        }
        What::Own(Own::Quit) => said(Asked::Last(b"+OK\r\n".to_vec())),
        What::Own(Own::Web) => said(Asked::Last(Vec::new())),
        What::Own(Own::Select) if args.get(1) == Some(&&b"0"[..]) && args.len() == 2 => said(okay()),
        What::Own(Own::Select) => said(refused(args, Refusal::Database)),
        What::Own(Own::Client) => said(client(args)),
        // What it is with its next argument was looked for.
        What::Subcommand => said(unknown(args)),
    }
}

fn okay() -> Asked {
    Asked::Answer(b"+OK\r\n".to_vec())
}

/// A word of the client, as an error may have it.
fn shown(word: &[u8]) -> String {
    String::from_utf8_lossy(word).chars().filter(|letter| !letter.is_control()).take(SHOWN_MAX).collect()
}

/// The command's name with its subcommand, as an error has it.
fn name_of(args: &[&[u8]]) -> String {
    let has_subcommand = args.first().is_some_and(|name| command::has_subcommands(name));
    let words: Vec<String> = args.iter().take(1 + usize::from(has_subcommand)).map(|word| shown(word)).collect();
    words.join(" ")
}

fn unknown(args: &[&[u8]]) -> Asked {
    let name = name_of(args);
    Asked::Answer(plain_error(&format!("unknown command '{name}': an ensemble would not know where its keys are")))
}

fn refused(args: &[&[u8]], refusal: Refusal) -> Asked {
    let text = format!("{} is not supported by an ensemble: {}", name_of(args), refusal.why());
    Asked::Answer(plain_error(&text))
}

fn wrong_number(args: &[&[u8]]) -> Asked {
    let name = name_of(args).to_lowercase();
    Asked::Answer(plain_error(&format!("wrong number of arguments for '{name}' command, or of its keys")))
}

fn key_too_long() -> Asked {
    Asked::Answer(plain_error(&format!("a key may have {KEY_MAX} bytes in an ensemble")))
}

/// A request between framers, with a key in front.
fn request(version: Version, args: &[&[u8]], in_front: Option<&[u8]>) -> Vec<u8> {
    let len: usize = args.iter().map(|arg| arg.len() + 16).sum();
    let mut bytes = Vec::with_capacity(len + 16 + in_front.map_or(0, |key| key.len() + 16));
    if let Some(key) = in_front {
        string(KEY_IN_FRONT, key, &mut bytes);
    }
    bytes.push(version.mark());
    bytes.extend_from_slice(args.len().to_string().as_bytes());
    bytes.extend_from_slice(b"\r\n");
    args.iter().for_each(|arg| string(b'$', arg, &mut bytes));
    bytes
}

fn string(first: u8, text: &[u8], bytes: &mut Vec<u8>) {
    bytes.push(first);
    bytes.extend_from_slice(text.len().to_string().as_bytes());
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(text);
    bytes.extend_from_slice(b"\r\n");
}

/// A request whose keys must be at one member.
fn together(args: &[&[u8]], keys: &[&[u8]], command: &Command, version: Version) -> Asked {
    let Some((first, others)) = keys.split_first() else { return wrong_number(args) };
    let place = place_of(first);
    if place.len() > KEY_MAX {
        return key_too_long();
    }
    if others.iter().any(|key| place_of(key) != place) {
        let text = "CROSSSLOT the keys of this request may be at several servers; give them a {tag} that is the same";
        return Asked::Answer(error(text));
    }
    let bytes = request(version, args, None);
    // A switch may see no more than the beginning.
    let is_seen = bytes.len() <= SEEN_MIN || end_of(args, first) <= SEEN_MIN;
    let bytes = if is_seen { bytes } else { request(version, args, Some(place)) };
    Asked::Servers { parts: vec![Part { bytes, is_safe: command.is_safe }], join: Join::Only }
}

/// Where a key ends, at most, in the request that has these arguments.
fn end_of(args: &[&[u8]], key: &[u8]) -> usize {
    // Arguments are parts of what the client has sent: the key is one of them.
    let before = args.iter().take_while(|arg| !std::ptr::eq(**arg, key));
    before.chain([&key]).map(|arg| arg.len() + 16).sum::<usize>() + 16
}

/// A request that is asked for each of its keys.
fn each(args: &[&[u8]], len: usize, join: Join, command: &Command, version: Version) -> Asked {
    let rest = &args[1..];
    if rest.is_empty() || !rest.len().is_multiple_of(len) {
        return wrong_number(args);
    }
    if rest.len() / len > PARTS_MAX {
        return Asked::Answer(plain_error(&format!("a request may have {PARTS_MAX} keys in an ensemble")));
    }
    let mut parts = Vec::with_capacity(rest.len() / len);
    for arguments in rest.chunks(len) {
        let place = place_of(arguments[0]);
        if place.len() > KEY_MAX {
            return key_too_long();
        }
        let told = [&args[..1], arguments].concat();
        let is_seen = end_of(&told, arguments[0]) <= SEEN_MIN;
        let bytes = request(version, &told, Some(place).filter(|_| !is_seen));
        parts.push(Part { bytes, is_safe: command.is_safe });
    }
    let join = if parts.len() == 1 { Join::Only } else { join };
    Asked::Servers { parts, join }
}

/// `HELLO [VERSION [AUTH USER PASSWORD] [SETNAME NAME]]`: a server says what it is, in the version that is asked for.
fn hello(args: &[&[u8]], version: Version) -> Said {
    let said = |asked| Said { asked, version, greeting: None };
    let wanted = match args.get(1) {
        None => version,
        Some(&b"2") => Version::Two,
        Some(&b"3") => Version::Three,
        Some(_) => return said(Asked::Answer(error("NOPROTO unsupported protocol version"))),
    };
    let mut options = args.get(2..).unwrap_or_default();
    loop {
        options = match options {
            [] => break,
            [word, _, _, ..] if word.eq_ignore_ascii_case(b"auth") => return said(refused(&[word], Refusal::Password)),
            // A name for lists of clients, which servers have of framers.
            [word, _, rest @ ..] if word.eq_ignore_ascii_case(b"setname") => rest,
            [word, ..] => {
                let text = format!("Syntax error in HELLO option '{}'", shown(word));
                return said(Asked::Answer(plain_error(&text)));
            }
        };
    }
    // The member's framer has greeted by then, so the server says the version that the client will speak.
    let bytes = request(wanted, &args[..1], None);
    let asked = Asked::Servers { parts: vec![Part { bytes, is_safe: true }], join: Join::Greeting };
    Said { asked, version, greeting: Some(wanted) }
}

/// `CLIENT`: what libraries say about themselves is taken, and nothing else.
fn client(args: &[&[u8]]) -> Asked {
    let is = |word: &[u8]| args.get(1).is_some_and(|arg| arg.eq_ignore_ascii_case(word));
    match args.len() {
        3 if is(b"setname") => okay(),
        4 if is(b"setinfo") => okay(),
        _ => refused(args, Refusal::Memory),
    }
}
