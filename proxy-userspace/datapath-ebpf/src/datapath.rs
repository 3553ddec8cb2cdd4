//! The eBPF datapath of this node: applies states to the maps, and attaches the programs.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use datapath::{ApplyReport, AttachStatus, NodePortAddresses, TableStats};
use model::{
    Family, ServiceName,
    diff::pairs,
    error_chain,
    state::{NodeInfos, NodeState},
};

use netlink::host_addresses::interfaces_with;

use crate::{
    error::Error,
    host::{capabilities, cgroup::Cgroup, clock},
    maps::{
        bpf_maps::BpfMaps, connected_backends::ConnectedBackends, exclusions::Exclusions,
        failure_records::FailureRecords, features::with_features, map_spec, open_connections::Recount,
        pins::Pins, pod_cgroups::CgroupEvents, program_log,
    },
    observe::{forwards::previous_rows, table_stats::StatsReader},
    options::Options,
    programs::{
        hook_status, hooks,
        peer_probes::PeerProbes,
        socket_termination::SocketTerminator,
        trace::TracedPrograms,
        trial_connects::TrialConnects,
        uplinks::{Uplinks, least_mtu, too_narrow},
    },
    tables::{
        double_buffer::DoubleBuffer,
        layout::forwarding::PacketPath,
        node_addresses::{NodeAddresses, node_addresses},
        peers::PeerStates,
    },
};

/// How long a connection reports failures to the counter of its endpoint: a SYN is answered, or retransmitted for the first
/// time after a second.
const REPORT_TIME: Duration = Duration::from_secs(3);

/// The eBPF datapath of this node. The kernel keeps serving when this value is dropped.
pub struct Datapath {
    buffer: DoubleBuffer<BpfMaps>,
    ebpf: Ebpf,
    /// The word that says whether the packet path serves.
    packet_path: Array<MapData, u32>,
    /// What it says; `None` if this process has not said it.
    packets_serve: Option<bool>,
    stats: StatsReader,
    failures: FailureRecords,
    trials: TrialConnects,
    recount: Recount,
    /// When counters were reclaimed last.
    reclaimed_at: Instant,
    exclusions: Exclusions,
    cgroup: Cgroup,
    pins: Pins,
    node_name: String,
    node_port_addresses: NodePortAddresses,
    /// The addresses of this host's interfaces.
    interfaces: BTreeSet<IpAddr>,
    /// The cluster IPs that are left to the host, as logged last.
    left_to_host: BTreeMap<ServiceName, Vec<IpAddr>>,
    node_addresses: NodeAddresses,
    /// Where packets from outside are forwarded.
    uplinks: Uplinks,
    /// Whether the last attempt to set them failed.
    are_uplinks_failing: bool,
    /// The TCP frontends whose forwarding has begun in the active generation.
    begun: BTreeSet<SocketAddr>,
    /// The probes of nodes that packets are forwarded to; `None` if they are not probed.
    probes: Option<PeerProbes>,
    /// The nodes that `node_addresses` were computed from; `None` if the interfaces changed since.
    nodes: Option<NodeInfos>,
    is_attached: bool,
    /// Whether a generation of this process is active.
    is_applied: bool,
    /// Dropped before the lock.
    trace: Option<TracedPrograms>,
    _lock: File,
}

