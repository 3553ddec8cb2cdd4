//! Where a brain is reached, or serves: an address as gRPC and Docker write it.
//!
//! The one rule: what parses can be tried. Nothing is looked up here.

use std::{fmt, path::PathBuf, str::FromStr};

/// `unix:///path`, `tcp://host:port` or `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// A socket in the file system, by its absolute path.
    Unix(PathBuf),
    /// A host, by its name or address, and a port of TCP.
    Tcp {
        /// A name, an IPv4 address, or an IPv6 address without brackets.
        host: String,
        /// The port; 0 is any free one to a server, and no address to a client.
        port: u16,
    },
}

/// Why a text is no [`Target`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an address: {reason}; write unix:///path, tcp://host:port or host:port")]
pub struct TargetError {
    /// What was given.
    pub text: String,
    /// What is wrong with it.
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
        // `unix:/path` is what gRPC writes for short.
        let path = path.strip_prefix("//").unwrap_or(path);
        return match path {
            it if it.contains('\0') => Err("a path has no zero byte"),
            it if !it.starts_with('/') => Err("the path of a socket begins with /"),
            it if it.ends_with('/') => Err("the path of a socket is not a folder's"),
            it => Ok(Target::Unix(it.into())),
        };
    }
    let address = text.strip_prefix("tcp://").unwrap_or(text);
    if address.contains("//") {
        return Err("it is of a kind that is not known");
    }
    let Some((host, port)) = address.rsplit_once(':') else { return Err("the port is missing") };
    let Ok(port) = port.parse() else { return Err("the port is not a number up to 65535") };
    let host = match host.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
        Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_ok() => v6,
        Some(_) => return Err("there is no IPv6 address between the brackets"),
        None if host.contains(':') => return Err("an IPv6 address stands in brackets"),
        None => host,
    };
    let is_name = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '.' | '_' | ':');
    if host.is_empty() || !host.chars().all(is_name) {
        return Err("the host is missing, or cannot be a name");
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
    fn addresses_are_written_as_grpc_and_docker_do() {
        check("unix:///run/a.sock", Ok("unix:///run/a.sock"));
        check("unix:/run/a.sock", Ok("unix:///run/a.sock"));
        check("tcp://127.0.0.1:12345", Ok("tcp://127.0.0.1:12345"));
        check("127.0.0.1:12345", Ok("tcp://127.0.0.1:12345"));
        check("[::1]:0", Ok("tcp://[::1]:0"));
        check("brain.kube-system:1", Ok("tcp://brain.kube-system:1"));
    }

    #[test]
    fn what_is_no_address_says_why() {
        check("unix://run/a.sock", Err("the path of a socket begins with /"));
        check("unix:///run/", Err("the path of a socket is not a folder's"));
        check("unix:", Err("the path of a socket begins with /"));
        check("http://a:1", Err("it is of a kind that is not known"));
        check("localhost", Err("the port is missing"));
        check("localhost:http", Err("the port is not a number up to 65535"));
        check("localhost:65536", Err("the port is not a number up to 65535"));
        check("::1:80", Err("an IPv6 address stands in brackets"));
        check("[x]:80", Err("there is no IPv6 address between the brackets"));
        check(":80", Err("the host is missing, or cannot be a name"));
        check("a b:80", Err("the host is missing, or cannot be a name"));
    }
}
