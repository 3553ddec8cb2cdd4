//! Tests in a network namespace of their own.

use std::{process::Command, thread};

use nix::sched::{CloneFlags, unshare};

/// Calls a function in a network namespace that ends with it.
pub(super) fn in_netns(work: impl FnOnce() + Send + 'static) {
    let test = thread::spawn(move || match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => work(),
        Err(error) => eprintln!("skipped: no network namespace can be created: {error}"),
    });
    test.join().unwrap();
}

/// Runs commands, one per line.
#[track_caller]
pub(super) fn run(commands: &str) {
    for it in commands.lines().map(str::trim).filter(|it| !it.is_empty()) {
        let words: Vec<_> = it.split_whitespace().collect();
        let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
        assert!(output.status.success(), "{it}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
