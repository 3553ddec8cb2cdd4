//! The kernel's settings of connection tracking (`net.netfilter.nf_conntrack_…`), as kube-proxy sets them.
//!
//! Invariant: a limit is only raised, a setting that is 0 is left to the host, and nothing else depends on success.

use std::{
    fs,
    path::{Path, PathBuf},
    thread::available_parallelism,
    time::Duration,
};

use datapath::Finding;

/// What kube-proxy's configuration says about connection tracking. The default leaves everything to the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConntrackSettings {
    /// The number of tracked connections per CPU of the node; 0 leaves the limit to the host.
    pub max_per_core: u32,
    /// The least number of them, whatever the number of CPUs; without effect if `max_per_core` is 0.
    pub min: u32,
    /// How long an idle TCP connection is tracked.
    pub tcp_established_timeout: Duration,
    /// How long a TCP connection is tracked after one side has closed it.
    pub tcp_close_wait_timeout: Duration,
    /// Whether TCP packets outside the window are not counted as invalid.
    pub tcp_be_liberal: bool,
    /// How long a UDP flow without an answer is tracked.
    pub udp_timeout: Duration,
    /// How long an answered UDP flow is tracked.
    pub udp_stream_timeout: Duration,
    /// Where the settings are, as /proc/sys/net.
    pub proc_sys_net: PathBuf,
}

/// A setting that is not as configured.
#[derive(Debug)]
pub struct Deviation {
    name: &'static str,
    /// `None` if there is no such setting.
    is: Option<u64>,
    should_be: u64,
}

impl Deviation {
    fn describe(&self) -> String {
        let is = self.is.map_or_else(|| "missing".to_owned(), |it| it.to_string());
        format!("net.netfilter.{} is {is} instead of {}", self.name, self.should_be)
    }
}

impl ConntrackSettings {
    const MAX: &str = "nf_conntrack_max";
    /// The size of the table behind [`Self::MAX`], which only the host's network namespace can change. kube-proxy changes the
    /// same by a parameter of the module.
    const BUCKETS: &str = "nf_conntrack_buckets";

    /// The settings that differ from those of the kernel.
    pub fn deviations(&self) -> Vec<Deviation> {
        self.deviations_on(cpus(Path::new("/sys/devices/system/cpu/online")))
    }

    fn deviations_on(&self, cpus: u64) -> Vec<Deviation> {
        let max = match u64::from(self.max_per_core) * cpus {
            0 => 0,
            scaled => scaled.max(self.min.into()),
        };
        let raised = [(Self::MAX, max), (Self::BUCKETS, max / 4)];
        let set = [
            ("nf_conntrack_tcp_timeout_established", self.tcp_established_timeout.as_secs()),
            ("nf_conntrack_tcp_timeout_close_wait", self.tcp_close_wait_timeout.as_secs()),
            ("nf_conntrack_tcp_be_liberal", self.tcp_be_liberal.into()),
            ("nf_conntrack_udp_timeout", self.udp_timeout.as_secs()),
            ("nf_conntrack_udp_timeout_stream", self.udp_stream_timeout.as_secs()),
        ];
        let deviation = |name, should_be, is_right: fn(u64, u64) -> bool| {
            let is = self.read(name);
            let is_set = should_be == 0 || is.is_some_and(|it| is_right(it, should_be));
            (!is_set).then_some(Deviation { name, is, should_be })
        };
        // 0 as a limit means none.
        let raised = raised.map(|(name, it)| deviation(name, it, |is, should_be| is == 0 || is >= should_be));
        let set = set.map(|(name, it)| deviation(name, it, |is, should_be| is == should_be));
        raised.into_iter().chain(set).flatten().collect()
    }

    /// Applies what differs, and logs it; returns what could not be set, and why. `track` is called if the kernel tracks no
    /// connections yet, which it begins to when a rule mentions them.
    pub fn apply(&self, track: impl FnOnce()) -> Vec<String> {
        let mut deviations = self.deviations();
        if deviations.iter().any(|it| it.is.is_none()) {
            track();
            deviations = self.deviations();
        }
        let mut failed = Vec::new();
        for Deviation { name, is, should_be } in deviations {
            match fs::write(self.path(name), format!("{should_be}\n")) {
                Ok(()) => {
                    let before = is.map_or_else(|| "unknown".to_owned(), |it| it.to_string());
                    tracing::info!(sysctl = name, value = should_be, before, "conntrack setting changed");
                }
                // It costs time where there are many connections, and the limit holds nevertheless.
                Err(error) if name == Self::BUCKETS => {
                    tracing::debug!(sysctl = name, value = ?is, %error, "conntrack setting kept");
                }
                Err(error) => {
                    failed.push(format!("net.netfilter.{name} cannot be set to {should_be}: {error}"));
                }
            }
        }
        failed
    }

