//! Which commands there are, where their keys are, and what an ensemble does with them: of Redis 7 as `COMMAND` has
//! them, and those of later versions, and of Valkey, whose key comes first.

use crate::protocol::Join;

/// A command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Command {
    /// In small letters, with the subcommand where there is one.
    name: &'static str,
    pub(super) what: What,
    /// It changes nothing: another server may be told the same.
    pub(super) is_safe: bool,
}

/// What an ensemble does with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The member of its keys gets the command: they must all be placed by the same.
    Keys(Keys),
    /// Each key is asked for alone; with it come `len - 1` arguments.
    Each {
        len: usize,
        join: Join,
    },
    /// Any member answers.
    Any,
    /// It depends on the next argument.
    Subcommand,
    /// The framer answers, or does more than to pass it on.
    Own(Own),
    Refused(Refusal),
}

/// Where the keys of a command are: arguments are counted from its name, which is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keys {
    /// Each `step`th from one to another, which is counted from the end if it is negative.
    Range { first: usize, last: isize, step: usize },
    /// At a place there is how many follow.
    Counted { at: usize },
    /// The first argument, and those behind the number in the second.
    FirstAndCounted,
    /// The first half of what follows the word `STREAMS`, which is looked for from a place on.
    Streams { options: usize },
    /// The first argument, and those behind the words `STORE` and `STOREDIST`, which are looked for from a place on.
    Stored { options: usize },
    /// The same of `SORT`, whose patterns name other keys.
    Sorted,
}

/// What a framer does itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    Hello,
    Quit,
    Select,
    Reset,
    Client,
    /// It is none of Redis: a browser was led here, as Redis itself suspects.
    Web,
}

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A server would have to remember it for the connection, and there are many servers.
    Memory,
    /// It would hold up what follows.
    Blocks,
    /// It concerns no key, or all.
    NoKey,
    /// It concerns another database than the first.
    Database,
    /// It is a password.
    Password,
    /// It names keys by patterns.
    Pattern,
}

impl Refusal {
    /// In words.
    pub(super) const fn why(self) -> &'static str {
        match self {
            Self::Memory => "a server would have to remember it for this connection, which has many servers",
            Self::Blocks => "it waits, and would hold up a server that leaves",
            Self::NoKey => "it concerns no key, or all of a server's; ask a server itself",
            Self::Database => "there is database 0 alone",
            Self::Password => "Margay knows who may connect, and there is no password",
            Self::Pattern => "patterns may name keys of other servers",
        }
    }
}

/// Finds a command; of one with subcommands the next argument says which.
pub(super) fn find(args: &[&[u8]]) -> Option<&'static Command> {
    let name = args.first()?.to_ascii_lowercase();
    let command = named(&name)?;
    if command.what != What::Subcommand {
        return Some(command);
    }
    let subcommand = args.get(1)?.to_ascii_lowercase();
    named(&[&name[..], b" ", &subcommand].concat())
}

/// Whether the next argument is part of a command's name.
pub(super) fn has_subcommands(name: &[u8]) -> bool {
    named(&name.to_ascii_lowercase())
        .is_some_and(|command| matches!(command.what, What::Subcommand | What::Own(Own::Client)))
}

fn named(name: &[u8]) -> Option<&'static Command> {
    let at = COMMANDS.binary_search_by(|command| command.name.as_bytes().cmp(name)).ok()?;
    COMMANDS.get(at)
}

/// The keys of a command, as far as its arguments are there. `count` is how many arguments it has. None: where they
/// are to be cannot be.
pub(super) fn keys_of<'a>(keys: Keys, args: &[&'a [u8]], count: usize) -> Option<Vec<&'a [u8]>> {
    let behind = |from: usize, len: usize| -> Option<Vec<&'a [u8]>> {
        let end = from.checked_add(len).filter(|end| len > 0 && *end <= count)?;
        Some(args.get(from..end.min(args.len())).unwrap_or_default().to_vec())
    };
    let number = |at: usize| -> Option<usize> { std::str::from_utf8(args.get(at)?).ok()?.parse().ok() };
    match keys {
        Keys::Range { first, last, step } => {
            let last = if last < 0 { count.checked_add_signed(last)? } else { last.unsigned_abs() };
            if first > last || last >= count {
                return None;
            }
            Some(args.iter().take(last + 1).skip(first).step_by(step).copied().collect())
        }
        Keys::Counted { at } => behind(at + 1, number(at)?),
        Keys::FirstAndCounted => {
            let others = behind(3, number(2)?)?;
            Some([&args[1..2], &others].concat())
        }
        Keys::Streams { options } => {
            let word = word_at(args, options, b"streams")?;
            let rest = count - word - 1;
            if rest.is_multiple_of(2) { behind(word + 1, rest / 2) } else { None }
        }
        Keys::Stored { options } => stored(args, options),
        Keys::Sorted => stored(args, 2),
    }
}

