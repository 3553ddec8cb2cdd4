//! A simulation: the processes and the steps that a seed chooses, and what must be true in the end.

use std::time::Duration;

use api_server::{Answers, ApiServer, Fault, Resource, Settings, Verb, WatchList};
use fastrand::{bool, u32, u64, usize};
use proxy_contract::localv1::Extension;
use tokio::time::{advance, sleep};
use wire::Extensions;

use crate::{
    brain::{Brain, OWN_NODE, serve_api},
    chance,
    clients::{Client, Kind},
    history,
    kernel::Kernel,
    network::{Network, Server},
    truth::Truth,
    world::World,
};

const RESOURCES: [Resource; 4] =
    [Resource::Services, Resource::EndpointSlices, Resource::Nodes, Resource::ServiceCidrs];
/// How long it may take until all have the newest state after the last fault: the longest delays of clients and source.
const MAX_CONVERGENCE: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) checked: u64,
    /// How long it took until all had the newest state after the last fault.
    pub(crate) convergence: Duration,
}

/// Runs a simulation within a runtime whose time is paused; ends the process if there is a defect.
pub(crate) async fn run(is_lossy: bool) -> Summary {
    let mut simulation = Simulation::begin(is_lossy);
    for _ in 0..usize(20..60) {
        simulation.step().await;
    }
    let convergence = simulation.end().await;
    Summary { checked: simulation.world.state.lock().checked, convergence }
}

struct Simulation {
    world: World,
    list_lag: u64,
    brains: Vec<Brain>,
    clients: Vec<Client>,
}

impl Simulation {
    fn begin(is_lossy: bool) -> Self {
        let network = Network::new([7, 100, 64 << 10][usize(..3)], bool());
        let any_node = usize(..4) > 0;
        let list_lag = if bool() { 0 } else { u64(1..6) };
        let server = ApiServer::without_socket(Settings {
            bookmark_interval: Duration::from_secs(60),
            list_lag,
            watch_list: watch_list(),
            has_cache: bool(),
            has_field_selectors: bool(),
            ..Settings::default()
        });
        let truth = Truth::new((!any_node).then_some(OWN_NODE));
        let world = World::new(network, server, truth);
        tokio::spawn(serve_api(world.clone(), world.network.listen(Server::Api)));
        (0..usize(2..20)).for_each(|_| world.change());
        let oldest = world.oldest_at_start(list_lag);

        let mut brains = Vec::new();
        let mut clients = Vec::new();
        for (index, kernel) in ["kernel 0", "kernel 1"].into_iter().enumerate().take(1 + usize(..2)) {
            world.add_consumer(kernel, OWN_NODE, oldest);
            brains.push(Brain::new(index, any_node, Kernel::new(kernel, is_lossy)));
        }
        for name in ["client 0", "client 1", "client 2", "client 3"].into_iter().take(usize(1..=4)) {
            let node = if any_node { ["n1", "n2", "n3"][usize(..3)] } else { OWN_NODE };
            let extensions = random_extensions();
            let kind = match usize(..6) {
                0 => Kind::Kpng,
                1..=3 => Kind::Watch(extensions),
                _ => Kind::Agent(Kernel::new(name, is_lossy)),
            };
            world.add_consumer(name, node, oldest);
            clients.push(Client::new(name, node, usize(..brains.len()), kind));
        }
        brains.iter_mut().for_each(|it| it.start(&world));
        clients.iter_mut().for_each(|it| it.start(&world));
        Self { world, list_lag, brains, clients }
    }

