//! A static file of names and where they are served. It is read again when it has changed; while it is wrong, its last
//! good content holds.
//!
//! ```text
//! # name      addresses                       share of each
//! web.shop    10.1.0.2 [fd01::3]:54324        weight=100
//! web.shop    10.1.0.4                        weight=50
//! sid:c0ffee/24  10.1.0.9
//! ```

use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use margay_core::Ranges;
use margay_core::name::{Name, Prefix, ServiceId};
use parking_lot::Mutex;

use super::{Answering, Found, INSTANCES_MAX, Place, Resolve, ResolveError, Wanted};

/// How long an answer holds: a change of the file is in force everywhere after that.
pub const TTL: Duration = Duration::from_secs(10);
/// Of the file.
const BYTES_MAX: u64 = 4 << 20;
/// Share of an instance whose line says none, as for services.
const WEIGHT: u32 = 100;
const WEIGHT_MAX: u32 = 65_535;

type Lines = Vec<(Prefix, Place)>;

/// By what a change is seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

#[derive(Default)]
struct Content {
    stamp: Option<Stamp>,
    lines: Lines,
    trouble: Option<String>,
}

/// The file.
pub struct StaticFile {
    path: PathBuf,
    ranges: Ranges,
    content: Mutex<Content>,
}

impl StaticFile {
    /// Reads it for the first time. What is wrong with it is said by `trouble`. `ranges`: addresses of no other host.
    pub fn new(path: PathBuf, ranges: Ranges) -> Self {
        let this = Self { path, ranges, content: Mutex::default() };
        this.refresh();
        this
    }

    fn refresh(&self) {
        let mut content = self.content.lock();
        match read(&self.path, content.stamp) {
            Ok(None) => {}
            Ok(Some((stamp, text))) => {
                content.stamp = Some(stamp);
                match parse(&text, self.ranges) {
                    Ok(lines) => (content.lines, content.trouble) = (lines, None),
                    Err((line, what)) => {
                        content.trouble = Some(format!("{}:{line}: {what}", self.path.display()));
                    }
                }
            }
            Err(error) => {
                // Whatever it was read from before is gone: the next content is new.
                content.stamp = None;
                content.trouble = Some(format!("{}: {error}", self.path.display()));
            }
        }
    }

    fn find(&self, service: &ServiceId) -> Result<Found, ResolveError> {
        self.refresh();
        let content = self.content.lock();
        let covering = content.lines.iter().filter(|(prefix, _)| prefix.contains(service));
        let Some(bits) = covering.clone().map(|(prefix, _)| prefix.bits).max() else {
            return Err(content.trouble.clone().map_or(ResolveError::Nobody, ResolveError::Failed));
        };
        let longest = covering.filter(|(prefix, _)| prefix.bits == bits);
        let places = longest.map(|(_, place)| *place).take(INSTANCES_MAX).collect();
        Ok(Found { prefix: Prefix::new(*service, bits), places, ttl: TTL })
    }
}

impl Resolve for StaticFile {
    fn kind(&self) -> &'static str {
        "static"
    }

    fn resolve<'a>(&'a self, wanted: &'a Wanted) -> Answering<'a> {
        Box::pin(async move { tokio::task::block_in_place(|| self.find(&wanted.service)) })
    }

    fn trouble(&self) -> Option<String> {
        self.refresh();
        self.content.lock().trouble.clone()
    }
}

/// The text, unless it is the one with this stamp.
fn read(path: &Path, known: Option<Stamp>) -> Result<Option<(Stamp, String)>, String> {
    let about = fs::metadata(path).map_err(|error| error.to_string())?;
    let stamp = Stamp { inode: about.ino(), bytes: about.size(), changed: (about.mtime(), about.mtime_nsec()) };
    if known == Some(stamp) {
        return Ok(None);
    }
    if !about.is_file() {
        return Err("it is no file".to_owned());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is larger than {BYTES_MAX} bytes"));
    }
    let text = String::from_utf8(bytes).map_err(|_| "it is no text (UTF-8)".to_owned())?;
    Ok(Some((stamp, text)))
}

