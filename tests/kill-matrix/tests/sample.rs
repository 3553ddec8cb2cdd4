//! A sample of the kill matrix.

use std::process::Command;

use tests::{requirements, skip};

#[test]
fn a_process_that_is_killed_or_fails_at_any_step_leaves_a_node_that_serves() {
    if !cfg!(target_arch = "x86_64") {
        skip("the tracer knows the registers of x86-64 only");
        return;
    }
    if let Err(missing) = requirements() {
        skip(&missing.join("; "));
        return;
    }
    let mut matrix = Command::new(env!("CARGO_BIN_EXE_kill-matrix"));
    let status = matrix.args(["--no-build", "--every", "97"]).status().expect("it starts");
    assert!(status.success(), "{status}");
}
