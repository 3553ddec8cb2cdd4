//! Whether this node can be served, and whether it is served right: both halves together.
//!
//! The one rule: it only looks.

use crate::{
    ebpf::check::{self, Checkup, Level},
    nft,
    node::Options,
};

/// Looks at this node.
pub fn check(options: &Options) -> Checkup {
    let mut checkup = match &options.sockets {
        Some(sockets) => check::check(sockets),
        None => Checkup { rivals: vec![check::rules()], ..Checkup::default() },
    };
    if let Some(packets) = &options.packets {
        // Sockets are served without it.
        let if_not = if options.sockets.is_some() { Level::Degraded } else { Level::Broken };
        checkup.machine.push(nft::machine(&packets.config, if_not));
        // Where packets are all, nothing but the tables says that it has run.
        let has_run = options.sockets.as_ref().is_some_and(check::has_run);
        checkup.own.push(nft::own(has_run));
    }
    checkup
}
