//! `dump`: what is in the kernel.

use std::io::Write as _;

use anyhow::Result;
use clap::Args;

use super::flags;

/// Show what is in the kernel: every entry in force, a line each, sorted
///
/// Two equal states of the kernel print equal lines, whatever their history. A line that begins with "orphan" is an
/// entry that no address leads to: it belongs to a Service whose address another one has. Lines that begin with "packets"
/// come from nftables, and follow those of eBPF.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: flags::Pins,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    // Where only one half serves, the other is no failure.
    let packets = backend::nft::dump();
    let (sockets, packets) = match (backend::ebpf::dump(&flags.pins.pin_dir), packets) {
        (Ok(sockets), packets) => (sockets, packets.unwrap_or_default()),
        (Err(_), Ok(packets)) if !packets.is_empty() => (Vec::new(), packets),
        (Err(error), _) => return Err(error.into()),
    };
    for line in sockets.into_iter().chain(packets) {
        writeln!(stdout, "{line}")?;
    }
    Ok(stdout.flush()?)
}
