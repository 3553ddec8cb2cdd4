//! Any bytes as a manifest.

use brain::{Brain, Options, node_state};
use model::cluster::ClusterState;
use source::file::{ManifestFormat, Object, parse};

use crate::laws;

/// A file is taken as a whole or not at all; what it says is a state, whichever way it is reached.
pub fn target(bytes: &[u8]) {
    let is_json = matches!(bytes.trim_ascii_start().first(), Some(b'{' | b'['));
    let format = if is_json { ManifestFormat::Json } else { ManifestFormat::Yaml };
    let parsed = match parse("file", bytes, format) {
        Ok(parsed) => parsed,
        Err(error) => return laws::line(&error.to_string()),
    };
    assert_eq!(parse("file", bytes, format).as_ref(), Ok(&parsed), "the same bytes say the same");
    laws::rejected(&parsed.rejected);
    let (mut brain, mut facts) = (Brain::new(Options::default()), ClusterState::default());
    brain.start_serving("n1");
    for (_, object) in parsed.objects {
        match object {
            Object::Service(it) => {
                brain.set_service(it.clone());
                facts.set_service(it);
            }
            Object::EndpointSlice(it) => {
                brain.set_slice(it.clone());
                facts.set_slice(it);
            }
            Object::Node(it) => {
                brain.set_node(it.clone());
                facts.set_node(it);
            }
        }
    }
    brain.recompute();
    let state = node_state(&facts, "n1", &Options::default());
    assert_eq!(brain.state("n1"), Some(&state), "there is one state for these facts");
    laws::state(&state);
}
