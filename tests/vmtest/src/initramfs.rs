//! The initramfs of a virtual machine: an archive in the format `newc`, which the kernel unpacks to its root.
//! Invariant: a program has every library it needs.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use build_tools::{command::output, files_below, read};
use cpio::newc;
use tempfile::NamedTempFile;

use crate::system::System;

const DIRECTORY: u32 = 0o04_0755;
const PROGRAM: u32 = 0o10_0755;
const LINK: u32 = 0o12_0777;
const CONSOLE: u32 = 0o02_0600;

/// The files of the root, by path.
#[derive(Clone, Default)]
pub(crate) struct Initramfs(BTreeMap<PathBuf, Entry>);

#[derive(Clone)]
enum Entry {
    Directory,
    Program(Arc<[u8]>),
    Link(PathBuf),
    /// The device that is the standard output of init.
    Console,
}

impl Initramfs {
    /// The standard folders, empty, and the console.
    pub(crate) fn new() -> Self {
        let mut initramfs = Self::default();
        for folder in ["/proc", "/sys", "/dev", "/tmp", "/run", "/root"] {
            initramfs.insert(Path::new(folder), Entry::Directory);
        }
        initramfs.insert(Path::new("/dev/console"), Entry::Console);
        initramfs
    }

    pub(crate) fn file(&mut self, path: impl AsRef<Path>, bytes: impl Into<Vec<u8>>) {
        self.insert(path.as_ref(), Entry::Program(bytes.into().into()));
    }

    /// Adds a folder of this machine, at the same path.
    pub(crate) fn folder(&mut self, folder: &Path) -> Result<()> {
        for file in files_below(folder)? {
            self.file(&file, read(&file)?);
        }
        Ok(())
    }

    pub(crate) fn link(&mut self, path: impl AsRef<Path>, target: impl Into<PathBuf>) {
        self.insert(path.as_ref(), Entry::Link(target.into()));
    }

    /// Adds a program of a system at a path, without debug information, and its libraries.
    pub(crate) fn program(&mut self, system: &System, program: &Path, path: &Path) -> Result<()> {
        for (library, path) in system.libraries(program)? {
            if !self.0.contains_key(&path) {
                self.insert(&path, Entry::Program(read(&library)?.into()));
            }
        }
        let bytes = stripped(system, program)?;
        self.insert(path, Entry::Program(bytes.into()));
        Ok(())
    }

    fn insert(&mut self, path: &Path, entry: Entry) {
        for folder in path.ancestors().skip(1).filter(|it| it.parent().is_some()) {
            self.0.entry(folder.to_owned()).or_insert(Entry::Directory);
        }
        self.0.insert(path.to_owned(), entry);
    }

    pub(crate) fn write(&self, file: &Path) -> Result<()> {
        let archive = || -> io::Result<()> {
            let mut out = BufWriter::new(File::create(file)?);
            // Ordered by path, a folder comes before its files.
            for (number, (path, entry)) in (1..).zip(&self.0) {
                let name = path.strip_prefix("/").unwrap_or(path).to_string_lossy();
                let (mode, data, (major, minor)) = match entry {
                    Entry::Directory => (DIRECTORY, &[][..], (0, 0)),
                    Entry::Program(bytes) => (PROGRAM, &bytes[..], (0, 0)),
                    Entry::Link(target) => (LINK, target.as_os_str().as_encoded_bytes(), (0, 0)),
                    Entry::Console => (CONSOLE, &[][..], (5, 1)),
                };
                let entry = newc::Builder::new(&name).ino(number).mode(mode).nlink(1);
                let length = u32::try_from(data.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
                let mut entry = entry.rdev_major(major).rdev_minor(minor).write(out, length);
                entry.write_all(data)?;
                out = entry.finish()?;
            }
            newc::trailer(out)?.flush()
        };
        archive().with_context(|| format!("cannot write {}", file.display()))
    }
}

fn stripped(system: &System, program: &Path) -> Result<Vec<u8>> {
    let stripped = NamedTempFile::new()?;
    let strip = output(Command::new(system.strip()).arg("-o").arg(stripped.path()).arg(program));
    // Without `strip`, or for a format it does not know, the file is only larger.
    read(if strip.is_ok() { stripped.path() } else { program })
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read as _};

    use super::*;

    #[test]
    fn an_archive_has_the_format_newc() {
        let folder = tempfile::tempdir().unwrap();
        let mut initramfs = Initramfs::default();
        initramfs.file("/a/b/three", "abc");
        initramfs.file("/a/b/four", "abcd");
        initramfs.link("/bin/sh", "busybox");
        let archive = folder.path().join("archive");
        initramfs.write(&archive).unwrap();
        let bytes = fs::read(&archive).unwrap();

        let mut names = Vec::new();
        let mut rest = &bytes[..];
        loop {
            let mut reader = newc::Reader::new(rest).unwrap();
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            let (mode, name) = (reader.entry().mode(), reader.entry().name().to_owned());
            if reader.entry().is_trailer() {
                break;
            }
            names.push(format!("{mode:o} {name} {text}"));
            rest = reader.finish().unwrap();
        }
        assert_eq!(
            names,
            [
                "40755 a ",
                "40755 a/b ",
                "100755 a/b/four abcd",
                "100755 a/b/three abc",
                "40755 bin ",
                "120777 bin/sh busybox",
            ]
        );
    }
}
