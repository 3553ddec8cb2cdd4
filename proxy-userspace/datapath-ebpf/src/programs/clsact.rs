//! Attaches classifiers to interfaces on kernels without links to them (before Linux 6.6): as filters of the queueing
//! discipline `clsact`.
//!
//! Invariant: a filter outlasts the process, and is known by its priority and handle; one of others is never replaced.

use std::path::Path;

use aya::programs::{
    SchedClassifier, TcAttachType,
    tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact},
};
use netlink::links::delete_empty_clsact;

use crate::{
    error::{ATTACH, Error},
    maps::pins::{self, Pins},
    programs::links::{failed, interface_name},
};

/// The lowest number comes first; filters of other agents may have the same one.
const PRIORITY: u16 = 1;
const HANDLE: TcHandle = TcHandle::new(0, 0x4b50);
/// A program that is pinned with this prefix and the index of an interface says that there are filters of ours; with the other
/// one, that the qdisc is ours, too.
const FILTERS: &str = "filters_";
const QDISC: &str = "clsact_";

/// Puts a program into the filter of an interface, which is created if it is missing.
pub(crate) fn attach(
    program: &mut SchedClassifier,
    name: &'static str,
    direction: TcAttachType,
    (interface, interface_name): (u32, &str),
    pins: &Pins,
) -> Result<(), Error> {
    let existing = SchedClassifierLink::attached(interface_name, direction, PRIORITY, HANDLE, None);
    let existing = existing.map_err(Error::syscall("if_nametoindex", interface_name))?;
    let id = match program.attach_to_link(existing) {
        Ok(id) => id,
        Err(_) => {
            let marker = |prefix| pins.links().join(format!("{prefix}{interface}"));
            // Fails if there is one, or the kernel has none: then so does the next call.
            let is_ours = qdisc_add_clsact(interface_name).is_ok() || marker(QDISC).exists();
            let marker = marker(if is_ours { QDISC } else { FILTERS });
            pins::replace(&marker, |path| program.pin(path).map_err(Error::pin(path)))?;
            let options = NlOptions { priority: PRIORITY, handle: HANDLE, classid: None };
            program
                .attach_with_options(interface_name, direction, TcAttachOptions::Netlink(options))
                .map_err(failed(ATTACH, name))?
        }
    };
    // The filter stays when this process ends.
    program.take_link(id).map(std::mem::forget).map_err(failed("take the link", name))
}

/// The interface that a marker stands for, and whether its qdisc is ours; `None` if the pin is no marker.
pub(crate) fn interface_of(pin: &Path) -> Option<(u32, bool)> {
    let name = pin.file_name()?.to_str()?.trim_end_matches("_new");
    let of = |prefix, is_ours| Some((name.strip_prefix(prefix)?.parse().ok()?, is_ours));
    of(QDISC, true).or_else(|| of(FILTERS, false))
}

/// Removes our filters from an interface, and the qdisc if it is ours and no one else uses it.
pub(crate) fn detach(marker: &Path, directions: impl IntoIterator<Item = TcAttachType>) -> Result<(), Error> {
    let Some((interface, is_qdisc_ours)) = interface_of(marker) else { return Ok(()) };
    // With an interface that has gone, so have its filters.
    if let Some(name) = interface_name(interface) {
        for direction in directions {
            // Dropping it detaches it; it may be missing.
            drop(SchedClassifierLink::attached(&name, direction, PRIORITY, HANDLE, None));
        }
        if is_qdisc_ours && let Err(error) = delete_empty_clsact(interface) {
            tracing::warn!(interface = ?name, %error, "the qdisc clsact stays, without a filter of this program");
        }
    }
    pins::remove_pin(marker)
}
