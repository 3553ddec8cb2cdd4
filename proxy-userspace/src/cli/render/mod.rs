//! A published state, or the difference of two, as text: the output of `print`.
//!
//! Invariant: equal states give equal bytes, and JSON and YAML contain the whole state.

mod changes;
mod format;
mod full;
mod table;

pub(super) use changes::render_changes;
pub(super) use format::Format;
pub(super) use full::parts;

#[cfg(test)]
mod tests;
