//! Short grace periods: the kernel's switch for them is set while one is waited for.
//!
//! The kernel then interrupts CPUs instead of waiting for their ticks: 0.1 ms instead of 8 to 25. `rcu_normal` forbids it
//! (Linux, Documentation/RCU and kernel-parameters.txt).
//! Invariant: what others have set stays, apart from a write in the same instant: sysfs cannot compare and set.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Sets the switch. An administrator would write 1; this value tells that it is ours, also after a death.
const OURS: &str = "2";
const UNSET: &str = "0";

/// The CPUs that must not be interrupted.
const TICKLESS: &str = "/sys/devices/system/cpu/nohz_full";

/// The switch, as `/sys/kernel/rcu_expedited`.
#[derive(Debug)]
pub(crate) struct GracePeriods {
    /// `None` if grace periods take their time.
    switch: Option<PathBuf>,
}

/// The switch is set as long as this lives.
struct Expedited<'a>(&'a Path);

impl GracePeriods {
    /// Tries the switch; an empty path leaves grace periods as they are.
    pub(crate) fn new(switch: &Path) -> Self {
        Self::on(switch, fs::read_to_string(TICKLESS))
    }

    /// As [`Self::new`], on a machine with these tickless CPUs.
    fn on(switch: &Path, tickless: io::Result<String>) -> Self {
        let reason = match tickless {
            _ if switch.as_os_str().is_empty() => None,
            Ok(cpus) if !matches!(cpus.trim(), "" | "(null)") => Some(format!("nohz_full={}", cpus.trim())),
            _ => match set(switch) {
                Ok(_) => return Self { switch: Some(switch.into()) },
                Err(error) => Some(error.to_string()),
            },
        };
        if let Some(reason) = reason {
            let switch = switch.display();
            tracing::info!(%switch, reason, "grace periods stay long: a change right after another takes up to 25 ms");
        }
        Self { switch: None }
    }

    /// Calls this, which waits for a grace period.
    pub(crate) fn shortened<T>(&self, wait: impl FnOnce() -> T) -> T {
        // Without the switch it only takes longer.
        let _expedited = self.switch.as_deref().and_then(|it| {
            let set = set(it).inspect_err(|error| {
                tracing::debug!(switch = %it.display(), %error, "a grace period stays long");
            });
            set.ok().flatten()
        });
        wait()
    }
}

/// Sets the switch, if nobody else has.
fn set(switch: &Path) -> io::Result<Option<Expedited<'_>>> {
    let is_free = matches!(fs::read_to_string(switch)?.trim(), UNSET | OURS);
    if is_free {
        fs::write(switch, OURS)?;
    }
    Ok(is_free.then(|| Expedited(switch)))
}

/// Unsets the switch if this process, or one that has died, has set it.
pub fn unset_expedited(switch: &Path) {
    if fs::read_to_string(switch).is_ok_and(|it| it.trim() == OURS)
        && let Err(error) = fs::write(switch, UNSET)
    {
        tracing::warn!(switch = %switch.display(), %error, "the switch of grace periods stays set");
    }
}

impl Drop for Expedited<'_> {
    fn drop(&mut self) {
        unset_expedited(self.0);
    }
}

#[cfg(test)]
mod tests {
    use tempfile::NamedTempFile;

    use super::*;

    /// A switch with this value.
    fn switch(value: &str) -> NamedTempFile {
        let it = NamedTempFile::new().unwrap();
        fs::write(&it, value).unwrap();
        it
    }

    fn on(switch: &Path) -> GracePeriods {
        GracePeriods::on(switch, Err(io::ErrorKind::NotFound.into()))
    }

    fn value(switch: &NamedTempFile) -> String {
        fs::read_to_string(switch).unwrap()
    }

    #[test]
    fn what_an_administrator_has_set_stays() {
        let switch = switch("1\n");
        let periods = on(switch.path());
        periods.shortened(|| assert_eq!(value(&switch), "1\n"));
        assert_eq!(value(&switch), "1\n");
        fs::write(&switch, "0\n").unwrap();
        periods.shortened(|| fs::write(&switch, "1\n").unwrap());
        assert_eq!(value(&switch), "1\n", "set meanwhile");
    }

    #[test]
    fn the_switch_is_set_only_while_something_waits_and_never_with_tickless_cpus() {
        for (tickless, expected) in
            [(None, OURS), (Some("\n"), OURS), (Some("(null)\n"), OURS), (Some("2-3\n"), UNSET)]
        {
            let switch = switch("0\n");
            let is = |expected: &str| assert_eq!(value(&switch).trim(), expected, "{tickless:?}");
            let cpus = tickless.map(str::to_owned).ok_or_else(|| io::ErrorKind::NotFound.into());
            let periods = GracePeriods::on(switch.path(), cpus);
            is(UNSET);
            periods.shortened(|| is(expected));
            is(UNSET);
        }
    }

    #[test]
    fn without_a_switch_grace_periods_take_their_time() {
        for path in ["", "/does/not/exist"] {
            let periods = on(Path::new(path));
            assert_eq!(periods.shortened(|| 7), 7, "{path}");
        }
    }
}
