//! The data plane of this node: everything between a state in hand and sockets that obey it.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
};

use aya::Ebpf;
use datapath::{ApplyReport, AttachStatus, NodePortAddresses, TableFill, TableStats, error_chain};
use model::state::{NodeInfos, NodeState};

use crate::{
    bpf_maps::{self, KernelMaps},
    capabilities,
    cgroup::Cgroup,
    double_buffer::{Applied, Plane},
    error::Error,
    exclusions::Exclusions,
    features::Features,
    hook_status, hooks,
    layout::Places,
    node_addresses::node_addresses,
    options::Options,
    pins::{PinLock, Pins},
    table_stats::Remembered,
    udp_termination::UdpTerminator,
};

/// The data plane of this node. It goes on serving when this value is dropped.
pub struct Datapath {
    plane: Plane<KernelMaps>,
    ebpf: Ebpf,
    remembered: Remembered,
    exclusions: Exclusions,
    cgroup: Cgroup,
    pins: Pins,
    node_name: String,
    node_port_addresses: NodePortAddresses,
    /// The addresses of this host's interfaces.
    interfaces: BTreeSet<IpAddr>,
    /// Whose the addresses of nodes are, and of which nodes that holds; none if the interfaces are others since.
    places: Places,
    placed: Option<NodeInfos>,
    /// Whether the programs are in effect on the cgroup.
    attached: bool,
    /// Whether the maps hold a whole generation of ours.
    filled: bool,
    _lock: PinLock,
}

impl Datapath {
    /// Takes over what is pinned, or prepares what is missing. Nothing is attached before the first state is applied,
    /// and what an earlier instance attached goes on serving its last state.
    ///
    /// # Errors
    ///
    /// Whatever served before goes on serving.
    pub fn start(options: &Options) -> Result<Self, Error> {
        // Before it leaves a folder behind that belongs to nobody of importance.
        if !capabilities::may_load_programs() {
            return Err(Error::Powerless);
        }
        let cgroup = Cgroup::open(options.cgroup.as_deref())?;
        let pins = Pins::new(&options.pin_dir);
        let lock = pins.prepare()?;
        hooks::check(&cgroup, &pins)?;
        let (mut ebpf, maps) = load(&pins, options)?;
        let remembered = Remembered::take(&mut ebpf)?;
        let exclusions = Exclusions::take(&mut ebpf, &options.excluded_cgroups)?;
        let plane = Plane::new(maps)?;
        tracing::info!(cgroup = %cgroup.path().display(), pins = %pins.dir().display(), "ready for the first state");
        Ok(Self {
            plane,
            ebpf,
            remembered,
            exclusions,
            cgroup,
            pins,
            node_name: options.node_name.clone(),
            node_port_addresses: options.node_port_addresses.clone(),
            interfaces: BTreeSet::new(),
            places: Places::new(),
            placed: None,
            attached: false,
            filled: false,
            _lock: lock,
        })
    }

