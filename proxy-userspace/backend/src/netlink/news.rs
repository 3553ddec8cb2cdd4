//! News from the kernel: what changes, as it changes.
//!
//! The one rule: nothing is lost silently. Where the kernel had more to tell than fits, that is news, too.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use netlink_packet_core::NetlinkHeader;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        socket::{MsgFlags, SockProtocol, recv, setsockopt, sockopt},
    },
};
use tokio::sync::Notify;

use super::{DATAGRAM, messages, open};

/// Room for what the kernel tells while nobody listens, in bytes.
const ROOM: usize = 16 << 20;

/// Whether something was heard since it was asked last.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    is_new: AtomicBool,
    notify: Notify,
}

impl Heard {
    /// Notes that something happened.
    pub(crate) fn note(&self) {
        self.is_new.store(true, Ordering::Release);
        self.notify.notify_one();
    }

    /// Whether something happened since the last call.
    pub(crate) fn take(&self) -> bool {
        self.is_new.swap(false, Ordering::AcqRel)
    }

    /// Waits until something happens.
    pub(crate) async fn wait(&self) {
        self.notify.notified().await;
    }
}

/// Listens in a thread of its own while it is alive.
#[derive(Debug)]
pub(crate) struct News {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl News {
    /// Listens to some groups of a protocol, given as a mask, in the calling thread's network namespace.
    /// `heard` is told when a message `matters`, and when some were lost.
    pub(crate) fn listen(
        protocol: SockProtocol,
        groups: u32,
        heard: Arc<Heard>,
        matters: impl FnMut(&NetlinkHeader, &[u8]) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let socket = open(protocol, groups)?;
        setsockopt(&socket, sockopt::RcvBufForce, &ROOM)?;
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("netlink news".into())
            .spawn(move || follow(&socket, &stopped, &heard, matters))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for News {
    fn drop(&mut self) {
        // If it cannot be told, it is not waited for.
        if self.stop.write(1).is_ok()
            && let Some(thread) = self.thread.take()
        {
            // If it has panicked, nobody listens any more, as is wanted.
            let _ = thread.join();
        }
    }
}

fn follow(
    socket: &OwnedFd,
    stop: &EventFd,
    heard: &Heard,
    mut matters: impl FnMut(&NetlinkHeader, &[u8]) -> bool,
) {
    let mut datagram = vec![0; DATAGRAM];
    loop {
        let mut watched =
            [PollFd::new(socket.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return tracing::error!("netlink is not listened to any more: {errno}"),
        }
        if watched[1].any() == Some(true) {
            return;
        }
        match recv(socket.as_raw_fd(), &mut datagram, MsgFlags::MSG_DONTWAIT) {
            Ok(length) => {
                if messages(&datagram[..length]).any(|(header, payload)| matters(&header, payload)) {
                    heard.note();
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(Errno::ENOBUFS) => heard.note(),
            Err(errno) => return tracing::error!("netlink is not listened to any more: {errno}"),
        }
    }
}
