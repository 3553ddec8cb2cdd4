//! What a kernel says on its console.
//! The one rule: whatever a kernel says when something is wrong with it is found, whichever test was running.

/// How the lines begin by which a kernel says that something is wrong, after the time.
const TROUBLE: [&str; 11] = [
    "BUG:",
    "INFO: rcu",
    "INFO: task",
    "Internal error",
    "Kernel panic",
    "Oops",
    "WARNING:",
    "general protection fault",
    "rcu: INFO:",
    "unregister_netdevice: waiting",
    "watchdog: BUG:",
];

/// The lines that tell of trouble, in order.
pub(crate) fn troubles(log: &str) -> Vec<&str> {
    log.lines().map(message).filter(|line| TROUBLE.iter().any(|it| line.starts_with(it))).collect()
}

/// Whether the kernel has given up.
pub(crate) fn is_dead(log: &str) -> bool {
    log.lines().any(|it| message(it).starts_with("Kernel panic"))
}

/// A line without the time, `[   12.345678] `.
fn message(line: &str) -> &str {
    let line = line.trim();
    let stamped = line.strip_prefix('[').and_then(|it| it.split_once("] "));
    match stamped {
        Some((time, rest)) if time.trim().parse::<f64>().is_ok() => rest,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_found_with_and_without_the_time() {
        let log = "[    0.000000] Linux version 5.10.0\r\n\
                   [    1.234567] BTF: WARNING is only a word here\r\n\
                   [   61.500000] watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [sockets:131]\r\n\
                   [  100.000001] rcu: INFO: rcu_sched self-detected stall on CPU\r\n\
                   Oops: 0002 [#1] SMP\r\n\
                   [  101.000000] Kernel panic - not syncing: Attempted to kill init!\r\n";
        let troubles = troubles(log);
        assert_eq!(troubles.len(), 4, "{troubles:?}");
        assert_eq!(troubles[0], "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [sockets:131]");
        assert!(is_dead(log));
    }

    #[test]
    fn a_quiet_kernel_is_in_no_trouble() {
        let log = "[    0.1] Warning: unable to open an initial console.\n[ 2.0] random: crng init done\n";
        assert!(troubles(log).is_empty());
        assert!(!is_dead(log));
    }
}
