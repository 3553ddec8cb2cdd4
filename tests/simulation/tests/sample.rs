//! A sample of the simulation, and of what it can find.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

use std::process::{Command, Output};

fn simulate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_simulation")).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn whatever_happens_between_the_processes_each_state_was_true_and_the_last_one_is_the_newest() {
    let output = simulate(&["--seeds", "100"]);
    assert!(output.status.success(), "{}", text(&output));
}

/// The hash is that of every byte between the processes, too.
#[test]
fn a_seed_is_replayed_exactly() {
    for seed in ["7", "8", "9"] {
        let [first, second] = [(); 2].map(|()| text(&simulate(&["--seed", seed])));
        assert!(first.contains("hash ") && first == second, "{first}\n\n{second}");
    }
    let [one, other] = ["7", "8"].map(|seed| text(&simulate(&["--brief", "--seed", seed])));
    assert_ne!(one.split("hash ").nth(1), other.split("hash ").nth(1));
}

#[test]
fn a_kernel_that_forgets_a_service_is_found() {
    let output = simulate(&["--seeds", "20", "--lossy"]);
    let text = text(&output);
    assert!(!output.status.success() && text.contains("has a state that was never true"), "{text}");
}
