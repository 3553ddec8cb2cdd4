//! Multicast notifications of netfilter.
//!
//! Invariant: no loss is silent. When the kernel drops notifications for want of room, that counts as a notification.

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
        socket::{MsgFlags, SockFlag, SockProtocol, recv},
    },
};
use tokio::sync::Notify;

use crate::{
    netfilter::NFGENMSG,
    socket::{DATAGRAM_SIZE, messages, open, set_receive_buffer},
};

/// The size of the receive buffer in bytes.
const RECEIVE_BUFFER: usize = 16 << 20;

/// Whether something has changed since the flag was taken last.
#[derive(Debug, Default)]
pub struct ChangeFlag {
    is_set: AtomicBool,
    notify: Notify,
}

impl ChangeFlag {
    pub fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        self.notify.notify_one();
    }

    pub fn take(&self) -> bool {
        self.is_set.swap(false, Ordering::AcqRel)
    }

    pub async fn wait(&self) {
        self.notify.notified().await;
    }
}

/// Notifications with their contents, read when the caller wants.
#[derive(Debug)]
pub struct Notifications {
    socket: OwnedFd,
    datagram: Vec<u8>,
}

impl Notifications {
    /// Subscribes to a multicast group (`NFNLGRP_…`) in the calling thread's network namespace.
    pub fn subscribe(group: u32) -> io::Result<Self> {
        let socket = open(SockProtocol::NetlinkNetFilter, 1 << (group - 1), SockFlag::SOCK_NONBLOCK)?;
        set_receive_buffer(&socket, RECEIVE_BUFFER)?;
        Ok(Self { socket, datagram: vec![0; DATAGRAM_SIZE] })
    }

    /// Passes the next datagram's messages to `each`: their header, and their attributes.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if nothing has come, `ENOBUFS` if some were lost.
    pub fn receive(&mut self, mut each: impl FnMut(&NetlinkHeader, &[u8])) -> Result<(), Errno> {
        let length = recv(self.socket.as_raw_fd(), &mut self.datagram, MsgFlags::empty())?;
        for (header, payload) in messages(&self.datagram[..length]) {
            each(&header, payload.get(NFGENMSG..).unwrap_or_default());
        }
        Ok(())
    }
}

/// Listens in a thread of its own until it is dropped.
#[derive(Debug)]
pub struct MulticastListener {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl MulticastListener {
    /// Listens to a multicast group (`NFNLGRP_…`) in the calling thread's network namespace.
    /// Sets `changed` for each message that is `relevant`, and when messages were lost.
    pub fn start(
        group: u32,
        changed: Arc<ChangeFlag>,
        is_relevant: impl FnMut(&NetlinkHeader, &[u8]) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let notifications = Notifications::subscribe(group)?;
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("netlink".into())
            .spawn(move || listen(notifications, &stopped, &changed, is_relevant))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for MulticastListener {
    fn drop(&mut self) {
        // A thread that cannot be stopped is not waited for.
        if self.stop.write(1).is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A thread that has panicked has stopped, too.
            let _ = thread.join();
        }
    }
}

fn listen(
    mut notifications: Notifications,
    stop: &EventFd,
    changed: &ChangeFlag,
    mut is_relevant: impl FnMut(&NetlinkHeader, &[u8]) -> bool,
) {
    loop {
        let mut fds =
            [notifications.socket.as_fd(), stop.as_fd()].map(|it| PollFd::new(it, PollFlags::POLLIN));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return report_end(errno),
        }
        let is_stopped = fds[1].any() == Some(true);
        let mut is_changed = false;
        match notifications
            .receive(|header, attributes| is_changed = is_changed || is_relevant(header, attributes))
        {
            // What has come before the end counts.
            Err(Errno::EAGAIN) if is_stopped => return,
            Ok(()) | Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(Errno::ENOBUFS) => is_changed = true,
            Err(errno) => return report_end(errno),
        }
        if is_changed {
            changed.set();
        }
    }
}

fn report_end(errno: Errno) {
    tracing::error!(%errno, "notifications have ended; external changes go unnoticed until the next restart");
}
