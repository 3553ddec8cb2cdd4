//! Cgroups whose processes are left alone: where they are in the hierarchy, and which ones they are now.
//!
//! The one rule: a path means whatever cgroup is there at the moment. It may come later, go, and come back as another one.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    maps::{HashMap, MapData},
};
use proxy_common::exclusion::{MAX_EXCLUDED, MAX_LEVELS};

use crate::{
    cgroup::{is_cgroup2, mount_of},
    error::Error,
};

const MAP: &str = "EXCLUDED";

/// The cgroups that are left alone.
pub(super) struct Exclusions {
    map: HashMap<MapData, u64, u32>,
    paths: Vec<Excluded>,
}

struct Excluded {
    path: PathBuf,
    /// The cgroup that is there, by its id, which is its inode number; `None` before it was looked for.
    id: Option<u64>,
    /// Whether its absence was told.
    is_missed: bool,
}

impl Exclusions {
    /// Takes the map out of the loaded object, and looks for every cgroup.
    pub(super) fn take(ebpf: &mut Ebpf, paths: &[PathBuf]) -> Result<Self, Error> {
        let map = ebpf.take_map(MAP).ok_or_else(|| Error::Incomplete(format!("map {MAP}")))?;
        let map = HashMap::try_from(map).map_err(Error::map(MAP))?;
        // Each once: what is named twice goes once.
        let paths = paths.iter().collect::<BTreeSet<_>>().into_iter();
        let paths = paths.map(|path| Excluded { path: path.clone(), id: None, is_missed: false });
        let mut exclusions = Self { map, paths: paths.collect() };
        exclusions.look()?;
        Ok(exclusions)
    }

    /// Looks which cgroups are at their places now.
    pub(super) fn look(&mut self) -> Result<(), Error> {
        for it in &mut self.paths {
            let shown = it.path.display();
            let now = id(&it.path)?;
            if now.is_none() && !it.is_missed {
                it.is_missed = true;
                tracing::warn!(
                    "{shown} does not exist: nobody there is left alone until it does; it is looked for again and again"
                );
            }
            if now == it.id {
                continue;
            }
            if let Some(before) = it.id.take() {
                self.map.remove(&before).map_err(Error::map(MAP))?;
            }
            if let Some(id) = now {
                self.map.insert(id, 1, 0).map_err(Error::map(MAP))?;
                tracing::info!("processes in {shown} are left alone");
                it.id = Some(id);
                it.is_missed = false;
            }
        }
        Ok(())
    }
}

/// Those of some paths at which there is no cgroup.
pub(super) fn missing(paths: &[PathBuf]) -> impl Iterator<Item = &Path> {
    paths.iter().filter(|it| id(it).is_ok_and(|it| it.is_none())).map(PathBuf::as_path)
}

fn id(path: &Path) -> Result<Option<u64>, Error> {
    match fs::metadata(path) {
        Ok(at) => Ok(Some(at.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::syscall("stat", path.display())(error)),
    }
}

/// On which levels of the hierarchy cgroups at these paths are, whether they are there or not: a bit for each.
///
/// # Errors
///
/// If a path is not below a cgroup2 mount, or too far below, or is its root; or if there are too many.
pub(super) fn levels(paths: &[PathBuf]) -> Result<u32, Error> {
    if paths.len() > MAX_EXCLUDED as usize {
        return Err(Error::TooManyExclusions(paths.len()));
    }
    paths.iter().try_fold(0, |levels, path| Ok(levels | level(path)?))
}

fn level(path: &Path) -> Result<u32, Error> {
    let Some(there) = path.ancestors().find(|it| it.exists()).filter(|it| is_cgroup2(it)) else {
        return Err(Error::NotCgroup2(path.to_path_buf()));
    };
    let top = mount_of(there);
    let below = path.strip_prefix(top).map_or(0, |it| it.components().count());
    // Only the root of the machine has no type (cgroups(7)): how far down any other is nobody says here.
    if top.join("cgroup.type").exists() {
        return Ok((1 << MAX_LEVELS) - 2);
    }
    match u32::try_from(below) {
        Ok(level @ 1..MAX_LEVELS) => Ok(1 << level),
        _ => Err(Error::BadExclusion(path.to_path_buf())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_no_cgroup2_mount_is_refused() {
        assert!(matches!(levels(&["/proc/nobody".into()]), Err(Error::NotCgroup2(_))));
        assert!(matches!(levels(&vec!["/".into(); 65]), Err(Error::TooManyExclusions(65))));
        assert_eq!(levels(&[]).unwrap(), 0);
    }

    #[test]
    fn absent_paths_are_named() {
        let paths: [PathBuf; 2] = ["/proc/nobody".into(), "/proc".into()];
        assert_eq!(missing(&paths).collect::<Vec<_>>(), [Path::new("/proc/nobody")]);
    }
}
