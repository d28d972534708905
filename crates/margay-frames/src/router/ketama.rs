//! Consistent hashing by key, with the ring of libketama: what libmemcached builds with `KETAMA_WEIGHTED` (and other
//! libraries where they are "libketama compatible") and twemproxy with `ketama`, for servers of equal weight.

use md5::{Digest, Md5};

/// Digests of a server; each gives [`POINTS_OF_DIGEST`] points.
const DIGESTS: u32 = 40;
const POINTS_OF_DIGEST: usize = 4;

/// A point of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    value: u32,
    server: usize,
}

/// The ring of some servers.
#[derive(Clone, Debug, Default)]
pub struct Ring {
    points: Vec<Point>,
}

impl Ring {
    /// Of servers by their labels, as the servers' list of a client has them: a name or an address, with `:port` where
    /// that is not 11211.
    pub fn new<'a>(labels: impl IntoIterator<Item = &'a str>) -> Self {
        let mut points = Vec::new();
        for (server, label) in labels.into_iter().enumerate() {
            for digest in 0..DIGESTS {
                let digest = Md5::digest(format!("{label}-{digest}"));
                let (values, _) = digest.as_slice().as_chunks::<POINTS_OF_DIGEST>();
                points.extend(values.iter().map(|value| Point { value: u32::from_le_bytes(*value), server }));
            }
        }
        points.sort_unstable();
        Self { points }
    }

    /// The servers that a key goes to, the first one before those that stand in for it. Each may come several times.
    pub fn servers_of(&self, key: &[u8]) -> impl Iterator<Item = usize> + '_ {
        let hash = hash_of(key);
        let at = self.points.partition_point(|point| point.value < hash);
        self.points[at..].iter().chain(&self.points[..at]).map(|point| point.server)
    }
}

fn hash_of(key: &[u8]) -> u32 {
    let digest = Md5::digest(key);
    u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]])
}

#[cfg(test)]
mod test {
    use super::*;

    /// Numbers of another implementation.
    #[test]
    fn the_ring_is_libketamas() {
        let ring = Ring::new(["10.0.0.1", "10.0.0.2", "10.0.0.3:11212"]);
        let points: Vec<(u32, usize)> = ring.points.iter().map(|point| (point.value, point.server)).collect();
        assert_eq!(points.len(), 3 * 160);
        assert_eq!(points[..4], [(3_706_987, 2), (6_707_921, 2), (18_272_749, 1), (36_885_389, 1)]);
        assert_eq!(points[478..], [(4_262_511_627, 0), (4_279_332_826, 1)]);
        let one = Ring::new(["10.0.0.1"]);
        let has = |value| one.points.iter().any(|point| point.value == value);
        assert!([563_378_236, 920_037_467, 4_058_903_954, 1_084_864_719].into_iter().all(has));
        for (key, hash, server) in [
            ("foo", 3_675_831_724, 1),
            ("key:1", 1_018_217_594, 1),
            ("key:2", 3_156_782_594, 2),
            ("a", 3_111_502_092, 1),
        ] {
            assert_eq!(hash_of(key.as_bytes()), hash, "{key}");
            assert_eq!(ring.servers_of(key.as_bytes()).next(), Some(server), "{key}");
        }
        assert_eq!(Ring::default().servers_of(b"a").next(), None);
    }

    #[test]
    fn only_keys_of_a_server_that_goes_move() {
        let three = Ring::new(["a", "b", "c"]);
        let two = Ring::new(["a", "b"]);
        for number in 0..1000 {
            let key = format!("key:{number}");
            let was = three.servers_of(key.as_bytes()).next();
            let is = two.servers_of(key.as_bytes()).next();
            assert!(was == is || was == Some(2), "{key}");
            let in_its_place = three.servers_of(key.as_bytes()).find(|server| *server != 2);
            assert_eq!(in_its_place, is, "{key}");
        }
    }
}
