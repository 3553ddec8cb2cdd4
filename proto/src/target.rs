//! The addresses of brains, as gRPC and Docker write them. Parsing resolves no names.

use std::{fmt, path::PathBuf, slice, str::FromStr};

/// `unix:///path`, `tcp://host:port` or `host:port`.
///
/// ```
/// use proxy_contract::Target;
///
/// assert_eq!("unix:///run/proxy.sock".parse(), Ok(Target::Unix("/run/proxy.sock".into())));
/// assert_eq!("[::1]:9090".parse(), Ok(Target::Tcp { host: "::1".into(), port: 9090 }));
/// assert!("localhost".parse::<Target>().is_err(), "the port is missing");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The absolute path of a unix socket.
    Unix(PathBuf),
    /// A host and a TCP port.
    Tcp {
        /// A name, an IPv4 address, or an IPv6 address without brackets.
        host: String,
        /// The port; 0 lets a server choose a free one, and is invalid for a client.
        port: u16,
    },
}

/// One or more brains of the same cluster, any of which will do: their addresses with commas between.
///
/// ```
/// use proxy_contract::Targets;
///
/// let targets: Targets = "brain-0:9090,brain-1:9090".parse()?;
/// assert_eq!(targets.iter().count(), 2);
/// assert_eq!(targets.to_string(), "tcp://brain-0:9090,tcp://brain-1:9090");
/// # Ok::<_, proxy_contract::TargetError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets(Vec<Target>);

impl Targets {
    /// The addresses, of which there is at least one.
    pub fn iter(&self) -> slice::Iter<'_, Target> {
        self.0.iter()
    }
}

impl From<Target> for Targets {
    fn from(target: Target) -> Self {
        Self(vec![target])
    }
}

impl FromStr for Targets {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

/// Why a text is not a [`Target`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an address: {reason}; use unix:///path, tcp://host:port or host:port")]
pub struct TargetError {
    /// The text.
    pub text: String,
    /// Why the text is no address.
    pub reason: &'static str,
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        parse(text).map_err(|reason| TargetError { text: text.to_owned(), reason })
    }
}

fn parse(text: &str) -> Result<Target, &'static str> {
    if let Some(path) = text.strip_prefix("unix:") {
        // gRPC also accepts `unix:/path`.
        let path = path.strip_prefix("//").unwrap_or(path);
        return match path {
            it if it.contains('\0') => Err("the path of a socket cannot contain a null byte"),
            it if !it.starts_with('/') => Err("the path of a socket must be absolute"),
            it if it.ends_with('/') => Err("the path of a socket cannot end with /"),
            it => Ok(Target::Unix(it.into())),
        };
    }
    let address = text.strip_prefix("tcp://").unwrap_or(text);
    if address.contains("//") {
        return Err("unknown scheme");
    }
    let Some((host, port)) = address.rsplit_once(':') else { return Err("the port is missing") };
    let Ok(port) = port.parse() else { return Err("the port must be a number up to 65535") };
    let host = match host.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
        Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_ok() => v6,
        Some(_) => return Err("the brackets must contain an IPv6 address"),
        None if host.contains(':') => return Err("an IPv6 address must be in brackets"),
        None => host,
    };
    let is_name = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '.' | '_' | ':');
    if host.is_empty() || !host.chars().all(is_name) {
        return Err("the host is missing or not a valid name");
    }
    Ok(Target::Tcp { host: host.to_owned(), port })
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Result<&str, &str>) {
        let parsed = text.parse::<Target>();
        let shown = parsed.as_ref().map(ToString::to_string).map_err(|it| it.reason);
        assert_eq!(shown.as_deref().map_err(|it| *it), expect, "{text}");
        if let Ok(target) = parsed {
            assert_eq!(target.to_string().parse(), Ok(target));
        }
    }

    #[test]
    fn addresses_have_the_form_of_grpc_and_docker() {
        check("unix:///run/a.sock", Ok("unix:///run/a.sock"));
        check("unix:/run/a.sock", Ok("unix:///run/a.sock"));
        check("tcp://127.0.0.1:12345", Ok("tcp://127.0.0.1:12345"));
        check("127.0.0.1:12345", Ok("tcp://127.0.0.1:12345"));
        check("[::1]:0", Ok("tcp://[::1]:0"));
        check("brain.kube-system:1", Ok("tcp://brain.kube-system:1"));
    }

    #[test]
    fn several_addresses_have_commas_between() {
        let targets: Targets = "10.0.0.1:7443,tcp://[fd00::1]:7443,brain:7443".parse().unwrap();
        assert_eq!(targets.to_string(), "tcp://10.0.0.1:7443,tcp://[fd00::1]:7443,tcp://brain:7443");
        for invalid in ["", "a:1,", ",a:1", "a:1,b"] {
            assert_eq!(invalid.parse::<Targets>().unwrap_err().reason, "the port is missing", "{invalid}");
        }
    }

    #[test]
    fn an_invalid_address_is_rejected_with_the_reason() {
        check("unix://run/a.sock", Err("the path of a socket must be absolute"));
        check("unix:///run/", Err("the path of a socket cannot end with /"));
        check("unix:", Err("the path of a socket must be absolute"));
        check("http://a:1", Err("unknown scheme"));
        check("localhost", Err("the port is missing"));
        check("localhost:http", Err("the port must be a number up to 65535"));
        check("localhost:65536", Err("the port must be a number up to 65535"));
        check("::1:80", Err("an IPv6 address must be in brackets"));
        check("[x]:80", Err("the brackets must contain an IPv6 address"));
        check(":80", Err("the host is missing or not a valid name"));
        check("a b:80", Err("the host is missing or not a valid name"));
    }
}
