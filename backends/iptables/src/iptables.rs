//! Applies states by the programs of iptables.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Display},
    sync::Arc,
};

use ipnet::IpNet;
use proxy_contract::{
    backend::{Backend, Changed, Family, NotServed, ServedPort, ports},
    client::State,
    localv1::{Extension, Protocol},
};

use crate::{
    rules::{self, ChainId, Chains, Config, masquerade, source_is_destination},
    ruleset::{Difference, ListedRules, Listing, Owner, Ruleset, input},
    tools::{Mode, ToolError},
    udp_flows::UdpFlows,
};

/// The chain that shows whether a rule works.
const PROBE: &str = "KPI-PROBE";

/// A part of Services that not every kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    V6,
    Sctp,
    /// Without it, a port is served all the same.
    Affinity,
}

impl Part {
    /// The parts that a port needs.
    fn of(port: &ServedPort) -> impl Iterator<Item = Self> + use<> {
        let parts = [
            (Self::V6, port.family == Family::V6),
            (Self::Sctp, port.protocol == Protocol::Sctp),
            (Self::Affinity, port.affinity.is_some()),
        ];
        parts.into_iter().filter_map(|(part, is_used)| is_used.then_some(part))
    }
}

impl Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V6 => "IPv6",
            Self::Sctp => "SCTP",
            Self::Affinity => "session affinity",
        })
    }
}

#[derive(Debug)]
pub(crate) struct Iptables {
    mode: Mode,
    config: Config,
    /// In the order in which they are written.
    families: Vec<Family>,
    is_probed: bool,
    /// Why parts of Services do not work here.
    missing: BTreeMap<Part, String>,
    ruleset: Ruleset,
    /// The chains as they were listed first after they were written.
    listed: BTreeMap<ChainId, ListedRules>,
    udp_flows: UdpFlows,
    /// The Services of which parts are not served.
    not_served: BTreeMap<Arc<str>, BTreeSet<Part>>,
}

impl Iptables {
    pub(crate) fn new(mode: Mode, config: Config) -> Self {
        Self {
            mode,
            config,
            families: vec![Family::V6, Family::V4],
            is_probed: false,
            missing: BTreeMap::new(),
            ruleset: Ruleset::default(),
            listed: BTreeMap::new(),
            udp_flows: UdpFlows::default(),
            not_served: BTreeMap::new(),
        }
    }

    /// Removes everything that this backend, or an earlier one, has written.
    pub(crate) async fn clean_up(&mut self) -> Result<(), ToolError> {
        self.probe().await?;
        let listing = self.list().await?;
        self.write(&listing.replace_by(Difference::new())).await
    }

    async fn list(&self) -> Result<Listing, ToolError> {
        let mut listing = Listing::default();
        for family in &self.families {
            self.mode.list(*family, &mut listing).await?;
        }
        Ok(listing)
    }

    async fn write(&self, difference: &Difference) -> Result<(), ToolError> {
        for family in &self.families {
            let input = input(*family, difference);
            if !input.is_empty() {
                self.mode.restore(*family, &input).await?;
            }
        }
        Ok(())
    }

    /// Finds out what the kernel and the programs can do. IPv4 they must.
    async fn probe(&mut self) -> Result<(), ToolError> {
        self.probe_rule(Family::V4, "-j RETURN").await?;
        let clients = format!("-m recent --name {PROBE} --set");
        let parts = [
            (Part::V6, Family::V6, "-j RETURN"),
            (Part::Sctp, Family::V4, "-p sctp -m sctp --dport 1"),
            (Part::Affinity, Family::V4, &clients),
        ];
        for (part, family, rule) in parts {
            if let Err(error) = self.probe_rule(family, rule).await {
                self.missing.insert(part, error.to_string());
            }
        }
        self.families.retain(|it| *it == Family::V4 || !self.missing.contains_key(&Part::V6));
        let random_fully = format!("-j {}", masquerade(true));
        self.config.has_random_fully = self.has("--random-fully", &random_fully).await;
        self.config.has_bpf = self.has("-m bpf", &source_is_destination(Family::V4)).await;
        self.is_probed = true;
        Ok(())
    }

