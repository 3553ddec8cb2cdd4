//! The chains of a Service, and those that all share.
//!
//! Invariant: pure. `nat` translates what a Service takes, and leaves everything else at the Service's address, where `filter`
//! refuses or drops it. No packet that has its endpoint gets to a rule of a Service in `filter`.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use proxy_contract::{
    backend::{Family, Frontend, FrontendAddress, ServedPort},
    localv1::Protocol,
};
use sha2::{Digest as _, Sha256};

/// What the names of this backend's chains begin with. A name has at most 28 characters.
pub(crate) const PREFIX: &str = "KPI-";
/// By address and port, to the chain of a frontend.
const SERVICES: &str = "KPI-SERVICES";
/// By port, to the chain of a node port.
const NODE_PORTS: &str = "KPI-NODEPORTS";
const MARK_MASQUERADE: &str = "KPI-MARK-MASQ";
/// Marks traffic from outside.
const MARK_OUTSIDE: &str = "KPI-MARK-OUTSIDE";
const POSTROUTING: &str = "KPI-POSTROUTING";
const FORWARD: &str = "KPI-FORWARD";

/// A table; `filter` is written first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Table {
    Filter,
    Nat,
}

impl Table {
    pub(crate) const ALL: [Self; 2] = [Self::Filter, Self::Nat];
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Filter { "filter" } else { "nat" })
    }
}

/// A chain of a table; of the kernel's own chains, only the jumps to this backend's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChainId {
    pub(crate) family: Family,
    pub(crate) table: Table,
    pub(crate) name: String,
}

impl ChainId {
    pub(crate) fn is_own(&self) -> bool {
        self.name.starts_with(PREFIX)
    }

    /// Whether several Services have rules in it.
    pub(crate) fn is_shared(&self) -> bool {
        [SERVICES, NODE_PORTS].contains(&self.name.as_str())
    }
}

/// The rules of chains, as lines of `iptables-restore`.
pub(crate) type Chains = BTreeMap<ChainId, String>;

/// What the rules depend on, beside Services.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The bit of a packet's mark that requests masquerading.
    pub(crate) masquerade_mark: u32,
    pub(crate) masquerade_all: bool,
    /// The sources that are inside, beside the node.
    pub(crate) inside: Vec<IpNet>,
    /// The node's addresses that have node ports; all if there are none of a family.
    pub(crate) node_port_addresses: Vec<IpNet>,
    /// Whether masquerading chooses ports at random.
    pub(crate) has_random_fully: bool,
    /// Whether the match `bpf` works: it compares source and destination.
    pub(crate) has_bpf: bool,
}

fn of_family(ranges: &[IpNet], family: Family) -> impl Iterator<Item = &IpNet> {
    ranges.iter().filter(move |it| Family::of(it.addr()) == family)
}

/// Adds a rule at the end of an own chain, or at the front of one of the kernel's.
fn add(chains: &mut Chains, family: Family, table: Table, chain: &str, rule: fmt::Arguments<'_>) {
    let id = ChainId { family, table, name: chain.to_owned() };
    let verb = if id.is_own() { "-A" } else { "-I" };
    writeln!(chains.entry(id).or_default(), "{verb} {chain} {rule}").expect("a string takes any text");
}

/// The chains that do not depend on Services; of [shared](ChainId::is_shared) ones, the rules after those of Services.
pub(crate) fn frame(config: &Config, service_cidrs: &[IpNet], family: Family) -> Chains {
    let mut chains = Chains::new();
    for table in Table::ALL {
        chains.insert(ChainId { family, table, name: NODE_PORTS.to_owned() }, String::new());
        let loopback = if family == Family::V4 { "127.0.0.0/8" } else { "::1" };
        let mut rule = |rule: fmt::Arguments<'_>| add(&mut chains, family, table, SERVICES, rule);
        rule(format_args!("-d {loopback} -j RETURN"));
        let to_node_ports = format!("-m addrtype --dst-type LOCAL -j {NODE_PORTS}");
        let mut ranges = of_family(&config.node_port_addresses, family).peekable();
        if ranges.peek().is_none() {
            rule(format_args!("{to_node_ports}"));
        }
        for range in ranges {
            rule(format_args!("-d {range} {to_node_ports}"));
        }
    }
    filter_frame(config, service_cidrs, family, &mut chains);
    nat_frame(config, family, &mut chains);
    chains
}

