//! The source `kube`: an API server that is watched.
//!
//! The one rule: the last facts stay in force.
//! Nothing is handed over before Services, EndpointSlices and Nodes have all been listed once; after that no failure of
//! any length takes anything away, and what comes back is compared with what was known.

mod apiserver_holddown;
mod client_config;
mod event_recorder;
mod kind;
mod reflector;
mod status;
mod store;
mod watch_error;
mod watch_stream;

use std::{
    mem,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, task::JoinSet, time::Instant};

use self::{
    apiserver_holddown::ApiServerHoldDown,
    kind::{EndpointSlices, Kind, Nodes, Services},
    reflector::{Reflector, Selectors},
    store::Store,
};
use crate::ClusterChanges;

pub use client_config::{ClientConfig, ClientConfigError};
pub use event_recorder::{EventRecorder, WarningEvent};
pub use status::ResourceStatus;

/// EventType to watch, and where.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where the API server is and who asks.
    pub client_config: ClientConfig,
    /// Which Services are served: those whose label names this proxy; without it, those without the label.
    pub service_proxy_name: Option<String>,
    /// The only Node to watch; without it, all of them.
    pub node: Option<String>,
    /// How patient to be.
    pub timing: Timing,
}

/// How patient to be.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The longest pause after the first failure, and after many.
    pub backoff: (Duration, Duration),
    /// How long to wait for an answer, and for the next part of a list.
    pub timeout: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            backoff: (Duration::from_millis(500), Duration::from_secs(30)),
            timeout: Duration::from_secs(30),
        }
    }
}

/// A running source; it ends when it is dropped.
#[derive(Debug)]
pub struct KubeSource {
    shared: Arc<Shared>,
    _followers: JoinSet<()>,
}

impl KubeSource {
    /// Begins to follow an API server, be it there or not.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// If it is not even clear where the server is and who asks.
    pub fn start(options: &Options) -> Result<Self, ClientConfigError> {
        let (server, client) = options.client_config.client()?;
        tracing::info!("following the API server at {server}");
        let address = server.host().and_then(|it| it.trim_matches(['[', ']']).parse().ok());
        let shared = Arc::new(Shared::new(address));
        let access = Arc::new(options.client_config.clone());
        let mut followers = JoinSet::new();
        let [services, slices, nodes] = selectors(options);
        let timing = options.timing;
        let (a, c, s) = (|| Arc::clone(&access), || client.clone(), || Arc::clone(&shared));
        followers.spawn(Reflector::<Services>::new(a(), c(), services, timing, s()).run());
        followers.spawn(Reflector::<EndpointSlices>::new(a(), c(), slices, timing, s()).run());
        followers.spawn(Reflector::<Nodes>::new(a(), c(), nodes, timing, s()).run());
        Ok(Self { shared, _followers: followers })
    }

    /// Waits for what is new; the first time that is everything, and never a part of it. `None` if the source has
    /// broken down.
    ///
    /// Nothing is lost if it is dropped while it waits.
    pub async fn next(&self) -> Option<ClusterChanges> {
        loop {
            let news = self.shared.news.notified();
            match self.shared.take() {
                Taken::ClusterChanges(changes) => return Some(changes),
                Taken::Nothing => news.await,
                Taken::End => return None,
            }
        }
    }

    /// A view of how following goes, which stays true while the source runs.
    pub fn health(&self) -> Health {
        Health(Arc::clone(&self.shared))
    }
}

/// How following goes, at any time.
#[derive(Clone, Debug)]
pub struct Health(Arc<Shared>);

impl Health {
    /// How it goes kind by kind.
    pub fn resources(&self) -> [ResourceStatus; 3] {
        self.0.state().kinds.clone()
    }

    /// Whether all kinds have been listed once.
    pub fn is_synced(&self) -> bool {
        self.0.state().is_synced()
    }
}

/// EventType the server is asked to leave out, as kube-proxy does it.
fn selectors(options: &Options) -> [Selectors; 3] {
    const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
    let services = Selectors {
        labels: Some(match &options.service_proxy_name {
            Some(name) => format!("{PROXY_NAME}={name}"),
            None => format!("!{PROXY_NAME}"),
        }),
        // Servers from 1.31 on can leave out what is headless.
        fields: Some("spec.clusterIP!=None".into()),
        fields_are_optional: true,
    };
    let slices = Selectors { labels: Some("!service.kubernetes.io/headless".into()), ..Selectors::default() };
    let nodes = Selectors {
        fields: options.node.as_ref().map(|it| format!("metadata.name={it}")),
        ..Selectors::default()
    };
    [services, slices, nodes]
}

/// EventType the followers and their reader share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    news: Notify,
    /// The address that the API server is asked at, unless it is a name.
    server: Option<IpAddr>,
}

#[derive(Debug)]
struct State {
    /// EventType has not been handed over yet.
    changes: ClusterChanges,
    kinds: [ResourceStatus; 3],
    own_service: ApiServerHoldDown,
    /// Whether everything has been handed over once.
    is_complete: bool,
    /// Whether a follower has ended, which none should.
    is_broken: bool,
}

/// EventType there is for the reader.
enum Taken {
    ClusterChanges(ClusterChanges),
    Nothing,
    End,
}

impl State {
    fn is_synced(&self) -> bool {
        self.kinds.iter().all(|it| it.is_synced)
    }
}

impl Shared {
    fn new(server: Option<IpAddr>) -> Self {
        let kinds = [Services::PLURAL, EndpointSlices::PLURAL, Nodes::PLURAL].map(ResourceStatus::new);
        let state = State {
            changes: ClusterChanges::default(),
            kinds,
            own_service: ApiServerHoldDown::default(),
            is_complete: false,
            is_broken: false,
        };
        Self { state: Mutex::new(state), news: Notify::new(), server }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Taken {
        let mut state = self.state();
        if state.is_broken {
            return Taken::End;
        }
        if !state.is_synced() || (state.is_complete && state.changes.is_empty()) {
            return Taken::Nothing;
        }
        if !state.is_complete {
            state.is_complete = true;
            let [services, slices, nodes] = state.kinds.each_ref().map(|it| it.objects);
            tracing::info!(services, slices, nodes, "the API server has said everything");
        }
        Taken::ClusterChanges(mem::take(&mut state.changes))
    }

    fn contact(&self, kind: usize) {
        self.state().kinds[kind].contact();
    }

    fn broken(&self) {
        self.state().is_broken = true;
        self.news.notify_one();
    }

    fn failed(&self, kind: usize, error: &str, next: Instant) {
        self.state().kinds[kind].failed(error, next);
    }

    /// Takes the news over.
    fn tell<K: Kind>(&self, store: &mut Store<K>) {
        let mut news = store.take_news();
        let mut state = self.state();
        let state = &mut *state;
        let kind = &mut state.kinds[K::INDEX];
        kind.contact();
        (kind.objects, kind.refused) = (store.len(), store.refusals());
        kind.is_synced = store.is_synced();
        K::doubt(&mut state.own_service, &mut news, self.server);
        if !news.is_empty() {
            K::among(&mut state.changes).extend(news);
        }
        // The first list may be an empty one.
        if !state.changes.is_empty() || !state.is_complete {
            self.news.notify_one();
        }
    }
}
