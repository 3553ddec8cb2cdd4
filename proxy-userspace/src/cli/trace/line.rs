//! The lines of a trace: as JSON, which the process writes and the command reads, and as text.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write as _},
    net::SocketAddr,
};

use datapath_ebpf::{EndReason, TraceAffinity, TraceChoice, TraceEjection, TraceStep, TraceVerdict};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::packet::Packet;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
pub(super) enum Line {
    /// The programs report from now on.
    Started,
    /// Events were lost, because they were not read in time: so many since the last such line, and in all.
    Lost { count: u64, total: u64 },
    /// The programs say no steps, as the kernel has no room for them.
    NoSteps { reason: String },
    /// Steps were lost, because they were not read in time: so many since the last such line, and in all.
    StepsLost { count: u64, total: u64 },
    /// A decision on a connect.
    Connect(Decision),
    /// A decision on a datagram of an unconnected socket.
    Send(Decision),
    /// The end of a connection.
    End(Decision),
    /// The first packet of a connection.
    Packet(Packet),
    /// Packets were lost, because their reports were not read in time.
    PacketsLost,
    /// Packets that are forwarded to other nodes are not shown.
    NoSentPackets { reason: String },
}

/// A decision, and the end of its connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Decision {
    /// When it was made; of an end, when the connection ended.
    pub(super) time: Timestamp,
    pub(super) pid: u32,
    pub(super) process: String,
    /// The path of the cgroup; none if it is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cgroup: Option<String>,
    /// The UID of the pod that the cgroup belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pod_uid: Option<String>,
    /// `NAMESPACE/NAME` of that pod, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pod: Option<String>,
    /// The cookie of the network namespace.
    pub(super) netns: u64,
    pub(super) protocol: String,
    /// The destination that the process asked for.
    pub(super) destination: SocketAddr,
    /// `NAMESPACE/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) service: Option<String>,
    /// The name of the port, or its number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) port: Option<String>,
    pub(super) verdict: TraceVerdict,
    /// Why it passed, if the destination is a cluster IP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) endpoint: Option<SocketAddr>,
    #[serde(flatten)]
    pub(super) choice: TraceChoice,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) end: Option<EndReason>,
    /// How long after the decision the connection was established, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) established_seconds: Option<f64>,
    /// How long after the decision it ended, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seconds: Option<f64>,
    /// The steps of the decision, if they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) steps: Vec<Step>,
}

/// A step of a decision, as a program has logged it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Step {
    pub(super) level: String,
    pub(super) step: String,
    /// Names and values.
    #[serde(flatten)]
    pub(super) fields: BTreeMap<String, Value>,
}

impl From<TraceStep> for Step {
    fn from(TraceStep { level, message, fields }: TraceStep) -> Self {
        let value = |it: String| it.parse::<u64>().map_or_else(|_| Value::from(it), Value::from);
        let fields = fields.into_iter().map(|(name, it)| (name, value(it))).collect();
        Self { level: level.as_str().to_ascii_lowercase(), step: message, fields }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.step)?;
        self.fields.iter().try_for_each(|(name, value)| match value.as_str() {
            Some(text) => write!(f, " {name}={text}"),
            None => write!(f, " {name}={value}"),
        })
    }
}

impl Line {
    /// Adds the name of the pod, given what is known by UID.
    pub(super) fn add_pod(&mut self, names: &HashMap<String, String>) {
        if let Self::Connect(it) | Self::Send(it) | Self::End(it) = self {
            it.pod = it.pod_uid.as_ref().and_then(|it| names.get(it)).cloned();
        }
    }

    /// Whether it is a decision or a packet.
    pub(super) fn is_traffic(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Send(_) | Self::End(_) | Self::Packet(_))
    }

    /// As text, as `strace` prints calls; none for a line that is not about traffic.
    pub(super) fn text(&self) -> Option<String> {
        let (call, it) = match self {
            Self::Started => return None,
            Self::Lost { count, total } => return Some(lost(*count, "event", *total)),
            Self::StepsLost { count, total } => return Some(lost(*count, "step", *total)),
            Self::NoSteps { reason } => {
                return Some(format!("-- no steps: this kernel has no room for them: {reason} --"));
            }
            Self::NoSentPackets { reason } => {
                return Some(format!(
                    "-- packets that are forwarded to other nodes are not shown: {reason} --"
                ));
            }
            Self::PacketsLost => return Some("-- packets were lost: use a narrower filter --".into()),
            Self::Packet(it) => return Some(it.text()),
            Self::Connect(it) => ("connect", it),
            Self::Send(it) => ("sendto", it),
            Self::End(it) => ("close", it),
        };
        let mut out = it.time.strftime("%H:%M:%S%.6f").to_string();
        let Decision { pid, process, protocol, destination, .. } = it;
        // Writing to a string cannot fail.
        let _ = write!(out, " {process}[{pid}] {call}({destination}/{protocol})");
        if let (Some(service), Some(port)) = (&it.service, &it.port) {
            let _ = write!(out, " {service}:{port}");
        }
        let _ = write!(out, " = {}", it.result());
        let notes = it.notes();
        if !notes.is_empty() {
            let _ = write!(out, " ({})", notes.join(", "));
        }
        if let Some(it) = it.pod.as_ref().or(it.pod_uid.as_ref()) {
            let _ = write!(out, " pod={it}");
        } else if let Some(it) = &it.cgroup {
            let _ = write!(out, " cgroup={it}");
        }
        let _ = write!(out, " netns={}", it.netns);
        for step in &it.steps {
            let _ = write!(out, "\n    {step}");
        }
        Some(out)
    }
}

