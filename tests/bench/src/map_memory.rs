//! The kernel memory of BPF maps.

use std::{collections::BTreeMap, fs};

use anyhow::Result;

/// The bytes of each map that a process has open, by the map's id.
pub(crate) fn open_maps(pid: u32) -> Result<BTreeMap<u32, u64>> {
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|it| it.trim().parse::<u64>().ok())
        };
        if let (Some(id), Some(bytes)) = (field("map_id"), field("memlock")) {
            maps.insert(u32::try_from(id)?, bytes);
        }
    }
    Ok(maps)
}
