//! Rules, elements, chains and tables as nf_tables messages (`include/uapi/linux/netfilter/nf_tables.h`).
//!
//! May know: the kernel's format. Knows neither Services nor how a message is sent.

pub(crate) mod chain;
pub(crate) mod elements;
pub(crate) mod expressions;
pub(crate) mod schema;
pub(crate) mod tables;
