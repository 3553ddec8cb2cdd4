//! Kernels from the packages of Debian and Ubuntu: which exist, fetched and unpacked.
//! Invariant: the machine's own apt state is only read; everything fetched is below target/vmtest.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, bail};
use build_tools::command::{output, run, status, workspace};

/// The suites with the kernels of the matrix, and the label of the archive of each.
const SUITES: [(&str, &str); 5] = [
    ("Debian-Security", "bullseye-security"),
    ("Debian-Security", "bookworm-security"),
    ("Debian-Security", "trixie-security"),
    ("Debian", "trixie-backports"),
    ("Ubuntu", "jammy-updates"),
];
/// Ubuntu's own archive: Debian configures no mirror of it.
const UBUNTU: &str = "http://archive.ubuntu.com/ubuntu/";
/// The key of Ubuntu's suites: its archive's key of 2018, F6EC B376 2474 EDA9 D21B 7022 8719 20D1 991B C93C,
/// from the package ubuntu-keyring.
const UBUNTU_KEY: &[u8] = include_bytes!("ubuntu-archive.asc");
/// How old the lists of packages may become.
const MAX_LIST_AGE: Duration = Duration::from_hours(24);

/// A kernel, unpacked.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// Its `uname -r`.
    pub(crate) release: String,
    pub(crate) image: PathBuf,
    /// The folder of its modules, with `modules.builtin` in it.
    pub(crate) modules: PathBuf,
}

/// The packages that exist, from an apt state of vmtest's own.
pub(crate) struct KernelPackages {
    folder: PathBuf,
    names: BTreeSet<String>,
}

impl KernelPackages {
    /// Reads the lists of packages; fetches them first if they are old. Fails if this machine has no apt, or the lists are
    /// missing and cannot be fetched.
    pub(crate) fn open() -> Result<Self> {
        let folder = workspace().join("target/vmtest/apt");
        let packages = Self { folder, names: BTreeSet::new() };
        let sources = packages.write_settings()?;
        // Its modification time is that of the lists; it contains their sources.
        let fetched = packages.folder.join("fetched");
        let age = fs::metadata(&fetched).and_then(|it| it.modified()).ok();
        let age = age.and_then(|it| SystemTime::now().duration_since(it).ok());
        let is_current = fs::read_to_string(&fetched).is_ok_and(|it| it == sources);
        if !is_current || age.is_none_or(|it| it > MAX_LIST_AGE) {
            status("Fetching", "the lists of kernels");
            match output(packages.apt("apt-get").args(["-q", "update"])) {
                Ok(_) => fs::write(&fetched, &sources)?,
                // The old lists may suffice.
                Err(error) => status("Warning", &format!("{error:#}")),
            }
        }
        let names = output(packages.apt("apt-cache").args(["pkgnames", "linux-"]))?;
        let names = names.lines().map(ToOwned::to_owned).collect();
        Ok(Self { names, ..packages })
    }

    /// The newest kernel of a series such as `5.10` or `7`, unpacked; `None` if there is no package.
    pub(crate) fn kernel(&self, series: &str) -> Result<Option<Kernel>> {
        let Some(release) = newest(&self.names, series, flavours()?) else { return Ok(None) };
        let folder = workspace().join("target/vmtest/kernels").join(&release);
        if !folder.join("complete").exists() {
            self.unpack(&release, &folder)?;
        }
        let places = ["usr/lib/modules", "lib/modules"].map(|it| folder.join(it).join(&release));
        let modules = places.into_iter().find(|it| it.join("kernel").exists());
        let image =
            [Some(folder.join("boot")), modules.clone()].into_iter().flatten().find_map(|it| image(&it));
        match (image, modules) {
            (Some(image), Some(modules)) => {
                fs::write(folder.join("complete"), "")?;
                Ok(Some(Kernel { release, image, modules }))
            }
            _ => {
                bail!(
                    "the packages of Linux {release} contain no image or no modules, see {}",
                    folder.display()
                )
            }
        }
    }

    /// The names of the suites, for messages.
    pub(crate) fn suites() -> String {
        SUITES.map(|(_, suite)| suite).join(", ")
    }

    fn unpack(&self, release: &str, folder: &Path) -> Result<()> {
        let packages = packages_of(&self.names, release);
        status("Fetching", &format!("Linux {release} ({})", packages.join(", ")));
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        // As root, apt downloads as another user by default, who cannot write to this folder.
        let mut download = self.apt("apt-get");
        download.args(["-q", "-o", "APT::Sandbox::User=root", "download"]).args(&packages);
        output(download.current_dir(folder))?;
        for file in fs::read_dir(folder)?.flatten().map(|it| it.path()) {
            if file.extension().is_some_and(|it| it == "deb") {
                run(Command::new("dpkg-deb").arg("-x").arg(&file).arg(folder))?;
                fs::remove_file(&file)?;
            }
        }
        Ok(())
    }