    async fn has(&self, option: &str, rule: &str) -> bool {
        let probed = self.probe_rule(Family::V4, rule).await;
        if let Err(error) = &probed {
            tracing::warn!(option, %error, "an option of iptables does not work here; see the README");
        }
        probed.is_ok()
    }

    /// Writes a rule that no packet gets to; it goes with what an earlier process has left.
    async fn probe_rule(&self, family: Family, rule: &str) -> Result<(), ToolError> {
        let input = format!("*nat\n:{PROBE} - [0:0]\n-A {PROBE} {rule}\nCOMMIT\n");
        self.mode.restore(family, &input).await
    }

    /// The rules of a Service; none if it was deleted.
    fn service(&mut self, state: &State, name: &Arc<str>, is_stale: bool) -> Chains {
        let mut ports = state.services.get(name).map(|it| ports(it)).unwrap_or_default();
        let mut lacks = BTreeSet::new();
        ports.retain_mut(|port| {
            let parts = Part::of(port).filter(|it| self.missing.contains_key(it));
            let parts: BTreeSet<Part> = parts.collect();
            port.affinity = port.affinity.filter(|_| !parts.contains(&Part::Affinity));
            lacks.extend(&parts);
            parts.iter().all(|it| *it == Part::Affinity)
        });
        self.not_served.remove(name);
        if !lacks.is_empty() {
            self.not_served.insert(Arc::clone(name), lacks);
        }
        self.udp_flows.update(name, &ports, is_stale);
        rules::of_service(&self.config, name, &ports)
    }
}

impl Backend for Iptables {
    const EXTENSIONS: &[Extension] = &[Extension::OtherServing, Extension::ServiceCidrs];

    type Error = ToolError;

    async fn apply(&mut self, state: &State, changed: Changed<'_>) -> Result<Vec<NotServed>, ToolError> {
        let is_everything = changed == Changed::Everything;
        if is_everything && !self.is_probed {
            self.probe().await?;
        }
        let names: BTreeSet<Arc<str>> = match changed {
            // Services that are no longer in the state are forgotten.
            Changed::Everything => {
                let former = std::mem::take(&mut self.ruleset);
                state.services.keys().chain(former.services()).cloned().collect()
            }
            Changed::Services(names) => names.clone(),
        };
        let service_cidrs = state.service_cidrs.values().flat_map(|it| &it.cidrs);
        let service_cidrs: Vec<IpNet> = service_cidrs.filter_map(|it| it.parse().ok()).collect();
        let mut parts = Vec::with_capacity(names.len() + 2);
        for name in names {
            let chains = self.service(state, &name, is_everything);
            parts.push((Owner::Service(name), chains));
        }
        for family in &self.families {
            parts.push((Owner::Frame(*family), rules::frame(&self.config, &service_cidrs, *family)));
        }
        let mut difference = self.ruleset.update(parts);
        if is_everything {
            difference = self.list().await?.replace_by(difference);
        }
        self.listed.retain(|id, _| !difference.contains_key(id));
        self.write(&difference).await?;
        self.udp_flows.clean().await;
        let not_served = |(service, parts): (&Arc<str>, &BTreeSet<Part>)| {
            let reasons = parts.iter().filter_map(|it| Some((*it, self.missing.get(it)?)));
            let reasons = reasons.map(|(part, error)| format!("{part} does not work here: {error}"));
            reasons.map(|reason| NotServed { service: Arc::clone(service), reason }).collect::<Vec<_>>()
        };
        Ok(self.not_served.iter().flat_map(not_served).collect())
    }

    async fn is_intact(&mut self) -> Result<bool, ToolError> {
        let listing = self.list().await?;
        let is_same = self.listed.iter().all(|(id, it)| listing.chains.get(id) == Some(it));
        let is_intact = is_same && self.ruleset.is_listed(&listing);
        self.listed = listing.chains;
        Ok(is_intact)
    }
}
