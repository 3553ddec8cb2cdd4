//! Entry point of the fuzz targets: change sets of arbitrary bytes.

use prost::Message as _;

use super::{
    cluster::ClusterView,
    inventory::Inventory,
    node_view::NodeView,
    state::Snapshot,
    tracker::Tracker,
    view::{Event, View, decode},
};
use crate::{
    digest::{Digest, KeptBuckets},
    localv1::{OpItem, op_item::Op},
};

/// Feeds a stream, as length-delimited operations, to a client of each view.
pub fn change_sets(bytes: &[u8]) {
    follow::<NodeView>(bytes);
    follow::<ClusterView>(bytes);
}

/// The differences lead to the state that the operations since the last reset make.
fn follow<V: View>(mut bytes: &[u8]) {
    let (mut tracker, mut inventory) = (Tracker::<V>::default(), Inventory::default());
    let mut state = Snapshot::default();
    // The operations since the last reset, and how many of them are synced; `None` if that reset kept something.
    let mut operations: Option<(Vec<Event<V>>, usize)> = Some(Default::default());
    while let Ok(OpItem { op }) = OpItem::decode_length_delimited(&mut bytes) {
        let Some(op) = op else { continue };
        let event = if let Op::Kept(it) = op {
            let have = inventory.message().map_or(0, |it| it.buckets.len() / size_of::<Digest>());
            let Some(kept) = KeptBuckets::parse(it.buckets, have) else { continue };
            inventory.keep(&kept);
            operations = None;
            Event::Keep(kept.into())
        } else {
            inventory.record(&op);
            match decode::<V>(op) {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(reason) => {
                    assert!(!reason.is_empty());
                    inventory = Inventory::default();
                    continue;
                }
            }
        };
        if matches!(event, Event::Reset(_)) {
            operations = Some(Default::default());
        }
        tracker.apply(event.clone());
        if let Event::Sync(revision) = &event
            && let Some(change) = tracker.finish(*revision)
        {
            state.apply(change);
        }
        if let Some((all, synced)) = &mut operations {
            all.push(event);
            if matches!(all.last(), Some(Event::Sync(_))) {
                *synced = all.len();
            }
        }
    }
    let have = inventory.message();
    assert!(have.is_none_or(|it| it.parse().is_ok_and(|it| it.is_some())), "what a client has can be sent");
    let Some((operations, synced)) = operations.filter(|(_, synced)| *synced > 0) else { return };
    let (mut at_once, mut expected) = (Tracker::<V>::default(), Snapshot::default());
    operations.into_iter().take(synced).for_each(|it| at_once.apply(it));
    expected.apply(at_once.finish(None).expect("the first state is a difference"));
    expected.revision = state.revision;
    assert!(state == expected, "the differences lead to the state");
}
