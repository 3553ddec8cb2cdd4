//! Arbitrary bytes as lists and watches of an API server.

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

/// A list has the same objects however it arrives. The first two bytes are the kind of its objects and the size of a fragment.
pub fn list(bytes: &[u8]) {
    let [kind, size, body @ ..] = bytes else { return };
    check(|it| it.list(*kind, usize::from(*size) + 1, body));
}

/// Each event changes something at most once, and whatever is wrong with it is said in a line. The first byte is the kind of
/// the objects.
pub fn watch(bytes: &[u8]) {
    let [kind, body @ ..] = bytes else { return };
    check(|it| it.watch(*kind, body));
}

/// Checks messages as users read them: errors as they are logged. The reflectors are made once per thread.
fn check(call: impl FnOnce(&Reflectors) -> Messages) {
    REFLECTORS.with(|(runtime, reflectors)| {
        let _context = runtime.enter();
        let messages = call(reflectors);
        invariants::rejected(&messages.rejected);
        messages.errors.iter().for_each(|it| invariants::line(&model::escaped_line(it)));
    });
}
