//! Attaches the programs of packets from outside to the uplinks of the node.
//!
//! Invariant: the links are pinned and outlast this process; the program of one is replaced without a moment without any.
//! So do filters, where the kernel has no links to interfaces.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf,
    programs::{
        LinkOrder, Program, SchedClassifier, TcAttachType, XdpMode,
        links::{FdLink, LinkError},
        tc::TcAttachOptions,
    },
};
use model::{Family, error_chain};
use netlink::{host_addresses::interfaces_with, links};
use proxy_common::forward::{Wrapping4, Wrapping6};

use crate::{
    error::{ATTACH, Error},
    host::{failpoint, raw_bpf},
    maps::pins::{self, Pins},
    programs::{
        clsact,
        links::{detach_link, failed, has_no_links_to_interfaces, interface_name, update},
    },
};

/// The programs, by the directions in which they see packets.
pub(crate) const PROGRAMS: [(&str, TcAttachType); 2] =
    [("egress", TcAttachType::Egress), ("ingress", TcAttachType::Ingress)];

/// The program in the driver. It has a link, or none.
pub(crate) const XDP: &str = "ingress_xdp";

/// The program of a trace, before that for packets which arrive. It has a link that is not pinned.
pub(crate) const TRACED: &str = "trace_ingress";

/// The least MTU of an uplink that packets of a family are forwarded by: senders need not divide packets of 576 bytes over IPv4
/// (RFC 791), and of 1,280 over IPv6 (RFC 8200), and the wrapping comes to these.
pub(crate) fn least_mtu(family: Family) -> u32 {
    match family {
        Family::V4 => 576 + size_of::<Wrapping4>() as u32,
        Family::V6 => 1_280 + size_of::<Wrapping6>() as u32,
    }
}

/// The interfaces of Ethernet with the address of a node that are too narrow for the packets of its family, each with its MTU.
pub(crate) fn too_narrow(address: IpAddr) -> io::Result<Vec<(String, u32)>> {
    let mut narrow = Vec::new();
    for interface in interfaces_with(|it| it == address)? {
        // One may have gone meanwhile.
        let link = links::read(interface)?;
        let link = link.filter(|it| it.is_ethernet && it.mtu < least_mtu(Family::of(address)));
        narrow.extend(link.map(|it| (it.name, it.mtu)));
    }
    Ok(narrow)
}

/// What the name of a pin at an uplink says.
pub(crate) struct UplinkPin {
    /// The number of the interface.
    pub(crate) interface: u32,
    /// The program of the link that is pinned; `None` if the pin stands for filters.
    pub(crate) program: Option<&'static str>,
}

impl UplinkPin {
    /// `None` for the pin of anything else.
    pub(crate) fn of(pin: &Path) -> Option<Self> {
        if let Some((interface, _)) = clsact::interface_of(pin) {
            return Some(Self { interface, program: None });
        }
        let (name, interface) = pin.file_name()?.to_str()?.trim_end_matches("_new").rsplit_once('_')?;
        let program = PROGRAMS.into_iter().map(|(it, _)| it).chain([XDP]).find(|it| *it == name)?;
        Some(Self { interface: interface.parse().ok()?, program: Some(program) })
    }
}

/// The uplinks, by the index of their interface.
#[derive(Debug)]
pub(crate) struct Uplinks {
    /// Whether packets are forwarded in the driver, where it can.
    in_driver: bool,
    /// Whether packets were forwarded when the links were set last; `None` if they have to be set.
    current: Option<bool>,
    /// Where the programs of this process are attached.
    attached: BTreeSet<u32>,
}

impl Uplinks {
    pub(crate) fn new(in_driver: bool) -> Self {
        Self { in_driver, current: None, attached: BTreeSet::new() }
    }

    /// Has the links set again: the addresses of the node or its interfaces have changed.
    pub(crate) fn expire(&mut self) {
        self.current = None;
    }

    /// Whether the links are as they should be, if packets are forwarded or if they are not.
    pub(crate) fn is_current(&self, is_forwarding: bool) -> bool {
        self.current == Some(is_forwarding)
    }

