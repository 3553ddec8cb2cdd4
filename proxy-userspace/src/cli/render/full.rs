//! A full state.

use std::iter;

use publish::{Published, json_parts};
use serde_json::Value;

use super::{
    format::{Format, PrintError, yaml},
    table,
};

/// Renders a state, with a final newline.
pub(in crate::cli) fn render(published: &Published, format: Format) -> Result<String, PrintError> {
    parts(published, format).collect()
}

/// The parts of a rendered state, each rendered when it is asked for; YAML has one.
pub(in crate::cli) fn parts(
    published: &Published,
    format: Format,
) -> Box<dyn Iterator<Item = Result<String, PrintError>> + Send> {
    let json = json_parts(published).map(|it| it.map_err(PrintError::from));
    match format {
        Format::Table => Box::new(table::parts(published).map(Ok)),
        Format::Json => Box::new(json),
        Format::Yaml => {
            let json = json.collect::<Result<String, _>>();
            let yaml = json.and_then(|it| yaml(&serde_json::from_str::<Value>(&it)?));
            Box::new(iter::once(yaml))
        }
    }
}