    async fn step(&mut self) {
        let Self { world, list_lag, brains, clients } = self;
        let (server, network) = (&world.server, &world.network);
        let brain = usize(..brains.len());
        match usize(..32) {
            0..12 => (0..usize(1..4)).for_each(|_| world.change()),
            12..15 => network.cut_one(),
            15 => network.stall_one(),
            16 => {
                let servers: Vec<_> = (0..brains.len()).map(Server::Brain).chain([Server::Api]).collect();
                network.isolate(servers[usize(..servers.len())], bool());
            }
            17 | 18 => {
                history::note("everything can be reached");
                network.heal();
            }
            19 | 20 if brains[brain].is_running() => brains[brain].stop(world, bool()).await,
            19..22 => start(&mut brains[brain], world, *list_lag),
            22 => {
                let client = usize(..clients.len());
                clients[client].restart(world).await;
            }
            23 => {
                history::note("the history of the API server is compacted");
                server.compact();
            }
            24 | 25 => {
                let verb = [Verb::List, Verb::Watch, Verb::Version][usize(..3)];
                let resource = RESOURCES[usize(..4)];
                let (fault, times) = (fault(), usize(1..4));
                history::note(format_args!("{times} times {verb:?} of {resource:?}: {fault:?}"));
                server.inject_fault(resource, verb, times, fault);
            }
            26 => {
                let answers = [Answers::All, Answers::Unavailable, Answers::None][usize(..3)];
                history::note(format_args!("the API server answers: {answers:?}"));
                server.configure(|it| it.answers = answers);
            }
            27 => {
                let (watch_list, has_cache, has_field_selectors) = (watch_list(), bool(), bool());
                history::note(format_args!(
                    "the API server has another version: {watch_list:?}, {has_cache}, {has_field_selectors}"
                ));
                server.configure(|it| {
                    (it.watch_list, it.has_cache, it.has_field_selectors) =
                        (watch_list, has_cache, has_field_selectors);
                });
            }
            28 => {
                let count = u32(1..6);
                history::note(format_args!("{count} applies fail"));
                world.state.lock().failing_applies = count;
            }
            29 => {
                let by = Duration::from_millis(u64(..200_000));
                history::note(format_args!("all processes stand still for {by:?}"));
                advance(by).await;
            }
            30 => {
                let (forward, by) = (bool(), Duration::from_secs(u64(..1_000_000)));
                history::note(format_args!(
                    "the wall clock is set {} by {by:?}",
                    if forward { "forward" } else { "back" }
                ));
                chance::set_wall_clock(forward, by);
            }
            _ => {}
        }
        // From no time to minutes.
        let millis = [0, 0, 0, 1, 3, 20, 200, 2_000, 20_000, 90_000][usize(..10)];
        sleep(Duration::from_millis(u64(..=millis))).await;
    }

    /// All faults end; returns how long it takes until all have the newest state.
    async fn end(&mut self) -> Duration {
        let Self { world, list_lag, brains, .. } = self;
        history::note("all faults end");
        world.network.heal();
        world.state.lock().failing_applies = 0;
        world.server.clear_faults();
        world.server.configure(|it| it.answers = Answers::All);
        brains.iter_mut().filter(|it| !it.is_running()).for_each(|it| start(it, world, *list_lag));
        let begin = history::now();
        loop {
            let behind = world.behind();
            let elapsed = history::now().saturating_sub(begin);
            if behind.is_empty() {
                history::note("all have the newest state");
                return elapsed;
            }
            if elapsed > MAX_CONVERGENCE {
                history::fail(format_args!(
                    "{behind:?} do not have the newest state {elapsed:?} after the last fault"
                ));
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Starts a brain. The first one may begin with a list that is behind.
fn start(brain: &mut Brain, world: &World, list_lag: u64) {
    if brain.is_running() {
        return;
    }
    if brain.is_first() {
        world.go_back(world.oldest_at_start(list_lag));
    }
    brain.start(world);
}

fn watch_list() -> WatchList {
    [WatchList::Supported, WatchList::Supported, WatchList::Rejected, WatchList::Ignored][usize(..4)]
}

fn fault() -> Fault {
    let message = || "simulated".to_owned();
    match usize(..8) {
        0 => Fault::Status { code: 500, message: message(), retry_after: None },
        1 => Fault::Status { code: 429, message: message(), retry_after: Some(u64(1..10)) },
        2 => Fault::Status { code: 410, message: message(), retry_after: None },
        3 => Fault::ErrorEvent { code: 410, message: message() },
        4 => Fault::ErrorEvent { code: 500, message: message() },
        5 => Fault::NoResponse,
        6 => Fault::Fragments(usize(1..40)),
        _ => Fault::DisconnectAfter(usize(1..4_000)),
    }
}

/// Any of the extensions that a client may request.
fn random_extensions() -> Extensions {
    // The library requests revisions.
    let requested = Extensions::LOCAL.iter().filter(|it| bool() || *it == Extension::Revisions);
    Extensions::LOCAL.negotiate(requested)
}
