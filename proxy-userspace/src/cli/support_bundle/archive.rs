//! The archive: packed in memory, and written beside its name before it gets that name.
//!
//! Invariant: a file with the given name is complete, and one that existed is never replaced.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use flate2::{Compression, write::GzEncoder};
use tar::{Builder, Header};

/// The folder in the archive.
const FOLDER: &str = "kube-proxy-ebpf-support";

/// Packs texts into a compressed tar archive.
pub(super) fn pack(files: impl IntoIterator<Item = (&'static str, String)>) -> io::Result<Vec<u8>> {
    let mut builder = Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    for (name, text) in files {
        let mut header = Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now);
        builder.append_data(&mut header, format!("{FOLDER}/{name}"), text.as_bytes())?;
    }
    builder.into_inner()?.finish()
}

/// Whether a new file could have this path.
pub(super) fn check_path(path: &Path) -> Result<()> {
    let shown = path.display();
    if path.file_name().is_none() {
        bail!("{shown} is a folder: name a file in it, as in bundle.tar.gz");
    }
    if path.symlink_metadata().is_ok() {
        bail!("{shown} exists: remove it, or name another file");
    }
    let folder = folder(path);
    if !folder.is_dir() {
        bail!("cannot create {shown}: {} is not a folder", folder.display());
    }
    Ok(())
}

/// Creates a file that only its owner may read.
pub(super) fn write(path: &Path, content: &[u8]) -> Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", process::id()));
    let temporary = folder(path).join(name);
    let result = write_new(&temporary, content).and_then(|()| {
        // Someone may have created it meanwhile.
        check_path(path)?;
        fs::rename(&temporary, path).map_err(Into::into)
    });
    if result.is_err() {
        // Where it was not created, there is nothing to remove.
        let _ = fs::remove_file(&temporary);
    }
    result.with_context(|| format!("cannot write {}", path.display()))
}

fn write_new(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(file.write_all(content)?)
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}
