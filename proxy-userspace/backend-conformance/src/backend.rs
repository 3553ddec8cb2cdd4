//! A running backend, whichever way it is asked.

use crate::{
    oracle::{Answer, Lookup, Tolerance},
    wait::Wait,
};

/// A backend that follows the brain; ended when dropped.
pub(crate) trait Backend {
    /// The answer to a question, or why there is none; `expected` says how often chance has to be asked.
    fn ask(&mut self, lookup: &Lookup, expected: &Answer, wait: &mut Wait<'_>) -> Result<String, String>;

    /// The answers that are right beside that of the contract, because of the interface.
    fn tolerance(&self, _lookup: &Lookup) -> Tolerance {
        Tolerance::default()
    }
}
