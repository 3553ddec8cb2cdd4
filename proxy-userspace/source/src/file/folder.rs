//! The files that a path stands for.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];
/// The same for messages.
pub(super) const PATTERNS: &str = "*.json, *.yaml or *.yml";

/// The file itself, or the manifests directly in the folder.
pub(super) fn list(path: &Path) -> io::Result<Vec<PathBuf>> {
    let metadata = fs::metadata(path)?;
    if metadata.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    if !metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a folder"));
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        if is_manifest(&file) && fs::metadata(&file).is_ok_and(|it| it.is_file()) {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}

/// The folder that contains a path.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Whether a file name is that of a manifest, not that of a hidden file or an editor's temporary file.
fn is_manifest(path: &Path) -> bool {
    let Some(name) = path.file_name() else { return false };
    let name = name.to_string_lossy();
    let extension = path.extension().unwrap_or_default();
    !name.starts_with(['.', '#', '~']) && EXTENSIONS.iter().any(|it| extension.eq_ignore_ascii_case(it))
}
