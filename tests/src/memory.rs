//! A memory cgroup with a limit, of either cgroup version, for the process under test.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};

use crate::{Sandbox, TIMEOUT, eventually, skip};

/// A memory cgroup; removed when dropped, if its processes have ended.
#[derive(Debug)]
pub struct MemoryCgroup {
    path: PathBuf,
    is_v1: bool,
}

impl MemoryCgroup {
    pub fn or_skip(sandbox: &Sandbox) -> Option<Self> {
        match Self::new(sandbox) {
            Ok(cgroup) => Some(cgroup),
            Err(error) => {
                skip(&format!("this machine has no memory cgroups: {error:#}"));
                None
            }
        }
    }

    /// Makes one beside a sandbox; fails if the machine has no memory cgroups.
    pub fn new(sandbox: &Sandbox) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let v1 = mounts.lines().find_map(|it| {
            let fields: Vec<_> = it.split(' ').collect();
            let is_memory = fields[2] == "cgroup" && fields[3].split(',').any(|it| it == "memory");
            is_memory.then(|| PathBuf::from(fields[1]))
        });
        let (parent, is_v1) = match v1 {
            Some(path) => (path, true),
            None => (sandbox.root_cgroup().to_path_buf(), false),
        };
        if !is_v1 {
            fs::write(parent.join("cgroup.subtree_control"), "+memory").context("cgroup.subtree_control")?;
        }
        let path = parent.join(format!("{}-memory", sandbox.name()));
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let cgroup = Self { path, is_v1 };
        cgroup.usage()?;
        Ok(cgroup)
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// The bytes that are charged to it, kernel memory included.
    pub fn usage(&self) -> Result<u64> {
        self.read(if self.is_v1 { "memory.usage_in_bytes" } else { "memory.current" })
    }

    /// The most bytes that were charged to it at one time (with cgroup version 2 since Linux 5.19).
    pub fn peak(&self) -> Result<u64> {
        self.read(if self.is_v1 { "memory.max_usage_in_bytes" } else { "memory.peak" })
    }

    /// The bytes of kernel memory; before Linux 5.18, cgroup version 2 tells only the [`Self::usage`].
    pub fn kernel(&self) -> Result<u64> {
        if self.is_v1 {
            return self.read("memory.kmem.usage_in_bytes");
        }
        let stat = fs::read_to_string(self.path.join("memory.stat"))?;
        let kernel = stat.lines().find_map(|it| it.strip_prefix("kernel ")?.parse().ok());
        kernel.map_or_else(|| self.usage(), Ok)
    }

    fn read(&self, file: &str) -> Result<u64> {
        let file = self.path.join(file);
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(text.trim().parse()?)
    }

    /// Limits it to a number of bytes: beyond, the kernel kills its processes.
    pub fn limit(&self, bytes: u64) -> Result<()> {
        let file = self.path.join(if self.is_v1 { "memory.limit_in_bytes" } else { "memory.max" });
        fs::write(&file, bytes.to_string()).with_context(|| format!("cannot write {}", file.display()))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        eventually(TIMEOUT, || fs::remove_dir(&self.path).is_ok());
    }
}
