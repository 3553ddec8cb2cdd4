//! `dump`: what is in the kernel.

use std::io::Write as _;

use anyhow::Result;
use clap::Args;

use super::flags;

/// Show what is in the kernel: every entry in force, a line each, sorted
///
/// Two equal states of the kernel print equal lines, whatever their history. A line that begins with "orphan" is an
/// entry that no address leads to: it belongs to a Service whose address another one has.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: flags::Pins,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    for line in backend::ebpf::dump(&flags.pins.pin_dir)? {
        writeln!(stdout, "{line}")?;
    }
    Ok(stdout.flush()?)
}
