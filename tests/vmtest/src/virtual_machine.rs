//! A virtual machine: a kernel, a root in memory, and two serial ports.
//! Invariant: it always ends: by itself, after a panic, or after a timeout without events.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use build_tools::{command::KilledOnDrop, machine::Machine, programs::find_or_install};

use crate::{console, kernels::Kernel, plan::Event};

/// From the start of the machine to the first event: seconds, or minutes where a busy machine emulates another one.
const BOOT_TIMEOUT: Duration = Duration::from_secs(900);
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const MAX_CONSOLE_ERRORS: usize = 5;
const SETTINGS: &str = "-m 2048 -smp 2 -nic none -display none -monitor none -no-reboot -nodefaults";
/// A panic ends the machine. CPU mitigations only cost time here. The kernel does not check that its timer ticks: on a
/// busy machine an emulated timer may be too late for that check, and the kernel would panic.
const COMMAND_LINE: &str =
    "panic=-1 loglevel=7 mitigations=off no_timer_check random.trust_cpu=on rdinit=/init";

/// Boots a kernel and forwards events until the machine has ended; returns errors of the machine or its kernel.
///
/// `silence` is the timeout for the next event. The kernel's log is written to `console`. Fails if QEMU cannot be started.
pub(crate) fn boot(
    machine: Machine,
    kernel: &Kernel,
    initramfs: &Path,
    console: &Path,
    silence: Duration,
    mut on_event: impl FnMut(Event),
) -> Result<Vec<String>> {
    let stderr = console.with_file_name("qemu.log");
    let (qemu, _) = qemu(machine);
    let child = Command::new(qemu)
        .args(SETTINGS.split(' '))
        .args(if has_kvm(machine) {
            ["-accel", "kvm", "-cpu", "host"]
        } else {
            // One thread for all CPUs, which is hardly slower: with several, a CPU may go on with an instruction that the
            // kernel has replaced, such as when the first program is attached to a hook, and never leave it.
            ["-accel", "tcg,thread=single", "-cpu", emulated_cpu(machine)]
        })
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .arg("-append")
        .arg(command_line(machine))
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(ports(machine).split(' '))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(&stderr)?)
        .spawn()
        .with_context(|| format!("cannot start `{qemu}`"))?;
    let mut machine = KilledOnDrop(child);

    let out = machine.0.stdout.take().expect("stdout is piped");
    let (sender, events) = mpsc::channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
            // Other lines on this port are noise.
            let Ok(event) = serde_json::from_slice::<Event>(&line) else { continue };
            if sender.send(event).is_err() {
                break;
            }
        }
    });

    let log = || String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned();
    let mut faults = Vec::new();
    let (mut last, mut timeout, mut is_done) = (Instant::now(), BOOT_TIMEOUT, false);
    loop {
        match events.recv_timeout(POLL_INTERVAL) {
            Ok(event) => {
                (last, timeout) = (Instant::now(), silence);
                is_done = event == Event::Done;
                on_event(event);
            }
            Err(RecvTimeoutError::Timeout) => {
                if last.elapsed() > timeout {
                    faults.push(format!("the machine sent no event for {} s", timeout.as_secs()));
                    break;
                }
                if console::errors(&log()).iter().any(|it| it.starts_with(console::PANIC)) {
                    break;
                }
            }
            // The machine has ended and closed its port.
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(machine);
    let _ = reader.join();

    faults.extend(console::errors(&log()).into_iter().take(MAX_CONSOLE_ERRORS).map(ToOwned::to_owned));
    if !is_done && faults.is_empty() {
        let stderr = fs::read_to_string(&stderr).unwrap_or_default();
        faults.push(format!("the machine ended before its tests; QEMU's error: {:?}", stderr.trim()));
    }
    Ok(faults)
}

pub(crate) fn install(machine: Machine) -> Result<()> {
    let (program, package) = qemu(machine);
    find_or_install(program, package).map(drop)
}

fn qemu(machine: Machine) -> (&'static str, &'static str) {
    match machine {
        Machine::X86_64 => ("qemu-system-x86_64", "qemu-system-x86"),
        Machine::Aarch64 => ("qemu-system-aarch64", "qemu-system-arm"),
    }
}

/// The board, and its ports for the log and for events.
fn ports(machine: Machine) -> &'static str {
    match machine {
        Machine::X86_64 => "-vga none -serial stdio",
        // This board has one port; another one is a card.
        Machine::Aarch64 => "-M virt -chardev stdio,id=events,signal=off -device pci-serial,chardev=events",
    }
}

/// The port of events in the machine; the kernel's log is at the other one.
pub(crate) fn port(machine: Machine) -> &'static str {
    match machine {
        Machine::X86_64 => "/dev/ttyS1\n",
        Machine::Aarch64 => "/dev/ttyS0\n",
    }
}

/// An emulated CPU with every feature; signed pointers with a cheap algorithm in the place of the architecture's.
fn emulated_cpu(machine: Machine) -> &'static str {
    match machine {
        Machine::X86_64 => "max",
        Machine::Aarch64 => "max,pauth-impdef=on",
    }
}

fn command_line(machine: Machine) -> String {
    match machine {
        Machine::X86_64 if has_kvm(machine) => format!("console=ttyS0 {COMMAND_LINE}"),
        Machine::X86_64 => format!("console=ttyS0 {COMMAND_LINE} {}", clock()),
        Machine::Aarch64 => format!("console=ttyAMA0 {COMMAND_LINE}"),
    }
}

/// Whether the CPU virtualizes other kernels; otherwise they are emulated, about 20 times slower.
///
/// The device alone proves nothing: a KVM in software (PVM) runs only kernels that were made for it.
pub(crate) fn has_kvm(machine: Machine) -> bool {
    if Machine::own().ok() != Some(machine) {
        return false;
    }
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut flags = field(&cpuinfo, "flags").unwrap_or_default().split_whitespace();
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    opens && (machine == Machine::Aarch64 || flags.any(|it| it == "svm" || it == "vmx"))
}

/// Kernel parameters that make an emulated kernel read the time from the CPU's counter, which is this machine's own.
///
/// On a busy machine the kernel cannot measure the counter's rate and takes an emulated timer instead. Each reading of
/// the time then costs thousands of instructions, and code that reads it often, such as the builds with delays, makes no
/// progress. A rate that is slightly wrong makes the kernel's seconds slightly longer or shorter.
fn clock() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match field(&cpuinfo, "cpu MHz").and_then(|it| it.parse::<f64>().ok()) {
        Some(rate) => format!("tsc=reliable tsc_early_khz={:.0}", rate * 1e3),
        None => String::new(),
    }
}

/// A field of the first CPU in `/proc/cpuinfo`.
fn field<'a>(cpuinfo: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = cpuinfo.lines().filter_map(|it| it.split_once(':'));
    fields.find(|(it, _)| it.trim() == name).map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_first_cpu_are_read_from_cpuinfo() {
        let cpuinfo = "processor\t: 0\ncpu MHz\t\t: 2596.138\nflags\t\t: fpu vme svm lm\nflags : vmx\n";
        assert_eq!(field(cpuinfo, "cpu MHz"), Some("2596.138"));
        assert_eq!(field(cpuinfo, "flags"), Some("fpu vme svm lm"));
        assert_eq!(field(cpuinfo, "cache size"), None);
    }
}
