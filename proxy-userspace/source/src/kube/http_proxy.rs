//! The proxy between this process and the API server, as client-go chooses it: `proxy-url` of the kubeconfig, or else
//! HTTPS_PROXY and its like.

use std::env;

use http::Uri;
use hyper_util::{
    client::{
        legacy::connect::{
            HttpConnector,
            proxy::{SocksV5, Tunnel},
        },
        proxy::matcher::{Intercept, Matcher},
    },
    rt::TokioIo,
};
use tokio::net::TcpStream;
use tower::{BoxError, Service, ServiceExt as _, util::BoxCloneSyncService};

/// Connects to the API server, directly or through a proxy.
pub(super) type Route = BoxCloneSyncService<Uri, TokioIo<TcpStream>, BoxError>;

#[derive(Debug)]
pub(super) struct Proxy(Intercept);

impl Proxy {
    /// The proxy for this server: `explicit`, or that of the environment; `None` if it is reached directly.
    ///
    /// # Errors
    ///
    /// If it is of a kind that is not supported: what is wrong, and the remedy.
    pub(super) fn of(server: &Uri, explicit: Option<&str>) -> Result<Option<Self>, String> {
        Self::by(server, explicit, |name| {
            let value = |name: &str| env::var(name).ok().filter(|it| !it.is_empty());
            value(name).or_else(|| value(&name.to_ascii_lowercase()))
        })
    }

    fn by(
        server: &Uri,
        explicit: Option<&str>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, String> {
        let (matcher, origin) = match explicit {
            Some(url) => (Matcher::builder().all(url).build(), "proxy-url"),
            // Go never uses a proxy of the environment for addresses of this host.
            None if is_this_host(server) => return Ok(None),
            None => {
                let value = |name| variable(name).unwrap_or_default();
                let builder = Matcher::builder().http(value("HTTP_PROXY")).https(value("HTTPS_PROXY"));
                (builder.no(value("NO_PROXY")).build(), "HTTPS_PROXY")
            }
        };
        let Some(found) = matcher.intercept(server) else {
            return match explicit {
                Some(url) => {
                    // Without credentials.
                    let shown = url.rsplit_once('@').map_or(url, |(_, host)| host);
                    Err(format!(
                        "proxy-url {shown:?} is not the URL of a proxy; write it as http://192.0.2.1:3128 or socks5://192.0.2.1:1080"
                    ))
                }
                None => Ok(None),
            };
        };
        match found.uri().scheme_str() {
            Some("http" | "socks5" | "socks5h") => Ok(Some(Self(found))),
            scheme => Err(format!(
                "a proxy of the kind {} is not supported ({origin}); use one that speaks http or socks5, or reach the API server \
                 without (NO_PROXY)",
                scheme.unwrap_or("?")
            )),
        }
    }

    /// Its address, without credentials.
    pub(super) fn address(&self) -> String {
        let uri = self.0.uri();
        format!("{}://{}", uri.scheme_str().unwrap_or("http"), uri.authority().map_or("", |it| it.as_str()))
    }
}

pub(super) fn route(tcp: HttpConnector, proxy: Option<&Proxy>) -> Route {
    let Some(Proxy(proxy)) = proxy else { return boxed(tcp) };
    if proxy.uri().scheme_str() != Some("http") {
        // Names are resolved by the proxy, as by Go.
        let socks = SocksV5::new(with_socks_port(proxy.uri()), tcp).local_dns(false);
        return boxed(match proxy.raw_auth() {
            Some((user, password)) => socks.with_auth(user.into(), password.into()),
            None => socks,
        });
    }
    // By an HTTP CONNECT request.
    let tunnel = Tunnel::new(proxy.uri().clone(), tcp);
    boxed(match proxy.basic_auth() {
        Some(it) => tunnel.with_auth(it.clone()),
        None => tunnel,
    })
}

fn boxed<S>(connector: S) -> Route
where
    S: Service<Uri, Response = TokioIo<TcpStream>> + Clone + Send + Sync + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    BoxCloneSyncService::new(connector.map_err(Into::<BoxError>::into))
}

/// A SOCKS proxy has port 1080 unless its URL names another (RFC 1928).
fn with_socks_port(proxy: &Uri) -> Uri {
    let with_port = proxy.host().filter(|_| proxy.port().is_none()).and_then(|host| {
        let authority = format!("{host}:1080");
        Uri::builder().scheme(proxy.scheme_str()?).authority(authority).path_and_query("/").build().ok()
    });
    with_port.unwrap_or_else(|| proxy.clone())
}

/// Whether the server has an address of this host, or its name.
fn is_this_host(server: &Uri) -> bool {
    let host = server.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|it: std::net::IpAddr| it.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The proxy for a server, `direct` if there is none, or the error.
    fn proxy(server: &str, explicit: Option<&str>, variables: &[(&str, &str)]) -> String {
        let variable =
            |name: &str| variables.iter().find(|it| it.0 == name).map(|(_, value)| (*value).to_owned());
        match Proxy::by(&server.parse().unwrap(), explicit, variable) {
            Ok(found) => found.map_or_else(|| "direct".into(), |it| it.address()),
            Err(error) => error,
        }
    }

    #[test]
    fn proxy_url_comes_before_the_environment_and_no_proxy() {
        let environment = [("HTTPS_PROXY", "http://proxy:3128"), ("NO_PROXY", "10.0.0.0/8,.cluster.local")];
        let api = "https://192.0.2.1:6443";
        assert_eq!(proxy(api, None, &[]), "direct");
        assert_eq!(proxy(api, None, &environment), "http://proxy:3128");
        assert_eq!(proxy("https://10.96.0.1", None, &environment), "direct");
        assert_eq!(proxy("https://api.cluster.local", None, &environment), "direct");
        assert_eq!(proxy("http://192.0.2.1:8080", None, &environment), "direct");
        for own in ["https://127.0.0.1:6443", "https://[::1]:6443", "https://localhost:6443"] {
            assert_eq!(proxy(own, None, &environment), "direct");
        }
        let explicit = Some("socks5://user:secret@bastion:1080");
        assert_eq!(proxy("https://10.96.0.1", explicit, &environment), "socks5://bastion:1080");
        assert_eq!(proxy("https://127.0.0.1:6443", explicit, &[]), "socks5://bastion:1080");
    }

    #[test]
    fn a_proxy_of_another_kind_is_refused() {
        for (explicit, words) in [
            ("https://proxy:3128", ["https", "not supported"]),
            ("::", ["\"::\"", "not the URL"]),
            ("ftp://user:secret@host", ["\"host\"", "not the URL"]),
        ] {
            let error = proxy("https://192.0.2.1:6443", Some(explicit), &[]);
            assert!(words.iter().all(|it| error.contains(it)) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_socks_proxy_has_port_1080_by_default() {
        for (url, expect) in [("socks5://bastion", "bastion:1080"), ("socks5://[::1]:99", "[::1]:99")] {
            let uri = with_socks_port(&url.parse().unwrap());
            assert_eq!(uri.authority().unwrap().as_str(), expect);
        }
    }
}
