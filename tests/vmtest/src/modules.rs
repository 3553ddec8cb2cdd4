//! The modules that a kernel needs for the tests, in the order in which they can be loaded.
//! The one rule: what a module depends on is read from the module itself, so that nothing has to be installed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

/// What the tests use of the kernel that distributions build as modules.
/// One that a kernel does not have is left out: a test that needs it says so.
const WANTED: &[&str] = &[
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_fib_ipv4",
    "nft_fib_ipv6",
    "nft_masq",
    "nft_nat",
    "nft_numgen",
    "nft_reject_ipv4",
    "nft_reject_ipv6",
    "sctp",
    "sctp_diag",
    "cifs",
    "veth",
    "bridge",
    "dummy",
];

/// A module, ready for `insmod`.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The wanted modules of a kernel and what they depend on, each after its dependencies.
///
/// # Errors
///
/// If a module cannot be read, or depends on one that is not there.
pub(crate) fn modules(folder: &Path) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    list(folder, &mut files)?;
    let mut loader = Loader { files, loaded: Vec::new() };
    for name in WANTED {
        if loader.files.contains_key(*name) {
            loader.load(name)?;
        }
    }
    Ok(loader.loaded)
}

struct Loader {
    files: BTreeMap<String, PathBuf>,
    loaded: Vec<Module>,
}

impl Loader {
    fn load(&mut self, name: &str) -> Result<()> {
        if self.loaded.iter().any(|it| it.name == name) {
            return Ok(());
        }
        let file = self.files.get(name).with_context(|| format!("there is no module {name}"))?;
        let bytes = read(file)?;
        for other in depends(&bytes).with_context(|| format!("{} is no module", file.display()))? {
            self.load(&other).with_context(|| format!("{name} depends on {other}"))?;
        }
        self.loaded.push(Module { name: name.to_owned(), bytes });
        Ok(())
    }
}

/// Every module below a folder, by its name as the kernel says it.
fn list(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().map(|it| it.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_dir() {
            list(&path, files)?;
        } else if let Some((name, "" | ".xz" | ".zst" | ".gz")) = name.split_once(".ko") {
            files.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>> {
    let program = match file.extension().and_then(|it| it.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(file).with_context(|| format!("cannot read {}", file.display())),
    };
    let output = Command::new(program)
        .args(["-d", "-c"])
        .arg(file)
        .output()
        .with_context(|| format!("cannot unpack {}: cannot start `{program}`", file.display()))?;
    if !output.status.success() {
        bail!("cannot unpack {}: {}", file.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// What a module says it depends on, in its section `.modinfo`: `depends=` and names with commas, then a NUL.
fn depends(module: &[u8]) -> Option<Vec<String>> {
    const KEY: &[u8] = b"\0depends=";
    let begin = module.windows(KEY.len()).position(|it| it == KEY)? + KEY.len();
    let rest = module.get(begin..)?;
    let names = std::str::from_utf8(rest.split(|it| *it == 0).next()?).ok()?;
    Some(names.split(',').filter(|it| !it.is_empty()).map(|it| it.replace('-', "_")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(depends: &str) -> Vec<u8> {
        format!("\x7fELF…\0license=GPL\0depends={depends}\0name=x\0").into_bytes()
    }

    #[test]
    fn a_module_comes_after_what_it_depends_on() {
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
    }

    #[test]
    fn what_a_module_depends_on_is_read_from_it() {
        assert_eq!(depends(&module("")), Some(vec![]));
        assert_eq!(depends(&module("a,b-c")), Some(vec!["a".to_owned(), "b_c".to_owned()]));
        assert_eq!(depends(b"garbage"), None);
    }
}
