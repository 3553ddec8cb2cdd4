//! Cgroups whose processes are excluded from translation: those of paths and of pods, and their current ids.
//!
//! A path means the cgroup that exists there at the moment: it may be created later, removed, and created anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use aya::Ebpf;
use model::state::{Pods, SocketLb};
use proxy_common::exclusion::{ALL, MAX_EXCLUDED, MAX_LEVELS, UDP_ONLY};

use crate::{
    error::Error,
    host::cgroup::{is_cgroup2, mount_of},
    maps::{
        pod_cgroups::{CgroupEvents, PodCgroups},
        tracked_map::TrackedMap,
    },
};

pub(crate) const MAP: &str = "EXCLUDED";

pub(crate) struct Exclusions {
    /// What the programs know of them: the ids, and which sockets are meant.
    pub(crate) map: TrackedMap<u64>,
    paths: Vec<Excluded>,
    /// If annotations of pods are honored.
    pods: Option<PodCgroups>,
    /// Whether it was logged that no path serves the sockets of pods.
    is_unserved: bool,
}

struct Excluded {
    path: PathBuf,
    /// The id (inode number) of the cgroup that was last found there.
    id: Option<u64>,
    /// What was logged last: its absence, or the id that is in effect.
    logged: Option<Option<u64>>,
}

impl Exclusions {
    /// Takes the map out of the loaded object, and writes the ids of all cgroups that exist; pods are below `cgroup`, if their
    /// annotations are honored.
    pub(crate) fn take(ebpf: &mut Ebpf, paths: &[PathBuf], cgroup: Option<&Path>) -> Result<Self, Error> {
        let map = TrackedMap::take(ebpf, MAP)?;
        // Each path once.
        let paths = paths.iter().collect::<BTreeSet<_>>().into_iter();
        let paths = paths.map(|path| Excluded { path: path.clone(), id: None, logged: None });
        let pods = cgroup.map(PodCgroups::new);
        let mut exclusions = Self { map, paths: paths.collect(), pods, is_unserved: false };
        exclusions.refresh()?;
        Ok(exclusions)
    }

    /// Replaces the pods whose annotation says how their sockets are served; returns whether they have changed and a
    /// [`refresh`](Self::refresh) is due. Of other nodes' pods no cgroup is found.
    pub(crate) fn set_pods(&mut self, pods: &Pods) -> bool {
        self.pods.as_mut().is_some_and(|it| it.set(pods))
    }

    /// Finds the cgroups that exist now, and updates the map.
    pub(crate) fn refresh(&mut self) -> Result<(), Error> {
        let pods = self.pods.as_mut().map(PodCgroups::refresh).into_iter().flatten();
        let mut entries: BTreeMap<_, _> = pods
            .map(|(id, sockets)| match sockets {
                SocketLb::Off => (id, ALL),
                SocketLb::TcpOnly => (id, UDP_ONLY),
            })
            .collect();
        for it in &mut self.paths {
            it.refresh()?;
            entries.extend(it.id.map(|id| (id, ALL)));
        }
        self.map.set(entries)?;
        self.paths.iter_mut().for_each(Excluded::log_new);
        if let Some(it) = &mut self.pods {
            it.log_new();
        }
        Ok(())
    }

    /// Warns once if no packet path serves what sockets of pods leave to it.
    pub(crate) fn report_unserved(&mut self, packets_serve: bool) {
        let pods = self.pods.as_ref().map_or_else(String::new, PodCgroups::names);
        let is_unserved = !packets_serve && !pods.is_empty();
        if is_unserved && !self.is_unserved {
            tracing::warn!(
                pods,
                "pods with the annotation kube-proxy-ebpf.io/socket-lb reach no Service: the packet path does not serve \
                 (--packets)"
            );
        }
        self.is_unserved = is_unserved;
    }

    /// Notifications of cgroups that were created where pods' are; `None` if annotations of pods are not honored.
    pub(crate) fn events(&self) -> Option<CgroupEvents> {
        self.pods.as_ref()?.events()
    }
}

impl Excluded {
    /// Finds the cgroup that exists at the path now.
    fn refresh(&mut self) -> Result<(), Error> {
        self.id = id(&self.path)?;
        if self.id.is_none() && self.logged != Some(None) {
            self.logged = Some(None);
            let cgroup = self.path.display();
            tracing::warn!(%cgroup, "the excluded cgroup does not exist; it is excluded once it is created");
        }
        Ok(())
    }