fn stored<'a>(args: &[&'a [u8]], options: usize) -> Option<Vec<&'a [u8]>> {
    let mut keys = vec![*args.get(1)?];
    for (at, word) in args.iter().enumerate().skip(options) {
        if word.eq_ignore_ascii_case(b"store") || word.eq_ignore_ascii_case(b"storedist") {
            keys.extend(args.get(at + 1));
        }
    }
    Some(keys)
}

/// Where a word is, in whatever letters, among arguments from one on.
fn word_at(args: &[&[u8]], from: usize, word: &[u8]) -> Option<usize> {
    args.iter().enumerate().skip(from).find(|(_, arg)| arg.eq_ignore_ascii_case(word)).map(|(at, _)| at)
}

/// Why a command with these arguments is refused, although others of its name are not.
pub(super) fn refusal_of(keys: Keys, args: &[&[u8]]) -> Option<Refusal> {
    match keys {
        Keys::Streams { options } => {
            let word = word_at(args, options, b"streams").unwrap_or(args.len());
            word_at(&args[..word], options, b"block").map(|_| Refusal::Blocks)
        }
        Keys::Sorted => [&b"by"[..], b"get"].iter().find_map(|word| word_at(args, 2, word)).map(|_| Refusal::Pattern),
        _ => None,
    }
}

const fn of(name: &'static str, keys: Keys, is_safe: bool) -> Command {
    Command { name, what: What::Keys(keys), is_safe }
}

const fn keys(name: &'static str, first: usize, last: isize, step: usize, is_safe: bool) -> Command {
    of(name, Keys::Range { first, last, step }, is_safe)
}

/// With one key, which it does not change.
const fn read(name: &'static str, key: isize) -> Command {
    keys(name, key.unsigned_abs(), key, 1, true)
}

/// With one key, which it may change.
const fn write(name: &'static str, key: isize) -> Command {
    keys(name, key.unsigned_abs(), key, 1, false)
}

const fn counted(name: &'static str, at: usize, is_safe: bool) -> Command {
    of(name, Keys::Counted { at }, is_safe)
}

const fn each(name: &'static str, len: usize, join: Join, is_safe: bool) -> Command {
    Command { name, what: What::Each { len, join }, is_safe }
}

const fn any(name: &'static str) -> Command {
    Command { name, what: What::Any, is_safe: true }
}

const fn with_subcommand(name: &'static str) -> Command {
    Command { name, what: What::Subcommand, is_safe: false }
}

const fn own(name: &'static str, own: Own) -> Command {
    // A greeting is asked of servers.
    Command { name, what: What::Own(own), is_safe: matches!(own, Own::Hello) }
}

const fn refused(name: &'static str, refusal: Refusal) -> Command {
    Command { name, what: What::Refused(refusal), is_safe: false }
}

