//! The kernel's console: lines that report an error of the kernel, whichever test was running.

/// How the line begins that the kernel ends with.
pub(crate) const PANIC: &str = "Kernel panic";
/// How these lines begin, after the timestamp.
const ERRORS: [&str; 11] = [
    "BUG:",
    "INFO: rcu",
    "INFO: task",
    "Internal error",
    PANIC,
    "Oops",
    "WARNING:",
    "general protection fault",
    "rcu: INFO:",
    "unregister_netdevice: waiting",
    "watchdog: BUG:",
];

/// The lines that report an error, in order.
pub(crate) fn errors(log: &str) -> Vec<&str> {
    log.lines().map(message).filter(|line| ERRORS.iter().any(|it| line.starts_with(it))).collect()
}

/// A line without its timestamp, `[   12.345678] `.
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
    fn errors_are_found_with_and_without_a_timestamp() {
        let log = "[    0.000000] Linux version 5.10.0\r\n\
                   [    1.234567] BTF: WARNING is only a word here\r\n\
                   [   61.500000] watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [sockets:131]\r\n\
                   [  100.000001] rcu: INFO: rcu_sched self-detected stall on CPU\r\n\
                   Oops: 0002 [#1] SMP\r\n\
                   [  101.000000] Kernel panic - not syncing: Attempted to kill init!\r\n";
        let errors = errors(log);
        assert_eq!(errors.len(), 4, "{errors:?}");
        assert_eq!(errors[0], "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [sockets:131]");
        assert!(errors[3].starts_with(PANIC));
    }

    #[test]
    fn ordinary_lines_are_no_errors() {
        let log = "[    0.1] Warning: unable to open an initial console.\n[ 2.0] random: crng init done\n";
        assert!(errors(log).is_empty());
    }
}