    /// Logs that it is in effect, once the programs know a new id.
    fn log_new(&mut self) {
        if self.id.is_some() && self.logged != Some(self.id) {
            self.logged = Some(self.id);
            tracing::info!(cgroup = %self.path.display(), "processes excluded");
        }
    }
}

/// The paths that do not exist.
pub(crate) fn missing(paths: &[PathBuf]) -> impl Iterator<Item = &Path> {
    paths.iter().filter(|it| id(it).is_ok_and(|it| it.is_none())).map(PathBuf::as_path)
}

fn id(path: &Path) -> Result<Option<u64>, Error> {
    match fs::metadata(path) {
        Ok(at) => Ok(Some(at.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::syscall("stat", path.display())(error)),
    }
}

/// The levels of the hierarchy at which these paths are, whether they exist or not: one bit per level.
///
/// # Errors
///
/// If a path is not below a cgroup2 mount, is too deep or the root, or if there are too many paths.
pub(crate) fn levels(paths: &[PathBuf]) -> Result<u32, Error> {
    if paths.len() > MAX_EXCLUDED as usize {
        return Err(Error::TooManyExclusions(paths.len()));
    }
    paths.iter().try_fold(0, |levels, path| Ok(levels | level(path)?))
}

fn level(path: &Path) -> Result<u32, Error> {
    let Some(existing) = path.ancestors().find(|it| it.exists()).filter(|it| is_cgroup2(it)) else {
        return Err(Error::NotCgroup2(path.to_path_buf()));
    };
    match depth(path, mount_of(existing)).map(u32::try_from) {
        None => Ok(EVERY_LEVEL),
        Some(Ok(level @ 1..MAX_LEVELS)) => Ok(1 << level),
        Some(_) => Err(Error::BadExclusion(path.to_path_buf())),
    }
}

/// All levels but that of the root.
const EVERY_LEVEL: u32 = (1 << MAX_LEVELS) - 2;

/// The level of a path below the topmost folder of its mount; `None` if that is not the machine's root: only this one has no type
/// (cgroups(7)), and the level of any other one is unknown.
fn depth(path: &Path, top: &Path) -> Option<usize> {
    let below = path.strip_prefix(top).map_or(0, |it| it.components().count());
    (!top.join("cgroup.type").exists()).then_some(below)
}

/// The levels at which there are cgroups of pods below this one: one bit per level.
pub(crate) fn pod_levels(cgroup: &Path) -> u32 {
    let Some(depth) = depth(cgroup, mount_of(cgroup)) else { return EVERY_LEVEL };
    // kubelet's own cgroup is at least at level 1.
    let levels = (depth + 1).max(2)..=depth + PodCgroups::MAX_DEPTH;
    levels.fold(0, |all, level| all | 1 << level) & EVERY_LEVEL
}

/// The id of a cgroup, and the levels of the hierarchy at which it may be.
///
/// # Errors
///
/// If there is no cgroup at this path, or it is the root.
pub(crate) fn id_and_levels(path: &Path) -> Result<(u64, u32), Error> {
    let id = id(path)?.ok_or_else(|| Error::NoCgroup(path.to_path_buf()))?;
    Ok((id, level(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_outside_of_cgroup2_are_refused() {
        assert!(matches!(levels(&["/proc/none".into()]), Err(Error::NotCgroup2(_))));
        assert!(matches!(levels(&vec!["/".into(); 65]), Err(Error::TooManyExclusions(65))));
        assert_eq!(levels(&[]).unwrap(), 0);
    }

    #[test]
    fn pods_are_searched_at_the_levels_that_the_programs_compare() {
        // A folder that is no cgroup is its own root, and has no type.
        assert_eq!(pod_levels(Path::new("/proc/none")), 0b1_1100);
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.type"), "domain\n").unwrap();
        assert_eq!(pod_levels(root.path()), EVERY_LEVEL);
    }

    #[test]
    fn missing_paths_are_found() {
        let paths: [PathBuf; 2] = ["/proc/none".into(), "/proc".into()];
        assert_eq!(missing(&paths).collect::<Vec<_>>(), [Path::new("/proc/none")]);
    }
}
