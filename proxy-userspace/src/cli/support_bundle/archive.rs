//! The archive: packed while it is read, and written beside its name before it gets that name.
//!
//! Invariant: a file with the given name is complete, and one that existed is never replaced. A large file in the archive is
//! several: the header of each has its size, and no more than one part is kept.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    mem,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use flate2::{Compression, write::GzEncoder};
use tar::{Builder, Header};

const FOLDER: &str = "kube-proxy-ebpf-support";
/// The size of the parts of a large file, in bytes.
const PART: usize = 1 << 20;

pub(super) struct Archive<W: Write> {
    builder: Builder<GzEncoder<W>>,
    /// In seconds since 1970.
    time: u64,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(out: W) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { builder: Builder::new(GzEncoder::new(out, Compression::default())), time }
    }

    /// Adds a file with what is written, or, if it is large, its parts with a number behind the name. The inner result is that of
    /// the callback.
    pub(super) fn add<T>(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> Result<T>,
    ) -> io::Result<Result<T>> {
        let mut parts = Parts { archive: self, name, text: Vec::new(), count: 0, error: None };
        let result = write(&mut parts);
        if parts.count == 0 {
            parts.end_part(name.to_owned());
        } else if !parts.text.is_empty() {
            parts.end_part(parts.next_name());
        }
        parts.error.map_or(Ok(result), Err)
    }

    pub(super) fn finish(self) -> io::Result<W> {
        self.builder.into_inner()?.finish()
    }
}

/// A file that is being added.
struct Parts<'a, W: Write> {
    archive: &'a mut Archive<W>,
    name: &'a str,
    text: Vec<u8>,
    count: usize,
    /// Why the archive cannot be written.
    error: Option<io::Error>,
}

impl<W: Write> Parts<'_, W> {
    fn next_name(&self) -> String {
        format!("{}.{:04}", self.name, self.count)
    }

    fn end_part(&mut self, name: String) {
        let text = mem::take(&mut self.text);
        let mut header = Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.archive.time);
        let added = self.archive.builder.append_data(&mut header, format!("{FOLDER}/{name}"), &*text);
        self.error = self.error.take().or(added.err());
        self.count += 1;
    }
}

impl<W: Write> Write for Parts<'_, W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.error.is_some() {
            return Err(io::Error::other("the archive cannot be written"));
        }
        let length = text.len().min(PART - self.text.len());
        self.text.extend_from_slice(&text[..length]);
        if self.text.len() == PART {
            self.end_part(self.next_name());
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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

/// Creates a file that only its owner may read, with what is written.
pub(super) fn create<T>(path: &Path, write: impl FnOnce(&mut File) -> Result<T>) -> Result<T> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", process::id()));
    let temporary = folder(path).join(name);
    let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary);
    let result = new.map_err(Into::into).and_then(|mut file| write(&mut file)).and_then(|written| {
        // Someone may have created it meanwhile.
        check_path(path)?;
        fs::rename(&temporary, path)?;
        Ok(written)
    });
    if result.is_err() {
        // Where it was not created, there is nothing to remove.
        let _ = fs::remove_file(&temporary);
    }
    result.with_context(|| format!("cannot write {}", path.display()))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn a_large_file_is_several_that_are_the_whole_one() {
        let mut archive = Archive::new(Vec::new());
        let whole: Vec<_> = (0..PART * 2 + 7).map(|it| it as u8).collect();
        archive.add("small", |out| Ok(out.write_all(b"small")?)).unwrap().unwrap();
        archive.add("large", |out| Ok(out.write_all(&whole)?)).unwrap().unwrap();
        archive.add("exact", |out| Ok(out.write_all(&whole[..PART])?)).unwrap().unwrap();
        archive.add("empty", |_| Ok(())).unwrap().unwrap();
        let packed = archive.finish().unwrap();
        let mut unpacked = tar::Archive::new(GzDecoder::new(&*packed));
        let files = unpacked.entries().unwrap().map(|it| {
            let (mut it, mut content) = (it.unwrap(), Vec::new());
            it.read_to_end(&mut content).unwrap();
            (it.path().unwrap().file_name().unwrap().display().to_string(), content)
        });
        let files: Vec<_> = files.collect();
        let names: Vec<_> = files.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["small", "large.0000", "large.0001", "large.0002", "exact.0000", "empty"]);
        let parts: Vec<_> = files[1..4].iter().map(|(_, it)| &**it).collect();
        assert!(parts.concat() == whole && files[4].1 == whole[..PART]);
        assert_eq!((&*files[0].1, &*files[5].1), (&b"small"[..], &b""[..]));
    }
}
