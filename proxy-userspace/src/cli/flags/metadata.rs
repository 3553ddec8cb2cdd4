//! Which labels and annotations of Services backends receive.

use clap::Args;
use model::{NamePattern, RequestedMetadata};

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
    /// The labels and annotations that are requested.
    pub(in crate::cli) fn requested(&self) -> RequestedMetadata {
        RequestedMetadata::new(self.with_service_labels.clone(), self.with_service_annotations.clone())
    }
}
