//! `cargo xtask vmtest`: the same end-to-end tests on one kernel after the other.
//! The one rule: every cell of the matrix is a test that ran, or says why it could not.

mod console;
mod guest;
mod initramfs;
mod machine;
mod modules;
mod packages;
mod report;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    guest::{Event, Outcome, Plan, Test},
    initramfs::Initramfs,
    packages::{Kernel, Packages},
    report::{Column, Ran},
    table::{Seen, Table},
};
use build_tools::{
    build::build_for_tests,
    command::{cargo, output, status as say, workspace},
    programs::{find_or_install, test_programs},
    progress::ProgressLine as Status,
};
use clap::Parser;

/// The matrix: `own` is the machine's own kernel, a number without a dot the newest of them all.
const KERNELS: [&str; 6] = ["own", "5.10", "5.15", "6.1", "6.12", "7"];
/// The machine's own kernel, without a virtual machine.
const OWN: &str = "own";
/// Test binaries that look at files or at brains, and at no kernel.
const OF_NO_KERNEL: [&str; 3] = ["architecture", "chains", "deploy"];
/// Whom this machine trusts.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// How much longer everything may take in an emulated machine.
const PATIENCE: u32 = 20;
/// How long one test may take, in seconds.
const LIMIT: u64 = 2400;
/// And how much less often it is repeated.
const HURRY: u32 = 50;

/// Run the end-to-end tests on other kernels, in virtual machines, and on the machine's own (as root).
///
/// Fetches kernels from the packages of Debian and Ubuntu, and QEMU and busybox, where they are missing; builds what
/// is missing. Prints kernel × test. tests/KERNELS.md says what a kernel may lack. Without hardware help (KVM) a
/// kernel takes the better part of an hour.
#[derive(Parser)]
#[command(bin_name = "cargo xtask vmtest", max_term_width = 100)]
struct Arguments {
    /// Only these kernels and tests: `own`, or a series that there is a package of, such as 6.1; anything else is a
    /// part of tests' names, as in `vmtest 5.10 6.1 sockets`.
    #[arg(value_name = "KERNEL|TEST")]
    only: Vec<String>,
    /// Boot each kernel so many times.
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: usize,
    /// Run a plan of tests inside a virtual machine.
    #[arg(long, hide = true)]
    guest: Option<PathBuf>,
}

