//! Messages to state, whoever has written them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::{NonZeroU16, NonZeroU32},
    str::FromStr,
};

use ipnet::IpNet;
use model::{
    Protocol, ServiceName, Timestamp,
    cluster::Rejected,
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, OtherServing, PerFamily, Scopes, Service,
        ServiceKind, ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};
use proxy_contract::localv1;

/// Seconds that a client keeps its endpoint if nothing else is said: three hours.
const DEFAULT_AFFINITY_SECONDS: NonZeroU32 = NonZeroU32::new(10_800).expect("it is not zero");

/// The longest name of an object in Kubernetes.
const LONGEST_NAME: usize = 253;
/// How much of a peer's text a message shows.
const LONGEST_SHOWN: usize = 80;
/// How much of what an object is called: its kind, namespace and name.
const LONGEST_OBJECT: usize = 160;

/// What came out of messages, and what of them was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded<T> {
    /// The result.
    pub value: T,
    /// The parts that were refused.
    pub rejected: Vec<Rejected>,
}

/// The state of one Service from its message and those of its endpoints, each with the last part of its path.
///
/// There is none if the Service has no usable name, or no cluster IP that could be served.
pub fn service_state<'a>(
    message: &localv1::Service,
    endpoints: impl IntoIterator<Item = (&'a str, &'a localv1::Endpoint)>,
) -> Decoded<Option<ServiceState>> {
    let object = format!("service {}/{}", message.namespace, message.name);
    let mut decoder = Reader::new(object);
    let value = decoder.service(message).map(|(service, places)| {
        let endpoints = endpoints.into_iter();
        let mut endpoints: Vec<_> =
            endpoints.filter_map(|(key, it)| decoder.endpoint(key, it, &service, &places)).collect();
        endpoints.sort_by(|a, b| a.key.cmp(&b.key));
        endpoints.dedup_by(|a, b| a.key == b.key);
        let trigger_time = message.trigger_time.map(Timestamp::from_micros);
        let other_serving = decoder.other_serving(&message.ports, &places).into();
        ServiceState { other_serving, trigger_time, ..ServiceState::new(service, endpoints) }
    });
    Decoded { value, rejected: decoder.into_rejected() }
}

/// The beginning of a text that may be anything, for a message of one line.
pub(crate) fn shown(text: &str) -> String {
    begun(text, LONGEST_SHOWN)
}

fn begun(text: &str, longest: usize) -> String {
    let mut shown: String = text.chars().take(longest).flat_map(char::escape_debug).collect();
    if text.chars().nth(longest).is_some() {
        shown.push('…');
    }
    shown
}

/// Reads single values, and collects what is refused on the way.
pub(crate) struct Reader {
    object: String,
    rejected: Vec<Rejected>,
}

/// Where each port of a message is in the state, if it is.
pub(crate) type Places = Vec<Option<u16>>;

impl Reader {
    /// Of an object, however the peer calls it.
    pub(crate) fn new(object: String) -> Self {
        Self { object: begun(&object, LONGEST_OBJECT), rejected: Vec::new() }
    }

    pub(crate) fn into_rejected(self) -> Vec<Rejected> {
        self.rejected
    }

    pub(crate) fn refuse(&mut self, field: &str, reason: String) {
        self.rejected.push(Rejected { item: format!("{}: {field}", self.object), reason });
    }

    pub(crate) fn parse<T: FromStr>(&mut self, field: &str, text: &str) -> Option<T> {
        let parsed = text.parse().ok();
        if parsed.is_none() {
            self.refuse(
                field,
                format!("\"{}\" cannot be read; the peer should send an address or a range", shown(text)),
            );
        }
        parsed
    }

    pub(crate) fn port_number(&mut self, field: &str, number: i32) -> Option<NonZeroU16> {
        let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
        if port.is_none() {
            self.refuse(field, format!("{number} is not a port; the peer should send 1 to 65535"));
        }
        port
    }

