//! What probing the hooks found.

use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    /// The hook's name, such as `connect4`.
    pub hook: &'static str,
    pub behavior: HookBehavior,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookBehavior {
    /// It translated as it should.
    Ok,
    /// It did not translate, with details.
    Fails(String),
    /// It could not be probed, with the reason.
    Unknown(String),
}

impl fmt::Display for ProbeResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.behavior {
            HookBehavior::Ok => write!(f, "{} works", self.hook),
            HookBehavior::Fails(how) => write!(f, "{} does not work: {how}", self.hook),
            HookBehavior::Unknown(why) => write!(f, "{} cannot be probed: {why}", self.hook),
        }
    }
}
