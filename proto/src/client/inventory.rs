//! The inventory of a client: digests of the received objects, for the extension `Resume`.
//!
//! Invariant: it describes the last complete state, which the caller has, and not what a broken stream sent after it.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    mem,
};

use crate::{
    digest::{self, Buckets, Digest, KeptBuckets, MAX_BUCKETS},
    localv1::{Digests, Ref, Set, Value, op_item::Op},
};

/// The digests of all objects.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    /// The objects of the last complete state.
    synced: HashMap<Group, Objects>,
    /// The operations since then, in their order: with an object's digest, or none if it was deleted.
    pending: HashMap<Group, Vec<(ObjectId, Option<Digest>)>>,
    /// Whether groups that are not kept end with the next complete state.
    is_reset: bool,
    hasher: RandomState,
}

/// The set and the path of a Service or of another object.
type Group = (Set, String);

/// The hash of an object's set and path.
type ObjectId = u64;

#[derive(Debug, Default)]
struct Objects {
    digests: Vec<(ObjectId, Digest)>,
    /// Whether they are kept since the last reset.
    is_kept: bool,
}

/// Operations of one group, at least, before those that others have replaced are forgotten.
const MIN_FORGOTTEN: usize = 1_024;

impl Inventory {
    /// The digests for the first request of a stream; `None` if there are no objects yet.
    pub(super) fn message(&self) -> Option<Digests> {
        let count = self.synced.len().next_power_of_two().min(MAX_BUCKETS);
        let mut buckets = Buckets::new(count);
        for ((set, path), objects) in &self.synced {
            let mut objects: Vec<_> = objects.digests.iter().map(|(_, it)| *it).collect();
            buckets.add(digest::position(*set, path), digest::all(&mut objects));
        }
        (!self.synced.is_empty()).then(|| Digests::of(&buckets.finish()))
    }

