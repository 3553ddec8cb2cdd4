//! The provenance of a release: what was built, from which sources, by which compiler. An in-toto statement with SLSA's
//! predicate. It is not signed: it says what the builder believes, and a rebuild shows it (`dist --check-reproducible`).

use std::{collections::BTreeMap, fs, process::Command};

use anyhow::{Context as _, Result};
use build_tools::{
    command::{output, workspace},
    container,
    machine::Machine,
    target::Target,
    toolchain::Toolchain,
};
use serde_json::{Value, json};

use crate::archive::sha256;

/// The statement about artifacts, by name and SHA-256, with binaries for these machines.
pub(crate) fn provenance(checksums: &BTreeMap<String, String>, machines: &[Machine]) -> Result<Value> {
    let subject =
        |(name, checksum): (&String, &String)| json!({ "name": name, "digest": { "sha256": checksum } });
    let lock = fs::read(workspace().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let repository = env!("CARGO_PKG_REPOSITORY");
    let revision = container::revision();
    let tools = Toolchain::find_or_install()?;
    let version = |command: &mut Command| output(command.current_dir(workspace()));
    let mut compilers = BTreeMap::new();
    for &machine in machines {
        let target = Target::find_or_install(machine)?;
        let compiler = json!({
            "rustc": version(Command::new(target.rustc()).arg("-vV"))?,
            "standardLibrary": target.standard_library(),
        });
        compilers.insert(machine.name(), compiler);
    }
    Ok(json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": checksums.iter().map(subject).collect::<Vec<_>>(),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": format!("{repository}/cargo-xtask-dist/v1"),
                "externalParameters": { "source": repository, "revision": revision },
                "internalParameters": {
                    "compilers": compilers,
                    "rustcOfTheKernelObject": version(Command::new(&tools.rustc).arg("-vV"))?,
                    "bpfLinker": version(Command::new(&tools.linker).arg("--version"))?,
                },
                "resolvedDependencies": [
                    { "uri": format!("git+{repository}"), "digest": { "gitCommit": revision } },
                    { "uri": "Cargo.lock", "digest": { "sha256": sha256(&lock) } },
                ],
            },
            // The person who has run it: no service vouches for it.
            "runDetails": { "builder": { "id": format!("{repository}/local") } },
        },
    }))
}
