//! Skipped tests: they are reported, because a test that returns early passes.

use std::{
    fs,
    io::{self, Write as _},
    thread,
};

pub use build_tools::SKIPPED_TESTS_FILE;

/// The name of the test that runs in this thread, without its modules: libtest names the thread after the test.
pub fn current_test() -> String {
    let thread = thread::current();
    let name = thread.name().unwrap_or("unknown");
    name.rsplit("::").next().unwrap_or(name).to_owned()
}

/// Reports in [`SKIPPED_TESTS_FILE`] that the current test is skipped: the test runner hides the output of a test that passes.
pub fn skip(reason: &str) {
    let line = format!("skipped: {}: {reason}\n", current_test());
    // Nothing else can be done if this fails.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(file) = std::env::var_os(SKIPPED_TESTS_FILE) {
        let file = fs::OpenOptions::new().create(true).append(true).open(file);
        let _ = file.and_then(|mut it| it.write_all(line.as_bytes()));
    }
}
