//! The kernel modules that the tests need, in the order in which they can be loaded.
//! Dependencies are read from the modules themselves: no depmod is needed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use build_tools::{files_below, read};

/// The names of modules, and comments.
const WANTED: &str = include_str!("kernel_modules.txt");

/// A module, ready for `insmod`.
pub(crate) struct KernelModule {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The wanted modules of a kernel and their dependencies, each after those it depends on.
pub(crate) fn modules(folder: &Path) -> Result<Vec<KernelModule>> {
    let files = files_below(folder)?.into_iter().filter_map(|it| Some((module_name(&it)?, it))).collect();
    let mut loader = Loader { files, loaded: Vec::new() };
    for name in WANTED.lines().filter(|it| !it.starts_with('#')) {
        if loader.files.contains_key(name) {
            loader.load(name)?;
        }
    }
    Ok(loader.loaded)
}

struct Loader {
    files: BTreeMap<String, PathBuf>,
    loaded: Vec<KernelModule>,
}

impl Loader {
    fn load(&mut self, name: &str) -> Result<()> {
        if self.loaded.iter().any(|it| it.name == name) {
            return Ok(());
        }
        let file = self.files.get(name).with_context(|| format!("there is no module {name}"))?;
        let bytes = unpacked(file)?;
        for other in dependencies(&bytes).with_context(|| format!("{} is not a module", file.display()))? {
            self.load(&other).with_context(|| format!("{name} depends on {other}"))?;
        }
        self.loaded.push(KernelModule { name: name.to_owned(), bytes });
        Ok(())
    }
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
    use std::fs;

    use super::*;

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
    }

    #[test]
    fn dependencies_are_read_from_the_module() {
        assert_eq!(dependencies(&module("")), Some(vec![]));
        assert_eq!(dependencies(&module("a,b-c")), Some(vec!["a".to_owned(), "b_c".to_owned()]));
        assert_eq!(dependencies(b"garbage"), None);
    }
}
