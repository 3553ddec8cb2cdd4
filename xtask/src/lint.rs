//! `cargo xtask lint`: what is checked without running the product.
//! Invariant: what could not be checked is listed at the end with the reason.

use anyhow::{Context as _, Result};
use build_tools::{
    command::{cargo, cargo_into_target, run, status},
    machine::Machine,
    target::Target,
};

use crate::{contract::contract, licences::licences};

/// Checks the format, clippy's lints, the product for other machines, the dependencies, and the package of the contract.
pub(crate) fn lint() -> Result<()> {
    run(cargo().args(["fmt", "--all", "--check"]))?;
    run(cargo_into_target("clippy").args(["--locked", "--all-targets", "--", "-D", "warnings"]))?;
    let unchecked = [
        ("the product for other machines", other_machines()?),
        ("advisories of the dependencies", licences().context("the dependencies")?),
        ("the .proto files with buf", contract().context("the package of the contract")?),
    ];
    for (what, reason) in unchecked {
        if let Some(reason) = reason {
            status("Unchecked", &format!("{what}: {reason}"));
        }
    }
    Ok(())
}

/// Compiles the product for the machines that this one is not, without linking it: `vmtest --arch` runs it. Returns why
/// it could not be compiled, if something is missing.
fn other_machines() -> Result<Option<String>> {
    let own = Machine::own()?;
    for machine in Machine::ALL.into_iter().filter(|it| *it != own) {
        let target = match Target::find_or_install(machine) {
            Ok(target) => target,
            Err(reason) => return Ok(Some(format!("{reason:#}"))),
        };
        status("Checking", &format!("the product for {}", machine.name()));
        run(target.cargo("check", &[]).args(["--locked", "--package", "kube-proxy-ebpf"]))
            .with_context(|| format!("the product for {}", machine.name()))?;
    }
    Ok(None)
}
