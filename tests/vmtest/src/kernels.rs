//! Kernels from the packages of Debian and Ubuntu: which exist, fetched and unpacked, and the modules that the tests need, in the
//! order in which they can be loaded. Dependencies are read from the modules themselves: no depmod is needed.
//! Invariant: the machine's own apt state is only read; everything fetched is below target/vmtest.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    apt::Apt,
    command::{output, output_bytes, status, workspace},
    files_below,
    machine::Machine,
    read,
};

/// The suites with the kernels of the matrix, and the label of the archive of each.
const SUITES: [(&str, &str); 5] = [
    ("Debian-Security", "bullseye-security"),
    ("Debian-Security", "bookworm-security"),
    ("Debian-Security", "trixie-security"),
    ("Debian", "trixie-backports"),
    ("Ubuntu", "jammy-updates"),
];
/// The names of modules, and comments.
const WANTED_MODULES: &str = include_str!("kernel_modules.txt");

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
    apt: Apt,
    machine: Machine,
    names: BTreeSet<String>,
}

impl KernelPackages {
    /// Reads the lists of packages, fetched first if they are old. Fails without apt, or if missing lists cannot be fetched.
    pub(crate) fn open(machine: Machine) -> Result<Self> {
        let suites = suites(machine);
        let folder = workspace().join(format!("target/vmtest/apt-{}", machine.debian()));
        let apt = Apt::open(Some(machine), folder, &suites)?;
        let names = output(apt.command("apt-cache").args(["pkgnames", "linux-"]))?;
        let names = names.lines().map(ToOwned::to_owned).collect();
        Ok(Self { apt, machine, names })
    }

    /// The newest kernel of a series such as `5.10` or `7`, unpacked; `None` if there is no package.
    pub(crate) fn kernel(&self, series: &str) -> Result<Option<Kernel>> {
        let Some(release) = newest(&self.names, series, flavors(self.machine)) else { return Ok(None) };
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
    pub(crate) fn suites(machine: Machine) -> String {
        suites(machine).iter().map(|(_, suite)| *suite).collect::<Vec<_>>().join(", ")
    }

    fn unpack(&self, release: &str, folder: &Path) -> Result<()> {
        let packages = packages_of(&self.names, release);
        status("Fetching", &format!("Linux {release} ({})", packages.join(", ")));
        self.apt.unpack(&packages, folder)
    }
}

/// The suitable flavors, in order of preference: Debian's, the smallest, and Ubuntu's.
fn flavors(machine: Machine) -> &'static [&'static str] {
    match machine {
        Machine::X86_64 => &["-cloud-amd64", "-generic"],
        Machine::Aarch64 => &["-cloud-arm64"],
    }
}

/// The suites that have kernels of a machine: Ubuntu has an archive of its own for others than x86-64.
fn suites(machine: Machine) -> Vec<(&'static str, &'static str)> {
    SUITES.into_iter().filter(|(label, _)| machine == Machine::X86_64 || *label != "Ubuntu").collect()
}

/// The newest release of a series that has a package, in the first of the flavors that has one.
fn newest(names: &BTreeSet<String>, series: &str, flavors: &[&str]) -> Option<String> {
    let prefixes = ["linux-image-", "linux-modules-"];
    let releases = names.iter().filter_map(|name| prefixes.iter().find_map(|it| name.strip_prefix(it)));
    let of_series: Vec<_> =
        releases.filter(|it| it.strip_prefix(series).is_some_and(|it| it.starts_with('.'))).collect();
    flavors.iter().find_map(|flavor| {
        let of_flavor = of_series.iter().filter(|it| it.ends_with(flavor));
        of_flavor.max_by_key(|it| numbers(it)).map(|it| (*it).to_owned())
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

/// A module, ready for `insmod`.
pub(crate) struct KernelModule {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The wanted modules of a kernel and their dependencies, each after those it depends on.
pub(crate) fn modules(folder: &Path) -> Result<Vec<KernelModule>> {
    let files = files_below(folder)?.into_iter().filter_map(|it| Some((module_name(&it)?, it)));
    let files: BTreeMap<_, _> = files.collect();
    let mut loaded = Vec::new();
    for name in WANTED_MODULES.lines().filter(|it| !it.starts_with('#')) {
        if files.contains_key(name) {
            load(name, &files, &mut loaded)?;
        }
    }
    Ok(loaded)
}

/// Adds a module behind those that it depends on.
fn load(name: &str, files: &BTreeMap<String, PathBuf>, loaded: &mut Vec<KernelModule>) -> Result<()> {
    if loaded.iter().any(|it| it.name == name) {
        return Ok(());
    }
    let file = files.get(name).with_context(|| format!("there is no module {name}"))?;
    let bytes = unpacked(file)?;
    for other in dependencies(&bytes).with_context(|| format!("{} is not a module", file.display()))? {
        load(&other, files, loaded).with_context(|| format!("{name} depends on {other}"))?;
    }
    loaded.push(KernelModule { name: name.to_owned(), bytes });
    Ok(())
}

/// The kernel's name of a module, given its file.
fn module_name(file: &Path) -> Option<String> {
    match file.file_name()?.to_str()?.split_once(".ko")? {
        (name, "" | ".xz" | ".zst" | ".gz") => Some(name.replace('-', "_")),
        _ => None,
    }
}

fn unpacked(file: &Path) -> Result<Vec<u8>> {
    let program = match file.extension().and_then(|it| it.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return read(file),
    };
    output_bytes(Command::new(program).args(["-d", "-c"]).arg(file))
}

/// The dependencies in a module's section `.modinfo`: `depends=`, names separated by commas, and a NUL.
fn dependencies(module: &[u8]) -> Option<Vec<String>> {
    const KEY: &[u8] = b"\0depends=";
    let begin = module.windows(KEY.len()).position(|it| it == KEY)? + KEY.len();
    let rest = module.get(begin..)?;
    let names = std::str::from_utf8(rest.split(|it| *it == 0).next()?).ok()?;
    Some(names.split(',').filter(|it| !it.is_empty()).map(|it| it.replace('-', "_")).collect())
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

    fn module(depends: &str) -> Vec<u8> {
        format!("\x7fELF…\0license=GPL\0depends={depends}\0name=x\0").into_bytes()
    }

    #[test]
    fn a_module_comes_after_its_dependencies() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, bytes: &[u8]| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        write("modules.builtin", b"kernel/net/core/core.ko\n");
        write("kernel/net/udp_diag.ko", &module("inet_diag"));
        write("kernel/net/inet_diag.ko", &module(""));
        write("kernel/net/nf_tables.ko", &module("nfnetlink,nf-base"));
        write("kernel/net/nfnetlink.ko", &module(""));
        write("kernel/net/nf-base.ko", &module("nfnetlink"));
        write("kernel/net/other.ko", b"not even a module");
        let names: Vec<_> = modules(folder.path()).unwrap().into_iter().map(|it| it.name).collect();
        assert_eq!(names, ["inet_diag", "udp_diag", "nfnetlink", "nf_base", "nf_tables"]);
        write("kernel/net/inet_diag.ko", b"garbage");
        let error = format!("{:#}", modules(folder.path()).err().expect("a module that is none"));
        assert!(error.contains("inet_diag.ko is not a module"), "{error}");
    }
}
