//! The filters of a trace: from flags to the query of the page `/trace`, and from there to what the programs are given.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use admin::TraceFilters;
use anyhow::{Context as _, Result, anyhow, bail};
use brain::Explanation;
use clap::Args;
use datapath_ebpf as ebpf;

/// What is traced.
#[derive(Debug, Args)]
pub(super) struct FilterFlags {
    /// Only connections to this Service
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = parse_service)]
    service: Option<String>,
    /// Only connections to this address, of a Service or of an endpoint
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = parse_address)]
    to: Option<SocketAddr>,
    /// Only connections of this process
    #[arg(long, value_name = "PID")]
    pid: Option<NonZeroU32>,
    /// Only connections of processes in this cgroup and below
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// Only connections of this pod, by its UID, or by its name if it is an endpoint of a Service
    #[arg(long, value_name = "UID|NAMESPACE/NAME", value_parser = parse_pod)]
    pod: Option<PodName>,
    /// Only failures: no endpoints, no room, and connections that the endpoint refuses or does not answer
    #[arg(long)]
    failed: bool,
    /// Also show how each connection ended, and when
    #[arg(long)]
    close: bool,
    /// Include destinations in networks without Services, and every datagram
    #[arg(long)]
    all: bool,
    /// End a running trace first
    #[arg(long)]
    replace: bool,
}

/// Which pod.
#[derive(Clone, Debug)]
enum PodName {
    Uid(String),
    /// `NAMESPACE/NAME`.
    Name(String),
}

/// An address, and a port or 0 for all.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let ip = text.parse().map(|it: IpAddr| SocketAddr::new(it, 0));
    ip.or_else(|_| text.parse())
        .map_err(|_| "use ADDRESS or ADDRESS:PORT, such as 10.96.0.10:80 or [fd00::1]:80".into())
}

/// `NAMESPACE/NAME`, as it is.
fn parse_service(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(text.to_owned())
        }
        _ => Err("use NAMESPACE/NAME, such as default/web".into()),
    }
}

fn parse_pod(text: &str) -> Result<PodName, String> {
    if text.contains('/') {
        return match parse_service(text) {
            Ok(name) => Ok(PodName::Name(name)),
            Err(_) => Err("use a UID, or NAMESPACE/NAME such as default/web-0".into()),
        };
    }
    // The UID of a static pod is a hash without dashes.
    let is_uid = text.len() >= 32 && text.bytes().all(|it| it.is_ascii_hexdigit() || it == b'-');
    if is_uid {
        Ok(PodName::Uid(text.to_ascii_lowercase()))
    } else {
        Err("use a UID (`kubectl get pod NAME --output jsonpath={.metadata.uid}`), or NAMESPACE/NAME".into())
    }
}

impl FilterFlags {
    /// The filters as the page takes them.
    ///
    /// # Errors
    ///
    /// If the pod is not known.
    pub(super) fn given(&self, socket: &Path, verbosity: u8) -> Result<TraceFilters> {
        let cgroup = self.cgroup.as_ref();
        let cgroup = cgroup.map(|it| it.to_str().context("--cgroup is not valid UTF-8")).transpose()?;
        let (pod, netns) = match &self.pod {
            Some(PodName::Uid(uid)) => (Some(uid.clone()), None),
            Some(PodName::Name(name)) => (None, Some(netns_of(socket, name)?.to_string())),
            None => (None, None),
        };
        let flag = |is_set: bool| is_set.then(String::new);
        let filters = [
            ("service", self.service.clone()),
            ("to", self.to.map(|it| it.to_string())),
            ("pid", self.pid.map(|it| it.to_string())),
            ("cgroup", cgroup.map(ToOwned::to_owned)),
            ("pod", pod),
            ("netns", netns),
            ("failed", flag(self.failed)),
            ("close", flag(self.close)),
            ("all", flag(self.all)),
            ("replace", flag(self.replace)),
            (VERBOSE, flag(verbosity > 0)),
            (VERBOSE, flag(verbosity > 1)),
        ];
        Ok(filters.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
    }
}

/// Given twice, it asks for more.
const VERBOSE: &str = "verbose";

/// The cookie of the network namespace of a pod that the brain knows.
fn netns_of(socket: &Path, pod: &str) -> Result<u64> {
    const REMEDY: &str = "give its UID (`kubectl get pod NAME --output jsonpath={.metadata.uid}`)";
    // Any destination: the answer has the addresses of the pod.
    let words = ["pod", pod, "192.0.2.1:1/tcp"].map(ToOwned::to_owned);
    let answer =
        admin::query_explanation(socket, &words).with_context(|| format!("--pod {pod}: {REMEDY}"))?;
    let answer = answer.map_err(|error| anyhow!("--pod: {error}; or {REMEDY}"))?;
    let explanation: Explanation =
        serde_json::from_str(&answer).context("the process has another version")?;
    let addresses = explanation.client.addresses;
    match ebpf::client_namespace(Some(&addresses)) {
        Ok(Some(netns)) => Ok(netns),
        Ok(None) => bail!("no network namespace on this node has an address of the pod {pod}: {REMEDY}"),
        Err(error) => bail!("the network namespace of the pod {pod} cannot be found: {error}; {REMEDY}"),
    }
}

/// The filters of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Requested {
    pub(super) service: Option<String>,
    pub(super) to: Option<SocketAddr>,
    pub(super) pid: Option<u32>,
    pub(super) cgroup: Option<String>,
    pub(super) pod: Option<String>,
    pub(super) netns: Option<u64>,
    pub(super) failed: bool,
    pub(super) close: bool,
    pub(super) all: bool,
    /// 1 with steps, 2 with those of the ends of sockets.
    pub(super) verbosity: u8,
    /// Whether it ends the trace that runs.
    pub(super) replace: bool,
}