/// All commands, in the order of their names.
const COMMANDS: &[Command] = &[
    refused("acl", Refusal::NoKey),
    write("append", 1),
    refused("asking", Refusal::Memory),
    refused("auth", Refusal::Password),
    refused("bgrewriteaof", Refusal::NoKey),
    refused("bgsave", Refusal::NoKey),
    read("bitcount", 1),
    write("bitfield", 1),
    read("bitfield_ro", 1),
    keys("bitop", 2, -1, 1, false),
    read("bitpos", 1),
    refused("blmove", Refusal::Blocks),
    refused("blmpop", Refusal::Blocks),
    refused("blpop", Refusal::Blocks),
    refused("brpop", Refusal::Blocks),
    refused("brpoplpush", Refusal::Blocks),
    refused("bzmpop", Refusal::Blocks),
    refused("bzpopmax", Refusal::Blocks),
    refused("bzpopmin", Refusal::Blocks),
    own("client", Own::Client),
    refused("cluster", Refusal::NoKey),
    any("command"),
    refused("config", Refusal::NoKey),
    keys("copy", 1, 2, 1, false),
    refused("dbsize", Refusal::NoKey),
    refused("debug", Refusal::NoKey),
    write("decr", 1),
    write("decrby", 1),
    each("del", 1, Join::Sum, false),
    write("delifeq", 1),
    read("digest", 1),
    refused("discard", Refusal::Memory),
    read("dump", 1),
    any("echo"),
    counted("eval", 2, false),
    counted("eval_ro", 2, true),
    counted("evalsha", 2, false),
    counted("evalsha_ro", 2, true),
    refused("exec", Refusal::Memory),
    each("exists", 1, Join::Sum, true),
    write("expire", 1),
    write("expireat", 1),
    read("expiretime", 1),
    refused("failover", Refusal::NoKey),
    counted("fcall", 2, false),
    counted("fcall_ro", 2, true),
    refused("flushall", Refusal::NoKey),
    refused("flushdb", Refusal::NoKey),
    refused("function", Refusal::NoKey),
    write("geoadd", 1),
    read("geodist", 1),
    read("geohash", 1),
    read("geopos", 1),
    of("georadius", Keys::Stored { options: 6 }, false),
    read("georadius_ro", 1),
    of("georadiusbymember", Keys::Stored { options: 5 }, false),
    read("georadiusbymember_ro", 1),
    read("geosearch", 1),
    keys("geosearchstore", 1, 2, 1, false),
    read("get", 1),
    read("getbit", 1),
    write("getdel", 1),
    write("getex", 1),
    read("getrange", 1),
    write("getset", 1),
    write("hdel", 1),
    own("hello", Own::Hello),
    read("hexists", 1),
    write("hexpire", 1),
    write("hexpireat", 1),
    read("hexpiretime", 1),
    read("hget", 1),
    read("hgetall", 1),
    write("hgetdel", 1),
    write("hgetex", 1),
    write("hincrby", 1),
    write("hincrbyfloat", 1),
    read("hkeys", 1),
    read("hlen", 1),
    read("hmget", 1),
    write("hmset", 1),
    own("host:", Own::Web),
    write("hpersist", 1),
    write("hpexpire", 1),
    write("hpexpireat", 1),
    read("hpexpiretime", 1),
    read("hpttl", 1),
    read("hrandfield", 1),
    read("hscan", 1),
    write("hset", 1),
    write("hsetex", 1),
    write("hsetnx", 1),
    read("hstrlen", 1),
    read("httl", 1),
    read("hvals", 1),
    write("incr", 1),
    write("incrby", 1),
    write("incrbyfloat", 1),
    any("info"),
    refused("keys", Refusal::NoKey),
    refused("lastsave", Refusal::NoKey),
    refused("latency", Refusal::NoKey),
    keys("lcs", 1, 2, 1, true),
    read("lindex", 1),
    write("linsert", 1),
    read("llen", 1),
    keys("lmove", 1, 2, 1, false),
    counted("lmpop", 1, false),
    refused("lolwut", Refusal::NoKey),
    write("lpop", 1),
    read("lpos", 1),
    write("lpush", 1),
    write("lpushx", 1),
    read("lrange", 1),
    write("lrem", 1),
    write("lset", 1),
    write("ltrim", 1),
    with_subcommand("memory"),
    refused("memory doctor", Refusal::NoKey),
    refused("memory help", Refusal::NoKey),
    refused("memory malloc-stats", Refusal::NoKey),
    refused("memory purge", Refusal::NoKey),
    refused("memory stats", Refusal::NoKey),
    read("memory usage", 2),
    each("mget", 1, Join::Array, true),
    refused("migrate", Refusal::NoKey),
    refused("module", Refusal::NoKey),
    refused("monitor", Refusal::Memory),
    refused("move", Refusal::Database),
    each("mset", 2, Join::Okay, false),
    keys("msetnx", 1, -1, 2, false),
    refused("multi", Refusal::Memory),
    with_subcommand("object"),
    read("object encoding", 2),
    read("object freq", 2),
    refused("object help", Refusal::NoKey),
    read("object idletime", 2),
    read("object refcount", 2),
    write("persist", 1),
    write("pexpire", 1),
    write("pexpireat", 1),
    read("pexpiretime", 1),
    write("pfadd", 1),
    keys("pfcount", 1, -1, 1, true),
    refused("pfdebug", Refusal::NoKey),
    keys("pfmerge", 1, -1, 1, false),
    refused("pfselftest", Refusal::NoKey),
    any("ping"),
    own("post", Own::Web),
    write("psetex", 1),
    refused("psubscribe", Refusal::Memory),
    refused("psync", Refusal::NoKey),
    read("pttl", 1),
    refused("publish", Refusal::NoKey),
    refused("pubsub", Refusal::NoKey),
    refused("punsubscribe", Refusal::Memory),
    own("quit", Own::Quit),
    refused("randomkey", Refusal::NoKey),
    refused("readonly", Refusal::Memory),
    refused("readwrite", Refusal::Memory),
    keys("rename", 1, 2, 1, false),
    keys("renamenx", 1, 2, 1, false),
    refused("replconf", Refusal::NoKey),
    refused("replicaof", Refusal::NoKey),
    own("reset", Own::Reset),
    write("restore", 1),
    refused("restore-asking", Refusal::NoKey),
    refused("role", Refusal::NoKey),
    write("rpop", 1),
    keys("rpoplpush", 1, 2, 1, false),
    write("rpush", 1),
    write("rpushx", 1),
    write("sadd", 1),
    refused("save", Refusal::NoKey),
    refused("scan", Refusal::NoKey),
    read("scard", 1),
    refused("script", Refusal::NoKey),
    keys("sdiff", 1, -1, 1, true),
    keys("sdiffstore", 1, -1, 1, false),
    own("select", Own::Select),
    write("set", 1),
    write("setbit", 1),
    write("setex", 1),
    write("setnx", 1),
    write("setrange", 1),
    refused("shutdown", Refusal::NoKey),
    keys("sinter", 1, -1, 1, true),
    counted("sintercard", 1, true),
    keys("sinterstore", 1, -1, 1, false),
    read("sismember", 1),
    refused("slaveof", Refusal::NoKey),
    refused("slowlog", Refusal::NoKey),
    read("smembers", 1),
    read("smismember", 1),
    keys("smove", 1, 2, 1, false),
    of("sort", Keys::Sorted, false),
    of("sort_ro", Keys::Sorted, true),
    write("spop", 1),
    refused("spublish", Refusal::NoKey),
    read("srandmember", 1),
    write("srem", 1),
    read("sscan", 1),
    refused("ssubscribe", Refusal::Memory),
    read("strlen", 1),
    refused("subscribe", Refusal::Memory),
    read("substr", 1),
    keys("sunion", 1, -1, 1, true),
    keys("sunionstore", 1, -1, 1, false),
    refused("sunsubscribe", Refusal::Memory),
    refused("swapdb", Refusal::NoKey),
    refused("sync", Refusal::NoKey),
    any("time"),
    each("touch", 1, Join::Sum, true),
    read("ttl", 1),
    read("type", 1),
    each("unlink", 1, Join::Sum, false),
    refused("unsubscribe", Refusal::Memory),
    refused("unwatch", Refusal::Memory),
    refused("wait", Refusal::Memory),
    refused("waitaof", Refusal::Memory),
    refused("watch", Refusal::Memory),
    write("xack", 1),
    write("xackdel", 1),
    write("xadd", 1),
    write("xautoclaim", 1),
    write("xclaim", 1),
    write("xdel", 1),
    write("xdelex", 1),
    with_subcommand("xgroup"),
    write("xgroup create", 2),
    write("xgroup createconsumer", 2),
    write("xgroup delconsumer", 2),
    write("xgroup destroy", 2),
    refused("xgroup help", Refusal::NoKey),
    write("xgroup setid", 2),
    with_subcommand("xinfo"),
    read("xinfo consumers", 2),
    read("xinfo groups", 2),
    refused("xinfo help", Refusal::NoKey),
    read("xinfo stream", 2),
    read("xlen", 1),
    read("xpending", 1),
    read("xrange", 1),
    of("xread", Keys::Streams { options: 1 }, true),
    of("xreadgroup", Keys::Streams { options: 4 }, false),
    read("xrevrange", 1),
    write("xsetid", 1),
    write("xtrim", 1),
    write("zadd", 1),
    read("zcard", 1),
    read("zcount", 1),
    counted("zdiff", 1, true),
    of("zdiffstore", Keys::FirstAndCounted, false),
    write("zincrby", 1),
    counted("zinter", 1, true),
    counted("zintercard", 1, true),
    of("zinterstore", Keys::FirstAndCounted, false),
    read("zlexcount", 1),
    counted("zmpop", 1, false),
    read("zmscore", 1),
    write("zpopmax", 1),
    write("zpopmin", 1),
    read("zrandmember", 1),
    read("zrange", 1),
    read("zrangebylex", 1),
    read("zrangebyscore", 1),
    keys("zrangestore", 1, 2, 1, false),
    read("zrank", 1),
    write("zrem", 1),
    write("zremrangebylex", 1),
    write("zremrangebyrank", 1),
    write("zremrangebyscore", 1),
    read("zrevrange", 1),
    read("zrevrangebylex", 1),
    read("zrevrangebyscore", 1),
    read("zrevrank", 1),
    read("zscan", 1),
    read("zscore", 1),
    counted("zunion", 1, true),
    of("zunionstore", Keys::FirstAndCounted, false),
];

