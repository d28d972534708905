//! A topology file: which hosts there are, which subnets join them, and how each link behaves.
//!
//! TOML, strict: an unknown word is an error, and every error names the line. [`crate::route`] computes the routes.
//!
//! ```toml
//! authority = "shop"
//!
//! [subnet.site]
//! v4 = "10.1.0.0/24"
//! delay_ms = 5
//!
//! [host.r1]
//! role = "router"
//! links = [{ subnet = "site" }]
//!
//! [host.web1]
//! role = "agent"
//! links = [{ subnet = "site", rate_mbit = 100 }]
//! ```

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::path::Path;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::Deserialize;
use toml::Spanned;

/// Longest host or subnet name: interface names are made of them (15 bytes, with a prefix and a number).
const NAME_MAX: usize = 9;
const MTU_MIN: u32 = 576;
const MTU_MIN_V6: u32 = 1280;
const MTU_MAX: u32 = 65_535;
const DELAY_MAX_MS: f64 = 10_000.0;

/// What a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Runs a Margay agent that joins the first service router.
    Agent,
    /// Runs a Margay agent as service router.
    Router,
    /// Has no Margay.
    Plain,
    /// Has no Margay and forwards IP; may masquerade or filter.
    Gateway,
}

/// How a link behaves. Rate, delay and loss hold in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Largest IP packet in bytes.
    pub mtu: u32,
    /// Token bucket at both ends.
    pub rate_mbit: Option<u32>,
    /// Delay of one direction. A packet between two hosts of a subnet passes two links.
    pub delay_ms: f64,
    /// Share of packets lost, 0 to 1.
    pub loss: f64,
    /// Whether segmentation may be left to the far end (as veth does); without, segments are cut on the way.
    pub offload: bool,
}

impl Shape {
    /// Whether packets must pass the user-space link.
    pub fn needs_pump(&self) -> bool {
        self.delay_ms > 0.0 || self.loss > 0.0
    }
}

/// A broadcast domain.
#[derive(Clone, Debug)]
pub struct Subnet {
    /// Its name in the file.
    pub name: String,
    /// IPv4 addresses of its hosts.
    pub v4: Option<Ipv4Net>,
    /// IPv6 addresses of its hosts.
    pub v6: Option<Ipv6Net>,
}

/// A host's place in a subnet. Its interface is `eth<index>`.
#[derive(Clone, Debug)]
pub struct Link {
    /// Index into [`Topology::subnets`].
    pub subnet: usize,
    /// Address in the subnet's IPv4 network.
    pub v4: Option<Ipv4Addr>,
    /// Address in the subnet's IPv6 network.
    pub v6: Option<Ipv6Addr>,
    /// The subnet's shape, as changed by the link.
    pub shape: Shape,
}

impl Link {
    /// The link's address of one family.
    pub fn address(&self, v6: bool) -> Option<IpAddr> {
        if v6 { self.v6.map(IpAddr::V6) } else { self.v4.map(IpAddr::V4) }
    }
}

/// A host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name in the file, and its host name.
    pub name: String,
    /// What it is.
    pub role: Role,
    /// Its interfaces in order.
    pub links: Vec<Link>,
    /// Subnet towards which a gateway masquerades; who is there cannot reach what is behind.
    pub nat: Option<usize>,
    /// Subnet from which a gateway lets in only what belongs to known connections.
    pub firewall: Option<usize>,
}

impl Host {
    /// The host's first address: IPv4 where there is one.
    pub fn address(&self) -> Option<IpAddr> {
        self.links.iter().find_map(|link| link.address(false).or(link.address(true)))
    }
}

/// A checked topology.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Name of the authority under which agents join.
    pub authority: String,
    /// In the order of the file.
    pub subnets: Vec<Subnet>,
    /// In the order of the file.
    pub hosts: Vec<Host>,
}

