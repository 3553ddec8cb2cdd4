//! Puts the kernel objects, as `cargo xtask build-ebpf` leaves them, where the binary embeds them.
//!
//! Without them the build succeeds all the same, so that `cargo check` and `cargo clippy` need no kernel-side toolchain;
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
    for (variant, embedded) in [("", "kernel.o"), ("-trace", "kernel-trace.o")] {
        let object = workspace.join("target/kernel").join(format!("{name}{variant}.o"));
        println!("cargo::rerun-if-changed={}", object.display());
        let bytes = if object.exists() { fs::read(&object)? } else { Vec::new() };
        fs::write(PathBuf::from(env::var("OUT_DIR")?).join(embedded), bytes)?;
    }
    Ok(())
}
