//! Revisions of a node's state, and how they are handed over.