    /// An apt with only these suites, which writes only below `folder`.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.folder.join("apt.conf"));
        command
    }

    /// Writes apt's settings; returns the sources in them.
    fn write_settings(&self) -> Result<String> {
        let folder = self.folder.display();
        for it in ["state/lists/partial", "cache/archives/partial"] {
            let it = self.folder.join(it);
            fs::create_dir_all(&it).with_context(|| format!("cannot create {}", it.display()))?;
        }
        let targets = output(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(ORIGIN)|$(LABEL)|$(REPO_URI)",
            "Created-By: Packages",
        ]))
        .context("the kernels come from Debian's packages, and this machine has no apt")?;
        let key = self.folder.join("ubuntu-archive.asc");
        let sources = sources(&targets, Path::new(KEYRING).exists(), &key)?;
        fs::write(key, UBUNTU_KEY)?;
        fs::write(self.folder.join("status"), "")?;
        fs::write(self.folder.join("sources.list"), &sources)?;
        let settings = format!(
            "Dir::State \"{folder}/state\";\nDir::State::status \"{folder}/status\";\nDir::Cache \"{folder}/cache\";\n\
             Dir::Etc::sourcelist \"{folder}/sources.list\";\nDir::Etc::sourceparts \"/dev/null\";\n\
             Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             Acquire::Check-Valid-Until \"false\";\nAPT::Sandbox::User \"root\";\n"
        );
        fs::write(self.folder.join("apt.conf"), settings)?;
        Ok(sources)
    }
}

/// Debian's keys for all its suites.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A sources.list of the suites; Debian's at the mirrors that this machine uses (`ORIGIN|LABEL|URI` per line).
fn sources(targets: &str, has_keyring: bool, ubuntu_key: &Path) -> Result<String> {
    let mirror = |wanted: &str| {
        targets.lines().find_map(|line| {
            let mut fields = line.split('|');
            let (origin, label, uri) = (fields.next()?, fields.next()?, fields.next()?);
            (origin == "Debian" && label == wanted).then_some(uri)
        })
    };
    let signed = if has_keyring { format!("[signed-by={KEYRING}] ") } else { String::new() };
    let mut lines = String::new();
    for (label, suite) in SUITES {
        if label == "Ubuntu" {
            lines += &format!("deb [signed-by={}] {UBUNTU} {suite} main\n", ubuntu_key.display());
            continue;
        }
        let uri = mirror(label).with_context(|| {
            format!("apt has no mirror of {label}, where Debian's kernels come from; add one to its sources and run `apt-get update`")
        })?;
        lines += &format!("deb {signed}{uri} {suite} main\n");
    }
    Ok(lines)
}

/// The suitable flavours, in order of preference: Debian's, the smallest, and Ubuntu's.
fn flavours() -> Result<&'static [&'static str]> {
    match env::consts::ARCH {
        "x86_64" => Ok(&["-cloud-amd64", "-generic"]),
        other => {
            bail!(
                "virtual machines are supported on x86_64 only, and this machine is {other}; `vmtest own` works"
            )
        }
    }
}

/// The newest release of a series that has a package, in the first of the flavours that has one.
fn newest(names: &BTreeSet<String>, series: &str, flavours: &[&str]) -> Option<String> {
    let prefixes = ["linux-image-", "linux-modules-"];
    let releases = names.iter().filter_map(|name| prefixes.iter().find_map(|it| name.strip_prefix(it)));
    let of_series: Vec<_> =
        releases.filter(|it| it.strip_prefix(series).is_some_and(|it| it.starts_with('.'))).collect();
    flavours.iter().find_map(|flavour| {
        let of_flavour = of_series.iter().filter(|it| it.ends_with(flavour));
        of_flavour.max_by_key(|it| numbers(it)).map(|it| (*it).to_owned())
    })
}

/// The numbers of a release, by which releases are compared.
fn numbers(release: &str) -> Vec<u64> {
    release.split(|it: char| !it.is_ascii_digit()).filter_map(|it| it.parse().ok()).collect()
}

