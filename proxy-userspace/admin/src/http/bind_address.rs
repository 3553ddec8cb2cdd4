//! The address of a server as a command-line value, in kube-proxy's syntax.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// An address to listen at, or none: `IP:PORT`, or an IP alone, with the default port; empty or `0` disables the server.
///
/// The unspecified address of either family stands for all addresses of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindAddress<const PORT: u16>(pub Option<SocketAddr>);

impl<const PORT: u16> FromStr for BindAddress<PORT> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() || text == "0" {
            return Ok(Self(None));
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Self(Some(address)));
        }
        let ip = text.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(text);
        match ip.parse::<IpAddr>() {
            Ok(ip) => Ok(Self(Some(SocketAddr::new(ip, PORT)))),
            Err(_) => Err(format!(
                "not an address: give IP:PORT as in 127.0.0.1:{PORT} or [::1]:{PORT}, an IP alone, or 0 to disable"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_syntax_of_kube_proxy() {
        for (text, expect) in [
            ("127.0.0.1:1", Some("127.0.0.1:1")),
            ("[::]:1", Some("[::]:1")),
            ("0.0.0.0", Some("0.0.0.0:10256")),
            ("::1", Some("[::1]:10256")),
            ("[::1]", Some("[::1]:10256")),
            // These disable the server.
            ("", None),
            ("0", None),
        ] {
            let bind: BindAddress<10256> = text.parse().unwrap();
            assert_eq!(bind.0, expect.map(|it| it.parse().unwrap()), "{text}");
        }
        for text in ["localhost:1", "1.2.3.4:99999", ":10256", "10256"] {
            let error = text.parse::<BindAddress<10256>>().unwrap_err();
            assert!(error.contains("IP:PORT"), "{error}");
        }
    }
}
