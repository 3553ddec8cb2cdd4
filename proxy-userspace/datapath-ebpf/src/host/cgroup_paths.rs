//! The paths of cgroups by their ids, and the pods that they belong to.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use crate::{
    error::Error,
    host::cgroup::{Cgroup, folders, mount_of, paths_of},
};

/// The paths of cgroups by their ids, each searched once.
#[derive(Debug)]
pub struct CgroupPaths {
    root: PathBuf,
    /// `None` for one that was gone.
    paths: HashMap<u64, Option<String>>,
}

impl CgroupPaths {
    /// Those of the hierarchy with this cgroup, by default the one that `run` would attach to.
    ///
    /// # Errors
    ///
    /// If there is no such hierarchy.
    pub fn open(cgroup: Option<&Path>) -> Result<Self, Error> {
        let root = mount_of(&Cgroup::open(cgroup)?.path).to_path_buf();
        Ok(Self { root, paths: HashMap::new() })
    }

    /// The path of a cgroup, relative to the root, unless it is gone. Ids are not reused.
    pub fn get(&mut self, id: u64) -> Option<&str> {
        let root = &self.root;
        self.paths.entry(id).or_insert_with(|| paths_of(root, [id].into_iter()).remove(&id)).as_deref()
    }

    pub fn of_pod(&self, uid: &str) -> Option<PathBuf> {
        let uid_of = |it: &PathBuf| pod_uid(it.file_name()?.to_str()?);
        folders(&self.root).find(|it| uid_of(it).is_some_and(|it| it == uid))
    }
}

/// The UID of the pod that a cgroup belongs to, by its path.
///
/// kubelet names the cgroup of a pod `podUID`, or `kubepods-CLASS-podUID.slice` with underscores instead of dashes if systemd
/// manages it (`pkg/kubelet/cm/pod_container_manager_linux.go`).
pub fn pod_uid(path: &str) -> Option<String> {
    path.split('/').find_map(|name| {
        let name = name.strip_suffix(".slice").unwrap_or(name);
        let (before, uid) = name.rsplit_once("pod")?;
        let is_kubelets = before.is_empty() || before.starts_with("kube") && before.ends_with('-');
        let uid = uid.replace('_', "-");
        // That of a static pod is a hash without dashes.
        let is_uid =
            matches!(uid.len(), 32 | 36) && uid.bytes().all(|it| it.is_ascii_hexdigit() || it == b'-');
        (is_kubelets && is_uid).then_some(uid)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_pod_is_found_in_the_path_of_its_cgroup() {
        let uid = "3f2a8d1c-0b4e-4c7d-9a51-6d2f1e0c9b8a";
        let underscored = uid.replace('-', "_");
        for path in [
            format!("/kubepods/burstable/pod{uid}/0123"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{underscored}.slice/cri-x.scope"
            ),
            format!("/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{underscored}.slice"),
        ] {
            assert_eq!(pod_uid(&path).as_deref(), Some(uid), "{path}");
        }
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(pod_uid(&format!("/kubepods/pod{hash}")).as_deref(), Some(hash));
        for path in ["/", "/system.slice/podman.service", "/kubepods/pod1234", "/tripod/x"] {
            assert_eq!(pod_uid(path), None, "{path}");
        }
    }

    #[test]
    fn the_cgroup_of_a_pod_is_found_by_its_uid() {
        let root = tempfile::tempdir().unwrap();
        let uid = "3f2a8d1c-0b4e-4c7d-9a51-6d2f1e0c9b8a";
        let pod = root.path().join("kubepods").join("besteffort").join(format!("pod{uid}"));
        fs::create_dir_all(pod.join("container")).unwrap();
        let paths = CgroupPaths { root: root.path().to_path_buf(), paths: HashMap::new() };
        assert_eq!(paths.of_pod(uid), Some(pod));
        assert_eq!(paths.of_pod(&uid.replace('3', "4")), None);
    }
}