fn filter_frame(config: &Config, service_cidrs: &[IpNet], family: Family, chains: &mut Chains) {
    let mut rule = |chain, rule: fmt::Arguments<'_>| add(chains, family, Table::Filter, chain, rule);
    for range in of_family(service_cidrs, family) {
        // No Service has the address, or it would have an endpoint by now.
        rule(SERVICES, format_args!("-d {range} -j DROP"));
    }
    // A node whose policy is to forward nothing forwards connections of Services.
    let mark = config.masquerade_mark;
    rule(FORWARD, format_args!("-m mark --mark {mark:#x}/{mark:#x} -j ACCEPT"));
    rule(FORWARD, format_args!("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"));
    rule("FORWARD", format_args!("-j {FORWARD}"));
    for chain in ["INPUT", "FORWARD", "OUTPUT"] {
        rule(chain, format_args!("-m conntrack --ctstate NEW -j {SERVICES}"));
    }
}

fn nat_frame(config: &Config, family: Family, chains: &mut Chains) {
    let mut rule = |chain, rule: fmt::Arguments<'_>| add(chains, family, Table::Nat, chain, rule);
    let mark = config.masquerade_mark;
    rule(MARK_MASQUERADE, format_args!("-j MARK --or-mark {mark:#x}"));
    for range in of_family(&config.inside, family) {
        rule(MARK_OUTSIDE, format_args!("-s {range} -j RETURN"));
    }
    rule(MARK_OUTSIDE, format_args!("-j {MARK_MASQUERADE}"));
    let masquerade = masquerade(config.has_random_fully);
    if config.has_bpf {
        // An endpoint that reaches itself through its Service would answer itself.
        rule(
            POSTROUTING,
            format_args!("-m conntrack --ctstate DNAT {} -j {masquerade}", source_is_destination(family)),
        );
    }
    rule(POSTROUTING, format_args!("-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN"));
    // A packet that is handled again, in a tunnel, is not masqueraded again.
    rule(POSTROUTING, format_args!("-j MARK --xor-mark {mark:#x}"));
    rule(POSTROUTING, format_args!("-j {masquerade}"));
    rule("PREROUTING", format_args!("-j {SERVICES}"));
    rule("OUTPUT", format_args!("-j {SERVICES}"));
    rule("POSTROUTING", format_args!("-j {POSTROUTING}"));
}

pub(crate) fn masquerade(has_random_fully: bool) -> &'static str {
    if has_random_fully { "MASQUERADE --random-fully" } else { "MASQUERADE" }
}

/// The match of packets whose source is their destination. It is a program of the classic BPF: load a word, compare it.
pub(crate) fn source_is_destination(family: Family) -> String {
    let (source, destination, words) = if family == Family::V4 { (12, 16, 1) } else { (8, 24, 4) };
    let mut program = Vec::new();
    for word in 0..words {
        let to_the_end = 4 * (words - word) - 3;
        program.push(format!("32 0 0 {}", source + 4 * word));
        program.push("7 0 0 0".to_owned());
        program.push(format!("32 0 0 {}", destination + 4 * word));
        program.push(format!("29 0 {to_the_end} 0"));
    }
    program.extend(["6 0 0 1".to_owned(), "6 0 0 0".to_owned()]);
    format!("-m bpf --bytecode \"{},{}\"", program.len(), program.join(","))
}

/// The chains of a Service, and its rules in shared ones.
pub(crate) fn of_service(config: &Config, service: &str, ports: &[ServedPort]) -> Chains {
    let mut chains = Chains::new();
    for port in ports {
        let protocol = match port.protocol {
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
            _ => "tcp",
        };
        // Protocol and port are unique in a Service.
        let number = port.frontends.last().map_or(0, |it| it.port);
        let id = hash(&format!("{service} {protocol} {number}"));
        PortRules { config, service, port, protocol, id, chains: &mut chains }.write();
    }
    chains
}

