//! Facts in, one node's state out; pure.
