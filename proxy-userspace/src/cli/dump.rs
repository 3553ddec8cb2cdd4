//! `dump`: the active entries in the kernel.

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::{Error, Result, anyhow};
use clap::Args;

use super::{flags::PinFlags, output::Escaped};

/// Print all active entries in the kernel, one sorted line each
///
/// Equal states print equal lines, regardless of history. A line that starts with "orphan" is an entry without an address:
/// another Service has its address. Lines that start with "packets" come from nftables, and follow those of eBPF. What
/// cannot be read is named, and the exit code is 1.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: PinFlags,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    let mut out = Escaped::new(io::stdout().lock());
    let errors = write_lines(&flags.pins.pin_dir, &mut out)?.1;
    out.flush()?;
    if errors.is_empty() { Ok(()) } else { Err(anyhow!(errors.join("; "))) }
}

/// Writes what `dump` prints, errors included; fails if nothing can be read.
pub(super) fn write(pin_dir: &Path, out: &mut dyn Write) -> Result<()> {
    let (count, errors) = write_lines(pin_dir, out)?;
    if count == 0 && !errors.is_empty() {
        return Err(anyhow!(errors.join("; ")));
    }
    Ok(errors.iter().try_for_each(|it| writeln!(out, "cannot be read: {it}"))?)
}

/// Writes the entries, one per line; returns how many, and why others could not be read.
fn write_lines(pin_dir: &Path, out: &mut dyn Write) -> io::Result<(usize, Vec<String>)> {
    let (mut count, mut written) = (0, Ok(()));
    let mut write = |line: &str| {
        count += 1;
        if written.is_ok() {
            written = writeln!(out, "{line}");
        }
    };
    let sockets = datapath_ebpf::dump(pin_dir, &mut write);
    let packets = datapath_nft::dump(&mut write);
    written?;
    let mut errors = Vec::new();
    match sockets {
        Ok(()) => {}
        // nftables may be the only datapath: an empty state is an error only if both are empty.
        Err(datapath_ebpf::Error::NotInitialized(_)) if count > 0 => {}
        Err(error) => errors.push(Error::from(error)),
    }
    errors.extend(packets.err().map(Error::from));
    Ok((count, errors.iter().map(|it| format!("{it:#}")).collect()))
}