impl Datapath {
    /// Takes over what is pinned, and creates what is missing. Nothing is attached before the first state is applied; what an
    /// earlier instance attached keeps serving its last state.
    ///
    /// # Errors
    ///
    /// What served before keeps serving.
    pub fn start(options: &Options) -> Result<Self, Error> {
        // Checked first, so that a user without privileges leaves no folder behind.
        if !capabilities::may_load_programs() {
            return Err(Error::MissingCapabilities);
        }
        if capabilities::is_in_user_namespace() {
            return Err(Error::UserNamespace);
        }
        let cgroup = Cgroup::open(options.cgroup.as_deref())?;
        let pins = Pins::new(&options.pin_dir);
        let lock = pins.prepare()?;
        hooks::check(&cgroup, &pins)?;
        let (mut ebpf, maps) = with_features(|features| {
            let (mut ebpf, maps) = BpfMaps::load(&pins, options, features)?;
            hooks::load(&mut ebpf)?;
            Ok((ebpf, maps))
        })?;
        program_log::forward(&mut ebpf)?;
        let packet_path = map_spec::take(&mut ebpf, "PACKET_PATH")?;
        let stats = StatsReader::take(&mut ebpf)?;
        let pods = options.pod_annotations.then_some(cgroup.path.as_path());
        let exclusions = Exclusions::take(&mut ebpf, &options.excluded_cgroups, pods)?;
        let failures = FailureRecords::take(&mut ebpf)?;
        let recount = Recount::open(&pins)?;
        let mut buffer = DoubleBuffer::new(maps)?;
        buffer.layout.passive_health = Some(options.passive_health);
        buffer.layout.forwarding.nodes.own = options.node_name.as_str().into();
        let probes = options.forwarding_timeout.map(|it| PeerProbes::new(options.forwarding_port, it));
        if probes.is_some() {
            buffer.layout.forwarding.nodes.set_peers(PeerStates::new());
        }
        match previous_rows(&pins) {
            Ok(previous) => buffer.layout.forwarding.restore(previous),
            Err(error) => tracing::warn!(
                error = error_chain(&error),
                "rows of an earlier process cannot be read: connections lose their second chance"
            ),
        }
        tracing::info!(
            cgroup = %cgroup.path.display(), pins = %pins.dir.display(),
            "the eBPF programs are loaded; they are attached after the first state"
        );
        Ok(Self {
            buffer,
            ebpf,
            packet_path,
            packets_serve: None,
            stats,
            failures,
            trials: TrialConnects::new(options.passive_health),
            recount,
            reclaimed_at: Instant::now(),
            exclusions,
            cgroup,
            pins,
            node_name: options.node_name.clone(),
            node_port_addresses: options.node_port_addresses.clone(),
            interfaces: BTreeSet::new(),
            left_to_host: BTreeMap::new(),
            node_addresses: NodeAddresses::default(),
            uplinks: Uplinks::new(options.forwarding_in_driver),
            are_uplinks_failing: false,
            begun: BTreeSet::new(),
            probes,
            nodes: None,
            is_attached: false,
            is_applied: false,
            trace: None,
            _lock: lock,
        })
    }