    /// Attaches the programs to these interfaces, and to no others; to none if no packets are forwarded.
    ///
    /// # Errors
    ///
    /// What is attached stays so; the next call goes on.
    pub(crate) fn set(
        &mut self,
        ebpf: &mut Ebpf,
        pins: &Pins,
        wanted: &BTreeSet<u32>,
        is_forwarding: bool,
    ) -> Result<(), Error> {
        for pin in pins.all_links()? {
            if UplinkPin::of(&pin).is_some_and(|it| !wanted.contains(&it.interface)) {
                detach_pin(&pin)?;
            }
        }
        self.attached.retain(|it| wanted.contains(it));
        // All are loaded first, so that programs of two versions see packets together as shortly as possible.
        for (name, _) in PROGRAMS.iter().filter(|_| !wanted.is_empty()) {
            let classifier = classifier(ebpf, name)?;
            if classifier.fd().is_err() {
                classifier.load().map_err(failed("load", name))?;
            }
        }
        for interface in wanted {
            let Some(name) = interface_name(*interface) else { continue };
            let is_new = !self.attached.contains(interface);
            for (program, direction) in PROGRAMS {
                let classifier = classifier(ebpf, program)?;
                let pin = pins.links().join(format!("{program}_{interface}"));
                // An interface that has gone took its links along; the pins stay.
                if is_new || attached_link(&pin).is_none() {
                    attach(classifier, (program, direction), (*interface, &name), pins, &pin)?;
                }
            }
            self.set_driver(ebpf, pins, (*interface, &name), is_new)?;
            if is_new {
                tracing::info!(interface = %name, "packets from outside are forwarded");
                self.attached.insert(*interface);
            }
        }
        self.current = Some(is_forwarding);
        Ok(())
    }

    /// Attaches the program in the driver if it is wanted, or detaches it. Without it the others serve.
    fn set_driver(
        &self,
        ebpf: &mut Ebpf,
        pins: &Pins,
        (interface, name): (u32, &str),
        is_new: bool,
    ) -> Result<(), Error> {
        let pin = pins.links().join(format!("{XDP}_{interface}"));
        if !self.in_driver {
            return if pin.exists() { detach_link(&pin) } else { Ok(()) };
        }
        if !is_new {
            return Ok(());
        }
        match attach_in_driver(ebpf, interface, &pin) {
            Ok(()) => tracing::info!(interface = name, "packets from outside are forwarded in the driver"),
            Err(error) => tracing::warn!(
                interface = name,
                error = error_chain(&error),
                "packets from outside are not forwarded in the driver, but after it: it has no XDP, another program is attached, or \
                 Linux is older than 5.18"
            ),
        }
        Ok(())
    }
}

fn attach_in_driver(ebpf: &mut Ebpf, interface: u32, pin: &Path) -> Result<(), Error> {
    let Some(Program::Xdp(program)) = ebpf.program_mut(XDP) else {
        return Err(Error::Incomplete(format!("program {XDP}")));
    };
    if program.fd().is_err() {
        program.load().map_err(failed("load", XDP))?;
    }
    if let Some(link) = attached_link(pin) {
        return update(&link, program.fd().map_err(failed("open", XDP))?, pin);
    }
    let id = program.attach_to_if_index(interface, XdpMode::Driver).map_err(failed(ATTACH, XDP))?;
    pin_link(program.take_link(id).map_err(failed("take the link", XDP))?, XDP, pin)
}

pub(crate) fn detach(pins: &Pins) -> Result<(), Error> {
    pins.all_links()?.iter().filter(|it| UplinkPin::of(it).is_some()).try_for_each(|it| detach_pin(it))
}

fn detach_pin(pin: &Path) -> Result<(), Error> {
    match clsact::interface_of(pin) {
        Some(_) => clsact::detach(pin, PROGRAMS.map(|(_, direction)| direction)),
        None => detach_link(pin),
    }
}

/// The pinned link, if its interface is still there.
fn attached_link(pin: &Path) -> Option<OwnedFd> {
    let link = raw_bpf::obj_get(pin).ok()?;
    raw_bpf::link_interface(link.as_fd()).is_ok_and(|it| it != 0).then_some(link)
}

/// Updates the pinned link, or creates one before those of other programs, and pins it. Without links to interfaces, before
/// Linux 6.6, the program becomes a filter.
fn attach(
    program: &mut SchedClassifier,
    (name, direction): (&'static str, TcAttachType),
    interface: (u32, &str),
    pins: &Pins,
    pin: &Path,
) -> Result<(), Error> {
    if let Some(link) = attached_link(pin) {
        return update(&link, program.fd().map_err(failed("open", name))?, pin);
    }
    if failpoint::is_enabled("no-links-to-interfaces") {
        return clsact::attach(program, name, direction, interface, pins);
    }
    let order = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id = match program.attach_with_options(interface.1, direction, order) {
        Ok(id) => id,
        Err(it) if has_no_links_to_interfaces(&it) => {
            return clsact::attach(program, name, direction, interface, pins);
        }
        Err(error) => return Err(failed(ATTACH, name)(error)),
    };
    pin_link(program.take_link(id).map_err(failed("take the link", name))?, name, pin)
}

fn pin_link(
    link: impl TryInto<FdLink, Error = LinkError>,
    name: &'static str,
    pin: &Path,
) -> Result<(), Error> {
    let link = link.try_into().map_err(failed("take the link", name))?;
    pins::replace(pin, |path| link.pin(path).map(drop).map_err(Error::pin(path)))
}

pub(crate) fn classifier<'a>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut SchedClassifier, Error> {
    match ebpf.program_mut(name) {
        Some(Program::SchedClassifier(program)) => Ok(program),
        _ => Err(Error::Incomplete(format!("program {name}"))),
    }
}
