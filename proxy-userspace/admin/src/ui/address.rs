//! Where the page for people is served.
//!
//! Invariant: no other host can connect.

use std::{net::SocketAddr, path::PathBuf, str::FromStr};

/// A loopback address or a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UiAddress {
    /// `IP:PORT`, or an IP alone.
    Loopback(SocketAddr),
    /// `unix:///path`.
    Unix(PathBuf),
}

/// The port if only an IP is given.
const DEFAULT_PORT: u16 = 10247;
const REMEDY: &str = "give a loopback address as in 127.0.0.1:10247 or [::1]:10247, or a Unix socket as in unix:///run/ui.sock";

impl FromStr for UiAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(format!("the path of the Unix socket is not absolute: {REMEDY}"))
            };
        }
        let ip = || text.trim_matches(['[', ']']).parse().map(|ip| SocketAddr::new(ip, DEFAULT_PORT));
        match text.parse().or_else(|_| ip()) {
            Ok(address) if address.ip().to_canonical().is_loopback() => Ok(Self::Loopback(address)),
            Ok(_) => Err(format!(
                "other hosts could connect, and the page asks for no password: {REMEDY}, and reach it through SSH \
                 (ssh -L 10247:127.0.0.1:10247 NODE)"
            )),
            Err(_) => Err(format!("not an address: {REMEDY}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_host_can_connect() {
        for (text, expect) in [
            ("127.0.0.1:10247", "127.0.0.1:10247"),
            ("127.0.0.2", "127.0.0.2:10247"),
            ("[::1]:80", "[::1]:80"),
            ("::1", "[::1]:10247"),
        ] {
            assert_eq!(text.parse::<UiAddress>(), Ok(UiAddress::Loopback(expect.parse().unwrap())));
        }
        assert_eq!("unix:///run/ui.sock".parse::<UiAddress>(), Ok(UiAddress::Unix("/run/ui.sock".into())));
        for text in ["0.0.0.0:10247", "[::]:10247", "192.0.2.1:10247", "::ffff:10.0.0.1"] {
            let error = text.parse::<UiAddress>().unwrap_err();
            assert!(error.contains("other hosts could connect") && error.contains("127.0.0.1"), "{error}");
        }
        for text in ["", "localhost:10247", "10247", "unix://ui.sock", "/run/ui.sock"] {
            let error = text.parse::<UiAddress>().unwrap_err();
            assert!(error.contains("give a loopback address"), "{error}");
        }
    }
}
