//! Arbitrary bytes as a watch of an API server.

use source::kube::fuzzing::{Messages, Reflectors};
use tokio::runtime::{Builder, Runtime};

use crate::invariants;

thread_local! {
    static REFLECTORS: (Runtime, Reflectors) = {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime without IO");
        let reflectors = {
            let _context = runtime.enter();
            Reflectors::new()
        };
        (runtime, reflectors)
    };
}

/// Each event changes something at most once, and whatever is wrong with it is said in a line. The first byte is the kind of
/// the objects.
pub fn target(bytes: &[u8]) {
    let [kind, body @ ..] = bytes else { return };
    with_reflectors(|it| check(&it.watch(*kind, body)));
}

/// Calls with reflectors, which are made once per thread.
pub(crate) fn with_reflectors(call: impl FnOnce(&Reflectors)) {
    REFLECTORS.with(|(runtime, reflectors)| {
        let _context = runtime.enter();
        call(reflectors);
    });
}

/// Checks messages as users read them: errors as they are logged.
pub(crate) fn check(messages: &Messages) {
    invariants::rejected(&messages.rejected);
    messages.errors.iter().for_each(|it| invariants::line(&model::escaped_line(it)));
}