    pub(super) fn record(&mut self, op: &Op) {
        match op {
            Op::Reset(_) => self.reset(),
            Op::Sync(_) => self.sync(),
            Op::Set(Value { r#ref: Some(it), bytes }) => self.note(it, Some(bytes)),
            Op::Delete(it) => self.note(it, None),
            Op::Set(_) | Op::Kept(_) | Op::Heartbeat(_) => {}
        }
    }

    fn reset(&mut self) {
        self.pending.clear();
        self.is_reset = true;
        self.synced.values_mut().for_each(|it| it.is_kept = false);
    }

    /// The groups in these buckets are as in the last complete state.
    pub(super) fn keep(&mut self, kept: &KeptBuckets) {
        for (group, objects) in &mut self.synced {
            if kept.contains(digest::position(group.0, &group.1)) {
                objects.is_kept = true;
                self.pending.remove(group);
            }
        }
    }

    /// An object was set to these bytes, or deleted.
    fn note(&mut self, Ref { set, path }: &Ref, bytes: Option<&[u8]>) {
        let Some(set) = Set::try_from(*set).ok().filter(|it| *it != Set::UnknownSet) else { return };
        let Some((group_set, group)) = digest::group_of(set, path) else { return };
        let digest = bytes.map(|it| digest::object(set, path, it));
        let id = self.hasher.hash_one((i32::from(set), path));
        let operations = self.pending.entry((group_set, group.into_owned())).or_default();
        // A peer may replace an object again and again.
        if operations.len() >= MIN_FORGOTTEN && operations.len() == operations.capacity() {
            forget_replaced(operations);
        }
        operations.push((id, digest));
    }

    /// The state is complete. What it costs depends on what has changed, and on the groups in which it has.
    fn sync(&mut self) {
        if mem::take(&mut self.is_reset) {
            self.synced.retain(|_, it| it.is_kept);
        }
        for (group, mut operations) in self.pending.drain() {
            forget_replaced(&mut operations);
            let objects = self.synced.entry(group.clone()).or_default();
            objects.is_kept = true;
            objects.digests.retain(|it| operations.binary_search_by_key(&it.0, |it| it.0).is_err());
            let count = operations.iter().filter(|it| it.1.is_some()).count();
            objects.digests.reserve_exact(count);
            objects.digests.extend(operations.into_iter().filter_map(|(id, digest)| Some((id, digest?))));
            if objects.digests.is_empty() {
                self.synced.remove(&group);
            }
        }
    }
}

/// Leaves the last operation of each object, in ascending order of ids.
fn forget_replaced(operations: &mut Vec<(ObjectId, Option<Digest>)>) {
    operations.reverse();
    operations.sort_by_key(|it| it.0);
    operations.dedup_by_key(|it| it.0);
}

#[cfg(test)]
mod tests {
    use std::{borrow::Cow, collections::BTreeMap};

    use proptest::prelude::*;

    use super::*;
    use crate::localv1::EmptyOp;

    fn message(inventory: &Inventory) -> Vec<u8> {
        inventory.message().map(|it| it.buckets).unwrap_or_default()
    }

    /// Objects by their paths, as they were sent.
    type Plain = BTreeMap<String, u8>;

    fn set_of(path: &str) -> Set {
        if path.matches('/').count() == 1 { Set::ServicesSet } else { Set::EndpointsSet }
    }

    fn group(path: &str) -> (Set, Cow<'_, str>) {
        digest::group_of(set_of(path), path).unwrap()
    }

    fn reference(path: &str) -> Ref {
        Ref { set: set_of(path).into(), path: path.to_owned() }
    }

    fn set(path: &str, bytes: &[u8]) -> Op {
        Op::Set(Value { r#ref: Some(reference(path)), bytes: bytes.to_vec().into() })
    }

    fn expected(objects: &Plain) -> Vec<u8> {
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (path, byte) in objects {
            groups.entry(group(path).1).or_default().push(digest::object(set_of(path), path, &[*byte]));
        }
        let mut buckets = Buckets::new(groups.len().next_power_of_two());
        for (path, mut digests) in groups {
            buckets.add(digest::position(Set::ServicesSet, &path), digest::all(&mut digests));
        }
        if objects.is_empty() { Vec::new() } else { buckets.finish().concat() }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(String, u8),
        Delete(String),
        Reset,
        /// Groups whose buckets' bits are set.
        Keep(u8),
        Sync,
    }

    fn step() -> impl Strategy<Value = Step> {
        let path = "ns/[abc](/[xyz])?";
        prop_oneof![
            6 => (path, any::<u8>()).prop_map(|(path, byte)| Step::Set(path, byte)),
            3 => path.prop_map(Step::Delete),
            1 => Just(Step::Reset),
            1 => any::<u8>().prop_map(Step::Keep),
            3 => Just(Step::Sync),
        ]
    }

    proptest! {
        #[test]
        fn it_describes_what_a_plain_map_has(steps in proptest::collection::vec(step(), 0..60)) {
            let mut inventory = Inventory::default();
            let (mut synced, mut current) = (Plain::new(), Plain::new());
            for step in steps {
                match step {
                    Step::Set(path, byte) => {
                        inventory.record(&set(&path, &[byte]));
                        current.insert(path, byte);
                    }
                    Step::Delete(path) => {
                        inventory.record(&Op::Delete(reference(&path)));
                        current.remove(&path);
                    }
                    Step::Reset => {
                        inventory.record(&Op::Reset(EmptyOp::default()));
                        current.clear();
                    }
                    Step::Keep(bits) => {
                        let count = message(&inventory).len() / size_of::<Digest>();
                        let Some(kept) = KeptBuckets::parse(vec![bits], count) else { continue };
                        inventory.keep(&kept);
                        let is_kept = |path: &str| {
                            let (set, group) = group(path);
                            kept.contains(digest::position(set, &group))
                        };
                        let had: Vec<_> = synced.keys().map(|it| group(it).1).collect();
                        current.retain(|path, _| !is_kept(path) || !had.contains(&group(path).1));
                        current.extend(synced.iter().filter(|(path, _)| is_kept(path)).map(|(path, it)| (path.clone(), *it)));
                    }
                    Step::Sync => {
                        inventory.record(&Op::Sync(EmptyOp::default()));
                        synced.clone_from(&current);
                    }
                }
                prop_assert_eq!(message(&inventory), expected(&synced));
            }
        }
    }

    #[test]
    fn an_object_that_is_replaced_again_and_again_is_one() {
        let mut inventory = Inventory::default();
        for n in 0..5 * MIN_FORGOTTEN {
            inventory.record(&set(&format!("ns/a/{}", n % 3), &n.to_be_bytes()));
        }
        let [operations] = &inventory.pending.values().collect::<Vec<_>>()[..] else {
            panic!("it is one group")
        };
        assert!(operations.len() <= MIN_FORGOTTEN);
        inventory.sync();
        let mut once = Inventory::default();
        for n in 5 * MIN_FORGOTTEN - 3..5 * MIN_FORGOTTEN {
            once.record(&set(&format!("ns/a/{}", n % 3), &n.to_be_bytes()));
        }
        once.sync();
        assert_eq!(message(&inventory), message(&once));
    }
}
