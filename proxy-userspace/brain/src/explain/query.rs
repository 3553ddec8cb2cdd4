//! The question that is explained: who connects, and where to.

use std::{
    fmt::Display,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use model::{Protocol, ServiceName, address, nearest};

use super::explanation::ClientKind;

/// Why a question has no answer: what is wrong with it, and what to ask instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidQuery(pub(super) String);

/// How similar a proposed name is at least; 1 is equal.
const MIN_SIMILARITY: f64 = 0.75;

/// The end of a message about an unknown name: the most similar ones, if there are any.
pub(super) fn did_you_mean<T: Display>(text: &str, names: impl IntoIterator<Item = T>) -> String {
    match &nearest(text, names, MIN_SIMILARITY)[..] {
        [] => String::new(),
        names => format!("; nearest: {}", names.join(", ")),
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    pub(super) client: Client,
    pub(super) destination: Destination,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Client {
    /// A program in the node's own network namespace.
    Node,
    /// A pod by namespace and name, with its addresses; without any, it is an endpoint of some Service.
    PodName(String, String, Vec<IpAddr>),
    PodAddress(IpAddr),
    /// A client outside the cluster, by its address if that matters, and by its port if that does, too.
    Outside(Option<IpAddr>, Option<NonZeroU16>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// An address; TCP if the protocol is not given, unless only another one is served there.
    Address(SocketAddr, Option<Protocol>),
    /// A port of a Service by name or number; its only one if it is not given.
    Service(ServiceName, Option<String>, Option<Protocol>),
}

const USAGE: &str = "ask for `node TO`, `pod NAMESPACE/NAME[=ADDRESS] TO`, `pod ADDRESS TO`, `outside TO` or `outside ADDRESS[:PORT] TO`; \
                     TO is ADDRESS:PORT or NAME.NAMESPACE:PORT, with /tcp, /udp or /sctp behind it where that is not clear";

impl Query {
    /// Parses the words of a question, such as `node 10.96.0.10:80/tcp` or `pod default/client web.default:http`.
    ///
    /// # Errors
    ///
    /// If it has another form.
    pub fn parse<W: AsRef<str>>(words: &[W]) -> Result<Self, InvalidQuery> {
        let words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
        let (client, destination) = match *words {
            ["node", to] => (Client::Node, to),
            ["pod", pod, to] => (self::pod(pod)?, to),
            ["outside", to] => (Client::Outside(None, None), to),
            ["outside", from, to] => (outside(from)?, to),
            _ => return Err(invalid(&words.join(" "), USAGE)),
        };
        Ok(Self { client, destination: self::destination(destination)? })
    }

    /// What the client is, and its addresses as far as the question names them.
    pub fn client(&self) -> (ClientKind, Vec<IpAddr>) {
        match self.client {
            Client::Node => (ClientKind::Node, Vec::new()),
            Client::PodName(.., ref addresses) => (ClientKind::Pod, addresses.clone()),
            Client::PodAddress(ip) => (ClientKind::Pod, vec![ip]),
            Client::Outside(ip, _) => (ClientKind::Outside, ip.into_iter().collect()),
        }
    }

    /// The port that the client connects from, if the question names it.
    pub fn client_port(&self) -> Option<NonZeroU16> {
        match self.client {
            Client::Outside(_, port) => port,
            Client::Node | Client::PodName(..) | Client::PodAddress(_) => None,
        }
    }

    /// The destination, if it is an address; TCP if the protocol is not given.
    pub fn address(&self) -> Option<(SocketAddr, Protocol)> {
        match self.destination {
            Destination::Address(address, protocol) => Some((address, protocol.unwrap_or(Protocol::Tcp))),
            Destination::Service(..) => None,
        }
    }
}

fn invalid(text: &str, expected: &str) -> InvalidQuery {
    InvalidQuery(format!("{text:?}: {expected}"))
}

fn ip(text: &str) -> Result<IpAddr, InvalidQuery> {
    address::parse(text).ok_or_else(|| invalid(text, "not an IP address"))
}

fn outside(text: &str) -> Result<Client, InvalidQuery> {
    if let Some(ip) = address::parse(text) {
        return Ok(Client::Outside(Some(ip), None));
    }
    let form = "not the address of a client, with or without its port, as in 198.51.100.7, 198.51.100.7:40000 or \
                [2001:db8::7]:40000";
    let client: SocketAddr = text.parse().map_err(|_| invalid(text, form))?;
    let port = NonZeroU16::new(client.port()).ok_or_else(|| invalid(text, "no client has port 0"))?;
    Ok(Client::Outside(Some(client.ip().to_canonical()), Some(port)))
}

fn pod(text: &str) -> Result<Client, InvalidQuery> {
    let (pod, addresses) = match text.split_once('=') {
        Some((pod, addresses)) => (pod, addresses.split(',').map(ip).collect::<Result<_, _>>()?),
        None => (text, Vec::new()),
    };
    match (address::parse(text), pod.split_once('/')) {
        (Some(ip), _) => Ok(Client::PodAddress(ip)),
        (None, Some((namespace, name))) if !namespace.is_empty() && !name.is_empty() => {
            Ok(Client::PodName(namespace.into(), name.into(), addresses))
        }
        _ => Err(invalid(text, "name a pod as NAMESPACE/NAME, or give its IP address")),
    }
}

fn destination(text: &str) -> Result<Destination, InvalidQuery> {
    let (place, protocol) = match text.rsplit_once('/') {
        Some((place, it)) if let Ok(protocol) = it.parse() => (place, Some(protocol)),
        _ => (text, None),
    };
    if let Ok(address) = place.parse::<SocketAddr>() {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        return match address.port() {
            0 => Err(invalid(text, "port 0 cannot be connected to")),
            _ => Ok(Destination::Address(address, protocol)),
        };
    }
    if address::parse(place.trim_matches(['[', ']'])).is_some() {
        return Err(invalid(text, "a port is missing, as in 10.96.0.10:80 or [fd00::10]:80"));
    }
    let (name, port) = match place.rsplit_once(':') {
        Some((name, port)) => (name, Some(port.to_owned())),
        None => (place, None),
    };
    let name = match name.split_once('/') {
        Some((namespace, name)) => Some((name, namespace)),
        // As DNS has it: web.default.svc.cluster.local.
        None => name.split_once('.').and_then(|(name, rest)| {
            let (namespace, domain) = rest.split_once('.').unwrap_or((rest, "svc"));
            domain.split('.').next().filter(|it| *it == "svc").map(|_| (name, namespace))
        }),
    };
    match name.filter(|(name, namespace)| !name.is_empty() && !namespace.is_empty()) {
        Some((name, namespace)) => {
            Ok(Destination::Service(ServiceName::new(namespace, name), port, protocol))
        }
        None => Err(invalid(text, "name a Service as NAME.NAMESPACE:PORT, or give ADDRESS:PORT")),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    fn parse(text: &str) -> Result<Query, String> {
        Query::parse(&text.split(' ').collect::<Vec<_>>()).map_err(|it| it.to_string())
    }

    /// A question, and what it is, or what is wrong with it.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Case {
        ask: String,
        is: Option<String>,
        error: Option<String>,
    }

    #[test]
    fn each_question_is_read_or_refused_as_its_case_says() {
        let cases: Vec<Case> = serde_saphyr::from_str(include_str!("query_cases.yaml")).unwrap();
        assert_eq!(cases.len(), 28, "no case is skipped unnoticed");
        for Case { ask, is, error } in cases {
            match parse(&ask) {
                Ok(Query { client, destination }) => {
                    assert_eq!(Some(format!("{client:?} to {destination:?}")), is, "{ask}");
                }
                Err(found) => assert!(error.is_some_and(|it| found.contains(&it)), "{ask}: {found}"),
            }
        }
    }

    #[test]
    fn a_client_outside_may_have_a_port_and_a_destination_may_be_an_address() {
        let ip = "192.0.2.1".parse::<IpAddr>().unwrap();
        let cases = [
            ("outside [::ffff:192.0.2.1]:7 web.default", vec![ip], Some(7), None),
            ("outside 192.0.2.1 web.default", vec![ip], None, None),
            ("outside web.default", Vec::new(), None, None),
            ("node web.default", Vec::new(), None, None),
            ("node 10.96.0.10:80/udp", Vec::new(), None, Some(("10.96.0.10:80", Protocol::Udp))),
            ("node [fd00::1]:80", Vec::new(), None, Some(("[fd00::1]:80", Protocol::Tcp))),
        ];
        for (text, client, port, address) in cases {
            let query = parse(text).unwrap();
            assert_eq!(query.client().1, client, "{text}");
            assert_eq!(query.client_port().map(NonZeroU16::get), port, "{text}");
            let address = address.map(|(it, protocol)| (it.parse::<SocketAddr>().unwrap(), protocol));
            assert_eq!(query.address(), address, "{text}");
        }
    }
}
