//! A virtual machine: a kernel, a root in memory, two serial ports, and nothing else.
//! The one rule: it always ends, by itself, in trouble, or because nothing happens in it any more.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use crate::{console, guest::Event, packages::Kernel};

/// From the start to the first test, at the most.
const BOOT: Duration = Duration::from_secs(240);
const QEMU: &str = "qemu-system-x86_64";
const SETTINGS: [&str; 14] = [
    "-m",
    "1024",
    "-smp",
    "2",
    "-nic",
    "none",
    "-display",
    "none",
    "-monitor",
    "none",
    "-vga",
    "none",
    "-no-reboot",
    "-nodefaults",
];
/// A kernel that panics ends the machine; nobody attacks it, so no mitigation is emulated. It does not try whether its
/// timer ticks either: on a busy machine an emulated one may be too late for that, and the kernel gives up.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 loglevel=7 mitigations=off no_timer_check random.trust_cpu=on rdinit=/init";

/// How a machine ended.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    /// What went wrong with the machine or its kernel.
    pub(crate) faults: Vec<String>,
    /// What the kernel said.
    pub(crate) console: PathBuf,
}

/// Boots a kernel, and passes on what happens, until the machine has ended.
///
/// `silence` is how long nothing may happen after the start of a test.
///
/// # Errors
///
/// If QEMU cannot be started.
pub(crate) fn boot(
    kernel: &Kernel,
    initramfs: &Path,
    folder: &Path,
    silence: Duration,
    mut tell: impl FnMut(Event),
) -> Result<Ending> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let console = folder.join("console.log");
    let complaints = folder.join("qemu.log");
    let child = Command::new(QEMU)
        .args(SETTINGS)
        .args(if is_fast() {
            ["-accel", "kvm", "-cpu", "host"]
        } else {
            // One thread for all CPUs: with one for each, a CPU may go on with an instruction that the kernel has replaced
            // meanwhile, as when the first program is attached to a hook, and never come out of it. It is hardly slower.
            ["-accel", "tcg,thread=single", "-cpu", "max"]
        })
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .arg("-append")
        .arg(if is_fast() { COMMAND_LINE.to_owned() } else { format!("{COMMAND_LINE} {}", clock()) })
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(["-serial", "stdio"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(&complaints)?)
        .spawn()
        .with_context(|| format!("cannot start `{QEMU}`"))?;
    let mut machine = Machine(child);

    let out = machine.0.stdout.take().expect("stdout is piped");
    let (sender, events) = mpsc::channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
            // Anything else on this line is noise.
            let Ok(event) = serde_json::from_slice::<Event>(&line) else { continue };
            if sender.send(event).is_err() {
                break;
            }
        }
    });

    let mut faults = Vec::new();
    let (mut last, mut limit, mut is_done) = (Instant::now(), BOOT, false);
    loop {
        match events.recv_timeout(Duration::from_millis(500)) {
            Ok(event) => {
                (last, limit) = (Instant::now(), silence);
                is_done = event == Event::Done;
                tell(event);
            }
            Err(RecvTimeoutError::Timeout) => {
                let log = fs::read(&console).unwrap_or_default();
                if last.elapsed() > limit {
                    faults.push(format!("nothing happened in the machine for {} s", limit.as_secs()));
                    break;
                }
                if console::is_dead(&String::from_utf8_lossy(&log)) {
                    break;
                }
            }
            // It has closed its port: it has ended.
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(machine);
    let _ = reader.join();

    let log = fs::read(&console).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    faults.extend(console::troubles(&log).into_iter().take(5).map(ToOwned::to_owned));
    if !is_done && faults.is_empty() {
        let said = fs::read_to_string(&complaints).unwrap_or_default();
        faults.push(format!("the machine ended before its tests did; QEMU said: {:?}", said.trim()));
    }
    Ok(Ending { faults, console })
}

/// Whether the processor runs other kernels, and else they are emulated, some twenty times slower.
///
/// A device is not enough: a KVM that works by software (PVM) runs only kernels that were made for it.
pub(crate) fn is_fast() -> bool {
    let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    opens && helps(&about)
}

fn helps(about: &str) -> bool {
    let flags = about.lines().find(|it| it.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|it| it == "svm" || it == "vmx")
}

/// How a kernel is told to read the time from the processor's counter, which is this machine's own.
///
/// On a busy machine it cannot measure how fast the counter runs, and takes an emulated timer instead. Each look at the
/// time then costs thousands of instructions, and what looks often, like the builds that linger, stands still.
/// A rate that is not quite right makes its seconds a little longer or shorter.
fn clock() -> String {
    let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match megahertz(&about) {
        Some(rate) => format!("tsc=reliable tsc_early_khz={:.0}", rate * 1e3),
        None => String::new(),
    }
}

fn megahertz(about: &str) -> Option<f64> {
    let line = about.lines().find(|it| it.starts_with("cpu MHz"))?;
    line.split_once(':')?.1.trim().parse().ok()
}

/// Ends with us.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_that_runs_other_kernels_says_so() {
        assert!(helps("model name\t: x\nflags\t\t: fpu vme svm lm\n") && helps("flags : vmx"));
        assert!(!helps("flags\t\t: fpu vme vmmcall lm\n") && !helps(""));
    }

    #[test]
    fn the_rate_of_the_counter_is_read_from_cpuinfo() {
        let about = "processor\t: 0\ncpu MHz\t\t: 2596.138\ncache size\t: 512 KB\n";
        assert_eq!(megahertz(about), Some(2596.138));
        assert_eq!(megahertz("processor : 0"), None);
    }
}
