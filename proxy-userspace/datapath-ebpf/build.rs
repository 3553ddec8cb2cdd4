//! Puts the kernel object, as `cargo xtask build-ebpf` leaves it, where the binary embeds it.
//!
//! Without one the build succeeds all the same, so that `cargo check` and `cargo clippy` need no kernel-side toolchain;
//! the binary then says that it lacks it.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut name = String::from("kube-proxy-ebpf");
    for feature in ["fault-points", "next-layout"] {
        let variable = format!("CARGO_FEATURE_{}", feature.to_uppercase().replace('-', "_"));
        if env::var_os(variable).is_some() {
            name = format!("{name}-{feature}");
        }
    }
    let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let object = workspace.join("target/kernel").join(name).with_extension("o");
    println!("cargo::rerun-if-changed={}", object.display());
    let bytes = if object.exists() { fs::read(&object)? } else { Vec::new() };
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("kernel.o"), bytes)?;
    Ok(())
}
