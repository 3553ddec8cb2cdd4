//! `dump`: what is in the kernel.

use std::io::Write as _;

use anyhow::{Error, Result, anyhow};
use clap::Args;

use super::flags;

/// Show what is in the kernel: every entry in force, a line each, sorted
///
/// Two equal states of the kernel print equal lines, whatever their history. A line that begins with "orphan" is an
/// entry that no address leads to: it belongs to a Service whose address another one has. Lines that begin with "packets"
/// come from nftables, and follow those of eBPF. What cannot be read is named, beside what can, and the exit code is 1.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: flags::PinFlags,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    let sockets = datapath_ebpf::dump(&flags.pins.pin_dir);
    let packets = datapath_nft::dump();
    let mut errors = Vec::new();
    let mut lines = Vec::new();
    match sockets {
        Ok(sockets) => lines = sockets,
        // Packets may be served alone: that nothing is there is said where it is known of both.
        Err(datapath_ebpf::Error::Nothing(_)) if !packets.as_ref().is_ok_and(Vec::is_empty) => {}
        Err(error) => errors.push(Error::from(error)),
    }
    match packets {
        Ok(packets) => lines.extend(packets),
        Err(error) => errors.push(error.into()),
    }
    let mut stdout = std::io::stdout().lock();
    for line in lines {
        writeln!(stdout, "{line}")?;
    }
    stdout.flush()?;
    let errors: Vec<_> = errors.iter().map(|it| format!("{it:#}")).collect();
    if errors.is_empty() { Ok(()) } else { Err(anyhow!(errors.join("; "))) }
}