fn main() -> ExitCode {
    let Arguments { only, repeat, guest } = Arguments::parse();
    let result = guest.map_or_else(|| vmtest(&only, repeat), |plan| guest::guest(&plan));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs tests on kernels, all of the matrix where `only` names none, `repeat` times.
fn vmtest(only: &[String], repeat: usize) -> Result<()> {
    let begin = Instant::now();
    let all = KERNELS.map(ToOwned::to_owned);
    let (kernels, filters): (Vec<_>, Vec<_>) = only.iter().cloned().partition(|it| is_kernel(it));
    let wanted = if kernels.is_empty() { &all[..] } else { &kernels };
    let table_text = fs::read_to_string(workspace().join(table::FILE))
        .with_context(|| format!("cannot read {}", table::FILE))?;
    let table = Table::parse(&table_text)?;
    let bench = Bench::prepare(&table, wanted, &filters)?;

    let queue: Mutex<VecDeque<_>> = Mutex::new((0..repeat).flat_map(|_| wanted.iter()).enumerate().collect());
    let status = Mutex::new(Board::default());
    let columns = Mutex::new(BTreeMap::new());
    thread::scope(|scope| {
        let mut lanes = Vec::new();
        for _ in 0..lanes_of_this_machine() {
            lanes.push(scope.spawn(|| {
                loop {
                    let next = lock(&queue).pop_front();
                    let Some((number, series)) = next else { break };
                    let column = bench.run(number, series, &status);
                    lock(&columns).insert(number, column);
                }
            }));
        }
        while lanes.iter().any(|it| !it.is_finished()) {
            thread::sleep(Duration::from_millis(500));
            lock(&status).show();
        }
    });
    drop(status);

    let columns: Vec<_> =
        columns.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect();
    let tests: Vec<_> = bench.plan.tests.iter().map(Test::title).collect();
    let faults = report::print(&tests, &columns, begin.elapsed());
    match faults {
        0 => Ok(()),
        faults => bail!("{faults} things went wrong, see above"),
    }
}

/// The name of a test without its suite and modules, as the table has it.
fn own_name(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

/// Whether a word of the command line is a kernel, or else part of a test's name.
fn is_kernel(word: &str) -> bool {
    word == OWN || word.starts_with(|it: char| it.is_ascii_digit())
}

/// How many kernels are tested at a time: each has two processors.
fn lanes_of_this_machine() -> usize {
    thread::available_parallelism().map_or(1, |it| it.get() / 2).max(1)
}

fn lock<T>(it: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    it.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything that the kernels have in common.
struct Bench<'a> {
    table: &'a Table,
    plan: Plan,
    /// What virtual machines are made of; `None` if there are none.
    supplies: Option<Supplies>,
}

/// What all virtual machines have in common.
struct Supplies {
    packages: Packages,
    root: Initramfs,
}

impl<'a> Bench<'a> {
    fn prepare(table: &'a Table, kernels: &[String], filters: &[String]) -> Result<Self> {
        let tools = test_programs();
        let mut packages = None;
        if kernels.iter().any(|it| it != OWN) {
            find_or_install("qemu-system-x86_64", "qemu-system-x86")?;
            packages = Some(Packages::open()?);
        }
        build_for_tests()?;
        let tests = find_tests()?;
        let names: BTreeSet<_> = tests.iter().map(|it| own_name(&it.name)).collect();
        if let Some(unknown) = table.unknown_tests(&names).first() {
            bail!("{unknown}");
        }
        let binaries: BTreeSet<_> = tests.iter().map(|it| it.binary.clone()).collect();
        let is_wanted =
            |it: &Test| filters.is_empty() || filters.iter().any(|part| it.title().contains(part));
        let tests: Vec<_> = tests.into_iter().filter(is_wanted).collect();
        if tests.is_empty() {
            bail!("no test's name contains {}", filters.join(" or "));
        }
        let features = table.features.iter().filter_map(|it| it.seen_as.clone()).collect();
        let plan = Plan { tests, features, environment: BTreeMap::new(), limit: LIMIT };
        let supplies = match packages {
            Some(packages) => Some(Supplies { packages, root: root(binaries.into_iter().chain(tools))? }),
            None => None,
        };
        Ok(Self { table, plan, supplies })
    }

    /// Runs the tests on a kernel of this series.
    fn run(&self, number: usize, series: &str, board: &Mutex<Board>) -> Column {
        let begin = Instant::now();
        let name = if series == OWN { "own".to_owned() } else { series.to_owned() };
        let mut seen = Seen::default();
        let mut ran = Ran::default();
        let mut journal = journal(number, &name);
        let mut tell = |event: Event| {
            // What is not written down is told in the end all the same.
            let _ = serde_json::to_writer(&mut journal, &event).map(|()| writeln!(journal));
            lock(board).tell(number, &name, self.plan.tests.len(), &event);
            match event {
                Event::Ready { release, features } => {
                    (seen.release, seen.features) = (release, features);
                }
                Event::Ended { test, outcome, seconds } => {
                    let own_name = own_name(&test).to_owned();
                    match &outcome {
                        Outcome::Passed => {
                            seen.passed.insert(own_name);
                        }
                        Outcome::Skipped(reason) => {
                            seen.skipped.insert(own_name, reason.clone());
                        }
                        Outcome::Failed(_) => {}
                    }
                    ran.outcomes.insert(test, (outcome, seconds));
                }
                Event::Started { .. } | Event::Done => {}
            }
        };
        let result = if series == OWN {
            guest::perform(&self.plan, |event| {
                tell(event);
                Ok(())
            })
            .map(|()| None)
        } else {
            self.boot(number, series, &mut tell)
        };
        lock(board).forget(number);
        match result {
            Ok(Some(Booted::NotOnOffer(reason))) => return Column::NotOnOffer { series: name, reason },
            Ok(Some(Booted::Ended(ending))) => {
                ran.faults.extend(ending.faults);
                ran.console = Some(ending.console);
            }
            Ok(None) => {}
            Err(error) => ran.faults.push(format!("{error:#}")),
        }
        if !seen.release.is_empty() {
            if series == OWN {
                // A machine may lack what no version of the kernel decides.
                seen.skipped.clear();
            }
            ran.faults.extend(self.table.differences(&seen));
        }
        ran.series = name;
        ran.release = seen.release;
        ran.took = begin.elapsed();
        Column::Ran(ran)
    }

    fn boot(&self, number: usize, series: &str, tell: &mut dyn FnMut(Event)) -> Result<Option<Booted>> {
        let Supplies { packages, root } = self.supplies.as_ref().context("there are no packages")?;
        let kernel = {
            // Two lanes may want the same one.
            static UNPACKING: Mutex<()> = Mutex::new(());
            let _one = lock(&UNPACKING);
            packages.kernel(series)?
        };
        let Some(kernel) = kernel else {
            let reason = format!("none of {} has a package of it", Packages::suites());
            return Ok(Some(Booted::NotOnOffer(reason)));
        };
        let folder = workspace().join("target/vmtest/runs").join(format!("{number}-{}", kernel.release));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let archive = folder.join("initramfs");
        self.fill(root.clone(), &kernel)?.write(&archive)?;
        let silence = Duration::from_secs(self.plan.limit + 60);
        let ending = machine::boot(&kernel, &archive, &folder, silence, tell);
        let _ = fs::remove_file(&archive);
        Ok(Some(Booted::Ended(ending?)))
    }

    /// Adds what this kernel and this plan need.
    fn fill(&self, mut root: Initramfs, kernel: &Kernel) -> Result<Initramfs> {
        let mut order = String::new();
        for module in modules::modules(&kernel.modules)? {
            order += &format!("{}\n", module.name);
            root.file(format!("/modules/{}.ko", module.name), module.bytes);
        }
        root.file("/modules/order", order);
        let mut plan = self.plan.clone();
        if !machine::is_fast() {
            plan.environment.insert(tests::TIMEOUT_FACTOR.to_owned(), PATIENCE.to_string());
            plan.environment.insert(tests::REPETITION_DIVISOR.to_owned(), HURRY.to_string());
        }
        root.file("/plan", serde_json::to_vec(&plan)?);
        Ok(root)
    }
}

/// Where everything that happens on a kernel is written as it happens, for who looks before the end, or ends it.
fn journal(number: usize, kernel: &str) -> Box<dyn io::Write + Send> {
    let folder = workspace().join("target/vmtest");
    let file = fs::create_dir_all(&folder)
        .and_then(|()| fs::File::create(folder.join(format!("{number}-{kernel}.jsonl"))));
    match file {
        Ok(file) => Box::new(file),
        Err(_) => Box::new(io::sink()),
    }
}

/// What every virtual machine boots into: busybox, these programs, every build of the product, and ourselves.
fn root(programs: impl Iterator<Item = PathBuf>) -> Result<Initramfs> {
    let busybox = find_or_install("busybox", "busybox-static")?;
    let mut root = Initramfs::new();
    root.program(&busybox, Some(Path::new("/bin/busybox")))?;
    let applets = output(Command::new(&busybox).arg("--list"))?;
    for applet in applets.lines().filter(|it| *it != "busybox") {
        root.link(format!("/bin/{applet}"), "/bin/busybox");
    }
    for program in programs {
        root.program(&program, None)?;
    }
    for variant in fs::read_dir(workspace().join("target/test-binaries"))?.flatten() {
        root.program(&variant.path().join("kube-proxy-ebpf"), None)?;
    }
    // A client of an API server wants to know whom to trust.
    if let Ok(certificates) = fs::read(CERTIFICATES) {
        root.file(CERTIFICATES, certificates);
    }
    // The tests take the capabilities of the proxy from there.
    root.folder(&::tests::deploy::folder())?;
    root.program(&std::env::current_exe()?, Some(Path::new("/guest")))?;
    // As everywhere.
    root.link("/var/run", "/run");
    root.file("/init", include_str!("init.sh"));
    Ok(root)
}

enum Booted {
    NotOnOffer(String),
    Ended(machine::Ending),
}

/// The end-to-end tests, built.
fn find_tests() -> Result<Vec<Test>> {
    let mut build = cargo();
    build.args(["test", "--package", "tests", "--tests", "--no-run", "--message-format", "json"]);
    let artifacts = output(build.arg("--target-dir").arg(workspace().join("target")))?;
    let mut tests = Vec::new();
    for (suite, binary) in artifacts.lines().filter_map(test_binary) {
        if OF_NO_KERNEL.contains(&suite.as_str()) {
            continue;
        }
        for line in output(Command::new(&binary).args(["--list", "--format", "terse"]))?.lines() {
            if let Some(name) = line.strip_suffix(": test") {
                let (binary, suite, name) = (binary.clone(), suite.clone(), name.to_owned());
                tests.push(Test { binary, suite, name });
            }
        }
    }
    // What is most likely to find something, and takes longest, comes last.
    tests.sort_by_key(|it| (it.suite != "sockets", it.suite.clone()));
    Ok(tests)
}

/// Name and path of an integration test, from a line of `cargo --message-format json`.
fn test_binary(line: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let target = message.get("target")?;
    let is_test = target.get("kind")?.as_array()?.iter().any(|it| it == "test");
    let binary = message.get("executable")?.as_str()?;
    is_test.then(|| Some((target.get("name")?.as_str()?.to_owned(), binary.into())))?
}

/// What each lane is at.
#[derive(Default)]
struct Board {
    lanes: BTreeMap<usize, (String, usize)>,
    status: Option<Status>,
}

impl Board {
    fn tell(&mut self, number: usize, kernel: &str, count: usize, event: &Event) {
        let status = self.status.get_or_insert_with(Status::new);
        let lane = self.lanes.entry(number).or_default();
        match event {
            Event::Ready { release, .. } => {
                status.clear();
                say("Booted", release);
                kernel.clone_into(&mut lane.0);
            }
            Event::Started { test } => lane.0 = format!("{kernel}: {} of {count}, {test}", lane.1 + 1),
            Event::Ended { test, outcome, .. } => {
                lane.1 += 1;
                if matches!(outcome, Outcome::Failed(_)) {
                    status.clear();
                    say("FAILED", &format!("{test} on {kernel}"));
                }
            }
            Event::Done => {}
        }
    }

    fn show(&mut self) {
        let lines: Vec<_> = self.lanes.values().map(|it| it.0.as_str()).filter(|it| !it.is_empty()).collect();
        if !lines.is_empty() {
            let status = self.status.get_or_insert_with(Status::new);
            status.show(&format!("     Testing {}", lines.join(" | ")));
        }
    }

    fn forget(&mut self, number: usize) {
        self.lanes.remove(&number);
    }
}
