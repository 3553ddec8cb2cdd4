//! A short index of each slice, kept with it: a change of one endpoint does not read the names of ten thousand others.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher as _},
    sync::Arc,
};

use model::cluster::{Endpoint, EndpointSlice, SliceName};

/// The slices of a Service that have changed since it was derived, as they were then.
pub(crate) type Replaced = BTreeMap<SliceName, Arc<EndpointSlice>>;

/// Of more names, a pass over the endpoints takes less time than a search for each.
const FEW_HASHES: usize = 16;

#[derive(Debug)]
struct SliceIndex {
    /// The hashes of all addresses and pods, in ascending order.
    hashes: Box<[u32]>,
    is_plain: bool,
    has_zone_hints: bool,
}

impl SliceIndex {
    fn new(slice: &EndpointSlice) -> Self {
        let hashes_of = |it: &Endpoint| [Some(hash(&it.address)), it.pod.as_ref().map(hash)];
        let mut hashes: Box<[_]> = slice.endpoints.iter().flat_map(hashes_of).flatten().collect();
        hashes.sort_unstable();
        Self {
            hashes,
            is_plain: slice.endpoints.iter().all(is_plain),
            has_zone_hints: slice.endpoints.iter().any(is_hinted),
        }
    }

    /// The index of a slice; `None` if it was replaced: a slice that changes is read anyway, and has no index of use for later.
    fn of<'a>(slice: &'a EndpointSlice, replaced: &Replaced) -> Option<&'a Self> {
        if replaced.contains_key(&slice.name) { None } else { slice.memo.get_or_init(|| Self::new(slice)) }
    }
}

/// The hash of an address, or of the name of a pod.
pub(crate) fn hash(name: &(impl Hash + ?Sized)) -> u32 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish() as u32
}

/// Whether a slice can contain an address or a pod of one of these hashes.
pub(crate) fn may_contain_any(slice: &EndpointSlice, replaced: &Replaced, hashes: &[u32]) -> bool {
    let contains = |it: &SliceIndex| hashes.iter().any(|hash| it.hashes.binary_search(hash).is_ok());
    hashes.len() > FEW_HASHES || SliceIndex::of(slice, replaced).is_none_or(contains)
}

/// Whether all endpoints of a slice are [plain](is_plain).
pub(crate) fn all_are_plain(slice: &EndpointSlice, replaced: &Replaced) -> bool {
    SliceIndex::of(slice, replaced).map_or_else(|| slice.endpoints.iter().all(is_plain), |it| it.is_plain)
}

pub(crate) fn has_zone_hints(slice: &EndpointSlice, replaced: &Replaced) -> bool {
    SliceIndex::of(slice, replaced)
        .map_or_else(|| slice.endpoints.iter().any(is_hinted), |it| it.has_zone_hints)
}

/// Whether an endpoint has a hint for a zone.
pub(crate) fn is_hinted(it: &Endpoint) -> bool {
    !it.zone_hints().is_empty()
}

/// Whether nothing but its own conditions, its node and its zones decide what an endpoint is used for, as long as others are
/// ready.
pub(crate) fn is_plain(it: &Endpoint) -> bool {
    // Another copy of its address may be preferred to one that is ready and terminating.
    it.node_hints().is_empty() && (!it.conditions.ready || !it.conditions.terminating)
}
