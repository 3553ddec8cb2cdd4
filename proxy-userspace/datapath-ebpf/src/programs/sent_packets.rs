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
use nix::net::if_::if_indextoname;
use proxy_common::trace::SentPacket as Event;

use crate::{
    error::{ATTACH, Error},
    maps::{
        bpf_maps::{self, Variant},
        embedded,
        features::with_features,
        map_spec,
        pins::Pins,
    },
    options::Options,
    programs::{links::failed, uplink_links, uplinks::classifier},
};

/// The program at each uplink.
pub(crate) const PROGRAM: &str = "trace_ingress";

/// A packet that goes on to another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentPacket {
    /// The name of the interface at which it arrived, if that still exists.
    pub interface: Option<String>,
    /// The IP protocol number.
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
    lost: Array<MapData, u64>,
    /// By the name of the interface.
    links: BTreeMap<String, SchedClassifierLink>,
}

impl SentPackets {
    /// Begins to report; `None` while no program forwards packets.
    ///
    /// # Errors
    ///
    /// If this binary has no such program, or the kernel refuses it: links to interfaces need Linux 6.6.
    pub fn start(options: &Options) -> Result<Option<Self>, Error> {
        let pins = Pins::new(&options.pin_dir);
        if uplink_links::attached(&pins)?.is_empty() {
            return Ok(None);
        }
        let object = embedded::traced()?;
        let mut ebpf = with_features(|features| {
            let variant = Variant { object, constants: &[], log_level: None };
            let mut ebpf = bpf_maps::load_object(&pins, options, features, &variant)?;
            classifier(&mut ebpf, PROGRAM)?.load().map_err(failed("load", PROGRAM))?;
            Ok(ebpf)
        })?;
        let packets = ebpf.take_map("SENT_PACKETS");
        let packets = packets.ok_or_else(|| Error::Incomplete("map SENT_PACKETS".into()))?;
        let mut packets = Self {
            pins,
            packets: RingBuf::try_from(packets).map_err(Error::map("SENT_PACKETS"))?,
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
    /// If the kernel refuses.
    pub fn follow_uplinks(&mut self) -> Result<(), Error> {
        let uplinks = uplink_links::attached(&self.pins)?;
        self.links.retain(|name, _| uplinks.contains(name));
        for name in uplinks {
            if self.links.contains_key(&name) {
                continue;
            }
            let program = classifier(&mut self.ebpf, PROGRAM)?;
            let order = TcAttachOptions::TcxOrder(LinkOrder::first());
            let link = program.attach_with_options(&name, TcAttachType::Ingress, order);
            let link = link.map_err(failed(ATTACH, PROGRAM))?;
            self.links.insert(name, program.take_link(link).map_err(failed("take the link", PROGRAM))?);
        }
        Ok(())
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

impl From<Event> for SentPacket {
    fn from(it: Event) -> Self {
        let node = IpAddr::from(it.node);
        Self {
            interface: if_indextoname(it.interface).ok().map(|it| it.to_string_lossy().into_owned()),
            protocol: it.protocol as u8,
            source: SocketAddr::new(it.source.into(), it.source_port.get()),
            destination: SocketAddr::new(it.destination.into(), it.destination_port.get()),
            node: (!node.is_unspecified()).then_some(node),
            row: it.row,
            rows: it.mask.saturating_add(1),
        }
    }
}
