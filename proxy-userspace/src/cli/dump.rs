//! `dump`: the active entries in the kernel.

use std::path::Path;

use anyhow::{Error, Result, anyhow};
use clap::Args;

use super::{flags::PinFlags, output};

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
    let (text, errors) = read(&flags.pins.pin_dir);
    output::print(&text)?;
    if errors.is_empty() { Ok(()) } else { Err(anyhow!(errors.join("; "))) }
}

/// What `dump` prints, errors included.
///
/// # Errors
///
/// If nothing can be read.
pub(super) fn text(pin_dir: &Path) -> Result<String> {
    let (text, errors) = read(pin_dir);
    if text.is_empty() && !errors.is_empty() {
        return Err(anyhow!(errors.join("; ")));
    }
    Ok(text + &errors.iter().map(|it| format!("cannot be read: {it}\n")).collect::<String>())
}

/// The entries, one per line, and why others could not be read.
fn read(pin_dir: &Path) -> (String, Vec<String>) {
    let sockets = datapath_ebpf::dump(pin_dir);
    let packets = datapath_nft::dump();
    let mut errors = Vec::new();
    let mut lines = Vec::new();
    match sockets {
        Ok(sockets) => lines = sockets,
        // nftables may be the only datapath: an empty state is an error only if both are empty.
        Err(datapath_ebpf::Error::NotInitialized(_)) if !packets.as_ref().is_ok_and(Vec::is_empty) => {}
        Err(error) => errors.push(Error::from(error)),
    }
    match packets {
        Ok(packets) => lines.extend(packets),
        Err(error) => errors.push(error.into()),
    }
    let errors = errors.iter().map(|it| format!("{it:#}")).collect();
    (lines.into_iter().map(|it| it + "\n").collect(), errors)
}
