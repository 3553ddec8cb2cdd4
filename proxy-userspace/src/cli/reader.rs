//! The reader of a command that goes on printing: whether it is there, and the names of pods that it gives.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read as _},
    os::{fd::AsFd as _, unix::fs::FileTypeExt as _},
    process,
    sync::Arc,
    thread,
};

use parking_lot::Mutex;

use anyhow::Result;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// The longest input that is kept until its line is complete.
const MAX_LINE: usize = 4 << 10;

/// The names of pods by UID.
pub(super) type PodNames = Arc<Mutex<HashMap<String, String>>>;

/// Ends this process when its reader is gone, even if it waits for a line, or for the reader: when the pipe or the terminal of
/// its output is closed, or its input ends, as when `kubectl exec --stdin` is interrupted, which leaves the output open. An
/// input that has ended before, as that of a job without one, says nothing.
///
/// Returns the names that come in through a pipe, in lines `UID NAMESPACE/NAME`.
pub(super) fn watch() -> Result<PodNames> {
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let kind = input.metadata()?.file_type();
    // Others are readable at their end, too.
    let wanted = if kind.is_fifo() || kind.is_socket() { PollFlags::POLLIN } else { PollFlags::empty() };
    let is_open = poll(&mut [PollFd::new(input.as_fd(), PollFlags::empty())], PollTimeout::ZERO)? == 0;
    let names = PodNames::default();
    let known = Arc::clone(&names);
    thread::Builder::new().name("reader".into()).spawn(move || {
        let output = io::stdout();
        let (mut text, mut chunk) = (Vec::new(), [0; MAX_LINE]);
        loop {
            // Errors and hangups are reported in any case.
            let mut files = [
                PollFd::new(output.as_fd(), PollFlags::empty()),
                PollFd::new(input.as_fd(), if is_open { wanted } else { PollFlags::empty() }),
            ];
            let files = if is_open { &mut files[..] } else { &mut files[..1] };
            if poll(files, PollTimeout::NONE) == Err(Errno::EINTR) {
                continue;
            }
            let has_come = |it: &PollFd<'_>| it.revents().is_some_and(|it| it.contains(PollFlags::POLLIN));
            if !files.iter().any(has_come) {
                process::exit(0);
            }
            match input.read(&mut chunk) {
                Ok(length @ 1..) => text.extend_from_slice(&chunk[..length]),
                _ => process::exit(0),
            }
            while let Some(end) = text.iter().position(|it| *it == b'\n') {
                let line = text.drain(..=end).collect::<Vec<_>>();
                let mut known = known.lock();
                known.extend(pod_name(&line));
            }
            if text.len() > MAX_LINE {
                text.clear();
            }
        }
    })?;
    Ok(names)
}

/// UID and name of a pod.
fn pod_name(line: &[u8]) -> Option<(String, String)> {
    let (uid, name) = str::from_utf8(line).ok()?.trim().split_once(' ')?;
    Some((uid.to_owned(), name.to_owned()))
}