    /// Sets the addresses of the host's interfaces, for the next [`Datapath::apply`].
    pub fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.buffer.layout.set_host_addresses(addresses.clone());
        self.interfaces = addresses;
        self.nodes = None;
    }

    /// Says whether the packet path translates what is left to it. What is said holds after this value is dropped.
    ///
    /// # Errors
    ///
    /// What was said before holds.
    pub fn set_packets_serve(&mut self, serve: bool) -> Result<(), Error> {
        self.packet_path.set(0, u32::from(serve), 0).map_err(Error::map("PACKET_PATH"))?;
        self.packets_serve = Some(serve);
        Ok(())
    }

    /// Makes a state active, for all sockets at the same moment. Programs are attached by [`Datapath::attach`].
    ///
    /// # Errors
    ///
    /// The generation before stays active; the next call tries again.
    pub fn apply(&mut self, state: &NodeState) -> Result<ApplyReport, Error> {
        let was_forwarding = self.buffer.layout.forwarding.is_used();
        let mut has_new_nodes = false;
        if self.nodes.as_ref().is_none_or(|it| !Arc::ptr_eq(it, &state.nodes)) {
            self.node_addresses =
                node_addresses(&state.nodes, &self.node_name, &self.interfaces, &self.node_port_addresses);
            self.nodes = Some(Arc::clone(&state.nodes));
            self.uplinks.expire();
            has_new_nodes = true;
        }
        // Before the programs are attached: pods that an earlier instance left to packets stay so.
        if self.exclusions.set_pods(&state.pods)
            && let Err(error) = self.refresh_exclusions()
        {
            tracing::warn!(%error, "pod annotations are not in effect yet; retrying");
        }
        let mut report = self.buffer.apply(state, &self.node_addresses)?;
        // Before packets are forwarded: programs are attached to the uplinks later.
        if (has_new_nodes || !was_forwarding) && self.check_uplinks() {
            report.entries += self.buffer.apply(state, &self.node_addresses)?.entries;
        }
        self.is_applied = true;
        if let Some(begun) = self.buffer.layout.forwarding.take_begun() {
            self.begun = begun;
        }
        self.forget_removed();
        self.report_left_to_host();
        Ok(ApplyReport {
            services: self.buffer.layout.services(),
            tables: self.buffer.fill().collect(),
            rejected: self.buffer.layout.rejected(),
            ..report
        })
    }

    /// Forgets the failures of endpoints that were removed: they may have changed when they return.
    fn forget_removed(&mut self) {
        let removed = self.buffer.layout.counters().take_removed();
        self.trials.forget(&removed);
        if let Err(error) = self.failures.forget(removed) {
            tracing::warn!(%error, "failures of removed endpoints stay recorded");
        }
    }

    /// Logs each Service whose cluster IP has come to an interface of the host, or is served again.
    fn report_left_to_host(&mut self) {
        let left = &self.buffer.layout.left_to_host;
        if self.left_to_host == *left {
            return;
        }
        for (name, _, now) in pairs(&self.left_to_host, left).filter(|(_, before, now)| before != now) {
            let Some(ips) = now else {
                tracing::info!(service = %name, "the cluster IP has left the host's interfaces; it is served");
                continue;
            };
            tracing::info!(
                service = %name, addresses = ?ips,
                "left to this host: an interface has the cluster IP, as with NodeLocal DNSCache"
            );
        }
        self.left_to_host.clone_from(left);
    }

    /// Waits until no program reads the generation before, and updates its maps for the next change.
    /// To be called when nothing more urgent is to be done; otherwise the next [`Datapath::apply`] does it.
    ///
    /// # Errors
    ///
    /// As for [`Datapath::apply`].
    pub fn finish_generation(&mut self) -> Result<(), Error> {
        self.buffer.finish_generation()
    }

    /// Frees the counters of removed endpoints, once no connection reports to them any more.
    fn reclaim_counters(&mut self) -> Result<(), Error> {
        // Before that, programs of an earlier instance may use the counters.
        if self.is_attached && self.reclaimed_at.elapsed() >= REPORT_TIME {
            self.reclaimed_at = Instant::now();
            self.buffer.reclaim_counters()?;
            self.forget_removed();
        }
        Ok(())
    }

    /// Attaches the programs to the cgroup, if they are not; also if the cgroup was removed and created anew, as a systemd
    /// slice can be. Does nothing before the first state is applied.
    ///
    /// # Errors
    ///
    /// What was attached stays attached, with the old programs or the new ones.
    pub fn attach(&mut self) -> Result<(), Error> {
        if !self.is_applied {
            return Ok(());
        }
        if let Some(now) = self.cgroup.successor()? {
            tracing::warn!(cgroup = %now.path.display(), "the cgroup was created anew; attaching to the new one");
            self.cgroup = now;
            self.is_attached = false;
        }
        self.set_uplinks();
        if self.is_attached {
            return Ok(());
        }
        hooks::attach(&mut self.ebpf, &self.cgroup, &self.pins)?;
        self.is_attached = true;
        self.buffer.programs_changed();
        if let Some(trace) = &mut self.trace
            && let Err(error) = trace.put(&mut self.ebpf, &self.pins)
        {
            tracing::warn!(%error, "the trace ends");
            self.trace = None;
        }
        // The active generation does not depend on these steps; the next start tries again.
        if let Err(error) = hooks::detach_unknown(&self.pins) {
            tracing::error!(
                %error,
                "programs of another version stay attached, with maps that are not updated; the next start retries"
            );
        }
        if let Err(error) = self.pins.remove_other_layouts() {
            tracing::warn!(%error, "unused maps of another version stay; the next start retries");
        }
        Ok(())
    }

    /// Attaches the programs that forward packets from outside to the interfaces with an address of this node, if anything is
    /// forwarded.
    fn set_uplinks(&mut self) {
        let is_forwarding = self.buffer.layout.forwarding.is_used();
        if self.uplinks.is_current(is_forwarding) {
            return;
        }
        let wanted = match self.nodes.as_ref().and_then(|it| it.get(&*self.node_name)) {
            Some(node) if is_forwarding => interfaces_with(|ip| node.addresses.contains(&ip)),
            _ => Ok(BTreeSet::new()),
        };
        let wanted = match wanted {
            Ok(wanted) => wanted,
            Err(error) => {
                self.are_uplinks_failing = true;
                return tracing::error!(%error, "the uplinks cannot be listed; they stay as they are");
            }
        };
        // Sockets do not depend on it; the next state, or change of addresses, tries again.
        let result = self.uplinks.set(&mut self.ebpf, &self.pins, &wanted, is_forwarding);
        // It is tried again every few seconds.
        let was_failing = std::mem::replace(&mut self.are_uplinks_failing, result.is_err());
        if let Err(error) = result.map_err(|it| error_chain(&it)) {
            if was_failing {
                tracing::debug!(error, "packets from outside are still not forwarded");
            } else {
                tracing::error!(error, "packets from outside are not forwarded");
            }
        }
    }

    /// Looks whether the uplinks are wide enough, if anything is forwarded: a family whose wrapped packets do not fit is
    /// translated. Returns whether the state has to be applied again.
    pub fn check_uplinks(&mut self) -> bool {
        if !self.buffer.layout.forwarding.is_used() {
            return false;
        }
        let mut narrow = BTreeMap::new();
        for address in self.buffer.layout.forwarding.nodes.own_addresses() {
            match too_narrow(address) {
                Ok(links) if links.is_empty() => {}
                Ok(links) => {
                    narrow.insert(Family::of(address), links);
                }
                Err(error) => {
                    tracing::debug!(%error, "uplinks cannot be read; what is known of them stays");
                    return false;
                }
            }
        }
        let families = narrow.keys().copied().collect();
        let is_changed = self.buffer.layout.forwarding.set_narrow(families);
        if is_changed {
            for (family, links) in &narrow {
                tracing::warn!(
                    %family, ?links, needs = least_mtu(*family),
                    "an uplink is too narrow for wrapped packets: those from outside are translated"
                );
            }
            if narrow.is_empty() {
                tracing::info!("uplinks are wide enough again: packets from outside are forwarded");
            }
        }
        is_changed
    }

    /// The families in which an earlier process has forwarded packets from outside.
    pub fn forwarded_families(&mut self) -> Vec<Family> {
        self.buffer.layout.forwarding.previous_families()
    }

    /// Sets what the packet path has, as packets that are forwarded follow it. Returns whether the state has to be applied again.
    pub fn set_packet_path(&mut self, now: PacketPath) -> bool {
        self.buffer.layout.forwarding.set_packet_path(now)
    }

    /// The TCP frontends whose forwarding has begun, and is in effect, while this node may know connections that it has translated.
    pub fn forwarding_begun(&self) -> &BTreeSet<SocketAddr> {
        static NONE: BTreeSet<SocketAddr> = BTreeSet::new();
        let is_in_effect = self.is_attached && !self.are_uplinks_failing;
        if is_in_effect { &self.begun } else { &NONE }
    }

    /// This node knows no translated connections of these frontends any more. Returns whether the state has to be applied again.
    pub fn set_forwarding_settled(&mut self, frontends: &HashSet<SocketAddr>) -> bool {
        self.buffer.layout.forwarding.set_settled(frontends)
    }

    /// Whether there are nodes that [`Datapath::probe_peers`] has not probed yet.
    pub fn has_new_peers(&mut self) -> bool {
        self.probes.is_some() && self.buffer.layout.forwarding.nodes.has_new_peers
    }

    /// Probes the nodes that packets from outside are forwarded to. Returns whether the state has to be applied again, because
    /// one does not answer any more, or answers now; and when to call again.
    pub fn probe_peers(&mut self) -> (bool, Duration) {
        let Some(probes) = &mut self.probes else { return (false, REPORT_TIME) };
        if let Some((own, wanted)) = self.buffer.layout.forwarding.nodes.take_peers() {
            probes.set(&own, &wanted);
        }
        let (states, due) = probes.step();
        let is_changed = states.is_some();
        if let Some(states) = states {
            self.buffer.layout.forwarding.nodes.set_peers(states);
        }
        (is_changed, due)
    }

    /// Queries which programs are attached; `None` before ours are.
    /// If one of ours was detached, the next [`Datapath::attach`] attaches it again.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the query. Nothing is changed.
    pub fn attach_status(&mut self) -> Result<Option<AttachStatus>, Error> {
        if !self.is_attached {
            return Ok(None);
        }
        // An interface may have been created anew with the same address.
        self.uplinks.expire();
        let status = hook_status::query(&self.cgroup, &self.pins)?;
        self.is_attached = status.is_complete();
        Ok(Some(status))
    }

    /// Puts the programs of a trace under the links, until [`Datapath::end_trace`], or until this value is dropped.
    ///
    /// # Errors
    ///
    /// If no program is attached yet, or the kernel refuses. The product's programs are attached then.
    pub fn begin_trace(&mut self, mut traced: TracedPrograms) -> Result<(), Error> {
        if !self.is_attached {
            return Err(Error::NotAttached);
        }
        self.trace = None;
        traced.set_exclusions(&self.exclusions)?;
        traced.put(&mut self.ebpf, &self.pins)?;
        self.trace = Some(traced);
        Ok(())
    }

    /// Puts the product's programs under the links again.
    pub fn end_trace(&mut self) {
        self.trace = None;
    }

    /// The cgroup whose sockets are translated.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup.path
    }

    /// Opens what terminates sockets whose endpoint was removed.
    ///
    /// # Errors
    ///
    /// If the maps with the NAT entries of sockets cannot be opened.
    pub fn socket_terminator(&self) -> Result<SocketTerminator, Error> {
        SocketTerminator::open(&self.pins)
    }

    /// Opens what sockets are connected to.
    ///
    /// # Errors
    ///
    /// If the maps with the NAT entries of sockets cannot be opened.
    pub fn connected_backends(&self) -> Result<ConnectedBackends, Error> {
        ConnectedBackends::open(&self.pins)
    }

    /// Updates the excluded cgroups: each may have been created, removed, or created anew.
    ///
    /// # Errors
    ///
    /// If one cannot be examined; the others stay excluded.
    pub fn refresh_exclusions(&mut self) -> Result<(), Error> {
        self.exclusions.refresh()?;
        if let Some(trace) = &mut self.trace {
            trace.set_exclusions(&self.exclusions)?;
        }
        if let Some(serve) = self.packets_serve {
            self.exclusions.report_unserved(serve);
        }
        Ok(())
    }

    /// Notifications of cgroups that may be excluded: then [`Datapath::refresh_exclusions`] is due. `None` if annotations of
    /// pods are not honored. Must be called within a tokio runtime.
    pub fn cgroup_events(&self) -> Option<CgroupEvents> {
        self.exclusions.events()
    }

    /// Connects to ejected endpoints whose time is nearly out, and prolongs the ejections of those that did not answer. To be
    /// called every second.
    ///
    /// # Errors
    ///
    /// If the records cannot be read or written: then clients find out what has become of an endpoint.
    pub fn try_ejected(&mut self) -> Result<(), Error> {
        let records = self.failures.ejected()?;
        let now = clock::now()?;
        let layout = &self.buffer.layout;
        for (key, record) in self.trials.step(now, &records, |counters| layout.endpoints_of(counters)) {
            self.failures.replace(key, &record)?;
        }
        Ok(())
    }

    /// Reads the usage of the tables that clients fill, after what is unused there was deleted.
    ///
    /// # Errors
    ///
    /// If a map cannot be read or written.
    pub fn table_stats(&mut self) -> Result<TableStats, Error> {
        self.reclaim_counters()?;
        self.recount.correct(&mut self.buffer.store.chunks)?;
        let avoiders = self.failures.read()?;
        let ejected = if avoiders.is_empty() { Vec::new() } else { self.buffer.layout.ejected(&avoiders) };
        let ejections = self.failures.ejections()?;
        let peers = self.probes.as_ref().map(PeerProbes::counts).unwrap_or_default();
        Ok(TableStats { ejected, ejections, peers, ..self.stats.read(&self.cgroup.path)? })
    }
}

/// Detaches every program and removes every map; returns whether there was anything. Connected sockets stay connected.
///
/// # Errors
///
/// If something cannot be removed; the rest may be removed already.
pub fn cleanup(pin_dir: &Path) -> Result<bool, Error> {
    let pins = Pins::new(pin_dir);
    if !pins.exists()? {
        return Ok(false);
    }
    let Some(_lock) = pins.lock()? else { return Ok(false) };
    hooks::detach(&pins)?;
    for it in pins.remove_all()? {
        tracing::warn!(path = %it.display(), "kept: it does not belong to kube-proxy-ebpf");
    }
    Ok(true)
}
