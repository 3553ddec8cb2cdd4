//! What `explain` says.

use std::{collections::BTreeSet, net::SocketAddr, process::Command};

use serde_json::Value;

use crate::agent::{Output, run};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// What becomes of the connection, such as `redirected`.
    pub verdict: String,
    /// The endpoints to which the connection may go.
    pub used: BTreeSet<SocketAddr>,
    /// The whole output.
    pub json: Value,
}

impl Explained {
    /// Runs a command `explain` with the words of a question. The kernel must agree with the answer.
    #[track_caller]
    pub fn ask(command: &mut Command, words: &[&str]) -> Self {
        let Output { code, stdout, stderr } = run(command.args(["--output", "json"]).args(words));
        assert_eq!(code, Some(0), "{words:?}: {stdout}{stderr}");
        let json: Value = serde_json::from_str(&stdout).expect("the output is JSON");
        assert_eq!(json["differences"], serde_json::json!([]), "{json}");
        let endpoints = json["endpoints"].as_array().into_iter().flatten();
        let used = endpoints.filter(|it| it["used"] == true).filter_map(|it| it["endpoint"].as_str());
        Self {
            verdict: json["verdict"].as_str().unwrap_or_default().to_owned(),
            used: used.map(|it| it.parse().expect("an endpoint is an address")).collect(),
            json,
        }
    }
}