/// What is wrong with a topology file, and where.
#[derive(Debug, thiserror::Error)]
pub struct TopologyError {
    file: String,
    line: usize,
    column: usize,
    source_line: String,
    message: String,
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)?;
        if !self.source_line.is_empty() {
            write!(f, "\n  | {}\n  | {:>width$}", self.source_line, '^', width = self.column)?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    #[serde(default = "default_authority")]
    authority: Spanned<String>,
    #[serde(default)]
    subnet: HashMap<Spanned<String>, SubnetForm>,
    #[serde(default)]
    host: HashMap<Spanned<String>, HostForm>,
}

fn default_authority() -> Spanned<String> {
    Spanned::new(0..0, "shop".to_owned())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubnetForm {
    v4: Option<Spanned<Ipv4Net>>,
    v6: Option<Spanned<Ipv6Net>>,
    mtu: Option<Spanned<u32>>,
    rate_mbit: Option<Spanned<u32>>,
    delay_ms: Option<Spanned<f64>>,
    loss: Option<Spanned<f64>>,
    offload: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostForm {
    role: Role,
    links: Vec<LinkForm>,
    nat: Option<Spanned<String>>,
    firewall: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkForm {
    subnet: Spanned<String>,
    v4: Option<Spanned<Ipv4Addr>>,
    v6: Option<Spanned<Ipv6Addr>>,
    mtu: Option<Spanned<u32>>,
    rate_mbit: Option<Spanned<u32>>,
    delay_ms: Option<Spanned<f64>>,
    loss: Option<Spanned<f64>>,
    offload: Option<bool>,
}

/// A message and the bytes of the file that it is about.
type Complaint = (String, Range<usize>);

impl Topology {
    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is not a topology; the message names the line.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| anyhow::anyhow!("cannot read the topology {}: {error}", path.display()))?;
        Ok(Self::parse(&path.display().to_string(), &text)?)
    }

    /// Checks a text; `file` is only used in messages.
    ///
    /// # Errors
    ///
    /// It is not TOML, has unknown words, or contradicts itself.
    pub fn parse(file: &str, text: &str) -> Result<Self, TopologyError> {
        let locate = |(message, span): Complaint| TopologyError::locate(file, text, message, &span);
        let form: FileForm =
            toml::from_str(text).map_err(|error| locate((error.message().to_owned(), error.span().unwrap_or(0..0))))?;
        check(form).map_err(locate)
    }

    /// The host of this name.
    pub fn host(&self, name: &str) -> Option<&Host> {
        self.hosts.iter().find(|host| host.name == name)
    }
}

impl TopologyError {
    fn locate(file: &str, text: &str, message: String, span: &Range<usize>) -> Self {
        let start = span.start.min(text.len());
        let before = &text[..start];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Self {
            file: file.to_owned(),
            line: before.matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            source_line: text[line_start..].lines().next().unwrap_or_default().to_owned(),
            message,
        }
    }

    /// Line of the file, from 1.
    pub fn line(&self) -> usize {
        self.line
    }
}

fn check(form: FileForm) -> Result<Topology, Complaint> {
    check_name(&form.authority, "authority", 63)?;
    let mut subnets = Vec::new();
    let mut shapes = Vec::new();
    for (name, subnet) in in_order(form.subnet) {
        check_name(&name, "subnet", NAME_MAX)?;
        shapes.push(shape_of_subnet(&name, &subnet)?);
        subnets.push(Subnet {
            name: name.into_inner(),
            v4: subnet.v4.map(Spanned::into_inner),
            v6: subnet.v6.map(Spanned::into_inner),
        });
    }
    let mut numbering = vec![Numbering::default(); subnets.len()];
    let forms = in_order(form.host);
    for (_, host) in &forms {
        reserve_addresses(host, &subnets, &mut numbering)?;
    }
    let mut hosts = Vec::new();
    for (name, host) in forms {
        check_name(&name, "host", NAME_MAX)?;
        hosts.push(check_host(name, host, &subnets, &shapes, &mut numbering)?);
    }
    Ok(Topology { authority: form.authority.into_inner(), subnets, hosts })
}

/// TOML tables have no order of their own; the file has.
fn in_order<T>(table: HashMap<Spanned<String>, T>) -> Vec<(Spanned<String>, T)> {
    let mut entries: Vec<_> = table.into_iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    entries
}

fn check_name(name: &Spanned<String>, what: &str, length_max: usize) -> Result<(), Complaint> {
    let text = name.get_ref();
    let fits = !text.is_empty() && text.len() <= length_max;
    let spelled = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if fits && spelled && !text.starts_with('-') {
        return Ok(());
    }
    Err((format!("{what} name \"{text}\": use 1 to {length_max} of a-z, 0-9 and -"), name.span()))
}

fn shape_of_subnet(name: &Spanned<String>, form: &SubnetForm) -> Result<Shape, Complaint> {
    if form.v4.is_none() && form.v6.is_none() {
        return Err((format!("subnet {} has neither v4 nor v6", name.get_ref()), name.span()));
    }
    if let Some(v4) = &form.v4
        && (v4.get_ref().trunc() != *v4.get_ref() || v4.get_ref().prefix_len() > 30)
    {
        return Err(("give the network's own address with at most /30, for example 10.1.0.0/24".into(), v4.span()));
    }
    if let Some(v6) = &form.v6
        && (v6.get_ref().trunc() != *v6.get_ref() || v6.get_ref().prefix_len() > 120)
    {
        return Err(("give the network's own address with at most /120, for example fd01::/64".into(), v6.span()));
    }
    let plain = Shape { mtu: 1500, rate_mbit: None, delay_ms: 0.0, loss: 0.0, offload: true };
    let shape = change_shape(plain, &form.mtu, &form.rate_mbit, &form.delay_ms, &form.loss, form.offload)?;
    check_v6_mtu(shape, form.v6.is_some(), &form.mtu)?;
    Ok(shape)
}

fn check_v6_mtu(shape: Shape, v6: bool, mtu: &Option<Spanned<u32>>) -> Result<(), Complaint> {
    match mtu {
        Some(mtu) if v6 && shape.mtu < MTU_MIN_V6 => {
            Err((format!("IPv6 needs an mtu of at least {MTU_MIN_V6}"), mtu.span()))
        }
        _ => Ok(()),
    }
}

fn change_shape(
    mut shape: Shape,
    mtu: &Option<Spanned<u32>>,
    rate_mbit: &Option<Spanned<u32>>,
    delay_ms: &Option<Spanned<f64>>,
    loss: &Option<Spanned<f64>>,
    offload: Option<bool>,
) -> Result<Shape, Complaint> {
    if let Some(mtu) = mtu {
        shape.mtu = within(mtu, MTU_MIN, MTU_MAX, "mtu")?;
    }
    if let Some(rate) = rate_mbit {
        shape.rate_mbit = Some(within(rate, 1, 100_000, "rate_mbit")?);
    }
    if let Some(delay) = delay_ms {
        shape.delay_ms = within(delay, 0.0, DELAY_MAX_MS, "delay_ms")?;
    }
    if let Some(loss) = loss {
        shape.loss = within(loss, 0.0, 1.0, "loss")?;
    }
    if let Some(offload) = offload {
        shape.offload = offload;
    }
    Ok(shape)
}

fn within<T: PartialOrd + Copy + fmt::Display>(value: &Spanned<T>, min: T, max: T, what: &str) -> Result<T, Complaint> {
    let number = *value.get_ref();
    if number >= min && number <= max {
        Ok(number)
    } else {
        Err((format!("{what} is {number}, must be from {min} to {max}"), value.span()))
    }
}

/// Addresses that are taken in one subnet.
#[derive(Clone, Default)]
struct Numbering {
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
}

/// Takes the addresses that the file names, so that the automatic ones go around them.
fn reserve_addresses(host: &HostForm, subnets: &[Subnet], numbering: &mut [Numbering]) -> Result<(), Complaint> {
    for link in &host.links {
        let index = find_subnet(&link.subnet, subnets)?;
        if let Some(v4) = &link.v4 {
            let network = subnets[index].v4.filter(|network| network.contains(v4.get_ref()));
            take(&mut numbering[index].v4, network.is_some(), v4)?;
        }
        if let Some(v6) = &link.v6 {
            let network = subnets[index].v6.filter(|network| network.contains(v6.get_ref()));
            take(&mut numbering[index].v6, network.is_some(), v6)?;
        }
    }
    Ok(())
}

fn take<A: PartialEq + Copy + fmt::Display>(
    taken: &mut Vec<A>,
    inside: bool,
    address: &Spanned<A>,
) -> Result<(), Complaint> {
    if !inside {
        return Err((format!("{} is not an address of the subnet", address.get_ref()), address.span()));
    }
    if taken.contains(address.get_ref()) {
        return Err((format!("{} is given to two hosts", address.get_ref()), address.span()));
    }
    taken.push(*address.get_ref());
    Ok(())
}

fn find_subnet(name: &Spanned<String>, subnets: &[Subnet]) -> Result<usize, Complaint> {
    subnets.iter().position(|subnet| subnet.name == *name.get_ref()).ok_or_else(|| {
        let known: Vec<_> = subnets.iter().map(|subnet| subnet.name.as_str()).collect();
        (format!("there is no subnet \"{}\"; there are: {}", name.get_ref(), known.join(", ")), name.span())
    })
}

fn check_host(
    name: Spanned<String>,
    form: HostForm,
    subnets: &[Subnet],
    shapes: &[Shape],
    numbering: &mut [Numbering],
) -> Result<Host, Complaint> {
    let mut links: Vec<Link> = Vec::new();
    for link in form.links {
        let subnet = find_subnet(&link.subnet, subnets)?;
        if links.iter().any(|other| other.subnet == subnet) {
            return Err((format!("host {} has two links to this subnet", name.get_ref()), link.subnet.span()));
        }
        let shape = change_shape(shapes[subnet], &link.mtu, &link.rate_mbit, &link.delay_ms, &link.loss, link.offload)?;
        check_v6_mtu(shape, subnets[subnet].v6.is_some(), &link.mtu)?;
        let full = || (format!("the subnet {} has no address left", subnets[subnet].name), link.subnet.span());
        let v4 = match (link.v4, subnets[subnet].v4) {
            (Some(v4), _) => Some(v4.into_inner()),
            (None, Some(network)) => Some(next_free(network.hosts(), &mut numbering[subnet].v4).ok_or_else(full)?),
            (None, None) => None,
        };
        let v6 = match (link.v6, subnets[subnet].v6) {
            (Some(v6), _) => Some(v6.into_inner()),
            // The first of the network is the subnet-router anycast address.
            (None, Some(network)) => {
                Some(next_free(network.hosts().skip(1), &mut numbering[subnet].v6).ok_or_else(full)?)
            }
            (None, None) => None,
        };
        links.push(Link { subnet, v4, v6, shape });
    }
    let gateway = form.role == Role::Gateway;
    let side = |which: Option<Spanned<String>>, word: &str| match which {
        None => Ok(None),
        Some(subnet) if !gateway => Err((format!("{word} is for a host with role = \"gateway\""), subnet.span())),
        Some(subnet) => {
            let index = find_subnet(&subnet, subnets)?;
            if links.iter().any(|link| link.subnet == index) {
                Ok(Some(index))
            } else {
                Err((format!("{word} names a subnet that the host has no link to"), subnet.span()))
            }
        }
    };
    let nat = side(form.nat, "nat")?;
    let firewall = side(form.firewall, "firewall")?;
    Ok(Host { name: name.into_inner(), role: form.role, links, nat, firewall })
}

fn next_free<A: PartialEq + Copy>(mut candidates: impl Iterator<Item = A>, taken: &mut Vec<A>) -> Option<A> {
    let free = candidates.find(|address| !taken.contains(address))?;
    taken.push(free);
    Some(free)
}