    /// Whether the kernel's settings are as configured; `has_run` if they should be.
    pub fn finding(&self, has_run: bool) -> Finding {
        const SUBJECT: &str = "conntrack settings";
        let deviations = self.deviations().into_iter().filter(|it| it.name != Self::BUCKETS);
        let (mut says, mut commands) = (Vec::new(), Vec::new());
        for it in deviations {
            says.push(it.describe());
            commands.push(format!("net.netfilter.{}={}", it.name, it.should_be));
        }
        let says = says.join("; ");
        if says.is_empty() {
            Finding::ok(SUBJECT, "they are as configured")
        } else if !has_run {
            Finding::ok(
                SUBJECT,
                format!("{says}: `run` sets it where it may, `run --init-only` with more privileges"),
            )
        } else {
            Finding::degraded(
                SUBJECT,
                format!("{says}: with too small a limit new connections are dropped under load"),
                format!(
                    "call `run --init-only` where /proc/sys is writable, as the init container of deploy/ does, or \
                     `sysctl -w {}`; the --conntrack flags change what is wanted, and 0 leaves it to the host",
                    commands.join(" ")
                ),
            )
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.proc_sys_net.join("netfilter").join(name)
    }

    fn read(&self, name: &str) -> Option<u64> {
        fs::read_to_string(self.path(name)).ok()?.trim().parse().ok()
    }
}

/// The number of CPUs of the node, which a limit of this process does not reduce; a file lists them as in `0-3,8`.
fn cpus(online: &Path) -> u64 {
    let count = |range: &str| -> Option<u64> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    let listed = fs::read_to_string(online).ok();
    let listed = listed.and_then(|it| it.trim().split(',').map(count).sum::<Option<u64>>());
    listed.unwrap_or_else(|| available_parallelism().map_or(1, |it| it.get() as u64))
}

#[cfg(test)]
mod tests {
    use datapath::Level;

    use super::*;

    /// Settings of a host in a folder.
    fn host(values: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("netfilter")).unwrap();
        for (name, value) in values {
            fs::write(folder.path().join("netfilter").join(name), format!("{value}\n")).unwrap();
        }
        folder
    }

    fn settings(host: &tempfile::TempDir) -> ConntrackSettings {
        ConntrackSettings { proc_sys_net: host.path().to_owned(), ..ConntrackSettings::default() }
    }

    #[track_caller]
    fn check(settings: &ConntrackSettings, cpus: u64, expected: &[&str]) {
        let found = settings.deviations_on(cpus);
        assert_eq!(found.iter().map(Deviation::describe).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_conntrack_limit_grows_with_the_cpus_and_is_only_raised() {
        let host = host(&[("nf_conntrack_max", "200"), ("nf_conntrack_buckets", "50")]);
        let limit = |max_per_core, min| ConntrackSettings { max_per_core, min, ..settings(&host) };
        let raised = |to| {
            [
                format!("net.netfilter.nf_conntrack_max is 200 instead of {to}"),
                format!("net.netfilter.nf_conntrack_buckets is 50 instead of {}", to / 4),
            ]
        };
        check(&limit(100, 0), 2, &[]);
        check(&limit(100, 0), 4, &raised(400).each_ref().map(String::as_str));
        check(&limit(100, 1000), 4, &raised(1000).each_ref().map(String::as_str));
        check(&limit(0, 1000), 4, &[]);
        check(&limit(1, 0), 4, &[]);
    }

    #[test]
    fn conntrack_timeouts_are_set_unless_they_are_0() {
        let host = host(&[
            ("nf_conntrack_tcp_timeout_established", "432000"),
            ("nf_conntrack_tcp_timeout_close_wait", "60"),
            ("nf_conntrack_tcp_be_liberal", "0"),
            ("nf_conntrack_udp_timeout", "30"),
        ]);
        check(&settings(&host), 4, &[]);
        let seconds = Duration::from_secs;
        let all = ConntrackSettings {
            tcp_established_timeout: seconds(86_400),
            tcp_close_wait_timeout: seconds(60),
            tcp_be_liberal: true,
            udp_timeout: seconds(10),
            ..settings(&host)
        };
        let finding = all.finding(true);
        assert_eq!(finding.level, Level::Degraded);
        assert!(
            finding.says.starts_with(
                "net.netfilter.nf_conntrack_tcp_timeout_established is 432000 instead of 86400; \
             net.netfilter.nf_conntrack_tcp_be_liberal is 0 instead of 1; \
             net.netfilter.nf_conntrack_udp_timeout is 30 instead of 10:"
            ),
            "{finding:?}"
        );
        assert_eq!(all.finding(false).level, Level::Ok);
        assert!(all.apply(|| ()).is_empty());
        check(&all, 4, &[]);
        assert_eq!(all.finding(true).level, Level::Ok);
    }

    #[test]
    fn a_conntrack_setting_that_cannot_be_written_is_named() {
        // A folder is as read-only as a file of /proc/sys in a container.
        let host = host(&[]);
        fs::create_dir(host.path().join("netfilter/nf_conntrack_udp_timeout")).unwrap();
        let settings = ConntrackSettings { udp_timeout: Duration::from_secs(10), ..settings(&host) };
        let [text] = &settings.apply(|| ())[..] else { panic!() };
        assert!(text.starts_with("net.netfilter.nf_conntrack_udp_timeout cannot be set to 10: "), "{text}");
    }

    #[test]
    fn the_cpus_of_the_node_are_counted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, expected) in [("0-3,8\n", 5), ("0\n", 1), ("0-127\n", 128)] {
            fs::write(file.path(), text).unwrap();
            assert_eq!(cpus(file.path()), expected, "{text}");
        }
        assert!(cpus(Path::new("/does/not/exist")) >= 1);
    }
}
