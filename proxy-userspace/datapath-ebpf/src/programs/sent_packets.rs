//! The first packets of connections that this node sends on to other nodes, while a trace runs.
//!
//! Invariant: the product's programs do not know of it. A program before them at each uplink reports, and the kernel detaches it
//! with the last descriptor of its link, however the process ends.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use aya::{
    Ebpf,
    maps::{Array, MapData, RingBuf},
    programs::{
        LinkOrder, TcAttachType,
        tc::{SchedClassifierLink, TcAttachOptions},
    },
};
use datapath::FrontendAddress;
use model::error_chain;
use proxy_common::{
    tables::FrontendKey6,
    trace::{MAX_FRONTENDS, SentPacket as Event},
};

use crate::{
    error::{ATTACH, Error},
    maps::{bpf_maps, embedded, features::with_features, map_spec, pins::Pins, tracked_map::TrackedMap},
    options::Options,
    programs::{
        links::{failed, has_no_links_to_interfaces, interface_name},
        uplink_links,
        uplinks::{TRACED, UplinkPin, classifier},
    },
    tables::layout::forwarding::frontend_key,
};

type Key = [u8; size_of::<FrontendKey6>()];

/// A packet that goes on to another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentPacket {
    /// The number of the interface at which it arrived.
    interface: u32,
    pub protocol: u8,
    /// The client.
    pub source: SocketAddr,
    /// The address of the Service.
    pub destination: SocketAddr,
    /// The address at which the node that serves it receives packets; none if it has left the cluster.
    pub node: Option<IpAddr>,
    /// Its row among those of the frontend, from 0 on.
    pub row: u32,
    /// How many rows the frontend has.
    pub rows: u32,
}

/// Reports packets until it is dropped.
pub struct SentPackets {
    ebpf: Ebpf,
    pins: Pins,
    packets: RingBuf<MapData>,
    /// The frontends whose packets are reported.
    frontends: TrackedMap<Key>,
    lost: Array<MapData, u64>,
    /// By the number of the interface: one that is made anew has another.
    links: BTreeMap<u32, SchedClassifierLink>,
}

impl SentPackets {
    /// Begins to report; `None` while no program forwards packets.
    ///
    /// # Errors
    ///
    /// If this binary has no such program, or the kernel refuses it.
    pub fn start(options: &Options) -> Result<Option<Self>, Error> {
        let pins = Pins::new(&options.pin_dir);
        let links = pins.all_links()?;
        let uplinks: Vec<_> = links.iter().filter_map(|it| UplinkPin::of(it)).collect();
        if uplinks.is_empty() {
            return Ok(None);
        }
        if uplinks.iter().any(|it| it.program.is_none()) {
            return Err(Error::NoLinksToInterfaces);
        }
        let object = embedded::traced()?;
        let mut ebpf = with_features(|features| {
            let mut ebpf = bpf_maps::load_object(&pins, options, features, object, &[], None)?;
            classifier(&mut ebpf, TRACED)?.load().map_err(failed("load", TRACED))?;
            Ok(ebpf)
        })?;
        let mut packets = Self {
            pins,
            packets: map_spec::take(&mut ebpf, "SENT_PACKETS")?,
            frontends: TrackedMap::take(&mut ebpf, "TRACED_FRONTENDS")?,
            lost: map_spec::take(&mut ebpf, "LOST_PACKETS")?,
            links: BTreeMap::new(),
            ebpf,
        };
        packets.follow_uplinks()?;
        Ok(Some(packets))
    }

    /// Attaches the program to the interfaces at which packets are forwarded now, and to no other.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; not for an interface that goes meanwhile, which the next call looks at again.
    pub fn follow_uplinks(&mut self) -> Result<(), Error> {
        let uplinks = uplink_links::attached(&self.pins)?;
        self.links.retain(|interface, _| uplinks.contains_key(interface));
        for (interface, name) in uplinks {
            if self.links.contains_key(&interface) {
                continue;
            }
            let program = classifier(&mut self.ebpf, TRACED)?;
            let order = TcAttachOptions::TcxOrder(LinkOrder::first());
            match program.attach_with_options(&name, TcAttachType::Ingress, order) {
                Ok(link) => {
                    let link = program.take_link(link).map_err(failed("take the link", TRACED))?;
                    self.links.insert(interface, link);
                }
                Err(it) if has_no_links_to_interfaces(&it) => {
                    return Err(Error::NoLinksToInterfaces);
                }
                Err(error) => {
                    let error = failed(ATTACH, TRACED)(error);
                    tracing::debug!(
                        interface = name,
                        error = error_chain(&error),
                        "no packets are traced there"
                    );
                }
            }
        }
        Ok(())
    }

    /// Sets whose packets are reported; node ports are not forwarded, and left out.
    ///
    /// # Errors
    ///
    /// If there are too many, or the kernel refuses.
    pub fn set_frontends(&mut self, wanted: impl IntoIterator<Item = FrontendAddress>) -> Result<(), Error> {
        let wanted = wanted.into_iter().filter(|it| !it.address.ip().is_unspecified());
        let key = |it: FrontendAddress| Some((bytemuck::cast::<_, Key>(frontend_key(&it)?), 1));
        let wanted: BTreeMap<Key, u32> = wanted.filter_map(key).collect();
        if wanted.len() > MAX_FRONTENDS as usize {
            return Err(Error::TooManyTracedPorts(wanted.len()));
        }
        self.frontends.set(wanted)
    }

    /// The next packet; more may follow the end.
    pub fn poll(&mut self) -> Option<SentPacket> {
        let item = self.packets.next()?;
        bytemuck::try_pod_read_unaligned::<Event>(&item).ok().map(SentPacket::from)
    }

    /// How many packets were lost because they were not read in time.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn lost(&self) -> Result<u64, Error> {
        self.lost.get(&0, 0).map_err(Error::map("LOST_PACKETS"))
    }
}

impl SentPacket {
    /// The name of the interface at which it arrived, if that still exists.
    pub fn interface(&self) -> Option<String> {
        interface_name(self.interface)
    }
}

impl From<Event> for SentPacket {
    fn from(it: Event) -> Self {
        let node = IpAddr::from(it.node);
        Self {
            interface: it.interface,
            protocol: it.protocol as u8,
            source: SocketAddr::new(it.source.into(), it.source_port.get()),
            destination: SocketAddr::new(it.destination.into(), it.destination_port.get()),
            node: (!node.is_unspecified()).then_some(node),
            row: it.row,
            rows: it.mask.saturating_add(1),
        }
    }
}
