//! Processes of tests in a kernel, and tests that are skipped.

use std::{env, fs::OpenOptions, io::Write as _, process::Child, thread};

/// A process that ends with this value.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reports that the current test is skipped: in the file that the test runner names, too.
pub(crate) fn skip(reason: &str) {
    let line = format!("skipped: {}: {reason}\n", thread::current().name().unwrap_or("unknown"));
    eprint!("{line}");
    if let Some(file) = env::var_os("KUBE_PROXY_EBPF_SKIPPED") {
        let file = OpenOptions::new().create(true).append(true).open(file);
        file.and_then(|mut it| it.write_all(line.as_bytes())).unwrap();
    }
}
