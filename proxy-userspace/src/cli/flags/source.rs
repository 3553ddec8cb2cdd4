//! Where the cluster state comes from, and which labels and annotations of Services backends receive.

use std::{ffi::OsString, path::PathBuf};

use anyhow::Result;
use clap::Args;
use model::{NamePattern, RequestedMetadata};
use pipeline::{Config, SourceConfig};
use proxy_contract::{TargetError, Targets, client::Client};
use source::kube::{ClientConfig, WatchedPods};

use super::{datapath::PodFlags, node::NodeFlags, selection::SelectionFlags, tls::SourceTlsFlags};

/// The source, and everything else that a pipeline is configured by.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct SourceFlags {
    /// Where Services and their endpoints come from
    ///
    /// kube: the API server of --kubeconfig, or of the cluster in which this process is a pod.
    ///
    /// file:PATH: a manifest or a folder of manifests in YAML or JSON (Service, EndpointSlice, Node and lists of them),
    /// watched for changes. The output of `kubectl get services,endpointslices,nodes -A -o yaml` is such a manifest.
    ///
    /// api:TARGET: another brain, this program's or KPNG's, at unix:///path, tcp://host:port or host:port, as in
    /// api:unix:///run/brain.sock; of several, with commas between, any one. Its cluster state is followed
    /// (globalv1.Sets/Watch) and node states are computed here.
    /// If it does not offer that, its state of this node is used unchanged (localv1.Sets/Watch), and no other node can be
    /// served.
    #[arg(long, value_name = "kube|file:PATH|api:TARGET", value_parser = source)]
    pub(in crate::cli) source: SourceArg,
    #[command(flatten)]
    pub(in crate::cli) options: SourceOptions,
    #[command(flatten)]
    metadata: MetadataFlags,
}

impl SourceFlags {
    /// The configuration of the pipeline of a process that keeps running; the states of other nodes take all Nodes.
    pub(in crate::cli) fn config(&self, serves_any_node: bool) -> Result<Config> {
        self.options.selection.log_remarks();
        let config = self.options.config(&self.source, serves_any_node)?;
        Ok(Config { service_metadata: self.metadata.requested(), ..config })
    }
}

/// Which labels and annotations of Services backends receive, as with KPNG.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct MetadataFlags {
    /// Labels of Services to hand out to backends, by name or glob (example.com/*)
    ///
    /// Every client receives them with the Service. A `*` matches any text, and alone all labels. Another brain as --source
    /// must hand them out itself. Labels that are not requested are neither kept nor sent, and their changes are none.
    #[arg(long, value_name = "GLOB,…", value_delimiter = ',')]
    with_service_labels: Vec<NamePattern>,
    /// Annotations of Services to hand out to backends, by name or glob
    ///
    /// No glob matches kubectl.kubernetes.io/last-applied-configuration, which is large and may contain anything: to hand it
    /// out, name it. Of one Service at most 256 KiB are handed out, as much as an API server accepts.
    #[arg(long, value_name = "GLOB,…", value_delimiter = ',')]
    with_service_annotations: Vec<NamePattern>,
}

impl MetadataFlags {
    pub(in crate::cli) fn requested(&self) -> RequestedMetadata {
        RequestedMetadata::new(self.with_service_labels.clone(), self.with_service_annotations.clone())
    }
}

/// How the source is reached, and what is derived from it.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct SourceOptions {
    /// kubeconfig file of the API server [default: the pod's service account]
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<OsString>,
    /// URL of the API server; overrides the kubeconfig and the pod's environment
    ///
    /// Set it to an address that does not depend on this proxy, such as the control plane's endpoint. The default in a pod
    /// is the cluster IP of default/kubernetes, which this proxy itself serves from what the API server reports.
    #[arg(long, alias = "master", value_name = "URL")]
    kube_api_server: Option<String>,
    /// Watch the Nodes of the whole cluster, not only this node's own
    ///
    /// Sockets are then redirected at other nodes' addresses, too: a node port saves the hop to that node. Without it, packets
    /// to other nodes' node ports go there, as with kube-proxy. Each node that does so receives every heartbeat of every
    /// Node; in a large cluster, a shared brain (brain --serve-any-node, which implies this) watches them once.
    #[arg(long)]
    watch_all_nodes: bool,
    #[command(flatten)]
    pub(in crate::cli) pods: PodFlags,
    #[command(flatten)]
    tls: SourceTlsFlags,
    #[command(flatten)]
    pub(in crate::cli) node: NodeFlags,
    #[command(flatten)]
    pub(in crate::cli) selection: SelectionFlags,
}

impl SourceOptions {
    /// The configuration of a pipeline with this source, without labels and annotations of Services.
    pub(in crate::cli) fn config(&self, source: &SourceArg, serves_any_node: bool) -> Result<Config> {
        let node = self.node.name()?;
        let source = match source {
            SourceArg::File(path) => SourceConfig::File(path.clone()),
            SourceArg::Api(target) => {
                SourceConfig::Api(self.tls.client(Client::new(target.clone(), node.as_str()))?)
            }
            SourceArg::Kube => SourceConfig::Kube {
                // An environment variable that is set but empty counts as not set.
                client_config: ClientConfig {
                    kubeconfig: self.kubeconfig.clone().filter(|it| !it.is_empty()),
                    server: self.kube_api_server.clone().filter(|it| !it.is_empty()),
                    ..ClientConfig::default()
                },
                all_nodes: self.watch_all_nodes || serves_any_node,
                pods: match self.pods.pod_annotations {
                    false => WatchedPods::None,
                    true if serves_any_node => WatchedPods::All,
                    true => WatchedPods::OfNode(node.clone()),
                },
                own_thread: serves_any_node,
            },
        };
        Ok(Config {
            node,
            source,
            checks_node: true,
            service_metadata: RequestedMetadata::default(),
            brain: self.selection.options(),
        })
    }
}

#[derive(Clone, Debug)]
pub(in crate::cli) enum SourceArg {
    /// A manifest or a folder of manifests.
    File(PathBuf),
    /// Other brains.
    Api(Targets),
    /// An API server.
    Kube,
}

pub(in crate::cli) fn source(text: &str) -> Result<SourceArg, String> {
    match text.split_once(':') {
        Some(("file", "")) => Err("file: needs a path, as in file:manifests/".into()),
        Some(("file", path)) => Ok(SourceArg::File(path.into())),
        Some(("api", target)) => target.parse().map(SourceArg::Api).map_err(|it: TargetError| it.to_string()),
        None if text == "kube" => Ok(SourceArg::Kube),
        _ => Err("unknown source; use kube, file:PATH or api:TARGET".into()),
    }
}
