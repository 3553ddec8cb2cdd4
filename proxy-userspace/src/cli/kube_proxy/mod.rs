//! Whether a kube-proxy runs on this node, and waiting until it serves.
//!
//! Invariant: a kube-proxy serves once every IP family has its rules, of this start as far as its metrics show.

pub(super) mod rules;

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use self::rules::Rules;

/// Where its health pages and its metrics are by default.
const HEALTH: SocketAddr = at_loopback(10256);
const METRICS: SocketAddr = at_loopback(10249);
/// The time of its last sync, 0 before the first one; by family since Kubernetes 1.34.
const LAST_SYNC: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";
/// How long its port may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of the checks while it is awaited.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

const fn at_loopback(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// Why a kube-proxy seems to run: by its process, which a container may not see, or by its port.
pub(super) fn evidence() -> Option<String> {
    if rules::is_process_visible() {
        return Some("a process is named kube-proxy".to_owned());
    }
    is_health_port_taken().then(|| format!("another program than this one answers at {HEALTH}"))
}

/// Whether another program than this one answers at kube-proxy's health port.
pub(super) fn is_health_port_taken() -> bool {
    TcpStream::connect_timeout(&HEALTH, CONNECT_TIMEOUT).is_ok() && admin::query_readiness(HEALTH).is_none()
}

/// Waits until kube-proxy serves this node; fails if it does not within `limit`.
pub(super) fn wait(limit: Duration) -> Result<()> {
    let start = Instant::now();
    let mut reported = None;
    while let Some(missing) = missing()? {
        if start.elapsed() >= limit {
            bail!(
                "kube-proxy does not serve this node after {limit:?}: {missing}; nothing was removed, and what this proxy \
                 has in the kernel still serves; find out why in kube-proxy's log, or give --force"
            );
        }
        if reported.as_ref() != Some(&missing) {
            tracing::info!(
                "waiting for kube-proxy, {limit:?} at most; until then nothing is removed: {missing}"
            );
            reported = Some(missing);
        }
        thread::sleep(CHECK_INTERVAL);
    }
    Ok(())
}

/// What kube-proxy lacks to serve this node.
fn missing() -> Result<Option<String>> {
    if admin::query_readiness(HEALTH).is_some() {
        return Ok(Some(format!("this proxy still runs, and answers at {HEALTH}")));
    }
    match admin::page(HEALTH, "/healthz") {
        Err(error) => return Ok(Some(format!("http://{HEALTH}/healthz: {error}"))),
        Ok((200, _)) => {}
        Ok((status, _)) => return Ok(Some(format!("http://{HEALTH}/healthz has status {status}"))),
    }
    let families = rules::rules().context("cannot list kube-proxy's rules")?;
    let has_synced = match admin::page(METRICS, "/metrics") {
        Ok((200, text)) => Some(has_synced(&text, families.len())),
        // They may be elsewhere, or off.
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => None,
        Err(error) => return Ok(Some(format!("http://{METRICS}/metrics: {error}"))),
    };
    if has_synced == Some(false) {
        return Ok(Some(format!("it has not written its rules since its start (http://{METRICS}/metrics)")));
    }
    Ok(families.into_iter().find_map(|(family, rules)| match rules {
        Rules::Written => None,
        Rules::Missing => Some(format!("it has no rules for {family} in nftables or iptables")),
        Rules::Unreadable if has_synced == Some(true) => None,
        Rules::Unreadable => Some(format!(
            "its rules for {family} in legacy iptables cannot be read without iptables-legacy-save, and its metrics do not \
             answer at {METRICS}"
        )),
    }))
}

/// Whether its metrics say that it has written the rules of every family.
fn has_synced(metrics: &str, families: usize) -> bool {
    let mut times = Vec::new();
    let mut by_family = false;
    for line in metrics.lines().filter_map(|it| it.strip_prefix(LAST_SYNC)) {
        by_family |= line.starts_with('{');
        times.extend(line.rsplit(' ').next().and_then(|it| it.parse::<f64>().ok()));
    }
    times.len() >= if by_family { families } else { 1 } && times.iter().all(|it| *it > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_synced_once_every_family_has_a_time() {
        for (samples, expected) in [
            (&[][..], false),
            (&[" 0"], false),
            (&[" 1.7e+09"], true),
            (&["{ip_family=\"IPv4\"} 1.7e+09"], false),
            (&["{ip_family=\"IPv4\"} 1.7e+09", "{ip_family=\"IPv6\"} 0"], false),
            (&["{ip_family=\"IPv4\"} 1.7e+09", "{ip_family=\"IPv6\"} 1.7e+09"], true),
        ] {
            let samples: String = samples.iter().map(|it| format!("{LAST_SYNC}{it}\n")).collect();
            let page = format!("# TYPE {LAST_SYNC} gauge\n{samples}go_threads 9\n");
            assert_eq!(has_synced(&page, 2), expected, "{page}");
        }
    }
}
