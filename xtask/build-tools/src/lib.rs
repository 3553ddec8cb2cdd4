//! What `cargo xtask` and the tools beside the tests share: running programs, fetching what is missing, building the product.
//! Invariant: it depends on no other crate of the workspace, so that `cargo xtask setup` compiles no tests.

#![forbid(unsafe_code)]

pub mod apt;
pub mod build;
pub mod command;
pub mod container;
pub mod machine;
pub mod other_systems;
pub mod parallel;
pub mod programs;
pub mod target;
pub mod test_suite;
pub mod toolchain;

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use walkdir::{DirEntry, WalkDir};

/// The environment variable with the factor by which tests multiply limits of time, such as `1.5`: how slow the machine is.
pub const TIMEOUT_FACTOR: &str = "KUBE_PROXY_EBPF_TEST_TIMEOUT_FACTOR";

/// The environment variable that names the file to which each skipped test appends a line.
pub const SKIPPED_TESTS_FILE: &str = "KUBE_PROXY_EBPF_SKIPPED";

/// Digits with separators of thousands: 12345 as `12,345`.
pub fn grouped(digits: &str) -> String {
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The bytes of a file; the error names it.
pub fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Makes a folder and those above it, unless they exist; the error names it.
pub fn create_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Makes a folder, or empties an existing one; the error names it.
pub fn empty_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => create_folder(folder),
    }
}

/// Every file at or below a path, ordered by path.
pub fn files_below(path: &Path) -> walkdir::Result<Vec<PathBuf>> {
    let entries = WalkDir::new(path).sort_by_file_name().into_iter().collect::<walkdir::Result<Vec<_>>>()?;
    Ok(entries.into_iter().filter(|it| !it.file_type().is_dir()).map(DirEntry::into_path).collect())
}
