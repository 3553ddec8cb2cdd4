//! What is said beyond KPNG's API, to those who want it.
//!
//! The one rule: who does not ask for it is not told, and who asks for what is not known is not told either.

use proxy_contract::localv1::Extension;

/// A set of [`Extension`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// The revision of the state that is complete, with each sync.
    pub revisions: bool,
    /// When the last change happened in the cluster that led to the state of a Service.
    pub trigger_times: bool,
    /// The nodes of the cluster.
    pub nodes: bool,
    /// Where a port is served besides, though nothing new is sent there.
    pub other_serving: bool,
    /// Services that other proxies serve.
    pub other_proxies: bool,
}

impl Extensions {
    /// What a stream of one node's state can say.
    pub const LOCAL: Self =
        Self { revisions: true, trigger_times: true, nodes: true, other_serving: true, other_proxies: false };
    /// What a stream of the cluster's facts can say.
    pub const GLOBAL: Self = Self {
        revisions: false,
        trigger_times: true,
        nodes: false,
        other_serving: false,
        other_proxies: true,
    };

    /// Those of `wanted` that are among these.
    #[must_use]
    pub fn negotiate(self, wanted: impl IntoIterator<Item = Extension>) -> Self {
        let mut granted = Self::default();
        for it in wanted {
            match it {
                Extension::UnknownExtension => {}
                Extension::Revisions => granted.revisions = self.revisions,
                Extension::TriggerTimes => granted.trigger_times = self.trigger_times,
                Extension::Nodes => granted.nodes = self.nodes,
                Extension::OtherServing => granted.other_serving = self.other_serving,
                Extension::OtherProxies => granted.other_proxies = self.other_proxies,
            }
        }
        granted
    }

    /// The same as a list.
    pub fn iter(self) -> impl Iterator<Item = Extension> {
        let all = [
            (self.revisions, Extension::Revisions),
            (self.trigger_times, Extension::TriggerTimes),
            (self.nodes, Extension::Nodes),
            (self.other_serving, Extension::OtherServing),
            (self.other_proxies, Extension::OtherProxies),
        ];
        all.into_iter().filter_map(|(is_in, it)| is_in.then_some(it))
    }

    /// The same as it stands in a message.
    pub fn numbers(self) -> Vec<i32> {
        self.iter().map(Into::into).collect()
    }
}
