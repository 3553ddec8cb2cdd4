//! The page, and what keeps others out of it.
//!
//! Invariant: the page runs what it consists of and asks its own server only; no other page reads it.

use std::{net::IpAddr, sync::LazyLock};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use hyper::{
    Request, Response,
    header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderValue, REFERRER_POLICY},
};
use sha2::{Digest as _, Sha256};

/// The page with its style and script.
pub(crate) const PAGE: &str = include_str!("page.html");

/// The page may run what it consists of, ask the server that it came from, and nothing else.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |tag: &str| {
        let (begin, end) = (format!("<{tag}>"), format!("</{tag}>"));
        let inner = PAGE.split_once(&begin).and_then(|(_, it)| it.split_once(&end)).map_or("", |(it, _)| it);
        format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(inner)))
    };
    format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        hash("script"),
        hash("style")
    )
});

/// Why a request is refused: it may come from a foreign page in a browser on this host.
pub(crate) fn refusal<B>(request: &Request<B>) -> Option<&'static str> {
    let header = |name: &str| request.headers().get(name).and_then(|it| it.to_str().ok());
    // A foreign name that resolves to this host (DNS rebinding) would make its page one of this origin.
    if !header(HOST.as_str()).is_some_and(is_loopback) {
        return Some(
            "the header Host names neither localhost nor a loopback address: open the page by one of these, through an SSH \
             tunnel where it is on another host\n",
        );
    }
    let is_own = matches!(header("sec-fetch-site"), None | Some("same-origin" | "none"));
    (!is_own && request.uri().path() != "/").then_some("only the page itself may ask for this\n")
}

/// Whether the value of a Host header is a loopback address or `localhost`, with any port: that of a tunnel differs.
fn is_loopback(host: &str) -> bool {
    let Ok(authority) = host.parse::<hyper::http::uri::Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let is_address = || name.parse::<IpAddr>().is_ok_and(|it| it.to_canonical().is_loopback());
    !host.contains('@') && (name.eq_ignore_ascii_case("localhost") || is_address())
}

/// Adds the headers that keep other pages out of this one, and this one from anything else.
pub(crate) fn protect<B>(response: &mut Response<B>) {
    let headers = response.headers_mut();
    if let Ok(policy) = HeaderValue::from_str(&POLICY) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    for (name, value) in [
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
        ("x-frame-options", "DENY"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
