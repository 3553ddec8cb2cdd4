//! Extensions of KPNG's API, which a client requests and a server confirms.
//!
//! Invariant: a server uses an extension only if the client requested it and the server knows it.

use proxy_contract::localv1::Extension;

/// A set of [`Extension`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// The revision of the complete state, with each sync.
    pub revisions: bool,
    /// The time of the last change in the cluster that led to the state of a Service.
    pub trigger_times: bool,
    /// The nodes of the cluster.
    pub nodes: bool,
    /// Targets that serve a port and were not selected for this node.
    pub other_serving: bool,
    /// Services of other proxies.
    pub other_proxies: bool,
    /// The ranges of cluster IPs.
    pub service_cidrs: bool,
    /// The pods whose sockets are excluded.
    pub pods: bool,
    /// The ports that are forwarded whole.
    pub forwarding: bool,
    /// The addresses that a Service lost to another one, with the ports that lost them.
    pub conflicting_addresses: bool,
    /// Objects that the client has are not sent again.
    pub resume: bool,
    /// A sign of life when there is nothing else to send.
    pub heartbeats: bool,
}

impl Extensions {
    /// The extensions of a stream of one node's state.
    pub const LOCAL: Self = Self {
        revisions: true,
        trigger_times: true,
        nodes: true,
        other_serving: true,
        other_proxies: false,
        service_cidrs: true,
        pods: true,
        forwarding: true,
        conflicting_addresses: true,
        resume: true,
        heartbeats: true,
    };
    /// The extensions of a long poll of one node's state.
    pub const POLL: Self = Self { resume: false, heartbeats: false, ..Self::LOCAL };
    /// The extensions of a stream of the cluster state.
    pub const GLOBAL: Self = Self {
        revisions: false,
        trigger_times: true,
        nodes: false,
        other_serving: false,
        other_proxies: true,
        service_cidrs: true,
        pods: true,
        forwarding: false,
        conflicting_addresses: false,
        resume: true,
        heartbeats: true,
    };

    /// The requested extensions that this set contains.
    #[must_use]
    pub fn negotiate(self, requested: impl IntoIterator<Item = Extension>) -> Self {
        let mut accepted = Self::default();
        for it in requested {
            match it {
                Extension::UnknownExtension => {}
                Extension::Revisions => accepted.revisions = self.revisions,
                Extension::TriggerTimes => accepted.trigger_times = self.trigger_times,
                Extension::Nodes => accepted.nodes = self.nodes,
                Extension::OtherServing => accepted.other_serving = self.other_serving,
                Extension::ServiceCidrs => accepted.service_cidrs = self.service_cidrs,
                Extension::Pods => accepted.pods = self.pods,
                Extension::ConflictingAddresses => {
                    accepted.conflicting_addresses = self.conflicting_addresses;
                }
                Extension::Forwarding => accepted.forwarding = self.forwarding,
                Extension::Resume => accepted.resume = self.resume,
                Extension::Heartbeats => accepted.heartbeats = self.heartbeats,
                Extension::OtherProxies => accepted.other_proxies = self.other_proxies,
            }
        }
        accepted
    }

    /// The extensions of this set.
    pub fn iter(self) -> impl Iterator<Item = Extension> {
        let all = [
            (self.revisions, Extension::Revisions),
            (self.trigger_times, Extension::TriggerTimes),
            (self.nodes, Extension::Nodes),
            (self.other_serving, Extension::OtherServing),
            (self.other_proxies, Extension::OtherProxies),
            (self.service_cidrs, Extension::ServiceCidrs),
            (self.conflicting_addresses, Extension::ConflictingAddresses),
            (self.pods, Extension::Pods),
            (self.forwarding, Extension::Forwarding),
            (self.resume, Extension::Resume),
            (self.heartbeats, Extension::Heartbeats),
        ];
        all.into_iter().filter_map(|(is_in, it)| is_in.then_some(it))
    }

    /// The extensions of this set, as the numbers of a message.
    pub fn numbers(self) -> Vec<i32> {
        self.iter().map(Into::into).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_sides_know_of_the_extensions_is_used() {
        let sets = [Extensions::LOCAL, Extensions::POLL, Extensions::GLOBAL, Extensions::default()];
        let known = || (0..100).filter_map(|it| Extension::try_from(it).ok());
        for set in sets {
            assert_eq!(set.negotiate(known()), set, "all are requested");
            assert_eq!(set.negotiate([]), Extensions::default(), "none is requested");
            for it in known() {
                let one: Vec<_> = set.negotiate([it]).iter().collect();
                assert_eq!(one, Vec::from_iter(set.iter().find(|own| *own == it)), "{it:?} is requested");
            }
            assert_eq!(set.numbers(), set.iter().map(|it| it as i32).collect::<Vec<_>>());
        }
        let names = |set: Extensions| set.iter().map(|it| it.as_str_name().to_owned()).collect::<Vec<_>>();
        let local = [
            "Revisions",
            "TriggerTimes",
            "Nodes",
            "OtherServing",
            "ServiceCidrs",
            "ConflictingAddresses",
            "Pods",
            "Forwarding",
            "Resume",
            "Heartbeats",
        ];
        assert_eq!(names(Extensions::LOCAL), local);
        assert_eq!(names(Extensions::POLL), local[..8]);
        assert_eq!(
            names(Extensions::GLOBAL),
            ["TriggerTimes", "OtherProxies", "ServiceCidrs", "Pods", "Resume", "Heartbeats"]
        );
    }
}
