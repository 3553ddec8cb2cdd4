//! Network namespaces.
//!
//! A thread that enters one leaves it again; threads and processes it starts inside stay inside. Errors are the kernel's, or
//! name the `ip` command that failed, with its standard error.

use std::{
    fs::{self, File},
    marker::PhantomData,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::AsRawFd as _,
    path::Path,
    process::{self, Command},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use build_tools::command::output;
use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    net::if_::InterfaceFlags,
    sched::{CloneFlags, setns, unshare},
};

use crate::{TIMEOUT, eventually};

/// How long the kernel may take to install a route.
const ROUTE_TIMEOUT: Duration = Duration::from_secs(60);
/// The port of the `discard` service; nothing is sent to it.
const DISCARD: u16 = 9;

/// A network namespace; it exists while this value or a process in it does.
#[derive(Debug)]
pub struct NetNs {
    file: File,
}

impl NetNs {
    /// Makes a namespace whose loopback interface is up.
    pub fn new() -> Result<Self> {
        let made = thread::spawn(|| -> Result<File> {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace: unshare")?;
            current()
        });
        let file = made.join().map_err(|_| anyhow!("the thread that makes a namespace panicked"))??;
        let namespace = Self { file };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Makes a namespace in which the IPv4 addresses of all endpoints are local.
    pub fn with_local_endpoints() -> Result<Self> {
        let namespace = Self::new()?;
        namespace.ip(&["route", "add", "local", "10.244.0.0/16", "dev", "lo"])?;
        Ok(namespace)
    }

    /// Opens an existing namespace, for example `/run/netns/NAME`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { file })
    }

    /// A path by which other programs can open it while this value lives.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.file.as_raw_fd())
    }

    /// Moves the calling thread into the namespace until the guard is dropped.
    pub fn enter(&self) -> Result<NetNsGuard> {
        let home = current()?;
        setns(&self.file, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace: setns")?;
        Ok(NetNsGuard { home, _thread: PhantomData })
    }

    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let _inside = self.enter().expect("a thread can enter a network namespace of its own");
        work()
    }

    /// Adds an address to the loopback interface and waits until it is reachable.
    pub fn add_address(&self, ip: IpAddr) -> Result<()> {
        self.add_host_address(ip, "lo")
    }

    /// Adds an address of a Service as kube-proxy's IPVS mode does, to an interface whose addresses are not the node's own, and
    /// waits until it is reachable.
    pub fn add_ipvs_address(&self, ip: IpAddr) -> Result<()> {
        const INTERFACE: &str = "kube-ipvs0";
        if self.ip(&["link", "show", INTERFACE]).is_err() {
            let peer = ["peer", "name", "kube-ipvs1"];
            self.ip(&[&["link", "add", INTERFACE, "type", "veth"][..], &peer].concat())?;
            for it in [INTERFACE, "kube-ipvs1"] {
                self.ip(&["link", "set", it, "up"])?;
            }
        }
        self.add_host_address(ip, INTERFACE)
    }

    fn add_host_address(&self, ip: IpAddr, interface: &str) -> Result<()> {
        let (prefix, any) = match ip {
            IpAddr::V4(_) => ("32", IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            IpAddr::V6(_) => ("128", Ipv6Addr::UNSPECIFIED.into()),
        };
        let mut words = vec!["address", "add"];
        let address = format!("{ip}/{prefix}");
        words.extend([&*address, "dev", interface]);
        if prefix == "128" {
            // Usable at once, without duplicate address detection; and with the route of the local table only: through a route
            // of the prefix, which is installed first, a socket would connect before its packets are delivered.
            words.extend(["nodad", "noprefixroute"]);
        }
        self.ip(&words)?;
        // The kernel installs the route of an IPv6 address asynchronously.
        let _inside = self.enter()?;
        let socket = UdpSocket::bind((any, 0))?;
        if !eventually(ROUTE_TIMEOUT, || socket.connect((ip, DISCARD)).is_ok()) {
            bail!("there is no route to {ip}, which this namespace has");
        }
        Ok(())
    }

    /// Adds an address with the length of its network to an interface; usable at once, without duplicate address detection.
    pub fn add_interface_address(&self, address: &str, interface: &str) -> Result<()> {
        let nodad = if address.contains(':') { &["nodad"][..] } else { &[] };
        self.ip(&[&["address", "add", address, "dev", interface], nodad].concat())
    }

    /// Removes an address from the loopback interface.
    pub fn remove_address(&self, address: IpAddr) -> Result<()> {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        self.ip(&["address", "del", &format!("{address}/{prefix}"), "dev", "lo"])
    }

    /// Writes a sysctl of the namespace, given by its path below `/proc/sys/net`.
    pub fn set_sysctl(&self, name: &str, value: &str) -> Result<()> {
        let _inside = self.enter()?;
        let path = Path::new("/proc/sys/net").join(name);
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Connects it to another namespace by a veth pair with these interface names, and waits until packets pass: a busy kernel
    /// takes a while to give an interface that is up its queue.
    pub fn connect_veth(&self, end: &str, other: &Self, other_end: &str) -> Result<()> {
        let words = ["link", "add", end, "type", "veth", "peer", "name", other_end, "netns", &other.path()];
        self.ip(&words)?;
        self.ip(&["link", "set", end, "up"])?;
        other.ip(&["link", "set", other_end, "up"])?;
        for (namespace, interface) in [(self, end), (other, other_end)] {
            let _inside = namespace.enter()?;
            let is_running = |it: InterfaceAddress| {
                it.interface_name == interface && it.flags.contains(InterfaceFlags::IFF_RUNNING)
            };
            if !eventually(TIMEOUT, || getifaddrs().is_ok_and(|mut all| all.any(is_running))) {
                bail!("the interface {interface} has no carrier");
            }
        }
        Ok(())
    }

    pub fn ip(&self, arguments: &[&str]) -> Result<()> {
        let _inside = self.enter()?;
        output(Command::new("ip").args(arguments)).map(drop)
    }
}

#[derive(Debug)]
#[must_use = "the thread leaves the namespace when this is dropped"]
pub struct NetNsGuard {
    home: File,
    /// Not `Send`: this thread must go back.
    _thread: PhantomData<*const ()>,
}

impl Drop for NetNsGuard {
    fn drop(&mut self) {
        if let Err(error) = setns(&self.home, CloneFlags::CLONE_NEWNET) {
            eprintln!("warning: a thread stays in a network namespace: setns: {error}");
        }
    }
}

fn current() -> Result<File> {
    const CURRENT: &str = "/proc/thread-self/ns/net";
    File::open(CURRENT).with_context(|| format!("cannot open {CURRENT}"))
}
