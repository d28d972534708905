//! DNS: SRV records under a zone say who serves a name, and on which port; A and AAAA where that is. TTLs are kept to.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use hickory_proto::rr::{Name, RData, Record, RecordType};
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use margay_core::key::HostId;
use margay_core::name::Prefix;
use tokio::task::JoinSet;

use super::dns_record::{Remark, owner};
use super::{Answering, Found, INSTANCES_MAX, Place, Resolve, ResolveError, Wanted};

/// Hosts of one answer whose addresses are asked for; further ones are left out.
const TARGETS_MAX: usize = 32;
/// Addresses of one host that are taken.
const ADDRESSES_MAX: usize = 4;
/// One server has so long before the next is asked.
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);

/// Servers that know a zone.
pub struct Dns {
    resolver: TokioResolver,
    zone: Name,
}

/// A host that SRV records name.
#[derive(Clone, Copy)]
struct Served {
    port: u16,
    weight: u32,
}

impl Dns {
    /// Asks these servers about names under `zone`.
    ///
    /// # Errors
    ///
    /// The zone is no name, or there is no server.
    pub fn new(servers: &[SocketAddr], zone: &str) -> Result<Self, String> {
        let mut zone = Name::from_ascii(zone).map_err(|error| format!("`{zone}` is no DNS zone: {error}"))?;
        zone.set_fqdn(true);
        let connections = |server: &SocketAddr| {
            let with_port = |mut connection: ConnectionConfig| {
                connection.port = server.port();
                connection
            };
            NameServerConfig::new(
                server.ip(),
                true,
                [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(with_port).into(),
            )
        };
        let config = ResolverConfig::from_parts(None, Vec::new(), servers.iter().map(connections).collect());
        let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        let options = builder.options_mut();
        options.timeout = SERVER_TIMEOUT;
        options.attempts = 1;
        // What holds is known to the service table; what does not is asked for again.
        options.cache_size = 0;
        options.use_hosts_file = ResolveHosts::Never;
        options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        let resolver = builder.build().map_err(|error| error.to_string())?;
        Ok(Self { resolver, zone })
    }

    async fn find(&self, wanted: &Wanted) -> Result<Found, ResolveError> {
        let owner = owner(wanted, &self.zone).map_err(|error| ResolveError::Unfit(error.to_string()))?;
        let (services, remarks) =
            tokio::join!(self.records(&owner, RecordType::SRV), self.records(&owner, RecordType::TXT));
        let (services, mut ttl) = services?;
        let served = best(&services);
        // Whoever writes no remarks has nothing to remark; a server that gives SRV and fails at TXT is as good.
        let (hosts, bits) = read_remarks(&remarks.map(|(records, _)| records).unwrap_or_default());
        let mut asking = JoinSet::new();
        for (target, served) in served {
            let resolver = self.resolver.clone();
            asking.spawn(async move {
                let addresses = resolver.lookup_ip(target.clone()).await;
                (target, served, addresses)
            });
        }
        let (mut places, mut failure) = (Vec::new(), ResolveError::Nobody);
        while let Some(Ok((target, served, addresses))) = asking.join_next().await {
            match addresses {
                Ok(addresses) => {
                    let addresses = addresses.as_lookup().answers();
                    ttl = ttl.min(shortest(addresses));
                    places.extend(places_of(addresses, served, hosts.get(&target).copied()));
                }
                Err(error) => failure = ResolveError::Failed(format!("{target} has no address: {error}")),
            }
        }
        if places.is_empty() {
            return Err(failure);
        }
        // The same for every answer, however the answers for the hosts came.
        places.sort_by_key(|place| place.address);
        places.truncate(INSTANCES_MAX);
        let prefix = bits.map_or_else(|| Prefix::from(wanted.service), |bits| Prefix::new(wanted.service, bits));
        Ok(Found { prefix, places, ttl })
    }

    /// Records of a name, and how long they hold.
    async fn records(&self, owner: &Name, kind: RecordType) -> Result<(Vec<Record>, Duration), ResolveError> {
        match self.resolver.lookup(owner.clone(), kind).await {
            Ok(found) => Ok((found.answers().to_vec(), shortest(found.answers()))),
            Err(error) if error.is_no_records_found() => Err(ResolveError::Nobody),
            Err(NetError::Timeout) => Err(ResolveError::Failed("no server answered in time".to_owned())),
            Err(error) => Err(ResolveError::Failed(error.to_string())),
        }
    }
}

fn shortest(records: &[Record]) -> Duration {
    Duration::from_secs(records.iter().map(|record| record.ttl).min().unwrap_or(0).into())
}

/// The hosts of the first priority (RFC 2782: the lowest number), each with its port and share.
fn best(records: &[Record]) -> HashMap<Name, Served> {
    let services = records.iter().filter_map(|record| match &record.data {
        // Its target is the root where the service is decidedly not there.
        RData::SRV(service) if service.port != 0 && !service.target.is_root() => Some(service),
        _ => None,
    });
    let Some(priority) = services.clone().map(|service| service.priority).min() else { return HashMap::new() };
    let first = services.filter(|service| service.priority == priority);
    // Zero is "hardly ever" there, and "never" here.
    let one = |service: &hickory_proto::rr::rdata::SRV| {
        (service.target.to_lowercase(), Served { port: service.port, weight: u32::from(service.weight).max(1) })
    };
    first.map(one).take(TARGETS_MAX).collect()
}

fn places_of(addresses: &[Record], served: Served, host: Option<HostId>) -> Vec<Place> {
    let address = |record: &Record| match &record.data {
        RData::A(v4) => Some(SocketAddr::new(v4.0.into(), served.port)),
        RData::AAAA(v6) => Some(SocketAddr::new(v6.0.into(), served.port)),
        _ => None,
    };
    let addresses: Vec<SocketAddr> = addresses.iter().filter_map(address).take(ADDRESSES_MAX).collect();
    // A host is one instance, by whichever family it is reached: IPv4 where it has that, as for registrations.
    let family = addresses.iter().any(SocketAddr::is_ipv4);
    let of_family = addresses.iter().filter(|address| address.is_ipv4() == family);
    of_family.take(1).map(|address| Place { address: *address, host, weight: served.weight }).collect()
}

/// What TXT records add: which host is behind a target, and for how many bits the answer is.
fn read_remarks(records: &[Record]) -> (HashMap<Name, HostId>, Option<u16>) {
    let (mut hosts, mut bits) = (HashMap::new(), None);
    for record in records.iter().take(INSTANCES_MAX + 1) {
        let RData::TXT(text) = &record.data else { continue };
        let bytes = text.txt_data.concat();
        match std::str::from_utf8(&bytes).ok().and_then(Remark::parse) {
            Some(Remark::Host { target, host }) => {
                hosts.insert(target, host);
            }
            Some(Remark::Bits(found)) => bits = Some(found),
            None => {}
        }
    }
    (hosts, bits)
}

impl Resolve for Dns {
    fn kind(&self) -> &'static str {
        "dns"
    }

