//! Faults that a test injects into the server's responses.
//!
//! A fault applies to requests for one resource with one verb, a given number of times, and to no other request.

use crate::Resource;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A page of a list.
    List,
    /// A watch, including one that begins with a list.
    Watch,
    /// A list of one object, of which the resource version alone is used.
    Version,
}

/// How a request fails.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A status other than 200.
    Status {
        /// The HTTP status code.
        code: u16,
        /// The message of the `Status` object.
        message: String,
        /// The header Retry-After, in seconds.
        retry_after: Option<u64>,
    },
    /// A watch whose first event is an ERROR.
    ErrorEvent {
        /// The code of the `Status` object.
        code: u16,
        message: String,
    },
    NoResponse,
    /// The connection is closed after this many bytes of the body.
    DisconnectAfter(usize),
    /// The body is sent in fragments of this many bytes.
    Fragments(usize),
}

/// A fault and the requests it applies to.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) resource: Resource,
    pub(crate) verb: Verb,
    pub(crate) times: usize,
    pub(crate) fault: Fault,
}

/// Takes the fault that applies to a request, if there is one.
pub(crate) fn take(rules: &mut Vec<Rule>, resource: Resource, verb: Verb) -> Option<Fault> {
    let index = rules.iter().position(|it| it.resource == resource && it.verb == verb && it.times > 0)?;
    rules[index].times -= 1;
    let fault = rules[index].fault.clone();
    rules.retain(|it| it.times > 0);
    Some(fault)
}