impl Decision {
    fn result(&self) -> String {
        let endpoint = self.endpoint.map_or_else(String::new, |it| it.to_string());
        if let Some(end) = self.end {
            let how = match end {
                EndReason::Closed => "closed",
                EndReason::ClosedByEndpoint => "closed by the endpoint",
                EndReason::Reset => "reset, or timed out",
                EndReason::Refused => "REFUSED by the endpoint",
                EndReason::NoAnswer => "NO ANSWER from the endpoint",
                EndReason::GivenUp => "GIVEN UP without an answer from the endpoint",
            };
            let after = self.seconds.map_or_else(String::new, |it| format!(" after {}", seconds(it)));
            let established = self.established_seconds.map(seconds);
            let established = established.map_or_else(String::new, |it| format!(", established within {it}"));
            return format!("{endpoint} {how}{after}{established}");
        }
        match self.verdict {
            TraceVerdict::Redirected => endpoint,
            TraceVerdict::NoEndpoints => "ECONNREFUSED: no endpoint serves here".into(),
            TraceVerdict::NoRoom => "ENOBUFS: there is no room for the translation".into(),
            TraceVerdict::Excluded => "not translated: the process is excluded".into(),
            TraceVerdict::LeftToPackets => "not translated: left to nftables".into(),
            TraceVerdict::Passed => {
                let reason = self.reason.as_deref();
                let reason = reason.unwrap_or("no Service has this address, port and protocol");
                format!("not translated: {reason}")
            }
        }
    }

    /// How the endpoint was chosen.
    fn notes(&self) -> Vec<&'static str> {
        let TraceChoice { affinity, ejected, least_connections, slow_start, further_datagram } = self.choice;
        let affinity = affinity.map(|it| match it {
            TraceAffinity::Kept => "affinity: kept",
            TraceAffinity::New => "affinity: new",
        });
        let ejected = ejected.map(|it| match it {
            TraceEjection::Avoided => "an ejected endpoint was avoided",
            TraceEjection::Tried => "it was ejected",
        });
        let flags = [
            (least_connections, "least connections"),
            (slow_start, "slow start"),
            (further_datagram, "as before"),
        ];
        let flags = flags.into_iter().filter(|it| it.0).map(|it| it.1);
        affinity.into_iter().chain(ejected).chain(flags).collect()
    }
}

fn lost(count: u64, what: &str, total: u64) -> String {
    format!("-- lost {}, {total} in all: use a narrower filter --", model::counted(count, what))
}

/// A number of seconds with a fitting unit.
fn seconds(seconds: f64) -> String {
    match seconds {
        ..0.001 => format!("{:.0} µs", seconds * 1e6),
        ..1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.3} s"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json, to_string};

    use super::*;

    #[derive(Deserialize)]
    struct Case {
        fields: Map<String, Value>,
        text: String,
    }

    #[test]
    fn each_line_is_read_from_json_and_is_the_text_of_its_case() {
        let cases: Vec<Case> = serde_saphyr::from_str(include_str!("line_cases.yaml")).unwrap();
        assert_eq!(cases.len(), 16, "no case is skipped unnoticed");
        for Case { fields, text } in cases {
            let mut line = json!({
                "event": "connect", "time": "2026-01-02T03:04:05.123456789Z", "pid": 42, "process": "curl",
                "cgroup": "/user", "netns": 7, "protocol": "TCP", "source": "192.0.2.1:1234",
                "destination": "10.96.0.10:80", "service": "default/web", "port": "http",
                "verdict": "redirected", "endpoint": "10.244.1.1:8080",
            });
            line.as_object_mut().unwrap().extend(fields);
            let line: Line = serde_json::from_value(line).unwrap();
            assert_eq!(line.text(), Some(text));
            // The command reads what the process has written.
            let json = to_string(&line).unwrap();
            assert_eq!(serde_json::from_str::<Line>(&json).unwrap(), line, "{json}");
            assert!(!json.contains('\n'));
        }
    }

    #[test]
    fn values_of_steps_are_numbers_where_they_can_be() {
        let fields = [("set", "5"), ("by", "name")].map(|(name, it)| (name.to_owned(), it.to_owned()));
        let step = TraceStep { level: log::Level::Debug, message: "found".into(), fields: fields.into() };
        let json = r#"{"level":"debug","step":"found","by":"name","set":5}"#;
        assert_eq!(to_string(&Step::from(step)).unwrap(), json);
    }
}
