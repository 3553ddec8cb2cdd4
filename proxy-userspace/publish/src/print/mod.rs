//! A published state, or the difference of two, as text: the output of `print`.
//!
//! Invariant: equal states give equal bytes, and JSON and YAML contain the whole state.

mod changes;
mod format;
mod full;
mod table;

pub use changes::render_changes;
pub use format::{Format, PrintError};
pub use full::{json_parts, parts, render};

#[cfg(test)]
mod tests;
