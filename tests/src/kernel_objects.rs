//! The BPF objects of one sandbox, to find leaks.
//!
//! Objects of other instances on the machine are not counted: an object belongs to a sandbox if it is pinned in its
//! folder, held open by one of its processes, or reachable from such an object.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use aya::{
    maps::{ArrayOfMaps, Map, MapData, loaded_maps},
    programs::{links::PinnedLink, loaded_links, loaded_programs},
};
use build_tools::files_below;

use crate::{Sandbox, count_each};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    /// A map, or an inner map.
    Map,
    Program,
    Link,
}

/// BPF objects by their ids.
pub type KernelObjects = BTreeSet<(ObjectKind, u32)>;

pub type ObjectCounts = BTreeMap<ObjectKind, usize>;

/// The objects that file descriptors of a process refer to, by `/proc/PID/fdinfo`.
fn read_fdinfo(process: &str) -> KernelObjects {
    let folder = Path::new("/proc").join(process).join("fdinfo");
    let mut objects = KernelObjects::new();
    // A process or a descriptor may be gone meanwhile.
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        for line in fs::read_to_string(file.path()).unwrap_or_default().lines() {
            let Some((key, id)) = line.split_once(':') else { continue };
            let kind = match key {
                "map_id" => ObjectKind::Map,
                "prog_id" => ObjectKind::Program,
                "link_id" => ObjectKind::Link,
                _ => continue,
            };
            objects.extend(id.trim().parse().map(|id| (kind, id)));
        }
    }
    objects
}

/// Adds the links of these programs, the maps of all programs, and inner maps.
fn follow(objects: &mut KernelObjects) {
    for link in loaded_links().flatten() {
        if objects.contains(&(ObjectKind::Program, link.program_id())) {
            objects.insert((ObjectKind::Link, link.id()));
        }
    }
    for program in loaded_programs().flatten() {
        if objects.contains(&(ObjectKind::Program, program.id())) {
            let maps = program.map_ids().ok().flatten().unwrap_or_default();
            objects.extend(maps.into_iter().map(|id| (ObjectKind::Map, id)));
        }
    }
    for (_, id) in objects.clone().into_iter().filter(|it| it.0 == ObjectKind::Map) {
        let map = MapData::from_id(id).and_then(Map::from_map_data);
        let Ok(Ok(outer)) = map.map(ArrayOfMaps::<MapData>::try_from) else { continue };
        let inner = (0..outer.len()).filter_map(|it| outer.get(&it, 0).ok()?.info().ok());
        objects.extend(inner.map(|it| (ObjectKind::Map, it.id())));
    }
}

fn loaded() -> KernelObjects {
    let maps = loaded_maps().flatten().map(|it| (ObjectKind::Map, it.id()));
    let programs = loaded_programs().flatten().map(|it| (ObjectKind::Program, it.id()));
    let links = loaded_links().flatten().map(|it| (ObjectKind::Link, it.id()));
    maps.chain(programs).chain(links).collect()
}

/// Follows the BPF objects of a sandbox: one that once belonged to it stays known, as the kernel does not reuse ids soon.
#[derive(Clone, Debug)]
pub struct ObjectTracker {
    cgroup_processes: PathBuf,
    pins: PathBuf,
    seen: KernelObjects,
}

impl ObjectTracker {
    pub fn new(sandbox: &Sandbox) -> Self {
        Self {
            cgroup_processes: sandbox.cgroup().join("cgroup.procs"),
            pins: sandbox.pins().to_owned(),
            seen: KernelObjects::new(),
        }
    }

    /// The objects that belong to the sandbox now.
    pub fn observe(&mut self) -> KernelObjects {
        // BPF_OBJ_GET opens every kind of pin; fdinfo then names the kind and the id.
        let pins = files_below(&self.pins).unwrap_or_default();
        let opened: Vec<_> = pins.into_iter().map(PinnedLink::from_pin).collect();
        let mut objects = read_fdinfo("self");
        drop(opened);
        let processes = fs::read_to_string(&self.cgroup_processes).unwrap_or_default();
        objects.extend(processes.lines().flat_map(read_fdinfo));
        follow(&mut objects);
        self.seen.extend(&objects);
        objects
    }

    pub fn counts(&mut self) -> ObjectCounts {
        count_each(self.observe().into_iter().map(|(kind, _)| kind))
    }

    /// Counts the objects once their numbers have been stable for half a second: the kernel frees them asynchronously.
    pub fn settled_counts(&mut self) -> ObjectCounts {
        let mut last = self.counts();
        let mut equal = 0;
        for _ in 0..100 {
            thread::sleep(Duration::from_millis(100));
            let now = self.counts();
            equal = if now == last { equal + 1 } else { 0 };
            last = now;
            if equal == 5 {
                break;
            }
        }
        last
    }

    /// The objects that belonged to the sandbox once, belong to it no more, and still exist.
    pub fn leaked(&mut self) -> KernelObjects {
        let now = self.observe();
        let loaded = loaded();
        self.seen.iter().filter(|it| loaded.contains(it) && !now.contains(it)).copied().collect()
    }
}
