//! The BPF objects of one sandbox, to find leaks.
//!
//! Objects of other instances on the machine are not counted: an object belongs to a sandbox if it is pinned in its
//! folder, held open by one of its processes, or reachable from such an object.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use aya::{
    maps::{ArrayOfMaps, Map, MapData, loaded_maps},
    programs::{links::PinnedLink, loaded_links, loaded_programs},
};

/// The ids of BPF objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelObjects {
    /// Maps, inner maps included.
    pub maps: BTreeSet<u32>,
    /// Programs.
    pub programs: BTreeSet<u32>,
    /// Links.
    pub links: BTreeSet<u32>,
}

/// How many maps, programs and links there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectCounts {
    /// The number of maps.
    pub maps: usize,
    /// The number of programs.
    pub programs: usize,
    /// The number of links.
    pub links: usize,
}

impl KernelObjects {
    /// Their number.
    #[must_use]
    pub fn counts(&self) -> ObjectCounts {
        ObjectCounts { maps: self.maps.len(), programs: self.programs.len(), links: self.links.len() }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn sets(&mut self) -> [&mut BTreeSet<u32>; 3] {
        [&mut self.maps, &mut self.programs, &mut self.links]
    }

    /// The objects that file descriptors refer to, by `/proc/PID/fdinfo`.
    fn read_fdinfo(&mut self, process: impl ToString) {
        let folder = Path::new("/proc").join(process.to_string()).join("fdinfo");
        // A process or a descriptor may be gone meanwhile.
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            for line in fs::read_to_string(file.path()).unwrap_or_default().lines() {
                let Some((key, id)) = line.split_once(':') else { continue };
                let set = match key {
                    "map_id" => &mut self.maps,
                    "prog_id" => &mut self.programs,
                    "link_id" => &mut self.links,
                    _ => continue,
                };
                set.extend(id.trim().parse::<u32>());
            }
        }
    }

    /// Adds the links of these programs, the maps of all programs, and inner maps.
    fn follow(&mut self) {
        let links = loaded_links().flatten().filter(|it| self.programs.contains(&it.program_id()));
        self.links.extend(links.map(|it| it.id()));
        for program in loaded_programs().flatten().filter(|it| self.programs.contains(&it.id())) {
            self.maps.extend(program.map_ids().ok().flatten().unwrap_or_default());
        }
        for id in self.maps.clone() {
            let map = MapData::from_id(id).and_then(Map::from_map_data);
            let Ok(Ok(outer)) = map.map(ArrayOfMaps::<MapData>::try_from) else { continue };
            let inner = (0..outer.len()).filter_map(|it| outer.get(&it, 0).ok()?.info().ok());
            self.maps.extend(inner.map(|it| it.id()));
        }
    }

    /// Those that the kernel still has, and that are not among `others`.
    fn loaded_but_not(&self, others: &Self) -> Self {
        let loaded = Self {
            maps: loaded_maps().flatten().map(|it| it.id()).collect(),
            programs: loaded_programs().flatten().map(|it| it.id()).collect(),
            links: loaded_links().flatten().map(|it| it.id()).collect(),
        };
        let rest = |ours: &BTreeSet<u32>, loaded: &BTreeSet<u32>, others: &BTreeSet<u32>| {
            ours.iter().filter(|it| loaded.contains(it) && !others.contains(it)).copied().collect()
        };
        Self {
            maps: rest(&self.maps, &loaded.maps, &others.maps),
            programs: rest(&self.programs, &loaded.programs, &others.programs),
            links: rest(&self.links, &loaded.links, &others.links),
        }
    }
}

/// Follows the BPF objects of a sandbox. The kernel does not reuse ids soon, so an object that belonged to the sandbox
/// once is recognised for as long as it exists.
#[derive(Clone, Debug)]
pub struct ObjectTracker {
    cgroup_processes: PathBuf,
    pins: PathBuf,
    seen: KernelObjects,
}

impl ObjectTracker {
    /// A tracker that has seen nothing yet.
    #[must_use]
    pub fn new(sandbox: &crate::Sandbox) -> Self {
        Self {
            cgroup_processes: sandbox.cgroup().join("cgroup.procs"),
            pins: sandbox.pins().to_owned(),
            seen: KernelObjects::default(),
        }
    }

    /// The objects that belong to the sandbox now.
    pub fn observe(&mut self) -> KernelObjects {
        let mut objects = KernelObjects::default();
        // BPF_OBJ_GET opens every kind of pin; fdinfo then names the kind and the id.
        let opened: Vec<_> = pins_below(&self.pins).into_iter().map(PinnedLink::from_pin).collect();
        objects.read_fdinfo("self");
        drop(opened);
        let processes = fs::read_to_string(&self.cgroup_processes).unwrap_or_default();
        processes.lines().for_each(|it| objects.read_fdinfo(it));
        objects.follow();
        for (all, new) in self.seen.sets().into_iter().zip(objects.clone().sets()) {
            all.append(new);
        }
        objects
    }

    /// As [`Self::observe`], once the numbers have been stable for half a second: the kernel frees objects asynchronously.
    pub fn observe_settled(&mut self) -> ObjectCounts {
        let mut last = self.observe().counts();
        let mut equal = 0;
        for _ in 0..100 {
            thread::sleep(Duration::from_millis(100));
            let now = self.observe().counts();
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
        self.seen.loaded_but_not(&now)
    }
}

/// Every pin below a folder, sorted; none if the folder does not exist.
#[must_use]
pub fn pins_below(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path()).collect();
    entries.sort_unstable();
    entries.into_iter().flat_map(|it| if it.is_dir() { pins_below(&it) } else { vec![it] }).collect()
}
