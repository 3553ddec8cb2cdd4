//! The files that a path stands for.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];
/// The names of manifests, for messages.
pub(super) const PATTERNS: &str = "*.json, *.yaml or *.yml";

/// Whether a path is a folder, and what it stands for: itself, or the paths directly in the folder that have the name of a manifest,
/// in ascending order.
pub(super) fn list(path: &Path) -> io::Result<(bool, Vec<PathBuf>)> {
    let metadata = fs::metadata(path)?;
    if metadata.is_file() {
        return Ok((false, vec![path.to_owned()]));
    }
    if !metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a folder"));
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if is_manifest(&name) {
            found.push(path.join(name));
        }
    }
    // They differ in their last component only: the order of the bytes is that of the paths, and much cheaper.
    found.sort_unstable_by(|a, b| a.as_os_str().cmp(b.as_os_str()));
    Ok((true, found))
}

pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Whether a file name is that of a manifest, not that of a hidden file or an editor's temporary file.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().unwrap_or_default();
    let name = name.to_string_lossy();
    !name.starts_with(['.', '#', '~']) && EXTENSIONS.iter().any(|it| extension.eq_ignore_ascii_case(it))
}
