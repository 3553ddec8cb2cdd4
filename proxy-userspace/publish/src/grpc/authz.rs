//! Who asks, and what for.
//!
//! The one rule: what a peer may see is decided by its certificate and the allow-list alone, request by request.
//! Whoever comes by a socket of this host's was let in by the kernel, and may ask for everything.

use std::{collections::BTreeSet, fmt, sync::Arc};

use tonic::{Request, Status};
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer as _, X509Certificate},
};

/// What the common name of a kubelet begins with.
const KUBELET: &str = "system:node:";
/// How many names of a certificate a message shows.
const MOST_SHOWN: usize = 3;

/// The other end of a connection.
#[derive(Clone, Debug)]
pub(super) struct Peer(Option<Arc<Certified>>);

/// One that has shown a certificate.
#[derive(Debug)]
struct Certified {
    names: Names,
    /// Whether the allow-list names it.
    is_allowed: bool,
}

impl Peer {
    /// One that comes by a socket of this host's.
    pub(super) const LOCAL: Self = Self(None);

    /// One that has shown this certificate, which has been verified.
    pub(super) fn certified(certificate: &[u8], allowed: &BTreeSet<String>) -> Self {
        let names = Names::of(certificate);
        let is_allowed = names.all.iter().any(|it| allowed.contains(it));
        Self(Some(Arc::new(Certified { names, is_allowed })))
    }

    /// Who has sent a request.
    pub(super) fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let peer = request.extensions().get::<Self>().cloned();
        peer.ok_or_else(|| Status::internal("the connection does not say who asks"))
    }

    /// Whether it may ask for the state of a node; of the brain's own node if the name is empty.
    pub(super) fn may(&self, node: &str) -> Result<(), Status> {
        match &self.0 {
            Some(it) if !it.is_allowed && !it.names.has_node(node) => {
                let own = || "the brain's own node, whatever its name,".to_owned();
                Err(it.refusal(&if node.is_empty() { own() } else { format!("node {node:?}") }))
            }
            _ => Ok(()),
        }
    }

    /// Whether it may ask for the whole cluster.
    pub(super) fn may_all(&self) -> Result<(), Status> {
        match &self.0 {
            Some(it) if !it.is_allowed => Err(it.refusal("the whole cluster")),
            _ => Ok(()),
        }
    }
}

impl Certified {
    fn refusal(&self, what: &str) -> Status {
        let names = &self.names;
        let whose = if names.nodes.is_empty() {
            "names no node".to_owned()
        } else {
            format!("is that of node {}", Shown(&names.nodes))
        };
        Status::permission_denied(format!(
            "{what} was asked for with a certificate of {}, which {whose}; ask for its own node, or have one of its \
             names put into the brain's --tls-allow",
            Shown(&names.all)
        ))
    }
}

/// The names in a certificate.
#[derive(Debug, Default, PartialEq, Eq)]
struct Names {
    /// As they are written: DNS names, URIs, and common names.
    all: BTreeSet<String>,
    /// The nodes among them.
    nodes: BTreeSet<String>,
}

impl Names {
    /// None of one that cannot be read.
    fn of(certificate: &[u8]) -> Self {
        let mut names = Self::default();
        let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return names };
        for it in certificate.subject().iter_common_name().filter_map(|it| it.as_str().ok()) {
            names.nodes.extend(it.strip_prefix(KUBELET).map(str::to_owned));
            names.all.insert(it.to_owned());
        }
        let alternatives = certificate.subject_alternative_name().ok().flatten();
        for it in alternatives.iter().flat_map(|it| &it.value.general_names) {
            match it {
                GeneralName::DNSName(it) => {
                    names.nodes.insert(it.to_ascii_lowercase());
                    names.all.insert((*it).to_owned());
                }
                GeneralName::URI(it) => {
                    names.nodes.extend(node_of_uri(it).map(str::to_owned));
                    names.all.insert((*it).to_owned());
                }
                _ => {}
            }
        }
        names.nodes.retain(|it| !it.is_empty());
        names
    }

    fn has_node(&self, node: &str) -> bool {
        self.nodes.contains(node)
    }
}

/// The node that a URI names: `system:node:NAME`, or one that ends in `/node/NAME`, as a SPIFFE ID does.
fn node_of_uri(uri: &str) -> Option<&str> {
    if let Some(node) = uri.strip_prefix(KUBELET) {
        return Some(node);
    }
    let (_, rest) = uri.split_once("://")?;
    let (before, node) = rest.rsplit_once('/')?;
    before.ends_with("/node").then_some(node)
}

/// Some names, for a message.
struct Shown<'a>(&'a BTreeSet<String>);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no name");
        }
        for (index, it) in self.0.iter().take(MOST_SHOWN).enumerate() {
            write!(f, "{}{it:?}", if index == 0 { "" } else { ", " })?;
        }
        match self.0.len().saturating_sub(MOST_SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
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
    fn the_whole_cluster_is_for_those_on_the_allow_list() {
        let refused = peer("system:node:n1", &["brain"]).may_all().unwrap_err();
        assert_eq!(
            refused.message(),
            "the whole cluster was asked for with a certificate of \"a.test\", \"b.test\", \"system:node:n1\", which is \
             that of node \"a.test\", \"b.test\", \"n1\"; ask for its own node, or have one of its names put into the \
             brain's --tls-allow"
        );
        assert!(peer("brain", &["brain"]).may_all().is_ok());
        assert!(Peer::LOCAL.may_all().is_ok());
    }

    #[test]
    fn what_is_no_certificate_has_no_name() {
        let peer = Peer::certified(b"nonsense", &BTreeSet::from(["".to_owned()]));
        assert!(peer.may_all().is_err() && peer.may("").is_err() && peer.may("n1").is_err());
    }

    #[test]
    fn a_request_that_came_by_no_connection_of_ours_is_refused() {
        assert!(Peer::of(&Request::new(())).is_err());
    }
}
