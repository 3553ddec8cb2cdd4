//! Tests in a network namespace of their own.

use std::{process::Command, thread};

use nix::sched::{CloneFlags, unshare};

/// Runs a test in a network namespace that ends with its thread, or says why it cannot, as without a program of iproute2.
pub(crate) fn in_netns(program: &str, test: impl FnOnce() + Send) {
    let run = || match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) if Command::new(program).arg("-V").output().is_ok() => test(),
        Ok(()) => eprintln!("skipped: there is no {program}: install iproute2"),
        Err(error) => eprintln!("skipped: no network namespace can be created: {error}"),
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap());
}

pub(crate) fn run(line: &str) {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let output = command.args(words).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}
