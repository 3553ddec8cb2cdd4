//! A published state, or the difference of two, as text: the output of `print`.
//!
//! Invariant: equal states give equal bytes, and JSON and YAML contain the whole state.

mod changes;
mod table;

use std::iter;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use publish::{Published, json_parts};
use serde::Serialize;
use serde_json::Value;

pub(super) use self::changes::render_changes;

/// What a failure is about.
const JSON: &str = "cannot render the state as JSON";

/// An output format. The lines of its values are help texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// A table
    Table,
    /// One object per line: the messages of the contract in proto3 JSON
    Json,
    /// The same messages in YAML, one document each
    Yaml,
}

/// Renders a state, with a final newline.
fn render(published: &Published, format: Format) -> Result<String> {
    parts(published, format).collect()
}

/// The parts of a rendered state, each rendered when it is asked for; YAML has one.
pub(super) fn parts(
    published: &Published,
    format: Format,
) -> Box<dyn Iterator<Item = Result<String>> + Send> {
    let json = json_parts(published).map(|it| it.context(JSON));
    match format {
        Format::Table => Box::new(table::parts(published).map(Ok)),
        Format::Json => Box::new(json),
        Format::Yaml => {
            let json = json.collect::<Result<String>>();
            let yaml = json.and_then(|it| yaml(&serde_json::from_str::<Value>(&it).context(JSON)?));
            Box::new(iter::once(yaml))
        }
    }
}

/// A YAML document. It is built from JSON, so that YAML quotes the strings that look like numbers.
fn yaml(value: &impl Serialize) -> Result<String> {
    let value = serde_json::to_value(value).context(JSON)?;
    let text = serde_saphyr::to_string(&value).context("cannot render the state as YAML")?;
    let end = if text.ends_with('\n') { "" } else { "\n" };
    Ok(format!("---\n{text}{end}"))
}

#[cfg(test)]
mod tests;
