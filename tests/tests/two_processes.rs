//! A brain and an agent in two processes behave as `run` does in one, and each may die and come back.

use std::{
    ffi::{OsStr, OsString},
    fs,
    net::{IpAddr, SocketAddr},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use tests::{
    Agent, Build, ConnectLoad, EchoConnection, EchoServer, TestNode, Transport,
    agent::AgentCommand,
    eventually,
    load::LoadReport,
    manifest::{self, Service},
    scaled,
    test_node::{NODE, expected_dump},
};

const LIMIT: Duration = Duration::from_secs(20);

fn ip(text: &str) -> IpAddr {
    text.parse().expect("it is an address")
}

fn web() -> SocketAddr {
    SocketAddr::new(ip("10.96.0.10"), 80)
}

fn endpoint(n: u8) -> IpAddr {
    ip(&format!("10.244.1.{n}"))
}

/// `web` with these endpoints, and a Service beside it that never changes.
fn services(endpoints: &[u8]) -> Vec<Service> {
    let other = Service::new("other", &[ip("10.96.0.11")]).port("udp", "UDP", 53, 5353);
    let web = Service::new("web", &[web().ip()]).port("tcp", "TCP", 80, 8080);
    let web = endpoints.iter().fold(web, |web, n| web.endpoint(&format!("e{n}"), &[endpoint(*n)]));
    vec![other.endpoint("o1", &[endpoint(9)]), web]
}

/// The two processes, and the socket between them.
struct Pair<'a> {
    world: &'a TestNode,
    target: OsString,
}

impl<'a> Pair<'a> {
    fn new(world: &'a TestNode) -> Self {
        let mut target = OsString::from("unix://");
        target.push(world.sandbox().files().join("proxy.sock"));
        Self { world, target }
    }

    fn brain(&self) -> Agent {
        let mut source = OsString::from("file:");
        source.push(self.world.manifests());
        let arguments = ["brain", "--source"]
            .map(OsStr::new)
            .into_iter()
            .chain([source.as_os_str()])
            .chain(self.rest("--listen"));
        self.start(&arguments.collect::<Vec<_>>())
    }

    fn agent(&self) -> Agent {
        let sandbox = self.world.sandbox();
        let begin = ["agent".as_ref(), "--cgroup".as_ref(), sandbox.cgroup().as_os_str()];
        let pins = ["--pin-dir".as_ref(), sandbox.pins().as_os_str()];
        let arguments = begin.into_iter().chain(pins).chain(self.rest("--target"));
        self.start(&arguments.collect::<Vec<_>>())
    }

    fn rest<'b>(&'b self, flag: &'static str) -> [&'b OsStr; 4] {
        [flag.as_ref(), &self.target, "--node-name".as_ref(), NODE.as_ref()]
    }

    fn start(&self, arguments: &[&OsStr]) -> Agent {
        let setting = AgentCommand::new(&Build::Product.binary(), arguments);
        setting.start(self.world.sandbox()).expect("the binary starts")
    }

    #[track_caller]
    fn comes_to(&self, agent: &mut Agent, services: &[Service]) {
        let expect = expected_dump(services);
        let log = agent.log_path().to_owned();
        // The programs are attached after the first state has been written.
        let is_attached = || fs::read_to_string(&log).is_ok_and(|it| it.contains("state active"));
        let is_so = || is_attached() && self.world.dump(Build::Product).is_ok_and(|it| it == expect);
        agent.wait_until(LIMIT, is_so).expect("the kernel has the state");
    }
}

fn count(agent: &Agent, what: &str) -> usize {
    agent.log().matches(what).count()
}

