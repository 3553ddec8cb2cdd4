//! What is pinned, and whether it is in effect: by what the kernel says, not by what should be.

use super::{Finding, Level};
use crate::{
    canary::{self, Answer},
    ebpf::{Options, cgroup::Cgroup, error::Error, hooks, kernel, look, pins::Pins},
};

pub(super) fn check(options: &Options) -> Vec<Finding> {
    let pins = Pins::new(&options.pin_dir);
    if pins.is_empty() {
        let says = format!(
            "nothing is pinned at {}: it has not run here, or was cleaned up",
            options.pin_dir.display()
        );
        return vec![Finding::ok("state", says)];
    }
    let mut findings = vec![instance(&pins), layout(&pins)];
    if matches!(kernel::is_filled(&pins), Ok(false)) && pins.other_layouts().is_ok_and(|it| it.is_empty()) {
        // Nothing is attached before the first state.
        return findings;
    }
    // If it cannot be opened, that is said of the machine.
    if let Ok(cgroup) = Cgroup::open(options.cgroup.as_deref()) {
        findings.push(match hooks::check(&cgroup, &pins) {
            Ok(()) => programs(&cgroup, &pins),
            Err(error) => Finding::failed("programs", &error),
        });
        findings.push(tried(&cgroup));
    }
    findings
}

/// Whether somebody works on the pins.
fn instance(pins: &Pins) -> Finding {
    const SUBJECT: &str = "instance";
    match pins.is_locked() {
        Ok(true) => Finding::ok(SUBJECT, format!("one runs on {}", pins.dir().display())),
        Ok(false) => Finding::degraded(
            SUBJECT,
            "none is running: the kernel goes on serving the last state, and no change arrives",
            "start `run` or `agent`; `cleanup` takes it all away instead",
        ),
        Err(error) => Finding::failed(SUBJECT, &error),
    }
}

/// Whether a generation is in force, and of which version.
fn layout(pins: &Pins) -> Finding {
    const SUBJECT: &str = "state";
    let others = pins.other_layouts().unwrap_or_default();
    if matches!(kernel::is_filled(pins), Ok(false)) {
        return match others.is_empty() {
            true => Finding::degraded(
                SUBJECT,
                "no state was ever in force",
                "see the log of `run`, or /readyz, for what it waits for",
            ),
            false => Finding::degraded(
                SUBJECT,
                format!("another version of this program serves (maps {})", others.join(", ")),
                "look with the binary that runs; starting this one takes over without a gap",
            ),
        };
    }
    // What could not be looked at just now fails here, too.
    match kernel::read_active(pins) {
        Err(error) => Finding::failed(SUBJECT, &error),
        Ok((_, flips)) if others.is_empty() => {
            Finding::ok(SUBJECT, format!("generation {flips} is in force"))
        }
        Ok(_) => Finding::degraded(
            SUBJECT,
            format!("maps of another version are left over ({})", others.join(", ")),
            "start `run` or `agent` once more: it takes them away",
        ),
    }
}

/// Whether the programs are in effect.
fn programs(cgroup: &Cgroup, pins: &Pins) -> Finding {
    const SUBJECT: &str = "programs";
    let found = match look::look(cgroup, pins) {
        Ok(found) => found,
        Err(error) => return unknown(SUBJECT, &error),
    };
    let missing: Vec<_> = found.missing().map(|it| it.name).collect();
    let (all, path) = (found.hooks.len(), cgroup.path().display());
    if missing.is_empty() {
        return Finding::ok(SUBJECT, format!("in effect at all {all} hooks of {path}"));
    }
    let says = if missing.len() == all {
        format!("none is in effect on {path}: Services are not served there")
    } else {
        format!("not in effect on {path}: {}", missing.join(", "))
    };
    Finding::broken(SUBJECT, says, "start `run` or `agent`: it puts them back; see its log if it does not")
}

/// Whether the hooks act, tried from inside the cgroup.
fn tried(cgroup: &Cgroup) -> Finding {
    const SUBJECT: &str = "canary";
    let heard = canary::ask(cgroup);
    let of = |kind: fn(&Answer) -> bool| -> Vec<String> {
        heard.iter().filter(|it| kind(&it.answer)).map(ToString::to_string).collect()
    };
    let fails = of(|it| matches!(it, Answer::Fails(_)));
    if !fails.is_empty() {
        return Finding::broken(
            SUBJECT,
            fails.join("; "),
            "see whether the programs are in effect, and who else has programs there",
        );
    }
    let untold = of(|it| matches!(it, Answer::Untold(_)));
    let acting = heard.len() - untold.len();
    if acting == 0 {
        return Finding::degraded(
            SUBJECT,
            untold.join("; "),
            "see that processes can be put into the cgroup, and that the loopback interface is up and open",
        );
    }
    let untold = if untold.is_empty() { String::new() } else { format!("; {}", untold.join("; ")) };
    Finding::ok(SUBJECT, format!("{acting} hooks act when they are used{untold}"))
}

/// A question that the kernel did not answer.
pub(super) fn unknown(subject: &'static str, error: &Error) -> Finding {
    Finding { level: Level::Degraded, ..Finding::failed(subject, error) }
}
