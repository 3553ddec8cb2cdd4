//! Tests in a network namespace of their own.

use std::thread;

use nix::sched::{CloneFlags, unshare};

/// Calls a function in a network namespace that ends with it.
pub(super) fn in_netns(work: impl FnOnce() + Send + 'static) {
    let test = thread::spawn(move || match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => work(),
        Err(error) => eprintln!("skipped: no network namespace can be created: {error}"),
    });
    test.join().unwrap();
}
