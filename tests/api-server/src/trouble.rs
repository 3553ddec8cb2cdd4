//! What the server does wrong when it is told to.
//!
//! The one rule: a trouble befalls the requests it was made for, as often as was said, and no other.

use crate::Resource;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A page of a list.
    List,
    /// A watch, be it one that begins with a list.
    Watch,
}

/// What befalls a request.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// Another status than 200.
    Status {
        /// The status.
        code: u16,
        /// What is said about it.
        message: String,
        /// The header Retry-After, in seconds.
        retry_after: Option<u64>,
    },
    /// A watch that is told of an error, at once.
    ErrorEvent {
        /// The status.
        code: u16,
        /// What is said about it.
        message: String,
    },
    /// No answer at all.
    Silence,
    /// The connection is cut after so many bytes of the body.
    CutAfter(usize),
    /// The body comes in pieces of so many bytes.
    Pieces(usize),
}

/// A trouble, and whom it befalls.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) resource: Resource,
    pub(crate) verb: Verb,
    pub(crate) times: usize,
    pub(crate) trouble: Trouble,
}

/// The trouble of a request, if it has one.
pub(crate) fn befalls(rules: &mut Vec<Rule>, resource: Resource, verb: Verb) -> Option<Trouble> {
    let index = rules.iter().position(|it| it.resource == resource && it.verb == verb && it.times > 0)?;
    rules[index].times -= 1;
    let trouble = rules[index].trouble.clone();
    rules.retain(|it| it.times > 0);
    Some(trouble)
}
