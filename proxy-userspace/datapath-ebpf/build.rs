//! Puts the kernel objects, as `cargo xtask build-ebpf` leaves them, where the binary embeds them, without what only a
//! debugger reads.
//!
//! Without them the build succeeds all the same, so that `cargo check` and `cargo clippy` need no kernel-side toolchain;
//! the binary then says that it lacks it.

use std::{env, error::Error, fs, path::PathBuf};

use object::{
    build::elf::{Builder, SectionData},
    elf,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut name = String::from("kube-proxy-ebpf");
    for feature in ["fault-points", "next-layout", "log"] {
        let variable = format!("CARGO_FEATURE_{}", feature.to_uppercase().replace('-', "_"));
        if env::var_os(variable).is_some() {
            name = format!("{name}-{feature}");
        }
    }
    let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..");
    for (variant, embedded) in [("", "kernel.o"), ("-trace", "kernel-trace.o")] {
        let object = workspace.join("target/kernel").join(format!("{name}{variant}.o"));
        println!("cargo::rerun-if-changed={}", object.display());
        let bytes = if object.exists() { without_debug_info(&fs::read(&object)?)? } else { Vec::new() };
        fs::write(PathBuf::from(env::var("OUT_DIR")?).join(embedded), bytes)?;
    }
    Ok(())
}

/// The object without its DWARF sections, four fifths of it. BTF stays: the kernel shows source lines from it.
fn without_debug_info(object: &[u8]) -> Result<Vec<u8>, object::build::Error> {
    let mut builder = Builder::read(object)?;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        section.delete = name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
    }
    builder.delete_orphans();
    // LLVM has one table for the names of symbols and sections, the writer wants two.
    let names = builder.sections.add();
    names.name = b".shstrtab".as_slice().into();
    names.sh_type = elf::SHT_STRTAB;
    names.data = SectionData::SectionString;
    let mut bytes = Vec::new();
    builder.write(&mut bytes)?;
    Ok(bytes)
}
