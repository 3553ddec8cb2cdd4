//! Which files a path stands for.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];
/// The same for people.
pub(super) const PATTERNS: &str = "*.json, *.yaml or *.yml";

/// The file itself, or the manifests that lie directly in the folder.
pub(super) fn list(path: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::metadata(path) {
        Ok(it) if it.is_dir() => {}
        Ok(it) if it.is_file() => return Ok(vec![path.to_owned()]),
        Ok(_) => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a folder; name one"));
        }
        Err(error) => return Err(error),
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

/// The folder a path lies in.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Whether a name is that of a manifest, and not of something hidden or an editor's own.
fn is_manifest(path: &Path) -> bool {
    let Some(name) = path.file_name() else { return false };
    let name = name.to_string_lossy();
    let extension = path.extension().unwrap_or_default();
    !name.starts_with(['.', '#', '~']) && EXTENSIONS.iter().any(|it| extension.eq_ignore_ascii_case(it))
}