#[cfg(test)]
mod test {
    use super::*;

    fn keys_in(text: &str) -> Option<Vec<String>> {
        let args: Vec<&[u8]> = text.split(' ').map(str::as_bytes).collect();
        let What::Keys(keys) = find(&args).expect("a command").what else { panic!("{text} has keys") };
        let found = keys_of(keys, &args, args.len())?;
        Some(found.into_iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect())
    }

    #[test]
    fn names_are_in_order_and_each_is_there_once() {
        assert!(COMMANDS.is_sorted_by(|a, b| a.name < b.name));
        assert!(COMMANDS.iter().all(|command| command.name == command.name.to_ascii_lowercase()));
    }

    #[test]
    fn keys_are_where_each_command_has_them() {
        for (text, keys) in [
            ("get a", "a"),
            ("SeT a 1 EX 5", "a"),
            ("bitop and d a b", "d a b"),
            ("smove a b m", "a b"),
            ("msetnx a 1 b 2", "a b"),
            ("eval s 2 a b x", "a b"),
            ("lmpop 2 a b left", "a b"),
            ("zunionstore d 2 a b weights 1 2", "d a b"),
            ("xread count 2 STREAMS a b 0 0", "a b"),
            ("xreadgroup group streams c streams a >", "a"),
            ("georadius a 1 2 3 km store d", "a d"),
            ("georadiusbymember a store 3 km storedist d", "a d"),
            ("sort a limit 0 5 store d", "a d"),
            ("object encoding a", "a"),
            ("memory usage a samples 0", "a"),
            ("xgroup create a g 0", "a"),
            ("pfcount a b c", "a b c"),
        ] {
            assert_eq!(keys_in(text).unwrap_or_default().join(" "), keys, "{text}");
        }
    }