    pub(crate) fn service(&mut self, message: &localv1::Service) -> Option<(Service, Places)> {
        let (namespace, name) = (message.namespace.as_str(), message.name.as_str());
        let is_name = |it: &str| {
            let is_part = |it: char| !matches!(it, '/' | '|') && !it.is_control();
            !it.is_empty() && it.len() <= LONGEST_NAME && it.chars().all(is_part)
        };
        if !is_name(namespace) || !is_name(name) {
            self.refuse(
                "name",
                "it cannot be part of a path; the peer should send a namespace and a name".to_owned(),
            );
            return None;
        }
        let ips = message.ips.clone().unwrap_or_default();
        let mut cluster_ips = Vec::new();
        let set = ips.cluster_ips.unwrap_or_default();
        cluster_ips.extend(self.v4("cluster_ips", &set).into_iter().take(1).map(IpAddr::V4));
        cluster_ips.extend(self.v6("cluster_ips", &set).into_iter().take(1).map(IpAddr::V6));
        if ips.primary_v6 {
            cluster_ips.reverse();
        }
        if ips.headless || cluster_ips.is_empty() {
            return None;
        }
        let kind = match message.r#type.as_str() {
            "ExternalName" => return None,
            "NodePort" => ServiceKind::NodePort,
            "LoadBalancer" => ServiceKind::LoadBalancer,
            "ClusterIP" | "" => ServiceKind::ClusterIp,
            other => {
                self.refuse("type", format!("\"{}\" is not known, ClusterIP is used", shown(other)));
                ServiceKind::ClusterIp
            }
        };
        let policy = |local| if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        let health = Some(message.health_check_node_port).filter(|it| *it != 0);
        let (ports, places) = self.ports(&message.ports);
        let service = Service {
            name: ServiceName::new(namespace, name),
            kind,
            cluster_ips,
            external_ips: self.addresses("external_ips", ips.external_ips.as_ref()),
            load_balancer_ips: self.addresses("load_balancer_ips", ips.load_balancer_ips.as_ref()),
            ports,
            internal_policy: policy(message.internal_traffic_to_local),
            external_policy: policy(message.external_traffic_to_local),
            affinity: message.session_affinity.as_ref().map(affinity),
            source_ranges: self.source_ranges(&message.ip_filters),
            health_check_node_port: health.and_then(|it| self.port_number("health_check_node_port", it)),
        };
        Some((service, places))
    }

    pub(crate) fn v4(&mut self, field: &str, set: &localv1::IpSet) -> Vec<Ipv4Addr> {
        set.v4.iter().filter_map(|it| self.parse(field, it)).collect()
    }

    pub(crate) fn v6(&mut self, field: &str, set: &localv1::IpSet) -> Vec<Ipv6Addr> {
        set.v6.iter().filter_map(|it| self.parse(field, it)).collect()
    }

    fn addresses(&mut self, field: &str, set: Option<&localv1::IpSet>) -> Vec<IpAddr> {
        let Some(set) = set else { return Vec::new() };
        let v4 = self.v4(field, set).into_iter().map(IpAddr::V4);
        let v6 = self.v6(field, set).into_iter().map(IpAddr::V6);
        v4.chain(v6).collect()
    }

    fn source_ranges(&mut self, filters: &[localv1::IpFilter]) -> Vec<IpNet> {
        let mut seen = BTreeSet::new();
        let texts = filters.iter().flat_map(|it| &it.source_ranges);
        let ranges = texts.filter_map(|it| self.parse("ip_filters", it)).map(|it: IpNet| it.trunc());
        let mut ranges: Vec<_> = ranges.filter(|it| seen.insert(*it)).collect();
        ranges.sort_by_key(|it| it.addr().is_ipv6());
        ranges
    }

    fn ports(&mut self, messages: &[localv1::PortMapping]) -> (Vec<ServicePort>, Places) {
        let mut ports: Vec<ServicePort> = Vec::new();
        let mut taken = BTreeSet::new();
        let mut places = Vec::new();
        for message in messages {
            let place = u16::try_from(ports.len()).ok();
            let port = self.port(message).filter(|it| taken.insert((it.port, it.protocol)));
            places.push(port.as_ref().and(place));
            ports.extend(port.filter(|_| place.is_some()));
        }
        (ports, places)
    }

    /// Where ports are served besides, in ascending order.
    fn other_serving(&mut self, ports: &[localv1::PortMapping], places: &Places) -> Vec<OtherServing> {
        let mut found = Vec::new();
        for (message, place) in ports.iter().zip(places) {
            let Some(index) = *place else { continue };
            let targets = message.other_serving.iter().filter_map(|it| self.parse("ports.other_serving", it));
            found.extend(targets.map(|target| OtherServing { index, target }));
        }
        found.sort_unstable();
        found
    }

    pub(crate) fn protocol(&mut self, field: &str, number: i32) -> Option<Protocol> {
        match localv1::Protocol::try_from(number) {
            Ok(localv1::Protocol::Tcp) => Some(Protocol::Tcp),
            Ok(localv1::Protocol::Udp) => Some(Protocol::Udp),
            Ok(localv1::Protocol::Sctp) => Some(Protocol::Sctp),
            Ok(localv1::Protocol::UnknownProtocol) | Err(_) => {
                self.refuse(field, format!("protocol {number} is not known; the peer should send one"));
                None
            }
        }
    }

    fn port(&mut self, message: &localv1::PortMapping) -> Option<ServicePort> {
        let protocol = self.protocol("ports", message.protocol)?;
        let port = self.port_number("ports", message.port)?;
        let node_port = Some(message.node_port).filter(|it| *it != 0);
        let target_port = match (message.target_port_name.as_str(), message.target_port) {
            ("", 0) => TargetPort::Number(port),
            ("", number) => TargetPort::Number(self.port_number("ports", number).unwrap_or(port)),
            (name, _) => TargetPort::Name(name.to_owned()),
        };
        // A brain that does not say whether a port is usable means: an empty set refuses.
        let usable = message.has_any_endpoint.unwrap_or_default();
        Some(ServicePort {
            name: message.name.clone(),
            protocol,
            port,
            node_port: node_port.and_then(|it| self.port_number("ports", it)),
            target_port,
            conflicting_addresses: self
                .addresses("ports.conflicting_addresses", message.conflicting_addresses.as_ref()),
            has_any_endpoint: PerFamily { v4: usable.v4, v6: usable.v6 },
        })
    }

    /// None if it serves nothing here.
    fn endpoint(
        &mut self,
        key: &str,
        message: &localv1::Endpoint,
        service: &Service,
        places: &Places,
    ) -> Option<Endpoint> {
        let ips = message.ips.clone().unwrap_or_default();
        let v4 = self.v4("endpoint", &ips).first().copied();
        let v6 = self.v6("endpoint", &ips).first().copied();
        if v4.is_none() && v6.is_none() {
            self.refuse("endpoint", format!("{} has no address; the peer should send one", shown(key)));
            return None;
        }
        let is_ours = message.port_overrides.iter().any(|it| it.index.is_some());
        let mut ports =
            if is_ours { self.indexed_ports(message, places) } else { self.named_ports(message, service) };
        ports.retain(|it| !it.scopes.is_empty());
        ports.sort_by_key(|it| it.index);
        ports.dedup_by_key(|it| it.index);
        if ports.is_empty() {
            return None;
        }
        let key = if message.pod_name == key && !key.is_empty() {
            EndpointKey::Pod(key.to_owned())
        } else {
            EndpointKey::Anonymous(key.to_owned())
        };
        let (hostname, local, serving_terminating) =
            (message.hostname.clone(), message.local, message.serving_terminating);
        Some(Endpoint { key, hostname, v4, v6, local, serving_terminating, ports })
    }

    /// The ports as our brain says them: by their positions.
    fn indexed_ports(&mut self, message: &localv1::Endpoint, places: &Places) -> Vec<EndpointPort> {
        let mut ports = Vec::new();
        for it in &message.port_overrides {
            let index = it.index.and_then(|it| usize::try_from(it).ok());
            let Some(index) = index.and_then(|it| places.get(it).copied().flatten()) else { continue };
            let Some(port) = self.port_number("endpoint", it.port) else { continue };
            ports.push(EndpointPort { index, port, scopes: scopes_of(it.scopes.or(message.scopes)) });
        }
        ports
    }

    /// The ports as KPNG's brain says them: by their names, or the Service's own number where there is none.
    fn named_ports(&mut self, message: &localv1::Endpoint, service: &Service) -> Vec<EndpointPort> {
        let mut ports = Vec::new();
        for (index, port) in (0_u16..).zip(&service.ports) {
            let name = match &port.target_port {
                TargetPort::Name(name) if port.name.is_empty() => name,
                _ => &port.name,
            };
            let said = message.port_overrides.iter().find(|it| it.name == *name);
            let target = match (said, &port.target_port) {
                (Some(said), _) => self.port_number("endpoint", said.port),
                (None, TargetPort::Number(number)) if name.is_empty() => Some(*number),
                (None, _) => None,
            };
            let scopes = scopes_of(said.and_then(|it| it.scopes).or(message.scopes));
            ports.extend(target.map(|port| EndpointPort { index, port, scopes }));
        }
        ports
    }
}

/// A brain that does not know the short circuit means: whatever may be used at all.
fn scopes_of(message: Option<localv1::EndpointScopes>) -> Scopes {
    let it = message.unwrap_or_default();
    Scopes {
        internal: it.internal,
        external: it.external,
        cluster: it.cluster.unwrap_or(it.internal || it.external),
    }
}

fn affinity(message: &localv1::service::SessionAffinity) -> ClientIpAffinity {
    let localv1::service::SessionAffinity::ClientIp(it) = message;
    let seconds = u32::try_from(it.timeout_seconds).ok().and_then(NonZeroU32::new);
    ClientIpAffinity { timeout_seconds: seconds.unwrap_or(DEFAULT_AFFINITY_SECONDS) }
}