impl Requested {
    /// Reads the filters of a request.
    ///
    /// # Errors
    ///
    /// Which one is unknown or invalid.
    pub(super) fn parse(filters: &TraceFilters) -> Result<Self, String> {
        let mut it = Self::default();
        for (name, value) in filters {
            let wrong = |error: String| format!("{name}={value}: {error}");
            match name.as_str() {
                "service" => it.service = Some(parse_service(value).map_err(wrong)?),
                "to" => it.to = Some(parse_address(value).map_err(wrong)?),
                "pid" => {
                    let pid = value.parse::<NonZeroU32>().map_err(|error| wrong(error.to_string()))?;
                    it.pid = Some(pid.get());
                }
                "cgroup" => it.cgroup = Some(value.clone()),
                "pod" => match parse_pod(value).map_err(wrong)? {
                    PodName::Uid(uid) => it.pod = Some(uid),
                    PodName::Name(_) => return Err(wrong("use a UID".into())),
                },
                "netns" => it.netns = Some(value.parse().map_err(|_| wrong("use a cookie".into()))?),
                "failed" => it.failed = true,
                "close" => it.close = true,
                "all" => it.all = true,
                VERBOSE => it.verbosity = it.verbosity.saturating_add(1),
                "replace" => it.replace = true,
                _ => return Err(format!("there is no filter {name:?}: this process has another version")),
            }
        }
        Ok(it)
    }
}

/// The filters as flags, to tell others who traces.
pub(super) fn described(filters: &TraceFilters) -> String {
    let flag = |(name, value): &(String, String)| match value.as_str() {
        "" => format!("--{name}"),
        value => format!("--{name} {value}"),
    };
    let filters = filters.iter().filter(|(name, _)| name != "replace");
    filters.map(flag).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        filters: FilterFlags,
    }

    fn requested(words: &[&str]) -> Result<Requested, String> {
        let command = Command::try_parse_from([&["trace"], words].concat()).map_err(|it| it.to_string())?;
        let filters = command.filters.given(Path::new("/none"), 2).map_err(|it| it.to_string())?;
        Requested::parse(&filters)
    }

    #[test]
    fn the_process_reads_what_the_command_was_given() {
        let uid = "0f8d35c2-5a2c-4d4e-9b3c-0123456789ab";
        let flags = "--service default/web --to [fd00::1]:80 --pid 7 --failed --close --all --replace";
        let words: Vec<_> =
            flags.split(' ').chain(["--cgroup", "/sys/fs/cgroup/a b", "--pod", uid]).collect();
        let expect = Requested {
            service: Some("default/web".into()),
            to: Some("[fd00::1]:80".parse().unwrap()),
            pid: Some(7),
            cgroup: Some("/sys/fs/cgroup/a b".into()),
            pod: Some(uid.into()),
            netns: None,
            failed: true,
            close: true,
            all: true,
            verbosity: 2,
            replace: true,
        };
        assert_eq!(requested(&words), Ok(expect));
        assert_eq!(requested(&[]), Ok(Requested { verbosity: 2, ..Requested::default() }));
        let any_port = requested(&["--to", "10.96.0.10"]).unwrap().to;
        assert_eq!(any_port, Some("10.96.0.10:0".parse().unwrap()));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_an_example() {
        for (words, expect) in [
            (["--service", "web"], "such as default/web"),
            (["--to", "10.96.0"], "such as 10.96.0.10:80"),
            (["--pod", "web-0"], "use a UID"),
            (["--pod", "a/b/c"], "NAMESPACE/NAME"),
            (["--pid", "0"], "--pid"),
        ] {
            let error = requested(&words).unwrap_err();
            assert!(error.contains(expect), "{words:?}: {error}");
        }
        let filters = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        assert!(Requested::parse(&filters("color", "red")).unwrap_err().contains("no filter \"color\""));
        assert!(Requested::parse(&filters("pid", "x")).unwrap_err().contains("pid=x"));
    }

    #[test]
    fn filters_are_described_as_flags() {
        let filters =
            [("service", "a/b"), ("replace", ""), ("failed", "")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(described(&filters.to_vec()), "--service a/b --failed");
    }
}
