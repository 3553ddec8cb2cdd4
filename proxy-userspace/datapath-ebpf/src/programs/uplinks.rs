//! Attaches the programs of packets from outside to the uplinks of the node.
//!
//! Invariant: the links are pinned and outlast this process; the program of one is replaced without a moment without any.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    programs::{LinkOrder, Program, SchedClassifier, TcAttachType, links::FdLink, tc::TcAttachOptions},
};
use nix::net::if_::if_indextoname;

use crate::{
    error::{ATTACH, Error},
    host::raw_bpf,
    maps::pins::{self, Pins},
    programs::links::{detach_link, failed},
};

/// The programs, by the directions in which they see packets.
const PROGRAMS: [(&str, TcAttachType); 2] =
    [("egress", TcAttachType::Egress), ("ingress", TcAttachType::Ingress)];

/// The uplinks, by the index of their interface, and where the links of each are pinned.
#[derive(Debug, Default)]
pub(crate) struct Uplinks {
    /// Whether packets were forwarded when the links were set last; `None` if they have to be set.
    current: Option<bool>,
    attached: BTreeMap<u32, [PathBuf; 2]>,
}

impl Uplinks {
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
        let is_unwanted = |(interface, _): &(u32, PathBuf)| !wanted.contains(interface);
        for (_, pin) in all_pins(pins)?.into_iter().filter(is_unwanted) {
            detach_link(&pin)?;
        }
        self.attached.retain(|it, _| wanted.contains(it));
        for interface in wanted {
            // An interface that has gone took its links along; the pins stay.
            let is_attached = |pins: &[PathBuf; 2]| pins.iter().all(|it| is_attached(it));
            if self.attached.get(interface).is_some_and(is_attached) {
                continue;
            }
            for (name, _) in PROGRAMS {
                let program = classifier(ebpf, name)?;
                if program.fd().is_err() {
                    program.load().map_err(failed("load", name))?;
                }
            }
            let Ok(name) = if_indextoname(*interface) else { continue };
            let name = name.to_string_lossy();
            let mut attached = Vec::new();
            for (program, direction) in PROGRAMS {
                let pin = pins.links().join(format!("{program}_{interface}"));
                attach(classifier(ebpf, program)?, program, direction, &name, &pin)?;
                attached.push(pin);
            }
            tracing::info!(interface = %name, "packets from outside are forwarded");
            if let Ok(pins) = attached.try_into() {
                self.attached.insert(*interface, pins);
            }
        }
        self.current = Some(is_forwarding);
        Ok(())
    }
}

/// Detaches the programs from all interfaces.
pub(crate) fn detach(pins: &Pins) -> Result<(), Error> {
    all_pins(pins)?.into_iter().try_for_each(|(_, pin)| detach_link(&pin))
}

/// Whether a pin is that of a link to an uplink.
pub(crate) fn is_pin(pin: &Path) -> bool {
    interface_of(pin).is_some()
}

/// Every such pin, with the index of the interface.
fn all_pins(pins: &Pins) -> Result<Vec<(u32, PathBuf)>, Error> {
    Ok(pins.all_links()?.into_iter().filter_map(|it| Some((interface_of(&it)?, it))).collect())
}

fn interface_of(pin: &Path) -> Option<u32> {
    let (program, interface) = pin.file_name()?.to_str()?.split_once('_')?;
    let interface = interface.trim_end_matches("_new");
    PROGRAMS.iter().any(|(it, _)| *it == program).then(|| interface.parse().ok())?
}

/// Whether the interface of a pinned link is still there.
fn is_attached(pin: &Path) -> bool {
    raw_bpf::obj_get(pin).and_then(|it| raw_bpf::link_interface(it.as_fd())).is_ok_and(|it| it != 0)
}

/// Updates the pinned link, or creates one before those of other programs, and pins it.
fn attach(
    program: &mut SchedClassifier,
    name: &'static str,
    direction: TcAttachType,
    interface: &str,
    pin: &Path,
) -> Result<(), Error> {
    if is_attached(pin) {
        let link = raw_bpf::obj_get(pin).map_err(Error::syscall("BPF_OBJ_GET", pin.display()))?;
        let fd = program.fd().map_err(failed("open", name))?;
        return raw_bpf::link_update(link.as_fd(), fd.as_fd())
            .map_err(Error::syscall("BPF_LINK_UPDATE", pin.display()));
    }
    let order = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id = program.attach_with_options(interface, direction, order).map_err(failed(ATTACH, name))?;
    let link = program.take_link(id).map_err(failed("take the link", name))?;
    let link = FdLink::try_from(link).map_err(failed("take the link", name))?;
    pins::replace(pin, |path| link.pin(path).map(drop).map_err(Error::pin(path)))
}

fn classifier<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut SchedClassifier, Error> {
    match ebpf.program_mut(name) {
        Some(Program::SchedClassifier(program)) => Ok(program),
        _ => Err(Error::Incomplete(format!("program {name}"))),
    }
}
