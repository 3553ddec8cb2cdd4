//! Where the links to uplinks are attached, and what else runs there. Read-only.

use std::{collections::BTreeMap, os::fd::AsFd as _};

use aya::programs::{ProgramInfo, SchedClassifier};
use datapath::ForeignProgram;
use netlink::links::{self, Classifier, Link};

use crate::{
    error::Error,
    host::raw_bpf,
    maps::pins::{self, Pins},
    programs::{
        hook_status::name_of,
        links::{failed, has_no_links_to_interfaces, interface_name},
        uplinks::{PROGRAMS, TRACED, UplinkPin, XDP},
    },
};

/// A program of ours at an interface, or filters.
struct Attached {
    interface: u32,
    /// The name of the program, and the kernel's id of it; `None` for filters.
    program: Option<(&'static str, u32)>,
}

/// An interface and what runs there besides our programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Uplink {
    pub(crate) link: Link,
    /// The directions in which our programs are attached.
    pub(crate) attached: Vec<&'static str>,
    /// What sees packets before our programs do: each with its place, such as `tcx ingress`.
    pub(crate) before: Vec<String>,
    /// What sees only the packets that they let pass.
    pub(crate) after: Vec<String>,
}

/// The names of the interfaces at which our programs are attached, by number.
pub(crate) fn attached(pins: &Pins) -> Result<BTreeMap<u32, String>, Error> {
    let name = |it: Attached| Some((it.interface, interface_name(it.interface)?));
    Ok(own(pins)?.into_iter().filter_map(name).collect())
}

/// What is pinned at interfaces that exist.
fn own(pins: &Pins) -> Result<Vec<Attached>, Error> {
    let mut found = Vec::new();
    for pin in pins.all_links()? {
        let Some(UplinkPin { interface, program }) = UplinkPin::of(&pin) else { continue };
        let Some(name) = program else {
            found.push(Attached { interface, program: None });
            continue;
        };
        // It may have been removed meanwhile.
        let Some(link) = pins::open(&pin)? else { continue };
        let info = raw_bpf::link_interface(link.as_fd())
            .and_then(|interface| Ok((interface, raw_bpf::link_program(link.as_fd())?)));
        let (interface, id) = info.map_err(Error::syscall("BPF_OBJ_GET_INFO_BY_FD", pin.display()))?;
        if interface != 0 {
            found.push(Attached { interface, program: Some((name, id)) });
        }
    }
    Ok(found)
}

/// An interface, if it exists.
pub(crate) fn query(pins: &Pins, interface: u32) -> Result<Option<Uplink>, Error> {
    let what = || format!("interface {interface}");
    let link = links::read(interface).map_err(Error::syscall("RTM_GETLINK", what()))?;
    let Some(link) = link else { return Ok(None) };
    let mut own = own(pins)?;
    own.retain(|it| it.interface == interface);
    let has_filters = own.iter().any(|it| it.program.is_none());
    let own: Vec<_> = own.iter().filter_map(|it| it.program).collect();
    let describe = |place: &str, id| format!("{place}: {}", ForeignProgram { id, name: name_of(id) });
    let mut attached: Vec<_> = own.iter().map(|(name, _)| *name).collect();
    let others = link.xdp.iter().filter(|it| !own.contains(&(XDP, **it)));
    let mut before: Vec<_> = others.map(|it| describe("XDP", *it)).collect();
    let mut after = Vec::new();
    for (name, direction) in PROGRAMS.into_iter().rev() {
        let (_, programs) = match SchedClassifier::query_tcx(&link.name, direction) {
            Err(it) if has_no_links_to_interfaces(&it) => (0, Vec::new()),
            result => result.map_err(failed("query", name))?,
        };
        let programs: Vec<_> = programs.iter().map(ProgramInfo::id).collect();
        let is_own = |id: &u32| own.contains(&(name, *id));
        let position = programs.iter().position(is_own).unwrap_or(programs.len());
        let place = format!("tcx {name}");
        let others = programs[..position].iter().filter(|it| name_of(**it) != TRACED);
        before.extend(others.map(|it| describe(&place, *it)));
        after.extend(programs[position..].iter().filter(|it| !is_own(it)).map(|it| describe(&place, *it)));
    }
    let mut classifiers = links::classifiers(interface).map_err(Error::syscall("RTM_GETTFILTER", what()))?;
    if has_filters {
        let name = |it: &Classifier| it.program.map(name_of).unwrap_or_default();
        let names = PROGRAMS.into_iter().map(|(own, _)| own);
        attached.extend(names.filter(|own| classifiers.iter().any(|it| name(it) == *own)));
        classifiers.retain(|it| name(it) != it.direction);
    }
    after.extend(classifiers.into_iter().map(|Classifier { direction, kind, program }| match program {
        Some(id) => describe(&format!("tc {direction}"), id),
        None => format!("tc {direction}: {kind}"),
    }));
    Ok(Some(Uplink { link, attached, before, after }))
}