    fn resolve<'a>(&'a self, wanted: &'a Wanted) -> Answering<'a> {
        Box::pin(self.find(wanted))
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
    use hickory_proto::rr::rdata::{A, SRV, TXT};
    use tokio::net::UdpSocket;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).expect("literal")
    }

    fn wanted() -> Wanted {
        let parsed: margay_core::name::Name = "web.shop".parse().expect("literal");
        Wanted { service: parsed.service_id(), written: Some("web.shop".to_owned()) }
    }

    /// A server that gives these records, and says of all else that there is none.
    async fn server(records: Vec<Record>) -> SocketAddr {
        let socket = UdpSocket::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = socket.local_addr().expect("bound");
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
                let Ok(asked) = Message::from_vec(&buffer[..len]) else { continue };
                let Some(query) = asked.queries.first().cloned() else { continue };
                let mut answer = Message::new(asked.id, MessageType::Response, OpCode::Query);
                let fits =
                    |record: &&Record| record.name == *query.name() && record.record_type() == query.query_type();
                answer.add_answers(records.iter().filter(fits).cloned());
                if answer.answers.is_empty() {
                    answer.metadata.response_code = ResponseCode::NXDomain;
                }
                answer.add_query(query);
                let bytes = answer.to_vec().expect("short");
                socket.send_to(&bytes, from).await.expect("sent");
            }
        });
        address
    }

    fn srv(priority: u16, weight: u16, target: &str) -> Record {
        Record::from_rdata(
            name("_sal._udp.web.shop.dns.test."),
            60,
            RData::SRV(SRV::new(priority, weight, 54324, name(target))),
        )
    }

    fn address(of: &str, ttl: u32, last: u8) -> Record {
        Record::from_rdata(name(of), ttl, RData::A(A::new(10, 1, 0, last)))
    }

    #[tokio::test]
    async fn srv_says_who_and_a_where_and_the_shortest_ttl_counts() {
        let remark = |text: &str| {
            let text = TXT::new(vec![text.to_owned()]);
            Record::from_rdata(name("_sal._udp.web.shop.dns.test."), 60, RData::TXT(text))
        };
        let server = server(vec![
            srv(5, 9, "h9.dns.test."),
            srv(1, 0, "H1.dns.test."),
            srv(1, 70, "h2.dns.test."),
            srv(1, 70, "gone.dns.test."),
            address("h1.dns.test.", 40, 1),
            address("h2.dns.test.", 30, 2),
            address("h9.dns.test.", 5, 9),
            remark("margay1 bits=96"),
            remark(&format!("margay1 host={} target=h2.dns.test.", "ab".repeat(16))),
            remark("v=spf1 -all"),
        ])
        .await;
        let dns = Dns::new(&[server], "dns.test").expect("right");
        let found = dns.find(&wanted()).await.expect("there");
        let place = |last: u8, host, weight| Place { address: ([10, 1, 0, last], 54324).into(), host, weight };
        assert_eq!(found.places, [place(1, None, 1), place(2, Some(HostId([0xab; 16])), 70)]);
        assert_eq!((found.prefix, found.ttl), (Prefix::new(wanted().service, 96), Duration::from_secs(30)));
    }

    #[tokio::test]
    async fn a_name_without_records_is_nobody_s_and_a_silent_server_is_no_answer() {
        let empty = Dns::new(&[server(Vec::new()).await], "dns.test").expect("right");
        assert_eq!(empty.find(&wanted()).await, Err(ResolveError::Nobody));
        let silent = UdpSocket::bind(("127.0.0.1", 0)).await.expect("a port");
        let silent = Dns::new(&[silent.local_addr().expect("bound")], "dns.test").expect("right");
        assert!(matches!(silent.find(&wanted()).await, Err(ResolveError::Failed(_))));
        let lost = Dns::new(&[server(vec![srv(1, 1, "gone.dns.test.")]).await], "dns.test").expect("right");
        let Err(ResolveError::Failed(why)) = lost.find(&wanted()).await else { panic!("found") };
        assert!(why.contains("gone.dns.test. has no address"), "{why}");
    }
}
