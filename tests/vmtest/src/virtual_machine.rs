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
use build_tools::command::KilledOnDrop;

use crate::{console, kernel_packages::Kernel, plan::Event};

/// From the start of the machine to the first event.
const BOOT_TIMEOUT: Duration = Duration::from_secs(240);
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const MAX_CONSOLE_ERRORS: usize = 5;
const QEMU: &str = "qemu-system-x86_64";
const SETTINGS: &str =
    "-m 2048 -smp 2 -nic none -display none -monitor none -vga none -no-reboot -nodefaults";
/// A panic ends the machine. CPU mitigations only cost time here. The kernel does not check that its timer ticks: on a
/// busy machine an emulated timer may be too late for that check, and the kernel would panic.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 loglevel=7 mitigations=off no_timer_check random.trust_cpu=on rdinit=/init";

/// Boots a kernel and forwards events until the machine has ended; returns errors of the machine or its kernel.
///
/// `silence` is the timeout for the next event. The kernel's log is written to `console`. Fails if QEMU cannot be started.
pub(crate) fn boot(
    kernel: &Kernel,
    initramfs: &Path,
    console: &Path,
    silence: Duration,
    mut on_event: impl FnMut(Event),
) -> Result<Vec<String>> {
    let stderr = console.with_file_name("qemu.log");
    let child = Command::new(QEMU)
        .args(SETTINGS.split(' '))
        .args(if has_kvm() {
            ["-accel", "kvm", "-cpu", "host"]
        } else {
            // One thread for all CPUs: with a thread per CPU, a CPU may continue with an instruction that the kernel has
            // replaced meanwhile, such as when the first program is attached to a hook, and never leave it. It is hardly
            // slower.
            ["-accel", "tcg,thread=single", "-cpu", "max"]
        })
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .arg("-append")
        .arg(if has_kvm() { COMMAND_LINE.to_owned() } else { format!("{COMMAND_LINE} {}", clock()) })
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(["-serial", "stdio"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(&stderr)?)
        .spawn()
        .with_context(|| format!("cannot start `{QEMU}`"))?;
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
                if console::has_panicked(&log()) {
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

/// Whether the CPU virtualises other kernels; otherwise they are emulated, about 20 times slower.
///
/// The device alone proves nothing: a KVM in software (PVM) runs only kernels that were made for it.
pub(crate) fn has_kvm() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut flags = field(&cpuinfo, "flags").unwrap_or_default().split_whitespace();
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    opens && flags.any(|it| it == "svm" || it == "vmx")
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
