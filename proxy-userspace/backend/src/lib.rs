//! Consumes a node's state and programs the kernel.
