//! A network namespace of one's own.
//! The one rule: a thread that enters one leaves it again; threads and processes it starts inside stay inside.

use std::{
    fs::{self, File},
    marker::PhantomData,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::AsRawFd as _,
    path::Path,
    process::{self, Command, Output},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::sched::{CloneFlags, setns, unshare};

use crate::eventually;

/// How long a route may take.
const LIMIT: Duration = Duration::from_secs(10);
/// The port of the service `discard`: nothing is sent there.
const DISCARD: u16 = 9;

/// A network namespace; it lives as long as somebody holds it or is in it.
#[derive(Debug)]
pub struct NetNs {
    file: File,
}

impl NetNs {
    /// Makes a namespace whose loopback interface is up.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, or `ip` is missing.
    pub fn new() -> Result<Self> {
        let made = thread::spawn(|| -> Result<File> {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace: unshare")?;
            own()
        });
        let file = made.join().map_err(|_| anyhow!("the thread that makes a namespace panicked"))??;
        let namespace = Self { file };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Opens one that is there already, for example `/run/netns/NAME`.
    ///
    /// # Errors
    ///
    /// If it cannot be opened.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { file })
    }

    /// A path that other programs can open it by, while this value lives.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.file.as_raw_fd())
    }

    /// Moves the calling thread into the namespace until the guard is dropped.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn enter(&self) -> Result<NetNsGuard> {
        let home = own()?;
        setns(&self.file, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace: setns")?;
        Ok(NetNsGuard { home, _thread: PhantomData })
    }

    /// Gives the namespace an address, on its loopback interface, and waits until it can be reached.
    ///
    /// # Errors
    ///
    /// If `ip` refuses, or the kernel never makes the route.
    pub fn add_address(&self, ip: IpAddr) -> Result<()> {
        let (prefix, any) = match ip {
            IpAddr::V4(_) => ("32", IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            IpAddr::V6(_) => ("128", Ipv6Addr::UNSPECIFIED.into()),
        };
        let mut words = vec!["address", "add"];
        let address = format!("{ip}/{prefix}");
        words.extend([&*address, "dev", "lo"]);
        if prefix == "128" {
            // Usable at once, without looking for another owner of it; and with the one route that makes it this host's: by that
            // of its prefix, which comes first, a socket connects whose packets nobody takes.
            words.extend(["nodad", "noprefixroute"]);
        }
        self.ip(&words)?;
        // The kernel makes the route to an IPv6 address a moment later, on its own.
        let _inside = self.enter()?;
        let socket = UdpSocket::bind((any, 0))?;
        if !eventually(LIMIT, || socket.connect((ip, DISCARD)).is_ok()) {
            bail!("no route leads to {ip}, which this namespace has");
        }
        Ok(())
    }

    /// Takes an address from the namespace's loopback interface.
    ///
    /// # Errors
    ///
    /// If it does not have it.
    pub fn remove_address(&self, address: IpAddr) -> Result<()> {
        self.ip(&[
            "address",
            "del",
            &format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 }),
            "dev",
            "lo",
        ])
    }

    /// Writes a setting of the kernel inside, given by its path below `/proc/sys/net`.
    ///
    /// # Errors
    ///
    /// If there is no such setting.
    pub fn set(&self, setting: &str, value: &str) -> Result<()> {
        let _inside = self.enter()?;
        let path = Path::new("/proc/sys/net").join(setting);
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Joins it to another one by a cable, of which each end bears a name.
    ///
    /// # Errors
    ///
    /// If `ip` refuses.
    pub fn join(&self, end: &str, other: &Self, other_end: &str) -> Result<()> {
        let words = ["link", "add", end, "type", "veth", "peer", "name", other_end, "netns", &other.path()];
        self.ip(&words)?;
        self.ip(&["link", "set", end, "up"])?;
        other.ip(&["link", "set", other_end, "up"])
    }

    /// Runs `ip` inside.
    ///
    /// # Errors
    ///
    /// If it fails: what it said.
    pub fn ip(&self, arguments: &[&str]) -> Result<()> {
        let _inside = self.enter()?;
        ip(arguments)
    }
}

/// The calling thread is inside a namespace.
#[derive(Debug)]
#[must_use = "the thread leaves the namespace when this is dropped"]
pub struct NetNsGuard {
    home: File,
    /// It is this thread that must go back.
    _thread: PhantomData<*const ()>,
}

impl Drop for NetNsGuard {
    fn drop(&mut self) {
        if let Err(error) = setns(&self.home, CloneFlags::CLONE_NEWNET) {
            eprintln!("warning: a thread stays in a network namespace: setns: {error}");
        }
    }
}

/// Runs `ip` where the calling thread is.
///
/// # Errors
///
/// If it fails: what it said.
pub fn ip(arguments: &[&str]) -> Result<()> {
    let line = arguments.join(" ");
    let Output { status, stderr, .. } = Command::new("ip")
        .args(arguments)
        .output()
        .with_context(|| format!("cannot start `ip {line}`: install iproute2"))?;
    if !status.success() {
        bail!("`ip {line}` failed: {status}: {}", String::from_utf8_lossy(&stderr).trim());
    }
    Ok(())
}

fn own() -> Result<File> {
    const OWN: &str = "/proc/thread-self/ns/net";
    File::open(OWN).with_context(|| format!("cannot open {OWN}"))
}
