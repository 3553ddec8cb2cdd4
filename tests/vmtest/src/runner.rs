//! Builds the end-to-end tests and what they need, and runs them on a kernel: in a virtual machine, or on this machine's own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{cargo_into_target, workspace},
    empty_folder,
    machine::Machine,
    target::Target,
    test_suite::{Test, TestBinary, build_test_binaries},
};
use parking_lot::Mutex;

use crate::{
    initramfs::Initramfs,
    kernel_table::KernelTable,
    kernels::{Kernel, KernelPackages, modules},
    plan::{Event, HOST, TestPlan, short_name},
    report::KernelRun,
    system::System,
    virtual_machine,
};

/// By how much timeouts are multiplied in an emulated machine.
const EMULATED_TIMEOUT_FACTOR: u32 = 20;
/// By how much repetitions are divided in an emulated machine.
const EMULATED_REPETITION_DIVISOR: u32 = 50;
/// The timeout of a test, in seconds. The longest one, of restarts, starts about twenty agents, of which each takes minutes.
const TEST_TIMEOUT: u64 = 5400;

/// How the names of tests begin that need what a virtual machine does not have: old versions of `nft`, and
/// `iptables-nft-restore` and its like. `cargo xtask test` runs them.
const NOT_OF_KERNELS: [&str; 2] = ["packet_path::listing::every_nft_", "standalone_backends::iptables::"];

/// The arguments of cargo for the end-to-end tests.
const TESTS: [&str; 4] = ["--package", "tests", "--test", "end_to_end"];
/// Files of this machine that programs read: the certificates that clients of an API server trust, and protocols for `nft`.
const FILES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/protocols"];

/// What all kernels share.
pub(crate) struct Runner<'a> {
    table: &'a KernelTable,
    machine: Machine,
    pub(crate) plan: TestPlan,
    /// `None` if there are no virtual machines.
    supplies: Option<Supplies>,
}

/// What all virtual machines share.
struct Supplies {
    packages: KernelPackages,
    root: Initramfs,
}

impl<'a> Runner<'a> {
    pub(crate) fn prepare(
        table: &'a KernelTable,
        machine: Machine,
        kernels: &[String],
        filters: &[String],
    ) -> Result<Self> {
        let is_own = machine == Machine::own()?;
        let mut packages = None;
        if kernels.iter().any(|it| it != HOST) {
            virtual_machine::install(machine)?;
            packages = Some(KernelPackages::open(machine)?);
        }
        let system = if is_own { System::own()? } else { System::of(machine)? };
        let tests = end_to_end_tests(system.target())?;
        let names: BTreeSet<_> = tests.iter().map(|it| short_name(&it.name)).collect();
        if let Some(unknown) = table.unknown_tests(&names).first() {
            bail!("{unknown}");
        }
        let is_wanted = |it: &Test| filters.is_empty() || filters.iter().any(|part| it.name.contains(part));
        let tests: Vec<_> = tests.into_iter().filter(is_wanted).collect();
        if tests.is_empty() {
            bail!("no test's name contains {}", filters.join(" or "));
        }
        let binaries: BTreeSet<_> = tests.iter().map(|it| it.binary.clone()).collect();
        let features = table.features.iter().filter_map(|it| it.btf_name.clone()).collect();
        let plan = TestPlan { tests, features, environment: BTreeMap::new(), timeout: TEST_TIMEOUT };
        let supply =
            |packages| anyhow::Ok(Supplies { packages, root: root_file_system(&system, &binaries)? });
        Ok(Self { table, machine, plan, supplies: packages.map(supply).transpose()? })
    }

    pub(crate) fn run(&self, number: usize, series: &str, mut on_event: impl FnMut(&Event)) -> KernelRun {
        let begin = Instant::now();
        let mut run = KernelRun { series: series.to_owned(), ..KernelRun::default() };
        // Every event as it happens, for runs that are watched or interrupted.
        let folder = workspace().join("target/vmtest");
        let _ = fs::create_dir_all(&folder);
        let mut journal = fs::File::create(folder.join(format!("{number}-{series}.jsonl"))).ok();
        let mut record = |event: Event| {
            // The final report contains the event, too.
            let _ = journal.as_mut().map(|it| serde_json::to_writer(&mut *it, &event).map(|()| writeln!(it)));
            on_event(&event);
            match event {
                Event::Ready { release, features } => (run.release, run.features) = (release, features),
                Event::Ended { test, outcome, seconds } => {
                    run.outcomes.insert(test, (outcome, seconds));
                }
                Event::Started { .. } | Event::Done => {}
            }
        };
        let result = if series == HOST {
            let ran = self.plan.run(|event| {
                record(event);
                Ok(())
            });
            ran.map(|()| Some((Vec::new(), None)))
        } else {
            self.boot(number, series, record)
        };
        match result {
            Ok(Some((faults, console))) => (run.faults, run.console) = (faults, console),
            Ok(None) => {
                let suites = KernelPackages::suites(self.machine);
                run.unavailable = Some(format!("none of {suites} has a package"));
            }
            Err(error) => run.faults.push(format!("{error:#}")),
        }
        if !run.release.is_empty() {
            run.faults.extend(self.table.differences(&run));
        }
        run.took = begin.elapsed();
        run
    }

