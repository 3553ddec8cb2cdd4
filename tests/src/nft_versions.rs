//! Versions of `nft` that administrators have, beside the one of this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use anyhow::{Context as _, Result};
use build_tools::{
    apt::Apt,
    command::{output, status, workspace},
    files_below,
};

use crate::{requirements::version, skip::skip};

/// The suites, each with its archive's label: the oldest `nft` beside a supported kernel, the most frequent one, and a new one.
const SUITES: [(&str, &str); 3] = [("Ubuntu", "jammy"), ("Debian", "bookworm"), ("Debian", "trixie")];

/// A version of `nft`, unpacked with its libraries.
#[derive(Clone, Debug)]
pub struct Nft {
    pub version: (u32, u32, u32),
    root: PathBuf,
    loader: PathBuf,
}

impl Nft {
    /// Runs it with its own libraries.
    pub fn command(&self) -> Command {
        let folders: Vec<_> = ["usr/lib", "lib"]
            .iter()
            .filter_map(|it| Some(self.root.join(it).join(self.loader.parent()?.file_name()?)))
            .map(|it| it.display().to_string())
            .collect();
        let mut command = Command::new(&self.loader);
        command.arg("--library-path").arg(folders.join(":")).arg(self.root.join("usr/sbin/nft"));
        command
    }

    fn open(root: &Path) -> Result<Self> {
        let files = files_below(root)?;
        // A symbolic link to it leads out of the folder.
        let is_loader = |it: &&PathBuf| {
            let name = it.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("ld-linux") && !it.is_symlink()
        };
        let loader = files.iter().find(is_loader).context("there is no dynamic loader")?.clone();
        let mut nft = Self { version: (0, 0, 0), root: root.to_owned(), loader };
        let says = output(nft.command().arg("--version"))?;
        let (_, number) = says.split_once(" v").with_context(|| format!("{says:?} is no version"))?;
        let (major, minor) = version(number).with_context(|| format!("{says:?} is no version"))?;
        let patch = number.split(|it: char| !it.is_ascii_digit()).nth(2).and_then(|it| it.parse().ok());
        nft.version = (major, minor, patch.unwrap_or_default());
        Ok(nft)
    }
}

/// The versions of [`SUITES`], fetched once into target/tools; those that cannot be are reported as skipped.
pub fn nft_versions_or_skip() -> Vec<Nft> {
    static FETCH: Mutex<()> = Mutex::new(());
    let _one_at_a_time = FETCH.lock();
    let versions = SUITES.into_iter().filter_map(|suite| {
        let nft = nft_of(suite);
        nft.inspect_err(|error| skip(&format!("there is no nft of {}: {error:#}", suite.1))).ok()
    });
    versions.collect()
}

fn nft_of(suite: (&str, &str)) -> Result<Nft> {
    let folder = workspace().join("target/tools/nft").join(suite.1);
    let (root, complete) = (folder.join("root"), folder.join("complete"));
    if !complete.exists() {
        status("Fetching", &format!("nft of {}", suite.1));
        Apt::open(None, folder.join("apt"), &[suite])?.unpack_with_dependencies(&["nftables"], &root)?;
        fs::write(complete, "")?;
    }
    Nft::open(&root)
}