/// The packages of a release: one for Debian's until Linux 7.1, several since then and for Ubuntu's.
fn packages_of(names: &BTreeSet<String>, release: &str) -> Vec<String> {
    let mut packages = Vec::new();
    for part in ["image", "binary", "modules", "modules-extra", "base"] {
        let signed = format!("linux-{part}-{release}");
        let unsigned =
            [format!("linux-{part}-{release}-unsigned"), format!("linux-{part}-unsigned-{release}")];
        packages.extend([signed].into_iter().chain(unsigned).find(|it| names.contains(it)));
    }
    packages
}

/// `vmlinuz-RELEASE`, `vmlinuz` or `vmlinuz.unsigned`.
fn image(folder: &Path) -> Option<PathBuf> {
    let mut files = fs::read_dir(folder).ok()?.flatten();
    files.find(|it| it.file_name().to_string_lossy().starts_with("vmlinuz")).map(|it| it.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&it| it.to_owned()).collect()
    }

    #[test]
    fn releases_are_compared_by_their_numbers() {
        let names = names(&[
            "linux-image-5.10.0-9-cloud-amd64",
            "linux-image-5.10.0-46-cloud-amd64",
            "linux-image-5.10.0-46-cloud-amd64-unsigned",
            "linux-image-5.10.0-47-amd64",
            "linux-image-6.1.0-0.deb11.52-cloud-amd64",
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-6.12.117+deb13-cloud-amd64",
            "linux-modules-7.3.4+deb13-cloud-amd64",
            "linux-image-7.2.12+deb13-cloud-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64-dbg",
            "linux-image-5.15.0-97-generic",
            "linux-image-5.15.0-204-generic",
            "linux-image-5.15.0-1099-aws",
            "linux-image-7.3.9-generic",
        ]);
        let newest = |series| newest(&names, series, &["-cloud-amd64", "-generic"]);
        assert_eq!(newest("5.10").as_deref(), Some("5.10.0-46-cloud-amd64"));
        assert_eq!(newest("6.1").as_deref(), Some("6.1.0-9-cloud-amd64"));
        assert_eq!(newest("6.12").as_deref(), Some("6.12.117+deb13-cloud-amd64"));
        assert_eq!(newest("7").as_deref(), Some("7.3.4+deb13-cloud-amd64"));
        assert_eq!(newest("5.15").as_deref(), Some("5.15.0-204-generic"));
        assert_eq!(newest("5.1"), None);
    }

    #[test]
    fn a_release_is_in_one_package_or_in_several() {
        let names = names(&[
            "linux-image-5.10.0-46-cloud-amd64",
            "linux-image-5.10.0-46-cloud-amd64-unsigned",
            "linux-base-7.3.4-cloud-amd64",
            "linux-binary-unsigned-7.3.4-cloud-amd64",
            "linux-modules-7.3.4-cloud-amd64",
            "linux-image-5.15.0-204-generic",
            "linux-image-unsigned-5.15.0-204-generic",
            "linux-modules-5.15.0-204-generic",
            "linux-modules-extra-5.15.0-204-generic",
        ]);
        assert_eq!(packages_of(&names, "5.10.0-46-cloud-amd64"), ["linux-image-5.10.0-46-cloud-amd64"]);
        assert_eq!(
            packages_of(&names, "7.3.4-cloud-amd64"),
            [
                "linux-binary-unsigned-7.3.4-cloud-amd64",
                "linux-modules-7.3.4-cloud-amd64",
                "linux-base-7.3.4-cloud-amd64",
            ]
        );
        assert_eq!(
            packages_of(&names, "5.15.0-204-generic"),
            [
                "linux-image-5.15.0-204-generic",
                "linux-modules-5.15.0-204-generic",
                "linux-modules-extra-5.15.0-204-generic",
            ]
        );
    }

    #[test]
    fn debians_mirrors_are_those_of_the_machine() {
        let targets = "Other|Other|http://other.example/\n\
                       Debian|Debian|http://mirror.example/debian/\n\
                       Debian|Debian-Security|http://mirror.example/security/\n";
        let sources = sources(targets, false, Path::new("key.asc")).unwrap();
        assert!(
            sources.contains("deb http://mirror.example/security/ bullseye-security main\n"),
            "{sources}"
        );
        assert!(sources.contains("deb http://mirror.example/debian/ trixie-backports main\n"), "{sources}");
        assert!(sources.contains("deb [signed-by=key.asc] http://"), "{sources}");
        assert!(!sources.contains("other.example"));
        let error =
            super::sources("Ubuntu|Ubuntu|http://mirror.example/\n", false, Path::new("")).unwrap_err();
        assert!(error.to_string().contains("no mirror of Debian"), "{error}");
    }
}