fn parse(text: &str, ranges: Ranges) -> Result<Lines, (usize, String)> {
    let mut all = Lines::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split_once('#').map_or(line, |(line, _)| line);
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        let prefix = name.parse::<Name>().map_err(|error| (number, error.to_string()))?.prefix();
        let (mut addresses, mut weight) = (Vec::new(), WEIGHT);
        for word in words {
            match word.split_once('=') {
                Some(("weight", value)) => weight = parse_weight(value).map_err(|what| (number, what))?,
                Some((other, _)) => return Err((number, format!("`{other}` is no word here; there is weight=NUMBER"))),
                None => addresses.push(parse_address(word, ranges).map_err(|what| (number, what))?),
            }
        }
        if addresses.is_empty() {
            return Err((number, format!("{name} has no address; write for example `{name} 10.1.0.2`")));
        }
        all.extend(addresses.into_iter().map(|address| (prefix, Place { address, host: None, weight })));
    }
    Ok(all)
}

fn parse_weight(text: &str) -> Result<u32, String> {
    let weight = text.parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight));
    weight.ok_or_else(|| format!("`weight={text}`: a weight is 1 to {WEIGHT_MAX}; leave out who takes nothing"))
}

fn parse_address(text: &str, ranges: Ranges) -> Result<SocketAddr, String> {
    let with_port = |ip: IpAddr| SocketAddr::new(ip, margay_wire::PORT);
    let address = text.parse::<IpAddr>().map(with_port).or_else(|_| text.parse::<SocketAddr>());
    let address =
        address.map_err(|_| format!("`{text}` is no address; write for example 10.1.0.2 or [fd01::2]:54324"))?;
    let ip = address.ip();
    let is_nobodys = ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || ranges.is_virtual(ip);
    if address.port() == 0 || is_nobodys {
        return Err(format!("{text} is no address of a host on the network"));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> ServiceId {
        name.parse::<Name>().expect("literal").service_id()
    }

    fn place(text: &str, weight: u32) -> Place {
        Place { address: text.parse().expect("literal"), host: None, weight }
    }

    #[test]
    fn lines_say_who_serves_what_and_the_longest_prefix_counts() {
        let text = "# comment\n\nweb.shop 10.1.0.2 [fd01::3]:99 weight=7 # two\nweb.shop\t10.1.0.4\nsid:/0 10.9.9.9\n";
        let lines = parse(text, Ranges::USUAL).expect("right");
        let of = |name: &str| lines.iter().filter(|(prefix, _)| prefix.contains(&service(name))).count();
        assert_eq!((of("web.shop"), of("mail.shop")), (4, 1));
        assert_eq!(lines[0].1, place("10.1.0.2:54324", 7));
        assert_eq!(lines[1].1, place("[fd01::3]:99", 7));
        assert_eq!(lines[2].1, place("10.1.0.4:54324", 100));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (text, line, what) in [
            ("web.shop 10.1.0.2\nweb 10.1.0.2", 2, "authority"),
            ("web.shop", 1, "has no address"),
            ("\n\nweb.shop 10.1.0", 3, "`10.1.0` is no address"),
            ("web.shop 10.1.0.2 weight=0", 1, "a weight is 1 to 65535"),
            ("web.shop 10.1.0.2 wait=1", 1, "`wait` is no word here"),
            ("web.shop 127.0.0.1", 1, "no address of a host on the network"),
            ("web.shop 198.18.0.9", 1, "no address of a host on the network"),
        ] {
            let (at, said) = parse(text, Ranges::USUAL).expect_err("wrong");
            assert!(at == line && said.contains(what), "{text:?}: {at}: {said}");
        }
    }

    #[test]
    fn a_change_is_seen_and_a_wrong_one_changes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("names");
        let file = StaticFile::new(path.clone(), Ranges::USUAL);
        assert!(file.trouble().expect("it is not there").contains("names: No such file"));
        assert!(matches!(file.find(&service("web.shop")), Err(ResolveError::Failed(_))));
        fs::write(&path, "web.shop 10.1.0.2\n").expect("written");
        assert_eq!(file.trouble(), None);
        let found = file.find(&service("web.shop")).expect("there");
        assert_eq!((found.prefix, found.ttl), (service("web.shop").into(), TTL));
        assert_eq!(file.find(&service("mail.shop")), Err(ResolveError::Nobody));
        fs::write(&path, "web.shop 10.1.0.3\nweb.shop nowhere\n").expect("written");
        assert!(file.trouble().expect("wrong").contains("names:2: `nowhere` is no address"));
        assert_eq!(file.find(&service("web.shop")), Ok(found), "the last good content holds");
        fs::write(&path, "web.shop 10.1.0.33\n").expect("written");
        assert_eq!(file.find(&service("web.shop")).expect("there").places, [place("10.1.0.33:54324", 100)]);
        assert_eq!(file.trouble(), None);
    }
}
