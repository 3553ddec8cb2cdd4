//! The page for people: one file with its style and script, and what it asks for every second.
//!
//! Invariant: it costs nothing while no browser asks: only meanwhile are counters read and rates kept. What is
//! answered is bounded at any number of Services.

mod address;
mod board;
mod live;
mod protection;
mod view;

#[cfg(test)]
mod tests;

pub use self::address::UiAddress;
pub(crate) use self::{
    live::Ui,
    protection::{PAGE, protect, refusal},
};
