//! Whether what is pinned works, and what else is attached: as the kernel reports it, not as it should be.

use datapath::{Finding, ForeignProgram, HookBehavior, Level, ProbeResult};

use crate::{
    host::cgroup::Cgroup,
    maps::{bpf_maps, pins::Pins},
    options::Options,
    programs::{hook_status, hooks, probe},
};

pub(super) fn check(options: &Options) -> Vec<Finding> {
    let pins = Pins::new(&options.pin_dir);
    if pins.is_empty() {
        let says =
            format!("nothing is pinned at {}: never started here, or cleaned up", options.pin_dir.display());
        return vec![Finding::ok("state", says)];
    }
    let mut findings = vec![instance(&pins), layout(&pins)];
    if matches!(bpf_maps::is_initialized(&pins), Ok(false))
        && pins.other_layouts().is_ok_and(|it| it.is_empty())
    {
        // Nothing is attached before the first state.
        return findings;
    }
    // The check of the host reports a cgroup that cannot be opened.
    if let Ok(cgroup) = Cgroup::open(options.cgroup.as_deref()) {
        findings.push(match hooks::check(&cgroup, &pins) {
            Ok(()) => programs(&cgroup, &pins),
            Err(error) => Finding::failed("programs", Level::Broken, &error),
        });
        findings.push(probe(&cgroup));
    }
    findings
}

/// Whether a process holds the pins.
fn instance(pins: &Pins) -> Finding {
    const SUBJECT: &str = "instance";
    match pins.is_locked() {
        Ok(true) => Finding::ok(SUBJECT, format!("one is running on {}", pins.dir.display())),
        Ok(false) => Finding::degraded(
            SUBJECT,
            "none is running: the kernel keeps serving the last state, without updates",
            "start `run` or `agent`; `cleanup` removes everything instead",
        ),
        Err(error) => Finding::failed(SUBJECT, Level::Broken, &error),
    }
}

/// Whether a generation is active, and of which version.
fn layout(pins: &Pins) -> Finding {
    const SUBJECT: &str = "state";
    let others = pins.other_layouts().unwrap_or_default();
    if matches!(bpf_maps::is_initialized(pins), Ok(false)) {
        return match others.is_empty() {
            true => Finding::degraded(
                SUBJECT,
                "no state has been applied yet",
                "the log of `run`, or /readyz, says what it waits for",
            ),
            false => Finding::degraded(
                SUBJECT,
                format!("another version of this program serves (maps {})", others.join(", ")),
                "check with the binary that runs; starting this one takes over without a gap",
            ),
        };
    }
    match bpf_maps::read_active(pins) {
        // What `is_initialized` could not read fails here, too.
        Err(error) => Finding::failed(SUBJECT, Level::Broken, &error),
        Ok((_, flips)) if others.is_empty() => Finding::ok(SUBJECT, format!("generation {flips} is active")),
        Ok(_) => Finding::degraded(
            SUBJECT,
            format!("maps of another version are left over ({})", others.join(", ")),
            "restart `run` or `agent`: it removes them",
        ),
    }
}

/// Whether the programs are attached.
fn programs(cgroup: &Cgroup, pins: &Pins) -> Finding {
    const SUBJECT: &str = "programs";
    let status = match hook_status::query(cgroup, pins) {
        Ok(status) => status,
        // The kernel did not answer.
        Err(error) => return Finding::failed(SUBJECT, Level::Degraded, &error),
    };
    let missing: Vec<_> = status.missing().map(|it| it.name).collect();
    let (all, path) = (status.hooks.len(), cgroup.path.display());
    if missing.is_empty() {
        return Finding::ok(SUBJECT, format!("attached at all {all} hooks of {path}"));
    }
    let says = if missing.len() == all {
        format!("none is attached to {path}: Services are not served there")
    } else {
        format!("not attached to {path}: {}", missing.join(", "))
    };
    Finding::broken(
        SUBJECT,
        says,
        "start `run` or `agent`, which attaches them again; its log says why it does not",
    )
}

/// Other programs at our hooks, which may translate sockets, too.
pub(super) fn foreign_programs(options: &Options) -> Finding {
    const SUBJECT: &str = "other programs";
    let status = match hook_status::query_at(options.cgroup.as_deref(), &options.pin_dir) {
        Ok(status) => status,
        // The kernel did not answer.
        Err(error) => return Finding::failed(SUBJECT, Level::Degraded, &error),
    };
    let foreign = status.foreign_programs();
    if foreign.is_empty() {
        return Finding::ok(SUBJECT, "no other programs are attached at our hooks");
    }
    let list: Vec<_> = foreign.iter().map(|(it, hooks)| format!("{it} at {}", hooks.join(", "))).collect();
    let remedy = remedy(foreign.keys().copied());
    let says = format!("the first program to match translates a connection: {}", list.join("; "));
    Finding::degraded(SUBJECT, says, remedy)
}

/// What to do about programs, by their names.
fn remedy<'a>(foreign: impl Iterator<Item = &'a ForeignProgram>) -> String {
    let names: Vec<_> = foreign.map(|it| &*it.name).collect();
    let any = |prefix: &str| names.iter().any(|it| it.starts_with(prefix));
    if any("cil_") {
        "they belong to Cilium: switch off its socket load balancer (kubeProxyReplacement: false, or socketLB.enabled: \
         false)"
    } else if any("cali_") {
        "they belong to Calico: switch off its connect-time load balancer (bpfConnectTimeLoadBalancing: Disabled)"
    } else if names.iter().any(|name| hooks::HOOKS.iter().any(|(hook, _)| hook == name)) {
        "they may belong to another instance of this program: `cleanup --pin-dir` with its folder removes them"
    } else {
        "if they translate Services, remove them; if they only observe, leave them"
    }
    .into()
}

/// Whether the hooks work, probed from inside the cgroup.
fn probe(cgroup: &Cgroup) -> Finding {
    const SUBJECT: &str = "probe";
    let results = probe::probe(cgroup);
    let only = |is_wanted: fn(&HookBehavior) -> bool| -> Vec<String> {
        results.iter().filter(|it| is_wanted(&it.behavior)).map(ProbeResult::to_string).collect()
    };
    let failed = only(|it| matches!(it, HookBehavior::Fails(_)));
    if !failed.is_empty() {
        return Finding::broken(
            SUBJECT,
            failed.join("; "),
            "see whether the programs are attached, and which other programs are attached there",
        );
    }
    let unknown = only(|it| matches!(it, HookBehavior::Unknown(_)));
    let working = results.len() - unknown.len();
    if working == 0 {
        return Finding::degraded(
            SUBJECT,
            unknown.join("; "),
            "processes must be allowed to enter the cgroup, and the loopback interface must be up and open",
        );
    }
    let unknown = if unknown.is_empty() { String::new() } else { format!("; {}", unknown.join("; ")) };
    Finding::ok(SUBJECT, format!("{working} hooks work{unknown}"))
}
