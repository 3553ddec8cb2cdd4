//! `cargo xtask bench file`: what manifests cost that `run` follows, in a folder of many files and in one large file.
//! Invariant: the real binary, and the kernel's figures of it.

use std::{
    fs::{self, File},
    io::Read as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use ::tests::{
    Agent, Sandbox,
    agent::{APPLIED, AgentCommand},
    manifest,
    test_node::NODE,
};
use anyhow::{Result, ensure};
use build_tools::{build, command::status};
use serde_json::{Value, json};

use crate::{
    apply::{folder, service, without_ports},
    figures::{Figures, median, milliseconds},
    kernel_figures::{cpu_seconds, memory_mb},
};

const START_TIMEOUT: Duration = Duration::from_secs(600);
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the CPU time is counted of a process that has nothing to do.
const IDLE_TIME: Duration = Duration::from_secs(10);
const CHANGES: u32 = 20;
/// How long a change is given beside the apply: the spare side of the maps catches up.
const SETTLE_TIME: Duration = Duration::from_millis(100);

const SERVICES: u32 = 5_000;
const ENDPOINTS: u32 = 10;

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    let mut report = Figures::new("CASE");
    for (files, read, memory) in [(100, 0.5, 25.0), (10_000, 2.0, 80.0), (50_000, 5.0, 250.0)] {
        let title = format!("{files} files of one Service");
        let others = |folder: &Path| -> Result<()> {
            for n in 1..files {
                fs::write(folder.join(format!("s{n}.yaml")), yaml_documents(&objects(n, 1, 0))?)?;
            }
            Ok(())
        };
        let edited = |first| yaml_documents(&objects(0, 1, first));
        let figures = FileFigures::measure(&binary, &title, others, &edited)?;
        figures.add_to(&mut report, &title, [read, 5.0, memory]);
    }
    let all = |first| -> Vec<Value> {
        (0..SERVICES).flat_map(|n| objects(n, ENDPOINTS, if n == SERVICES / 2 { first } else { 0 })).collect()
    };
    let list = |first| json!({"apiVersion": "v1", "items": all(first), "kind": "List"});
    let forms: [(&str, &Edited<'_>); 3] = [
        ("documents in YAML", &|first| yaml_documents(&all(first))),
        ("a list in YAML", &|first| Ok(serde_saphyr::to_string(&list(first))?)),
        ("a list in JSON", &|first| Ok(list(first).to_string())),
    ];
    for (name, edited) in forms {
        let title = format!("{:.1} MB, {name}", edited(0)?.len() as f64 / 1e6);
        let figures = FileFigures::measure(&binary, &title, |_| Ok(()), edited)?;
        figures.add_to(&mut report, &title, [3.0, 2_000.0, 300.0]);
    }
    Ok(report.method(format!(
        "`run` with a folder of manifests. One file has {SERVICES} Services of {ENDPOINTS} endpoints; a change is one endpoint \
         in a file that is replaced. The nftables path is off."
    )))
}

/// The text of the file that is edited, by the first endpoint of a Service in it.
type Edited<'a> = dyn Fn(u32) -> Result<String> + 'a;

struct FileFigures {
    read_seconds: f64,
    idle_percent: f64,
    change_ms: f64,
    change_cpu_ms: f64,
    read_mb: f64,
    changed_mb: f64,
}

impl FileFigures {
    /// Measures a folder with the file that is edited, and with what `others` writes.
    fn measure(
        binary: &Path,
        title: &str,
        others: impl FnOnce(&Path) -> Result<()>,
        edited: &Edited<'_>,
    ) -> Result<Self> {
        status("Measuring", title);
        let sandbox = Sandbox::new("bench-file")?;
        let folder = folder(&sandbox, 0, 0)?;
        others(&folder)?;
        let edit = |first| manifest::write_atomically(&folder.join("edited.yaml"), &edited(first)?);
        edit(0)?;
        let command = without_ports(AgentCommand::run(binary, &sandbox, &folder, NODE));
        let begin = Instant::now();
        let mut agent = command.start(&sandbox)?;
        agent.wait_until_applied(START_TIMEOUT)?;
        let read_seconds = begin.elapsed().as_secs_f64();
        // Freed memory is returned.
        thread::sleep(Duration::from_secs(3));
        let pid = agent.pid();
        let read_mb = memory_mb(pid, "VmRSS")?;

        let before = cpu_seconds(pid)?;
        thread::sleep(IDLE_TIME);
        let idle_percent = (cpu_seconds(pid)? - before) / IDLE_TIME.as_secs_f64() * 100.0;

        let mut log = AppliedLog::new(&agent)?;
        let (mut times, before) = (Vec::new(), cpu_seconds(pid)?);
        for first in 1..=CHANGES {
            let begin = edit(first)?;
            log.wait_for_apply()?;
            times.push(milliseconds(begin.elapsed()));
            thread::sleep(SETTLE_TIME);
        }
        let change_cpu_ms = (cpu_seconds(pid)? - before) / f64::from(CHANGES) * 1e3;
        let change_ms = median(times);
        let changed_mb = memory_mb(pid, "VmRSS")?;
        agent.terminate()?;
        Ok(Self { read_seconds, idle_percent, change_ms, change_cpu_ms, read_mb, changed_mb })
    }

    /// Adds the figures with their goals: the time to read, the CPU time of a change, and the memory.
    fn add_to(&self, report: &mut Figures, title: &str, [read, change, memory]: [f64; 3]) {
        report.row(&format!("{title}: first state in the kernel"), read, self.read_seconds, "s", 2);
        report.row("  without changes, of one core", 0.2, self.idle_percent, "%", 1);
        report.row("  a change is active", (2.0 * change).max(20.0), self.change_ms, "ms", 1);
        report.row("  CPU of a change", change, self.change_cpu_ms, "ms", 1);
        report.row("  resident", memory, self.read_mb, "MB", 0);
        report.row("  resident after the changes", memory, self.changed_mb, "MB", 0);
    }
}

/// The log of a proxy, read as it grows.
struct AppliedLog(File);

impl AppliedLog {
    /// Skips what is there already.
    fn new(agent: &Agent) -> Result<Self> {
        let mut file = File::open(agent.log_path())?;
        file.read_to_end(&mut Vec::new())?;
        Ok(Self(file))
    }

    fn wait_for_apply(&mut self) -> Result<()> {
        let (begin, mut text) = (Instant::now(), String::new());
        while !text.contains(APPLIED) {
            ensure!(begin.elapsed() < CHANGE_TIMEOUT, "a change is not active after {CHANGE_TIMEOUT:?}");
            thread::sleep(Duration::from_micros(200));
            self.0.read_to_string(&mut text)?;
        }
        Ok(())
    }
}

/// A Service and its slice; `first` makes the first endpoint differ.
fn objects(n: u32, endpoints: u32, first: u32) -> Vec<Value> {
    service(n, endpoints, first).objects().collect()
}

fn yaml_documents(objects: &[Value]) -> Result<String> {
    let documents = objects.iter().map(|it| Ok(format!("---\n{}", serde_saphyr::to_string(it)?)));
    documents.collect()
}