    #[test]
    fn what_has_no_keys_where_they_should_be_is_found() {
        for text in [
            "get",
            "bitop and",
            "eval s 0",
            "eval s x",
            "eval s 3 a",
            "lmpop 0 left",
            "xread count 2 a 0",
            "xread streams a b 0",
            "xread streams",
            "zunionstore d 3 a b",
            "smove a",
            "eval s 18446744073709551615 a",
        ] {
            assert_eq!(keys_in(text), None, "{text}");
        }
    }

    #[test]
    fn some_are_refused_for_their_options() {
        let refused = |text: &str| {
            let args: Vec<&[u8]> = text.split(' ').map(str::as_bytes).collect();
            let What::Keys(keys) = find(&args).expect("a command").what else { panic!("{text} has keys") };
            refusal_of(keys, &args)
        };
        assert_eq!(refused("xread block 0 streams a 0"), Some(Refusal::Blocks));
        assert_eq!(refused("xread streams block 0"), None, "it is a key");
        assert_eq!(refused("sort a by w_*"), Some(Refusal::Pattern));
        assert_eq!(refused("sort a desc"), None);
    }

    #[test]
    fn subcommands_and_unknown_words() {
        assert!(find(&[b"object", b"dance"]).is_none());
        assert!(find(&[b"object"]).is_none());
        assert!(find(&[b"dance"]).is_none());
        assert!(find(&[]).is_none());
        let help = find(&[b"OBJECT", b"HELP"]).expect("a command");
        assert_eq!(help.what, What::Refused(Refusal::NoKey));
    }
}
