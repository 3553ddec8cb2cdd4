//! Cgroups whose processes are excluded from translation: their levels in the hierarchy, and their current ids.
//!
//! A path means the cgroup that exists there at the moment: it may be created later, removed, and created anew.

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
    map_spec,
};

const MAP: &str = "EXCLUDED";

/// The excluded cgroups.
pub(super) struct Exclusions {
    map: HashMap<MapData, u64, u32>,
    paths: Vec<Excluded>,
}

struct Excluded {
    path: PathBuf,
    /// The id (inode number) of the cgroup that was last found there.
    id: Option<u64>,
    /// Whether its absence was logged.
    is_missing: bool,
}

impl Exclusions {
    /// Takes the map out of the loaded object, and writes the ids of all cgroups that exist.
    pub(super) fn take(ebpf: &mut Ebpf, paths: &[PathBuf]) -> Result<Self, Error> {
        let map = map_spec::take(ebpf, MAP)?;
        // Each path once.
        let paths = paths.iter().collect::<BTreeSet<_>>().into_iter();
        let paths = paths.map(|path| Excluded { path: path.clone(), id: None, is_missing: false });
        let mut exclusions = Self { map, paths: paths.collect() };
        exclusions.refresh()?;
        Ok(exclusions)
    }

    /// Finds the cgroups that exist at the paths now, and updates the map.
    pub(super) fn refresh(&mut self) -> Result<(), Error> {
        for it in &mut self.paths {
            let path = it.path.display();
            let now = id(&it.path)?;
            if now.is_none() && !it.is_missing {
                it.is_missing = true;
                tracing::warn!(
                    "the excluded cgroup {path} does not exist; it will be excluded once it is created"
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
                tracing::info!("processes in {path} are excluded");
                it.id = Some(id);
                it.is_missing = false;
            }
        }
        Ok(())
    }
}

/// The paths that do not exist.
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

/// The levels of the hierarchy at which these paths are, whether they exist or not: one bit per level.
///
/// # Errors
///
/// If a path is not below a cgroup2 mount, is too deep or the root, or if there are too many paths.
pub(super) fn levels(paths: &[PathBuf]) -> Result<u32, Error> {
    if paths.len() > MAX_EXCLUDED as usize {
        return Err(Error::TooManyExclusions(paths.len()));
    }
    paths.iter().try_fold(0, |levels, path| Ok(levels | level(path)?))
}

fn level(path: &Path) -> Result<u32, Error> {
    let Some(existing) = path.ancestors().find(|it| it.exists()).filter(|it| is_cgroup2(it)) else {
        return Err(Error::NotCgroup2(path.to_path_buf()));
    };
    let top = mount_of(existing);
    let below = path.strip_prefix(top).map_or(0, |it| it.components().count());
    // Only the machine's root has no type (cgroups(7)); the level of any other one is unknown, so that all levels are set.
    if top.join("cgroup.type").exists() {
        return Ok((1 << MAX_LEVELS) - 2);
    }
    match u32::try_from(below) {
        Ok(level @ 1..MAX_LEVELS) => Ok(1 << level),
        _ => Err(Error::BadExclusion(path.to_path_buf())),
    }
}

/// The id of a cgroup, and the levels of the hierarchy at which it may be.
///
/// # Errors
///
/// If there is no cgroup at this path, or it is the root.
pub(super) fn id_and_levels(path: &Path) -> Result<(u64, u32), Error> {
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
    fn missing_paths_are_found() {
        let paths: [PathBuf; 2] = ["/proc/none".into(), "/proc".into()];
        assert_eq!(missing(&paths).collect::<Vec<_>>(), [Path::new("/proc/none")]);
    }
}