/// 16 characters that stand for a text, as in kube-proxy's names.
fn hash(text: &str) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let digest = Sha256::digest(text);
    digest.iter().take(16).map(|it| char::from(ALPHABET[usize::from(it % 32)])).collect()
}

struct PortRules<'a> {
    config: &'a Config,
    service: &'a str,
    port: &'a ServedPort,
    protocol: &'static str,
    /// The suffix of the names of its chains.
    id: String,
    chains: &'a mut Chains,
}

impl PortRules<'_> {
    fn write(&mut self) {
        let port = self.port;
        for it in &port.frontends {
            let entry = match it.address {
                FrontendAddress::Cluster(_) => self.selection(&port.internal),
                FrontendAddress::External(_) | FrontendAddress::Node => self.external(),
            };
            if let Some(entry) = entry {
                self.translate(it, entry);
            }
            self.reject(it);
        }
    }

    fn rule(&mut self, table: Table, chain: &str, rule: fmt::Arguments<'_>) {
        add(self.chains, self.port.family, table, chain, rule);
    }

    fn has(&self, chain: &str) -> bool {
        let id = ChainId { family: self.port.family, table: Table::Nat, name: chain.to_owned() };
        self.chains.contains_key(&id)
    }

    /// Sends the packets to a frontend to a chain.
    fn dispatch(&mut self, table: Table, frontend: &Frontend, target: &str) {
        let Self { protocol, service, port, .. } = *self;
        let printable = |it: char| it.is_ascii_alphanumeric() || "-./:".contains(it);
        let comment: String =
            format!("{service}:{}", port.name).chars().filter(|it| printable(*it)).collect();
        let comment = comment.trim_end_matches(':');
        let rest = format!(
            "-p {protocol} -m {protocol} --dport {} -m comment --comment \"{comment:.200}\" -j {target}",
            frontend.port
        );
        match frontend.address.ip() {
            Some(ip) => self.rule(table, SERVICES, format_args!("-d {ip} {rest}")),
            None => self.rule(table, NODE_PORTS, format_args!("{rest}")),
        }
    }

    /// The chain of a frontend that only some sources may use.
    fn restricted(&self, address: Option<IpAddr>) -> String {
        format!("KPI-FW-{}", hash(&format!("{} {address:?}", self.id)))
    }

    /// Translates the packets to a frontend; those of other sources are left.
    fn translate(&mut self, frontend: &Frontend, entry: String) {
        let Some(sources) = &frontend.sources else { return self.dispatch(Table::Nat, frontend, &entry) };
        let chain = self.restricted(frontend.address.ip());
        for range in sources {
            self.rule(Table::Nat, &chain, format_args!("-s {range} -j {entry}"));
        }
        if !sources.is_empty() {
            self.dispatch(Table::Nat, frontend, &chain);
        }
    }

    /// Refuses or drops the packets to a frontend that were not translated, if there can be any.
    fn reject(&mut self, frontend: &Frontend) {
        let port = self.port;
        let is_used = [true, false].map(|inside| !port.endpoints(frontend.address, inside).is_empty());
        let may_lack_an_endpoint = is_used != [true, true];
        let verdict = match (port.drops, port.protocol, port.family) {
            (true, ..) => "DROP",
            (_, Protocol::Tcp, _) => "REJECT --reject-with tcp-reset",
            (.., Family::V4) => "REJECT --reject-with icmp-port-unreachable",
            (.., Family::V6) => "REJECT --reject-with icmp6-port-unreachable",
        };
        match &frontend.sources {
            None if !may_lack_an_endpoint => {}
            None => self.dispatch(Table::Filter, frontend, verdict),
            Some(sources) if may_lack_an_endpoint && !port.drops => {
                let chain = self.restricted(frontend.address.ip());
                for range in sources {
                    self.rule(Table::Filter, &chain, format_args!("-s {range} -j {verdict}"));
                }
                self.rule(Table::Filter, &chain, format_args!("-j DROP"));
                self.dispatch(Table::Filter, frontend, &chain);
            }
            Some(_) => self.dispatch(Table::Filter, frontend, "DROP"),
        }
    }

    /// The chain of addresses that are reached from outside, too; `None` if there is no endpoint at all.
    fn external(&mut self) -> Option<String> {
        let (port, family) = (self.port, self.port.family);
        let (inside, outside) = (self.selection(&port.cluster), self.selection(&port.external));
        if inside.is_none() && outside.is_none() {
            return None;
        }
        let chain = format!("KPI-EXT-{}", self.id);
        if self.has(&chain) {
            return Some(chain);
        }
        let mut rule = |rule: fmt::Arguments<'_>| add(self.chains, family, Table::Nat, &chain, rule);
        if inside == outside && !port.keeps_source {
            rule(format_args!("-j {MARK_OUTSIDE}"));
        } else {
            let target = inside.as_deref().unwrap_or("RETURN");
            for range in of_family(&self.config.inside, family) {
                rule(format_args!("-s {range} -j {target}"));
            }
            rule(format_args!("-m addrtype --src-type LOCAL -j {MARK_MASQUERADE}"));
            rule(format_args!("-m addrtype --src-type LOCAL -j {target}"));
            if !port.keeps_source {
                rule(format_args!("-j {MARK_MASQUERADE}"));
            }
        }
        if let Some(outside) = outside {
            rule(format_args!("-j {outside}"));
        }
        Some(chain)
    }

    /// The chain that selects one of these endpoints, which are those of a kind of traffic; kinds may share it.
    fn selection(&mut self, endpoints: &[SocketAddr]) -> Option<String> {
        let port = self.port;
        let kinds = [("SVC", &port.internal), ("CLU", &port.cluster), ("LOC", &port.external)];
        let (kind, _) = kinds.into_iter().find(|(_, it)| ***it == *endpoints && !it.is_empty())?;
        let chain = format!("KPI-{kind}-{}", self.id);
        if !self.has(&chain) {
            self.masquerade(&chain, endpoints);
            self.select(&chain, endpoints);
        }
        Some(chain)
    }

    /// Marks traffic from outside to the cluster IPs, and without the match `bpf` all that may be for its own sender.
    fn masquerade(&mut self, chain: &str, endpoints: &[SocketAddr]) {
        let Self { config, port, .. } = *self;
        let marks = match (config.masquerade_all, of_family(&config.inside, port.family).next()) {
            (true, _) => Some(MARK_MASQUERADE),
            (false, Some(_)) => Some(MARK_OUTSIDE),
            (false, None) => None,
        };
        for it in &port.frontends {
            if let (FrontendAddress::Cluster(ip), Some(marks)) = (it.address, marks)
                && port.internal == endpoints
            {
                self.rule(Table::Nat, chain, format_args!("-d {ip} -j {marks}"));
            }
        }
        for it in endpoints.iter().filter(|_| !config.has_bpf) {
            self.rule(Table::Nat, chain, format_args!("-s {} -j {MARK_MASQUERADE}", it.ip()));
        }
    }

    /// Selects an endpoint: that of the client, if it has one, or each with the same probability.
    fn select(&mut self, chain: &str, endpoints: &[SocketAddr]) {
        let protocol = self.protocol;
        let affinity = self.port.affinity.map(|it| it.as_secs().max(1));
        for it in endpoints {
            let Some(seconds) = affinity else { break };
            let is_client = format!("{} --update --seconds {seconds} --reap", self.clients(it));
            let rule = format_args!("-p {protocol} {is_client} -j DNAT --to-destination {it}");
            self.rule(Table::Nat, chain, rule);
        }
        for (index, it) in endpoints.iter().enumerate() {
            let mut rule = format!("-p {protocol}");
            let left = endpoints.len() - index;
            if left > 1 {
                let _ = write!(rule, " -m statistic --mode random --probability {:.10}", 1.0 / left as f64);
            }
            if affinity.is_some() {
                let _ = write!(rule, " {} --set", self.clients(it));
            }
            self.rule(Table::Nat, chain, format_args!("{rule} -j DNAT --to-destination {it}"));
        }
    }

    /// The match of the list of an endpoint's clients.
    fn clients(&self, endpoint: &SocketAddr) -> String {
        format!("-m recent --name KPI-{}", hash(&format!("{} {endpoint}", self.id)))
    }
}

#[cfg(test)]
mod tests;
