//! Archives that depend only on names, contents and what may be executed: not on times, owners or the order of a folder.

use std::{os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) is_executable: bool,
    pub(crate) bytes: Vec<u8>,
}

impl Entry {
    pub(crate) fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self { name: name.into(), is_executable: false, bytes: bytes.into() }
    }

    pub(crate) fn executable(self) -> Self {
        Self { is_executable: true, ..self }
    }

    /// A file of this machine, executable if it is here.
    pub(crate) fn read(name: impl Into<String>, path: &Path) -> Result<Self> {
        let entry = Self::new(name, build_tools::read(path)?);
        let mode = path.metadata()?.permissions().mode();
        Ok(Self { is_executable: mode & 0o100 != 0, ..entry })
    }
}

/// An archive of the files, ordered by name, with the folders that lead to them if `with_folders`.
pub(crate) fn tar(mut entries: Vec<Entry>, with_folders: bool) -> Result<Vec<u8>> {
    entries.sort();
    let mut tar = Builder::new(Vec::new());
    let mut folders: Vec<&str> = Vec::new();
    for Entry { name, is_executable, bytes } in &entries {
        for (end, _) in name.match_indices('/').filter(|_| with_folders) {
            let folder = &name[..=end];
            if !folders.contains(&folder) {
                folders.push(folder);
                let mut header = header(EntryType::Directory, 0, 0o755);
                tar.append_data(&mut header, folder, &[][..])?;
            }
        }
        let mode = if *is_executable { 0o755 } else { 0o644 };
        let mut header = header(EntryType::Regular, bytes.len(), mode);
        tar.append_data(&mut header, name, &**bytes)?;
    }
    Ok(tar.into_inner()?)
}

fn header(kind: EntryType, size: usize, mode: u32) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_size(size as u64);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// The bytes compressed, without a time.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    std::io::Write::write_all(&mut gzip, bytes)?;
    Ok(gzip.finish()?)
}

/// The SHA-256 of the bytes, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|it| format!("{it:02x}")).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Read;

    use build_tools::command::workspace;

    use super::*;

    /// The names in an archive, each with its mode and its contents; none has a time or an owner.
    pub(crate) fn read(archive: impl Read) -> Vec<(String, (u32, Vec<u8>))> {
        let mut archive = tar::Archive::new(archive);
        let entries = archive.entries().expect("an archive").map(|it| it.expect("an entry"));
        let read = |mut it: tar::Entry<'_, _>| {
            let name = it.path().expect("a name").display().to_string();
            let header = it.header();
            let [mtime, uid] = [header.mtime(), header.uid()].map(|it| it.expect("a number"));
            assert_eq!((mtime, uid), (0, 0), "{name}");
            let (mode, mut bytes) = (header.mode().expect("a mode"), Vec::new());
            it.read_to_end(&mut bytes).expect("contents");
            (name, (mode, bytes))
        };
        entries.map(read).collect()
    }

    #[test]
    fn a_file_is_as_executable_as_it_is_here() {
        for (path, expected) in [("kubectl-service_proxy", true), ("Containerfile", false)] {
            let entry = Entry::read(path, &workspace().join("deploy").join(path)).expect("a file");
            assert_eq!(entry.is_executable, expected, "{path}");
        }
    }

    #[test]
    fn an_archive_has_no_times_and_owners_and_its_own_order() {
        let program = Entry::new("usr/bin/program", "1").executable();
        let license = Entry::new("LICENSE", "2");
        let archive = tar(vec![program.clone(), license.clone()], true).expect("an archive");
        let modes: Vec<_> = read(&*archive).into_iter().map(|(name, (mode, _))| (name, mode)).collect();
        let expected = [("LICENSE", 0o644), ("usr/", 0o755), ("usr/bin/", 0o755), ("usr/bin/program", 0o755)];
        assert_eq!(modes, expected.map(|(name, mode)| (name.to_owned(), mode)));
        assert_eq!(tar(vec![license, program], true).expect("an archive"), archive);
        assert_eq!(gzip(&archive).expect("gzip"), gzip(&archive).expect("gzip"));
    }
}
