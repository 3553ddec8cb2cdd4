//! Passes the pipeline's reports on to the health, metrics and status pages.

use admin::Admin;
use model::Rejected;
use pipeline::{Observer, Stage, SyncStatus};

pub(super) struct AdminObserver<'a>(pub(super) &'a Admin);

impl Observer for AdminObserver<'_> {
    fn source(&self, name: &str, SyncStatus { is_synced, last_contact, error }: SyncStatus) {
        self.0.set_source(name, admin::SourceHealth { is_synced, last_contact, error });
    }

    fn rejected(&self, stage: Stage, items: Vec<Rejected>) {
        let stage = match stage {
            Stage::Source => admin::RejectedBy::Source,
            Stage::Brain => admin::RejectedBy::Brain,
        };
        self.0.set_rejected(stage, items);
    }
}
