//! The lines of packets.

use std::{
    fmt::{self, Write as _},
    net::{IpAddr, SocketAddr},
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The first packet of a connection, as nftables has treated it, or forwarded to another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Packet {
    /// When it was through.
    pub(super) time: Timestamp,
    /// The interface at which it arrived; none if it is from this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) interface: Option<String>,
    pub(super) protocol: String,
    pub(super) source: SocketAddr,
    /// The destination before translation.
    pub(super) destination: SocketAddr,
    /// `NAMESPACE/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) service: Option<String>,
    /// The name of the port, or its number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) port: Option<String>,
    pub(super) verdict: PacketResult,
    /// The node that it was forwarded to, whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) forwarded_to: Option<ForwardedTo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) endpoint: Option<SocketAddr>,
    /// What replaced the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) masqueraded: Option<SocketAddr>,
    /// Whose rule dropped it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) table: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) chain: Option<String>,
    /// Why this proxy dropped it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// The rules that it met, if they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) steps: Vec<String>,
}

/// The node that a packet was forwarded to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ForwardedTo {
    /// Its name, if a Node has the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) node: Option<String>,
    /// Where it receives packets.
    pub(super) address: IpAddr,
    /// The row of the packet among those of the Service's address.
    pub(super) row: u32,
    pub(super) rows: u32,
}

impl fmt::Display for ForwardedTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, address, row, rows } = self;
        match node {
            Some(node) => write!(f, "forwarded to node {node} at {address}")?,
            None => write!(f, "forwarded to the node at {address}")?,
        }
        write!(f, " (row {row} of {rows})")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum PacketResult {
    Passed,
    Redirected,
    /// Another node serves it.
    Forwarded,
    NoEndpoints,
    NoPort,
    Dropped,
    Vanished,
}

impl Packet {
    pub(super) fn text(&self) -> String {
        let Self { source, destination, protocol, .. } = self;
        let mut out = self.time.strftime("%H:%M:%S%.6f").to_string();
        // Writing to a string cannot fail.
        let _ = write!(out, " packet({source} to {destination}/{protocol})");
        if let (Some(service), Some(port)) = (&self.service, &self.port) {
            let _ = write!(out, " {service}:{port}");
        }
        let _ = write!(out, " = {}", self.result());
        if let Some(it) = self.masqueraded {
            let _ = write!(out, " (masqueraded as {it})");
        }
        if let Some(it) = &self.interface {
            let _ = write!(out, " interface={it}");
        }
        for step in &self.steps {
            let _ = write!(out, "\n    {step}");
        }
        out
    }

    fn result(&self) -> String {
        let endpoint = self.endpoint.map_or_else(String::new, |it| it.to_string());
        let what = match self.verdict {
            PacketResult::Redirected => return endpoint,
            PacketResult::Forwarded => {
                return self.forwarded_to.as_ref().map_or_else(String::new, ToString::to_string);
            }
            PacketResult::Passed if self.service.is_some() => "not translated".into(),
            PacketResult::Passed => "not translated: no Service has this address, port and protocol".into(),
            PacketResult::NoEndpoints => "REFUSED: the Service has no endpoints".into(),
            PacketResult::NoPort => "REFUSED: the cluster IP has no such port".into(),
            PacketResult::Dropped => {
                let (table, chain) = (self.table.as_deref(), self.chain.as_deref());
                let by = format!("table {}, chain {}", table.unwrap_or("?"), chain.unwrap_or("?"));
                format!("DROPPED: {}", self.reason.as_ref().unwrap_or(&by))
            }
            PacketResult::Vanished => {
                "NOT SEEN TO LEAVE: routing, or something besides nftables, dropped it".into()
            }
        };
        if endpoint.is_empty() { what } else { format!("{endpoint}, {what}") }
    }
}
