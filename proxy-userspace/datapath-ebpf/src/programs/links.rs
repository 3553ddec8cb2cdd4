//! Links of programs, whatever they are attached to.

use std::{os::fd::AsFd, path::Path};

use aya::programs::ProgramError;
use nix::{libc, net::if_::if_indextoname};

use crate::{error::Error, host::raw_bpf, maps::pins};

pub(crate) fn update(link: &impl AsFd, program: &impl AsFd, pin: &Path) -> Result<(), Error> {
    raw_bpf::link_update(link.as_fd(), program.as_fd())
        .map_err(Error::syscall("BPF_LINK_UPDATE", pin.display()))
}

/// Detaches a program, before the call returns, and removes the pin of its link.
pub(crate) fn detach_link(pin: &Path) -> Result<(), Error> {
    if let Ok(link) = raw_bpf::obj_get(pin) {
        // Older kernels cannot; they detach it some time after the pin is removed.
        let _ = raw_bpf::link_detach(link.as_fd());
    }
    pins::remove_pin(pin)
}

/// Whether a link to an interface was refused as an unknown type of link: there are none before Linux 6.6.
pub(crate) fn has_no_links_to_interfaces(error: &ProgramError) -> bool {
    matches!(error, ProgramError::SyscallError(it) if it.io_error.raw_os_error() == Some(libc::EINVAL))
}

/// The name of an interface; `None` if it has gone.
pub(crate) fn interface_name(interface: u32) -> Option<String> {
    if_indextoname(interface).ok().map(|it| it.to_string_lossy().into_owned())
}

/// A failed operation on a program, for `map_err`.
pub(crate) fn failed<E: std::error::Error + Send + Sync + 'static>(
    call: &'static str,
    program: &'static str,
) -> impl FnOnce(E) -> Error {
    move |source| Error::Program { call, program, source: Box::new(source) }
}
