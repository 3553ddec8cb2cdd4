//! `cargo xtask mutants`: mutation testing of the pure code.
//! Invariant: code is tested by the tests of its own crate alone.

use anyhow::{Context as _, Result, ensure};
use build_tools::{
    command::{cargo, workspace},
    create_folder,
    programs::install_subcommand,
};

/// A crate, or a part of one.
struct Subject {
    name: &'static str,
    package: &'static str,
    /// More about which mutants.
    selection: &'static [&'static str],
    /// Which tests; empty for all of the crate.
    tests: &'static [&'static str],
}

const SUBJECTS: [Subject; 5] = [
    Subject { name: "proxy-common", package: "proxy-common", selection: &["--features", "user"], tests: &[] },
    Subject { name: "model", package: "model", selection: &[], tests: &[] },
    Subject { name: "wire", package: "wire", selection: &[], tests: &[] },
    Subject { name: "brain", package: "brain", selection: &[], tests: &[] },
    // The layout of the tables, with maps in memory.
    Subject {
        name: "layout",
        package: "datapath-ebpf",
        selection: &[
            "--file",
            "proxy-userspace/datapath-ebpf/src/tables/layout.rs",
            "--file",
            "proxy-userspace/datapath-ebpf/src/tables/layout/*.rs",
        ],
        tests: &["--lib", "--", "layout::", "double_buffer::tests"],
    },
];

/// cargo-mutants ends with this if no mutant is missed, and some loop forever, which is noticed, too.
const ONLY_TIMEOUTS: i32 = 3;

pub(crate) fn mutants(subject: Option<&str>, shard: Option<&str>) -> Result<()> {
    install_subcommand("cargo-mutants")?;
    let chosen: Vec<_> = SUBJECTS.iter().filter(|it| subject.is_none_or(|name| name == it.name)).collect();
    ensure!(!chosen.is_empty(), "no such subject; choose one of {}", SUBJECTS.map(|it| it.name).join(", "));
    let folder = workspace().join("target/mutants");
    create_folder(&folder)?;
    let mut failed = Vec::new();
    for Subject { name, package, selection, tests } in chosen {
        let mut command = cargo();
        command
            .args(["mutants", "--no-shuffle", "--timeout", "60", "--output"])
            .arg(folder.join(name))
            .args(["--package", package])
            .args(*selection)
            .args(shard.map(|it| format!("--shard={it}")))
            .arg("--")
            .args(*tests);
        // A rebuild per mutant: debug information is not needed, and most of the crate is unchanged.
        command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "1").current_dir(workspace());
        let status = command.status().context("cannot start cargo-mutants")?;
        if !status.success() && status.code() != Some(ONLY_TIMEOUTS) {
            failed.push(*name);
        }
    }
    ensure!(failed.is_empty(), "not every mutant is noticed in {}: see target/mutants", failed.join(", "));
    Ok(())
}
