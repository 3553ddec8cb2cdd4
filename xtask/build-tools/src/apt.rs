//! Packages of Debian and Ubuntu, also from other suites than this machine's own, unpacked.
//! Invariant: nothing is installed; everything unpacked is below a folder.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};

use crate::{
    command::{output, run, status},
    create_folder, empty_folder,
    machine::Machine,
};

/// Ubuntu's own archive: Debian configures no mirror of it.
const UBUNTU: &str = "http://archive.ubuntu.com/ubuntu/";
/// The key of Ubuntu's suites: its archive's key of 2018, F6EC B376 2474 EDA9 D21B 7022 8719 20D1 991B C93C,
/// from the package ubuntu-keyring.
const UBUNTU_KEY: &[u8] = include_bytes!("ubuntu-archive.asc");
/// How old the lists of packages may become.
const MAX_LIST_AGE: Duration = Duration::from_hours(24);
/// Debian's keys for all its suites.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// An apt with certain suites and without any installed package, which writes only below its folder.
#[derive(Clone, Debug)]
pub struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// With the packages of a machine, by default this one, in these suites, each with the label of its archive (`Debian`,
    /// `Debian-Security` or `Ubuntu`). Fetches the lists of packages if they are old. Fails if this machine has no apt.
    pub fn open(machine: Option<Machine>, folder: PathBuf, suites: &[(&str, &str)]) -> Result<Self> {
        let apt = Self { folder };
        let sources = apt.write_settings(machine, suites)?;
        // Its modification time is that of the lists; it contains their sources.
        let fetched = apt.folder.join("fetched");
        let age = fs::metadata(&fetched).and_then(|it| it.modified()).ok();
        let age = age.and_then(|it| SystemTime::now().duration_since(it).ok());
        let is_current = fs::read_to_string(&fetched).is_ok_and(|it| it == sources);
        if !is_current || age.is_none_or(|it| it > MAX_LIST_AGE) {
            let names: Vec<_> = suites.iter().map(|(_, suite)| *suite).collect();
            status("Fetching", &format!("the lists of packages of {}", names.join(", ")));
            match output(apt.command("apt-get").args(["-q", "update"])) {
                Ok(_) => fs::write(&fetched, &sources)?,
                // The old lists may suffice.
                Err(error) => status("Warning", &format!("{error:#}")),
            }
        }
        Ok(apt)
    }

    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.folder.join("apt.conf"));
        command
    }

    /// Fetches packages and unpacks them into a folder, which is emptied.
    pub fn unpack(&self, packages: &[String], folder: &Path) -> Result<()> {
        empty_folder(folder)?;
        output(self.command("apt-get").args(["-q", "download"]).args(packages).current_dir(folder))?;
        unpack_all(folder, folder)
    }

    /// Like [`Self::unpack`], with all packages that these depend on, libc included.
    pub fn unpack_with_dependencies(&self, packages: &[&str], folder: &Path) -> Result<()> {
        let archives = self.folder.join("cache/archives");
        empty_folder(&archives)?;
        fs::create_dir_all(archives.join("partial"))?;
        let install = ["-q", "-y", "--download-only", "--no-install-recommends", "install"];
        output(self.command("apt-get").args(install).args(packages))?;
        empty_folder(folder)?;
        unpack_all(&archives, folder)
    }

    /// Writes apt's settings; returns the sources in them.
    fn write_settings(&self, machine: Option<Machine>, suites: &[(&str, &str)]) -> Result<String> {
        let folder = self.folder.display();
        for it in ["state/lists/partial", "cache/archives/partial"] {
            create_folder(&self.folder.join(it))?;
        }
        let targets = output(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(ORIGIN)|$(LABEL)|$(REPO_URI)",
            "Created-By: Packages",
        ]))
        .context("packages come from Debian's and Ubuntu's archives, and this machine has no apt")?;
        let key = self.folder.join("ubuntu-archive.asc");
        let sources = sources(suites, &targets, Path::new(KEYRING).exists(), &key)?;
        fs::write(key, UBUNTU_KEY)?;
        fs::write(self.folder.join("status"), "")?;
        fs::write(self.folder.join("sources.list"), &sources)?;
        let architecture = machine.map_or_else(String::new, |it| {
            let name = it.debian();
            format!("APT::Architecture \"{name}\";\nAPT::Architectures {{ \"{name}\"; }};\n")
        });
        let settings = format!(
            "{architecture}Dir::State \"{folder}/state\";\nDir::State::status \"{folder}/status\";\nDir::Cache \"{folder}/cache\";\n\
             Dir::Etc::sourcelist \"{folder}/sources.list\";\nDir::Etc::sourceparts \"/dev/null\";\n\
             Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             Acquire::Check-Valid-Until \"false\";\nAPT::Sandbox::User \"root\";\n"
        );
        fs::write(self.folder.join("apt.conf"), settings)?;
        Ok(sources)
    }
}

