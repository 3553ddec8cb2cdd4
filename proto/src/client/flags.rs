//! The flags of a backend, for its command line.

use clap::Args;

use super::Client;
use crate::Targets;

/// The brain that a backend follows, and its node; flatten it into the backend's own flags.
///
/// ```
/// use clap::Parser;
/// use proxy_contract::client::Flags;
///
/// #[derive(Parser)]
/// struct Backend {
///     #[command(flatten)]
///     brain: Flags,
/// }
///
/// let backend = Backend::parse_from(["backend", "--target", "brain:9090", "--node-name", "node-1"]);
/// let client = backend.brain.client()?;
/// assert_eq!(client.node(), "node-1");
/// # Ok::<_, proxy_contract::client::FlagsError>(())
/// ```
// A backend may have a group of this name.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Address of the brain: unix:///path, tcp://host:port or host:port; of several, with commas between, any one is followed
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "KUBE_PROXY_EBPF_TARGET",
        default_value = "unix:///run/kube-proxy-ebpf/proxy.sock"
    )]
    pub target: Targets,
    /// Name of the node [default: the brain's own]
    #[arg(long, value_name = "NAME", env = "NODE_NAME", default_value = "", hide_default_value = true)]
    pub node_name: String,
    /// Apply the current state, and end
    #[arg(long)]
    pub once: bool,
    #[cfg(feature = "tls")]
    #[command(flatten)]
    tls: TlsFlags,
}

/// Mutual TLS with the brain.
#[cfg(feature = "tls")]
#[derive(Clone, Debug, Args)]
struct TlsFlags {
    /// CA certificates that the brain's certificate must be signed by (PEM); enables mutual TLS
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_CA", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<std::path::PathBuf>,
    /// Client certificate, followed by its intermediate certificates (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_CERT", requires = "tls_ca")]
    tls_cert: Option<std::path::PathBuf>,
    /// Private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_KEY", requires = "tls_ca")]
    tls_key: Option<std::path::PathBuf>,
    /// Name that the brain's certificate must contain [default: the host of --target]
    #[arg(long, value_name = "NAME", env = "KUBE_PROXY_EBPF_TARGET_TLS_SERVER_NAME", requires = "tls_ca")]
    tls_server_name: Option<String>,
}

/// Why the flags of TLS cannot be used: the file or the flag, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FlagsError(pub String);

impl Flags {
    /// The client that the flags ask for.
    ///
    /// # Errors
    ///
    /// The files of TLS cannot be used.
    pub fn client(&self) -> Result<Client, FlagsError> {
        let client = Client::new(self.target.clone(), self.node_name.clone());
        #[cfg(feature = "tls")]
        if let TlsFlags { tls_ca: Some(ca), tls_cert: Some(cert), tls_key: Some(key), tls_server_name } =
            &self.tls
        {
            let [authorities, certificate, key] = [ca, cert, key].map(Clone::clone);
            let tls = crate::tls::ClientTls::new(crate::tls::TlsFiles { certificate, key, authorities });
            let mut tls = tls.map_err(|it| FlagsError(it.to_string()))?;
            if let Some(name) = tls_server_name {
                let named = tls.server_name(name);
                tls = named.map_err(|it| FlagsError(format!("--tls-server-name: {it}")))?;
            }
            return Ok(client.tls(tls));
        }
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Backend {
        #[command(flatten)]
        brain: Flags,
    }

    fn parse(arguments: &[&str]) -> Result<Flags, String> {
        let all = ["backend"].iter().chain(arguments);
        Backend::try_parse_from(all).map(|it| it.brain).map_err(|it| it.to_string())
    }

    #[test]
    fn the_flags_describe_a_client() {
        let client = parse(&["--target", "10.0.0.1:9090", "--node-name", "n1"]).unwrap().client().unwrap();
        assert_eq!((client.targets().to_string().as_str(), client.node()), ("tcp://10.0.0.1:9090", "n1"));
        let flags = parse(&["--once"]).unwrap();
        assert!(flags.once && flags.client().unwrap().targets().to_string().starts_with("unix:///run/"));
        assert!(parse(&["--target", "nothing"]).unwrap_err().contains("--target"));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn an_incomplete_set_of_files_is_no_weaker_connection() {
        assert!(parse(&["--tls-ca", "/none"]).unwrap_err().contains("--tls-cert"));
        let all = ["--tls-ca", "/none", "--tls-cert", "/none", "--tls-key", "/none"];
        let error = parse(&all).unwrap().client().unwrap_err();
        assert!(error.to_string().starts_with("/none: "), "{error}");
    }
}
