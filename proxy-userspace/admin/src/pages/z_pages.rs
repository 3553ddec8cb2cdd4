//! `/configz`, `/flagz` and `/statusz`, as components of Kubernetes have them at their metrics address
//! (`k8s.io/component-base/configz` and `.../zpages`).

use jiff::Timestamp;
use serde_json::json;

use crate::{COMMIT, VERSION, state::Configuration};

const COMPONENT: &str = "kube-proxy-ebpf";
/// Upstream's warning: tools must not rely on these pages.
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees \
                       and is for debugging purposes only.";

impl Configuration {
    /// The body of `/configz`: JSON, under the name of kube-proxy's group.
    pub(crate) fn configz(&self) -> String {
        json!({ "kubeproxy.config.k8s.io": self.fields }).to_string()
    }

    pub(crate) fn flagz(&self) -> String {
        let flags = self.flags.iter().map(|(name, value)| format!("{name}={value}\n"));
        format!("\n{COMPONENT} flags\n{WARNING}\n\n{}", flags.collect::<String>())
    }
}

/// The body of `/statusz`; `paths` are those of all pages beside it.
pub(crate) fn statusz(started: Timestamp, now: Timestamp, paths: &[&str]) -> String {
    let up = now.as_second() - started.as_second();
    let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
    format!(
        "\n{COMPONENT} statusz\n{WARNING}\n\nStarted: {}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\n\
         Binary version: {VERSION}\nCommit: {COMMIT}\n\nPaths: {}\n",
        started.strftime("%a %b %e %H:%M:%S UTC %Y"),
        paths.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statusz_says_since_when_the_process_runs() {
        let started: Timestamp = "2026-11-07T09:08:07Z".parse().unwrap();
        let text = statusz(started, "2026-11-08T11:09:10Z".parse().unwrap(), &["/flagz"]);
        for line in ["Started: Sat Nov  7 09:08:07 UTC 2026", "Up: 26 hr 01 min 03 sec"] {
            assert!(text.lines().any(|it| it == line), "{line} is not in {text}");
        }
        assert!(text.contains(WARNING) && text.contains("/flagz"), "{text}");
    }
}
