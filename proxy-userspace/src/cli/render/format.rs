//! The output formats.

use clap::ValueEnum;
use serde::Serialize;

/// An output format. The lines of its values are help texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Format {
    /// A table
    Table,
    /// One object per line: the messages of the contract in proto3 JSON
    Json,
    /// The same messages in YAML, one document each
    Yaml,
}

/// Why a state could not be rendered.
#[derive(Debug, thiserror::Error)]
pub(in crate::cli) enum PrintError {
    #[error("cannot render the state as JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("cannot render the state as YAML: {0}")]
    Yaml(#[from] serde_saphyr::SerializeError),
}

/// A line of JSON.
pub(super) fn json(value: &impl Serialize) -> Result<String, PrintError> {
    Ok(serde_json::to_string(value)? + "\n")
}

/// A YAML document. It is built from JSON, so that YAML quotes the strings that look like numbers.
pub(super) fn yaml(value: &impl Serialize) -> Result<String, PrintError> {
    let mut text = format!("---\n{}", serde_saphyr::to_string(&serde_json::to_value(value)?)?);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}