    /// Tells which addresses the host's interfaces have; counts from the next [`Datapath::apply`] on.
    pub fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.interfaces = addresses;
        self.placed = None;
    }

    /// Brings a state into force, at one moment for all sockets that the programs are in effect for; see
    /// [`Datapath::attach`].
    ///
    /// # Errors
    ///
    /// What was in force stays in force; the next call tries everything again.
    pub fn apply(&mut self, state: &NodeState) -> Result<ApplyReport, Error> {
        if self.placed.as_ref().is_none_or(|it| !it.ptr_eq(&state.nodes)) {
            self.places =
                node_addresses(&state.nodes, &self.node_name, &self.interfaces, &self.node_port_addresses);
            self.placed = Some(state.nodes.clone());
        }
        let Applied { services, entries, flipped, whole } = self.plane.apply(state, &self.places)?;
        self.filled = true;
        Ok(ApplyReport {
            changed_services: services,
            services: self.plane.services(),
            entries,
            flipped,
            is_full: whole,
            tables: self
                .plane
                .fill()
                .map(|(table, entries, capacity)| TableFill { name: table.name(), entries, capacity })
                .collect(),
            rejected: self.plane.rejected(),
        })
    }

    /// Waits until no program reads the generation before, and readies its maps for the next change.
    /// To be called when there is nothing more urgent; the next [`Datapath::apply`] does it otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Datapath::apply`].
    pub fn finish_generation(&mut self) -> Result<(), Error> {
        self.plane.settle()?;
        // Programs of before may lead by other maps.
        if self.attached { self.plane.reclaim_counters() } else { Ok(()) }
    }

    /// Sees to it that the programs are in effect on the cgroup; also on one that has taken the place of the one before,
    /// as when a systemd slice comes back. Does nothing before the first state is in the maps.
    ///
    /// # Errors
    ///
    /// Whatever was in effect stays so, the old programs or the new ones.
    pub fn attach(&mut self) -> Result<(), Error> {
        if !self.filled {
            return Ok(());
        }
        if let Some(now) = self.cgroup.successor()? {
            tracing::warn!("{} is another cgroup than before", now.path().display());
            self.cgroup = now;
            self.attached = false;
        }
        if self.attached {
            return Ok(());
        }
        let attached = hooks::attach(&mut self.ebpf, &self.cgroup, &self.pins)?;
        self.attached = true;
        self.plane.programs_changed();
        tracing::info!(
            new = attached.made,
            taken_over = attached.updated,
            "attached to {}",
            self.cgroup.path().display()
        );
        // What is in force does not depend on these; the next start tries again.
        match hooks::detach_unknown(&self.pins) {
            Ok(detached) => {
                for hook in detached {
                    tracing::info!(
                        "detached {hook}, a hook of another version, which led by maps that nobody updates"
                    );
                }
            }
            Err(error) => {
                tracing::error!("a hook of another version leads by maps that nobody updates: {error}");
            }
        }
        match self.pins.remove_other_layouts() {
            Ok(removed) => {
                for layout in removed {
                    tracing::info!("removed the maps of layout {layout}, which nothing uses any more");
                }
            }
            Err(error) => tracing::warn!("maps of another layout are left over: {error}"),
        }
        Ok(())
    }

    /// Asks the kernel which programs are in effect; `None` before ours are attached.
    /// Where one of ours is not, the next [`Datapath::attach`] puts it back.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to tell. Nothing is changed.
    pub fn attach_status(&mut self) -> Result<Option<AttachStatus>, Error> {
        if !self.attached {
            return Ok(None);
        }
        let hooks = hook_status::query(&self.cgroup, &self.pins)?;
        self.attached = hooks.is_complete();
        Ok(Some(hooks))
    }

    /// The cgroup whose sockets are translated.
    pub fn cgroup(&self) -> &Path {
        self.cgroup.path()
    }

    /// What ends flows that have no place to go any more.
    ///
    /// # Errors
    ///
    /// If what sockets remember cannot be opened.
    pub fn udp_terminator(&self) -> Result<UdpTerminator, Error> {
        UdpTerminator::open(&self.pins)
    }

    /// Looks for the cgroups whose processes are left alone: they may have come, gone, or come back as others.
    ///
    /// # Errors
    ///
    /// If one cannot be looked for; those that were known stay.
    pub fn refresh_exclusions(&mut self) -> Result<(), Error> {
        self.exclusions.look()
    }

    /// Says how much is remembered for sockets and clients, and takes away what closed sockets have left over.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to tell.
    pub fn table_stats(&mut self) -> Result<TableStats, Error> {
        self.remembered.look()
    }
}

/// Loads the kernel object and its programs. Where the verifier refuses to have the kernel's sockets read, they do without.
fn load(pins: &Pins, options: &Options) -> Result<(Ebpf, KernelMaps), Error> {
    let load = |features| {
        let (mut ebpf, maps) = bpf_maps::load(pins, options, features)?;
        hooks::load(&mut ebpf)?;
        Ok((ebpf, maps))
    };
    let features = Features::ask();
    match (load(features), features.without_reading()) {
        // Who lacks a capability is refused for that, and would be later on.
        (Err(error @ Error::Program { .. }), Some(fewer)) if !capabilities::is_any_missing() => {
            let loaded = load(fewer)?;
            tracing::warn!(
                "this kernel does not show whose a socket is, and who calls is asked instead: {}",
                error_chain(&error)
            );
            Ok(loaded)
        }
        (loaded, _) => loaded,
    }
}

/// What `cleanup` did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cleaned {
    /// Everything of ours is gone.
    Removed {
        /// What was found beside it, and is not ours.
        left: Vec<PathBuf>,
    },
    /// There was nothing.
    Nothing,
}

/// Detaches every program and removes every map. Sockets that are connected stay so.
///
/// # Errors
///
/// What could not be removed is named; what was removed stays removed.
pub fn cleanup(pin_dir: &Path) -> Result<Cleaned, Error> {
    let pins = Pins::new(pin_dir);
    if !pins.is_present()? {
        return Ok(Cleaned::Nothing);
    }
    let Some(_lock) = pins.lock()? else { return Ok(Cleaned::Nothing) };
    hooks::detach(&pins)?;
    Ok(Cleaned::Removed { left: pins.remove_all()? })
}