#[test]
fn two_processes_behave_as_one() {
    let Some(world) = TestNode::or_skip("two_processes_behave_as_one") else { return };
    let _servers: Vec<_> = (1..=3)
        .map(|n| EchoServer::start(&n.to_string(), SocketAddr::new(endpoint(n), 8080)).unwrap())
        .collect();
    world.write(&services(&[1]));

    // In one process.
    let mut run = world.command(Build::Product).start(world.sandbox()).unwrap();
    let pair = Pair::new(&world);
    pair.comes_to(&mut run, &services(&[1]));
    let mut connection = EchoConnection::connect(web()).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, web(), 1, scaled(Duration::from_millis(1)));
    assert!(run.terminate().unwrap().success());

    // The same in two, whichever is first; what was connected stays so.
    let mut agent = pair.agent();
    agent.wait_until(LIMIT, || is_said(&pair, "no state received yet")).unwrap();
    assert_eq!(world.dump(Build::Product).unwrap(), expected_dump(&services(&[1])));
    let mut brain = pair.brain();
    world.write(&services(&[1, 2]));
    pair.comes_to(&mut agent, &services(&[1, 2]));
    connection.ping().unwrap();

    // A brain that dies takes nothing with it, and what happens meanwhile comes when it is back.
    brain.kill9().unwrap();
    world.write(&services(&[3]));
    agent.wait_until(LIMIT, || is_said(&pair, "the last state stays")).unwrap();
    assert_eq!(world.dump(Build::Product).unwrap(), expected_dump(&services(&[1, 2])));
    connection.ping().unwrap();
    let before = count(&agent, "state active");
    brain = pair.brain();
    pair.comes_to(&mut agent, &services(&[3]));
    assert!(eventually(LIMIT, || count(&agent, "state active") > before));
    assert_eq!(count(&agent, "state active"), before + 1, "{}", agent.log());
    let last = agent.log().lines().rfind(|it| it.contains("state active")).unwrap().to_owned();
    assert!(last.contains("changed=1"), "only what differs is written: {last}");

    // One that comes back with what it said before changes nothing at all: what changes next is the next.
    let followed = count(&agent, "in sync again");
    assert!(brain.terminate().unwrap().success());
    brain = pair.brain();
    assert!(eventually(LIMIT, || count(&agent, "in sync again") > followed), "{}", agent.log());
    world.write(&services(&[1, 3]));
    pair.comes_to(&mut agent, &services(&[1, 3]));
    assert!(eventually(LIMIT, || count(&agent, "state active") > before + 1));
    assert_eq!(count(&agent, "state active"), before + 2, "{}", agent.log());

    // And the agent itself, with a change while it is away.
    agent.kill9().unwrap();
    world.write(&services(&[2, 3]));
    let mut agent = pair.agent();
    pair.comes_to(&mut agent, &services(&[2, 3]));
    connection.ping().unwrap();
    let report = LoadReport::of(&load.stop());
    assert_eq!(report.failed, 0, "{:?}", report.errors);
    assert!(report.connects > 100);

    assert!(agent.terminate().unwrap().success());
    assert!(brain.terminate().unwrap().success());
    assert!(!world.sandbox().files().join("proxy.sock").exists());
    assert_eq!(world.dump(Build::Product).unwrap(), expected_dump(&services(&[2, 3])));
}

#[test]
fn both_halves_say_that_the_cluster_does_not_know_the_node() {
    let Some(world) = TestNode::or_skip("both_halves_say_that_the_cluster_does_not_know_the_node") else {
        return;
    };
    world.write(&services(&[1]));
    manifest::write_atomically(&world.manifests().join("node.yaml"), &manifest::node("n2")).unwrap();
    let pair = Pair::new(&world);
    let (mut brain, mut agent) = (pair.brain(), pair.agent());
    for half in [&mut brain, &mut agent] {
        let log = half.log_path().to_owned();
        let says = "no Node object has this name (found n2)";
        half.wait_until(LIMIT, || fs::read_to_string(&log).is_ok_and(|it| it.contains(says))).unwrap();
    }
}

/// Whether any log in the sandbox says so.
fn is_said(pair: &Pair<'_>, what: &str) -> bool {
    let files = fs::read_dir(pair.world.sandbox().files()).expect("the sandbox has a folder");
    files.flatten().any(|it| fs::read_to_string(it.path()).is_ok_and(|text| text.contains(what)))
}

#[test]
fn print_follows_a_brain_and_resumes_where_it_was() {
    let Some(world) = TestNode::or_skip("print_follows_a_brain_and_resumes_where_it_was") else { return };
    world.write(&services(&[1]));
    let pair = Pair::new(&world);
    let _brain = pair.brain();
    let start = |more: &[&str]| {
        let mut command = Command::new(Build::Product.binary());
        command.args(["print", "--once", "--output", "json"]).args(pair.rest("--target")).args(more);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let end = |print: Child| {
        let output = print.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        (out, err)
    };
    let (first, said) = end(start(&[]));
    // What it says about how to go on is taken at its word.
    let word = |after: &str| {
        let rest = said.split_once(after).unwrap_or_else(|| panic!("{after} is not in {said}")).1;
        rest.split_whitespace().next().unwrap().to_owned()
    };
    let (instance, rev) = (word("--instance-id "), word("--rev "));
    assert!(first.starts_with(&format!("{{\"instanceId\":\"{instance}\",\"rev\":\"{rev}\"")), "{first}");
    // Both ways to ask have the same answer.
    let (stale, _) = end(start(&["--instance-id", &instance, "--rev", "0"]));
    assert_eq!(stale, first);
    let mut waiting = start(&["--instance-id", &instance, "--rev", &rev]);
    thread::sleep(Duration::from_millis(300));
    assert!(waiting.try_wait().unwrap().is_none(), "it has this revision already");
    world.write(&services(&[1, 2]));
    let (second, _) = end(waiting);
    assert!(second.contains("10.244.1.2"), "{second}");
}
