//! Arbitrary bytes as what a client sends to the pages.

use admin::fuzzing::Pages;
use tokio::runtime::{Builder, Runtime};

thread_local! {
    static PAGES: (Runtime, Pages) = {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime without IO");
        (runtime, Pages::default())
    };
}

/// The server answers in HTTP, if at all, and it is never its own error. The first byte is the group of pages.
pub fn target(bytes: &[u8]) {
    let [group, request @ ..] = bytes else { return };
    PAGES.with(|(runtime, pages)| runtime.block_on(pages.send(*group, request)));
}