/// Fetches a package of this machine's own suites, and unpacks it into a folder, which is emptied. It is not installed.
pub fn unpack_own(package: &str, folder: &Path) -> Result<()> {
    empty_folder(folder)?;
    let download =
        || output(Command::new("apt-get").args(["-q", "download", package]).current_dir(folder)).map(drop);
    // The lists of packages may be old or missing.
    download().or_else(|_| {
        run(Command::new("apt-get").args(["-q", "update"]))?;
        download()
    })?;
    unpack_all(folder, folder)
}

/// Unpacks the packages in a folder, and removes them.
fn unpack_all(packages: &Path, folder: &Path) -> Result<()> {
    for file in fs::read_dir(packages)?.flatten().map(|it| it.path()) {
        if file.extension().is_some_and(|it| it == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&file).arg(folder))?;
            fs::remove_file(&file)?;
        }
    }
    Ok(())
}

/// A sources.list of the suites; Debian's at the mirrors that this machine uses (`ORIGIN|LABEL|URI` per line).
fn sources(suites: &[(&str, &str)], targets: &str, has_keyring: bool, ubuntu_key: &Path) -> Result<String> {
    let mirror = |label: &str| {
        let prefix = format!("Debian|{label}|");
        targets.lines().find_map(|it| it.strip_prefix(&prefix))
    };
    let signed = if has_keyring { format!("[signed-by={KEYRING}] ") } else { String::new() };
    let mut lines = String::new();
    for (label, suite) in suites {
        if *label == "Ubuntu" {
            lines += &format!("deb [signed-by={}] {UBUNTU} {suite} main\n", ubuntu_key.display());
            continue;
        }
        let uri = mirror(label).with_context(|| {
            format!("apt has no mirror of {label}; add one to its sources and run `apt-get update`")
        })?;
        lines += &format!("deb {signed}{uri} {suite} main\n");
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITES: [(&str, &str); 3] = [
        ("Debian-Security", "bullseye-security"),
        ("Debian", "trixie-backports"),
        ("Ubuntu", "jammy-updates"),
    ];

    #[test]
    fn debians_mirrors_are_those_of_the_machine() {
        let targets = "Other|Other|http://other.example/\n\
                       Debian|Debian|http://mirror.example/debian/\n\
                       Debian|Debian-Security|http://mirror.example/security/\n";
        let sources = sources(&SUITES, targets, false, Path::new("key.asc")).unwrap();
        assert!(
            sources.contains("deb http://mirror.example/security/ bullseye-security main\n"),
            "{sources}"
        );
        assert!(sources.contains("deb http://mirror.example/debian/ trixie-backports main\n"), "{sources}");
        assert!(sources.contains("deb [signed-by=key.asc] http://"), "{sources}");
        assert!(!sources.contains("other.example"));
        let error = super::sources(&SUITES, "Ubuntu|Ubuntu|http://mirror.example/\n", false, Path::new(""))
            .unwrap_err();
        assert!(error.to_string().contains("no mirror of Debian"), "{error}");
    }
}
