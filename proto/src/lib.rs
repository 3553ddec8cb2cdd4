//! The contract between a brain and its backends, and its client library.
