//! Authorization of peers.
//!
//! Invariant: only the peer's certificate and the allow-list count, for each request.
//! A peer on a unix socket or a loopback address without TLS is authorized for everything.

use std::{collections::BTreeSet, fmt, sync::Arc};

use tonic::{Request, Status};
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer as _, X509Certificate},
};

/// The prefix of a kubelet's common name.
const KUBELET_PREFIX: &str = "system:node:";
/// The number of names of a certificate that a message lists.
const MAX_SHOWN: usize = 3;

/// The other end of a connection. Equal peers count together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Peer {
    /// At a Unix socket, which only trusted users can connect to.
    Trusted,
    /// Without TLS, on this host.
    Host,
    Certified(Arc<Certificate>),
}

/// What a certificate says of its peer. The same names of another kind are another peer.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Certificate {
    /// DNS names, URIs and common names, verbatim.
    names: BTreeSet<String>,
    /// The node names among them.
    nodes: BTreeSet<String>,
    /// Whether one of the names is on the allow-list.
    is_allowed: bool,
}

impl Peer {
    /// A peer with this certificate, which has been verified.
    pub(crate) fn certified(certificate: &[u8], allowed: &BTreeSet<String>) -> Self {
        let certificate = Certificate::parse(certificate);
        let is_allowed = certificate.names.iter().any(|it| allowed.contains(it));
        Self::Certified(Arc::new(Certificate { is_allowed, ..certificate }))
    }

    /// Whether any number of its clients may connect, each for any number of streams.
    pub(crate) fn is_trusted(&self) -> bool {
        match self {
            Self::Trusted => true,
            Self::Host => false,
            Self::Certified(it) => it.is_allowed,
        }
    }

    /// The peer that sent a request.
    pub(crate) fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let peer = request.extensions().get::<Self>().cloned();
        peer.ok_or_else(|| Status::internal("the connection has no peer"))
    }

    /// Authorizes a request for the state of a node, or of the brain's own node if the name is empty.
    pub(crate) fn authorize_node(&self, node: &str) -> Result<(), Status> {
        match self {
            Self::Certified(it) if !it.is_allowed && !it.nodes.contains(node) => {
                let own = "the brain's own node".to_owned();
                Err(it.denied(&if node.is_empty() { own } else { format!("node {node:?}") }))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn authorize_cluster(&self) -> Result<(), Status> {
        match self {
            Self::Certified(it) if !it.is_allowed => Err(it.denied("the cluster state")),
            _ => Ok(()),
        }
    }
}

/// The name of the peer in the log.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trusted | Self::Host => f.write_str("local"),
            Self::Certified(it) => f.write_str(&shown(&it.names)),
        }
    }
}

impl Certificate {
    fn denied(&self, what: &str) -> Status {
        let nodes = if self.nodes.is_empty() {
            "names no node".to_owned()
        } else {
            format!("permits only node {}", shown(&self.nodes))
        };
        Status::permission_denied(format!(
            "no access to {what}: the certificate of {} {nodes}; request that node, or add one of these names to the \
             brain's --tls-allow",
            shown(&self.names)
        ))
    }

    /// Without names if it cannot be parsed.
    fn parse(der: &[u8]) -> Self {
        let mut found = Self::default();
        let Ok((_, certificate)) = X509Certificate::from_der(der) else { return found };
        for it in certificate.subject().iter_common_name().filter_map(|it| it.as_str().ok()) {
            found.nodes.extend(it.strip_prefix(KUBELET_PREFIX).map(str::to_owned));
            found.names.insert(it.to_owned());
        }
        let alternatives = certificate.subject_alternative_name().ok().flatten();
        for it in alternatives.iter().flat_map(|it| &it.value.general_names) {
            match it {
                GeneralName::DNSName(it) => {
                    found.nodes.insert(it.to_ascii_lowercase());
                    found.names.insert((*it).to_owned());
                }
                GeneralName::URI(it) => {
                    found.nodes.extend(node_of_uri(it).map(str::to_owned));
                    found.names.insert((*it).to_owned());
                }
                _ => {}
            }
        }
        found.nodes.retain(|it| !it.is_empty());
        found
    }
}

/// The node name in a URI: `system:node:NAME`, or one that ends in `/node/NAME`, such as a SPIFFE ID.
fn node_of_uri(uri: &str) -> Option<&str> {
    if let Some(node) = uri.strip_prefix(KUBELET_PREFIX) {
        return Some(node);
    }
    let (_, rest) = uri.split_once("://")?;
    let (before, node) = rest.rsplit_once('/')?;
    before.ends_with("/node").then_some(node)
}

/// Names for a message.
fn shown(names: &BTreeSet<String>) -> String {
    if names.is_empty() {
        return "no name".to_owned();
    }
    let first: Vec<_> = names.iter().take(MAX_SHOWN).map(|it| format!("{it:?}")).collect();
    match names.len().saturating_sub(MAX_SHOWN) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn peer(common_name: &str, allowed: &[&str]) -> Peer {
        let mut params = CertificateParams::new(["a.test".to_owned(), "b.test".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        Peer::certified(certificate.der(), &allowed.iter().map(|it| (*it).to_owned()).collect())
    }

    #[test]
    fn only_peers_on_the_allow_list_get_the_cluster_state() {
        let denied = peer("system:node:n1", &["brain"]).authorize_cluster().unwrap_err();
        assert_eq!(
            denied.message(),
            "no access to the cluster state: the certificate of \"a.test\", \"b.test\", \"system:node:n1\" permits only \
             node \"a.test\", \"b.test\", \"n1\"; request that node, or add one of these names to the brain's \
             --tls-allow"
        );
        assert!(peer("brain", &["brain"]).authorize_cluster().is_ok());
        assert!([Peer::Trusted, Peer::Host].iter().all(|it| it.authorize_cluster().is_ok()));
    }

    #[test]
    fn clients_count_together_only_if_all_names_of_their_certificates_are_the_same() {
        let unlisted = |name: &str| peer(name, &[]);
        // Beyond the names that a message lists.
        let name = |n: u8| format!("system:node:n{n}");
        let many = |n: u8| {
            let names = ["a.test", "b.test", "c.test"].map(str::to_owned);
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(DnType::CommonName, name(n));
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            Peer::certified(certificate.der(), &BTreeSet::new())
        };
        assert!(many(1) == many(1) && many(1) != many(2));
        assert!(unlisted("n1") == unlisted("n1") && unlisted("n1") != unlisted("n2"));
    }

    #[test]
    fn a_request_without_a_peer_is_rejected() {
        assert!(Peer::of(&Request::new(())).is_err());
    }
}