    /// Runs the tests in a virtual machine: its errors, and the file of the kernel's log. `None` if no package has the series.
    fn boot(
        &self,
        number: usize,
        series: &str,
        on_event: impl FnMut(Event),
    ) -> Result<Option<(Vec<String>, Option<PathBuf>)>> {
        let Supplies { packages, root } = self.supplies.as_ref().context("there are no packages")?;
        let kernel = {
            // Two lanes may need the same kernel.
            static UNPACKING: Mutex<()> = Mutex::new(());
            let _guard = UNPACKING.lock();
            packages.kernel(series)?
        };
        let Some(kernel) = kernel else { return Ok(None) };
        let folder = workspace().join("target/vmtest/runs").join(format!("{number}-{}", kernel.release));
        empty_folder(&folder)?;
        let archive = folder.join("initramfs");
        self.complete(root.clone(), &kernel)?.write(&archive)?;
        let silence = Duration::from_secs(self.plan.timeout + 60);
        let console = folder.join("console.log");
        let faults = virtual_machine::boot(self.machine, &kernel, &archive, &console, silence, on_event);
        let _ = fs::remove_file(&archive);
        Ok(Some((faults?, Some(console))))
    }

    /// Adds the modules of a kernel, and the plan.
    fn complete(&self, mut root: Initramfs, kernel: &Kernel) -> Result<Initramfs> {
        let mut order = String::new();
        for module in modules(&kernel.modules)? {
            order += &format!("{}\n", module.name);
            root.file(format!("/modules/{}.ko", module.name), module.bytes);
        }
        root.file("/modules/order", order);
        root.file("/port", virtual_machine::port(self.machine));
        let mut plan = self.plan.clone();
        if !virtual_machine::has_kvm(self.machine) {
            plan.environment.extend([
                (tests::TIMEOUT_FACTOR.to_owned(), EMULATED_TIMEOUT_FACTOR.to_string()),
                (tests::REPETITION_DIVISOR.to_owned(), EMULATED_REPETITION_DIVISOR.to_string()),
            ]);
        }
        root.file("/plan", serde_json::to_vec(&plan)?);
        Ok(root)
    }
}

/// The root file system of every virtual machine: busybox, these test binaries, every build of the product and this program;
/// the caller adds kernel modules and the plan.
fn root_file_system(system: &System, binaries: &BTreeSet<PathBuf>) -> Result<Initramfs> {
    let mut root = Initramfs::new();
    root.program(system, &system.busybox()?, Path::new("/bin/busybox"))?;
    for binary in binaries {
        root.program(system, binary, binary)?;
    }
    for (program, path) in &system.programs {
        root.program(system, program, path)?;
    }
    for path in FILES {
        if let Ok(bytes) = fs::read(path) {
            root.file(path, bytes);
        }
    }
    // The tests read the proxy's capabilities from the DaemonSet.
    root.folder(&workspace().join("deploy"))?;
    root.link("/var/run", "/run");
    root.file("/init", include_str!("init.sh"));
    Ok(root)
}

/// Builds the end-to-end tests, without those of a browser, and lists them; for another machine with the binaries that run there.
fn end_to_end_tests(other: Option<&Target>) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    for binary in binaries(cargo_into_target("test"))? {
        tests.extend(binary.tests()?);
    }
    if let Some(target) = other {
        let others = binaries(target.cargo("test", &[]))?;
        for test in &mut tests {
            let other = others.iter().find(|it| test.suite.starts_with(it.package()));
            let other = other.with_context(|| format!("cargo has not built {} for it", test.suite))?;
            test.binary.clone_from(&other.path);
        }
    }
    tests.retain(|it| !NOT_OF_KERNELS.iter().any(|prefix| it.name.starts_with(prefix)));
    // The basic tests come first: most regressions fail there, early.
    tests.sort_by_key(|it| (!it.name.starts_with("sockets::"), it.name.clone()));
    Ok(tests)
}

fn binaries(mut cargo_test: Command) -> Result<Vec<TestBinary>> {
    cargo_test.args(TESTS);
    build_test_binaries(cargo_test)
}
