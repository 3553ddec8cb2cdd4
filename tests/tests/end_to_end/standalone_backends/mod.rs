//! The standalone backends that program a kernel, beside a brain: what the conformance cases do not ask.

mod iptables;
mod ipvs;

use std::{
    fs::{self, File},
    ops::Deref,
    path::PathBuf,
    process::Command,
};

use build_tools::{build::backend_binary, command::KilledOnDrop};
use tests::{Agent, AgentCommand, Build, Service, TestCluster, brain_socket, run};

/// A cluster with a brain on n1, where a backend is started.
struct BackendCluster {
    _brain: Agent,
    cluster: TestCluster,
}

impl Deref for BackendCluster {
    type Target = TestCluster;

    fn deref(&self) -> &TestCluster {
        &self.cluster
    }
}

impl BackendCluster {
    fn or_skip(services: &[Service]) -> Option<Self> {
        let cluster = TestCluster::or_skip()?;
        cluster.write(services);
        let (binary, manifests) = (Build::Product.binary(), cluster.manifests());
        let brain = AgentCommand::brain(&binary, cluster.sandbox(), &manifests, "n1");
        Some(Self { _brain: cluster.start(&brain), cluster })
    }

    /// The command line of a backend, which begins a new log.
    fn backend(&self, package: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(backend_binary(package));
        command.args(["--target", &brain_socket(self.sandbox()), "--node-name=n1", "--sync-period=1"]);
        command.args(["--cluster-cidr=10.244.0.0/16,fd00:244::/32"]);
        command.args(["--healthz-bind-address=", "--metrics-bind-address="]).args(arguments);
        command.stderr(File::create(self.log_file()).unwrap());
        command
    }

    fn log_file(&self) -> PathBuf {
        self.sandbox().files().join("backend.log")
    }

    /// What the last backend has logged.
    fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap()
    }

    /// Starts a program on n1.
    fn spawn(&self, mut command: Command) -> KilledOnDrop {
        KilledOnDrop(self.n1.run(|| command.spawn()).unwrap())
    }

    /// Runs a program on n1 to its end: whether it succeeds.
    fn succeeds(&self, mut command: Command) -> bool {
        self.n1.run(|| command.status()).unwrap().success()
    }

    /// Runs a program on n1, which must succeed: what it prints.
    #[track_caller]
    fn run_line(&self, line: &str) -> String {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command.args(words);
        self.n1.run(|| run(&mut command)).success()
    }
}
