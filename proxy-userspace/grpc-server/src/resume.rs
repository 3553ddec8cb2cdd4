//! Resuming by content: what a client has is not sent again.
//!
//! Invariant: whatever a client says that it has, it ends with the state of the server.

use std::collections::HashMap;

use proxy_contract::{
    digest::{self, Buckets, Digest, KeptBuckets},
    localv1::{Digests, Extension, Kept, OpItem, Value, op_item::Op},
};
use tokio::task::coop::consume_budget;
use tonic::Status;
use wire::Extensions;

use super::{change_set::ChangeSet, cluster_diff::ClusterDiff};

/// The extensions of a stream whose first request has these extensions and digests.
pub(crate) fn negotiate(
    supported: Extensions,
    requested: impl IntoIterator<Item = Extension>,
    have: Option<&Digests>,
) -> Extensions {
    let extensions = supported.negotiate(requested);
    // Unknown digest version: disable resume.
    let is_unknown = have.is_some_and(|it| it.parse() == Ok(None));
    if is_unknown { extensions.without(&[Extension::Resume]) } else { extensions }
}

/// The digests of a first request, if the stream resumes.
pub(crate) fn parse(have: Option<Digests>, extensions: Extensions) -> Result<Option<Vec<Digest>>, Status> {
    let Some(have) = have.filter(|_| extensions.has(Extension::Resume)) else { return Ok(None) };
    Ok(have.parse().map_err(Status::invalid_argument)?.map(<[_]>::to_vec))
}

/// The operation that keeps buckets.
pub(crate) fn keep(kept: &KeptBuckets) -> OpItem {
    OpItem { op: Some(Op::Kept(Kept { buckets: kept.bits().to_vec() })) }
}

/// The part of the whole state `all` that a client with these digests lacks.
pub(crate) async fn rest(all: ClusterDiff, theirs: Vec<Digest>) -> ChangeSet<ClusterDiff> {
    let mut all = ChangeSet::new(all);
    let mut groups = HashMap::<_, Vec<_>>::new();
    for item in &mut all {
        // The digests of a whole cluster take a long time; other tasks run in between.
        consume_budget().await;
        let Some(Op::Set(Value { r#ref: Some(it), bytes })) = item.op else { continue };
        if let Some((set, group)) = digest::group_of(it.set(), &it.path) {
            let digest = digest::object(it.set(), &it.path, &bytes);
            groups.entry((set, group.into_owned())).or_default().push(digest);
        }
    }
    let mut buckets = Buckets::new(theirs.len());
    for ((set, path), mut objects) in groups {
        consume_budget().await;
        buckets.add(digest::position(set, &path), digest::all(&mut objects));
    }
    let kept = KeptBuckets::equal(&buckets.finish(), &theirs);
    let mut rest = ChangeSet::new(all.diff.without(&kept).await);
    rest.begin_with(keep(&kept));
    rest
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fuzz::random_cluster::apply_changes;
    use model::cluster::ClusterState;
    use proptest::{collection::vec, prelude::*, sample::Index};
    use prost::{Message as _, bytes::Bytes};
    use proxy_contract::{
        globalv1::{EndpointInfo, ServiceInfo},
        localv1::Set,
    };
    use tokio::runtime;

    use super::*;
    use crate::cluster_diff::Filter;

    /// The objects that a client has, by set and path.
    type Objects = BTreeMap<(Set, String), Bytes>;

    fn everything(state: &ClusterState) -> ClusterDiff {
        let filter = Filter { proxy_name: None, extensions: Extensions::GLOBAL };
        ClusterDiff::new(&ClusterState::default(), state, filter)
    }

    /// The objects that are set, Services without the times that make no difference.
    fn objects(items: impl Iterator<Item = OpItem>) -> Objects {
        let object = |item: OpItem| {
            let Some(Op::Set(Value { r#ref: Some(it), bytes })) = item.op else { panic!("{item:?}") };
            let bytes = match it.set() {
                Set::GlobalServiceInfos => {
                    let info = ServiceInfo::decode(bytes).unwrap();
                    ServiceInfo { hash: 0, trigger_time: None, ..info }.encode_to_vec().into()
                }
                _ => bytes,
            };
            ((it.set(), it.path), bytes)
        };
        items.map(object).collect()
    }

    /// The group of an object; the message of an endpoint names its Service, whichever of its paths this is.
    fn group(set: Set, path: &str, bytes: &Bytes) -> (Set, String) {
        match set {
            Set::GlobalEndpointInfos => {
                let it = EndpointInfo::decode(bytes.clone()).unwrap();
                (Set::GlobalServiceInfos, format!("{}|{}||", it.namespace, it.service_name))
            }
            _ => (set, path.to_owned()),
        }
    }

    fn digests(objects: &Objects, count: usize) -> Vec<Digest> {
        let mut groups = BTreeMap::<_, Vec<_>>::new();
        for ((set, path), bytes) in
            objects.iter().filter(|((_, path), _)| !path.contains("||") || path.ends_with("||"))
        {
            groups.entry(group(*set, path, bytes)).or_default().push(digest::object(*set, path, bytes));
        }
        let mut buckets = Buckets::new(count);
        for ((set, path), mut objects) in groups {
            buckets.add(digest::position(set, &path), digest::all(&mut objects));
        }
        buckets.finish()
    }

    /// The objects of a client after it resumes with these digests, and the number of objects that it receives.
    fn resume(mut client: Objects, digests: &[Digest], state: &ClusterState) -> (Objects, usize) {
        let runtime = runtime::Builder::new_current_thread().build().unwrap();
        let mut items = runtime.block_on(rest(everything(state), digests.to_vec()));
        let Some(Op::Kept(it)) = items.next().unwrap().op else { panic!("it begins with what is kept") };
        let kept = KeptBuckets::parse(it.buckets, digests.len()).unwrap();
        client.retain(|(set, path), bytes| {
            let (set, group) = group(*set, path, bytes);
            kept.contains(digest::position(set, &group))
        });
        let sent = objects(items);
        let count = sent.len();
        for (key, bytes) in sent {
            assert!(client.insert(key, bytes).is_none(), "what is kept is not sent");
        }
        (client, count)
    }

    proptest! {
        #[test]
        fn a_client_ends_with_the_state_of_the_server(
            before in vec(any::<u8>(), 0..2_000),
            missed in vec(any::<u8>(), 0..200),
            count in 1..40_usize,
            garbage in vec((any::<Index>(), any::<Digest>()), 0..3),
        ) {
            let mut state = ClusterState::default();
            apply_changes(&mut state, &before);
            let client = objects(ChangeSet::new(everything(&state)));
            let mut digests = digests(&client, count);
            garbage.iter().for_each(|(bucket, it)| *bucket.get_mut(&mut digests) = *it);
            if garbage.is_empty() {
                let (after, sent) = resume(client.clone(), &digests, &state);
                prop_assert_eq!((&after, sent), (&client, 0));
            }
            apply_changes(&mut state, &missed);
            let (after, _) = resume(client, &digests, &state);
            prop_assert_eq!(after, objects(ChangeSet::new(everything(&state))));
        }
    }
}
