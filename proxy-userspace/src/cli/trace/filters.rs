//! The filters of a trace: from flags to the query of the page `/trace`, and back.

use std::{
    net::{IpAddr, SocketAddr},
    num::{NonZeroU32, ParseIntError},
    path::{Path, PathBuf},
};

use admin::TraceFilters;
use anyhow::{Context as _, Result, anyhow, bail};
use brain::Explanation;
use clap::Args;
use datapath_ebpf as ebpf;
use model::ServiceName;

/// What is traced: the flags of the command, and what the process reads of its request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(super) struct Filters {
    /// Only connections to this Service
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = parse_service)]
    pub(super) service: Option<ServiceName>,
    /// Only connections to this address, of a Service or of an endpoint
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = parse_address)]
    pub(super) to: Option<SocketAddr>,
    /// Only connections of this process
    #[arg(long, value_name = "PID")]
    pub(super) pid: Option<NonZeroU32>,
    /// Only connections of processes in this cgroup and below
    #[arg(long, value_name = "PATH")]
    pub(super) cgroup: Option<PathBuf>,
    /// Only connections of this pod, by its UID, or by its name if it is an endpoint of a Service
    #[arg(long, value_name = "UID|NAMESPACE/NAME", value_parser = parse_pod)]
    pub(super) pod: Option<String>,
    /// Only failures: no endpoints, no such cluster IP or port, no room, and connections that the endpoint refuses or does not answer
    #[arg(long)]
    pub(super) failed: bool,
    /// Also show how each connection ended, and when
    #[arg(long)]
    pub(super) close: bool,
    /// Include destinations in networks without Services, and every datagram
    #[arg(long)]
    pub(super) all: bool,
    /// End a running trace first
    #[arg(long)]
    pub(super) replace: bool,
    /// The cookie of the network namespace of a pod that was given by name.
    #[arg(skip)]
    pub(super) netns: Option<u64>,
    /// 1 with steps, 2 with those of the ends of sockets.
    #[arg(skip)]
    pub(super) verbosity: u8,
}

/// An address, and a port or 0 for all.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let ip = text.parse().map(|it: IpAddr| SocketAddr::new(it, 0));
    ip.or_else(|_| text.parse())
        .map_err(|_| "use ADDRESS or ADDRESS:PORT, such as 10.96.0.10:80 or [fd00::1]:80".into())
}

fn parse_service(text: &str) -> Result<ServiceName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(ServiceName::new(namespace, name))
        }
        _ => Err("use NAMESPACE/NAME, such as default/web".into()),
    }
}

/// A UID in lower case, or `NAMESPACE/NAME`.
fn parse_pod(text: &str) -> Result<String, String> {
    if text.contains('/') {
        let name = parse_service(text).map(|it| it.to_string());
        return name.map_err(|_| "use a UID, or NAMESPACE/NAME such as default/web-0".into());
    }
    // The UID of a static pod is a hash without dashes.
    let is_uid = text.len() >= 32 && text.bytes().all(|it| it.is_ascii_hexdigit() || it == b'-');
    if is_uid {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("use a UID (`kubectl get pod NAME --output jsonpath={.metadata.uid}`), or NAMESPACE/NAME".into())
    }
}

impl Filters {
    /// The flags as the page takes them. A pod that is named must be known.
    pub(super) fn given(&self, socket: &Path) -> Result<TraceFilters> {
        let cgroup = self.cgroup.as_ref();
        let cgroup = cgroup.map(|it| it.to_str().context("--cgroup is not valid UTF-8")).transpose()?;
        let (pod, netns) = match &self.pod {
            Some(name) if name.contains('/') => (None, Some(netns_of(socket, name)?)),
            uid => (uid.clone(), self.netns),
        };
        let flag = |is_set: bool| is_set.then(String::new);
        let filters = [
            ("service", self.service.as_ref().map(ToString::to_string)),
            ("to", self.to.map(|it| it.to_string())),
            ("pid", self.pid.map(|it| it.to_string())),
            ("cgroup", cgroup.map(ToOwned::to_owned)),
            ("pod", pod),
            ("netns", netns.map(|it| it.to_string())),
            ("failed", flag(self.failed)),
            ("close", flag(self.close)),
            ("all", flag(self.all)),
            ("replace", flag(self.replace)),
            (VERBOSE, flag(self.verbosity > 0)),
            (VERBOSE, flag(self.verbosity > 1)),
        ];
        Ok(filters.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
    }

    /// Reads the filters of a request; an error names the one that is unknown or invalid.
    pub(super) fn parse(filters: &TraceFilters) -> Result<Self, String> {
        let mut it = Self::default();
        for (name, value) in filters {
            let wrong = |error: String| format!("{name}={value}: {error}");
            match name.as_str() {
                "service" => it.service = Some(parse_service(value).map_err(wrong)?),
                "to" => it.to = Some(parse_address(value).map_err(wrong)?),
                "pid" => {
                    it.pid = Some(value.parse().map_err(|error: ParseIntError| wrong(error.to_string()))?);
                }
                "cgroup" => it.cgroup = Some(value.into()),
                "pod" => match parse_pod(value).map_err(wrong)? {
                    name if name.contains('/') => return Err(wrong("use a UID".into())),
                    uid => it.pod = Some(uid),
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
    use super::*;
    use crate::cli::tests::parse_flags;

    fn requested(words: &[&str]) -> Result<Filters, String> {
        let filters = parse_flags::<Filters>(words).map_err(|it| it.to_string())?;
        let filters = Filters { netns: Some(9), verbosity: 2, ..filters };
        Filters::parse(&filters.given(Path::new("/none")).map_err(|it| it.to_string())?)
    }

    #[test]
    fn the_process_reads_what_the_command_was_given() {
        let uid = "0f8d35c2-5a2c-4d4e-9b3c-0123456789ab";
        let flags = "--service default/web --to [fd00::1]:80 --pid 7 --failed --close --all --replace";
        let words: Vec<_> =
            flags.split(' ').chain(["--cgroup", "/sys/fs/cgroup/a b", "--pod", uid]).collect();
        let expect = Filters {
            service: Some(ServiceName::new("default", "web")),
            to: Some("[fd00::1]:80".parse().unwrap()),
            pid: NonZeroU32::new(7),
            cgroup: Some("/sys/fs/cgroup/a b".into()),
            pod: Some(uid.into()),
            netns: Some(9),
            failed: true,
            close: true,
            all: true,
            verbosity: 2,
            replace: true,
        };
        assert_eq!(requested(&words), Ok(expect));
        assert_eq!(requested(&[]), Ok(Filters { netns: Some(9), verbosity: 2, ..Filters::default() }));
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
        assert!(Filters::parse(&filters("color", "red")).unwrap_err().contains("no filter \"color\""));
        assert!(Filters::parse(&filters("pid", "x")).unwrap_err().contains("pid=x"));
        assert!(Filters::parse(&filters("pod", "a/b")).unwrap_err().ends_with("use a UID"));
        assert!(Filters::parse(&filters("pod", "a//b")).unwrap_err().contains("NAMESPACE/NAME"));
    }

    #[test]
    fn filters_are_described_as_flags() {
        let filters =
            [("service", "a/b"), ("replace", ""), ("failed", "")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(described(&filters.to_vec()), "--service a/b --failed");
    }
}
