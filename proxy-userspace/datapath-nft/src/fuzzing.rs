//! What the fuzz targets and tests play: tables with arbitrary contents, and any history of states.

use std::collections::HashSet;

use model::{Family, state::NodeState};

use crate::{
    apply::snapshot::{Snapshot, keys, number_in, value},
    encode::{
        elements::{Changes, Element, Elements, Value},
        schema::{Bytes, Field, Map, MapData},
    },
    observe::dump::{frontends, lines},
    plan::{
        endpoint_selector::{DROP, MatchKey, REFUSE, Selector},
        layout::{Layout, PreviousSlots},
    },
};

/// Elements that were listed in the kernel, of any map. Whatever they are, the state has the same meaning after a start with
/// them, and they can be described.
///
/// Each message is preceded by its map, its family and its length, which are a byte, a byte and two.
pub fn tables(mut bytes: &[u8], state: &NodeState) {
    let mut elements = Elements::new();
    while let [map, family, high, low, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])).min(rest.len()));
        let maps: Vec<_> = Map::all().chain([Map::SourceRanges]).collect();
        let map = maps[usize::from(*map) % maps.len()];
        let family = if family % 2 == 0 { Family::V4 } else { Family::V6 };
        for (key, element) in keys(message) {
            let key = Bytes(key.into());
            elements.insert(Element { family, map, list: u32::from(*high), key }, value(element));
        }
        bytes = rest;
    }
    // There are no more lines than elements; endpoints of a frontend are elements, too.
    assert!(lines(&elements).len() <= elements.len());
    let found: usize = frontends(&elements).iter().map(|it| it.backends.len()).sum();
    assert!(found <= elements.len() * elements.len());
    let snapshot = Snapshot { elements, ..Snapshot::default() };
    let _ = (snapshot.udp_endpoints(), snapshot.lists());
    let found = sorted_lines(&started(state, left(snapshot.elements)));
    assert_eq!(found, sorted_lines(&started(state, PreviousSlots::default())));
}

/// A history of states, whose changes lead from one to the next, as the kernel would apply them; each has the meaning that it
/// has without a history.
pub fn history<'a>(states: impl IntoIterator<Item = &'a NodeState>) {
    let (mut layout, mut elements) = (Layout::default(), Elements::new());
    for state in states {
        let changes = layout.update(state, &[], None).changes;
        apply(&mut elements, &changes);
        assert_eq!(elements, layout.elements(), "the changes lead to the elements");
        assert_eq!(sorted_lines(&layout), sorted_lines(&started(state, PreviousSlots::default())));
        let restarted = started(state, left(elements.clone()));
        let differ = Changes::between(&elements, &restarted.elements());
        assert_eq!(differ.len(), 0, "a restart changes nothing: {differ:?}");
        check_selectors(&elements);
        check_numbers(&elements);
    }
}

/// Every number of a selector is that of a chain.
fn check_selectors(elements: &Elements) {
    let is_in = |it: &Element, map| MatchKey::ALL.into_iter().any(|by| by.map(map) == it.map);
    let selectors = elements.keys().filter_map(|it| {
        let by = MatchKey::ALL.into_iter().find(|by| by.map(Map::Selectors) == it.map)?;
        Selector::of(by, it.parts().number()?).map(Selector::word)
    });
    let known: HashSet<_> = selectors.chain([REFUSE, DROP]).collect();
    for (element, value) in elements {
        if is_in(element, Map::Internal) || is_in(element, Map::External) {
            let word = number_in(value, element.family);
            assert!(word.is_some_and(|it| known.contains(&it)), "{element:?} {value:?}");
        }
    }
}

/// `nft` can list every number, and load it again.
fn check_numbers(elements: &Elements) {
    for (element, value) in elements {
        let data = match (element.map.data(), value) {
            (MapData::Fields(fields), Value::Data(it)) => Some((fields, it)),
            _ => None,
        };
        let parts = [(element.map.key(), &element.key)].into_iter().chain(data);
        for (_, bytes) in parts.filter(|(fields, _)| fields.last() == Some(&Field::Number)) {
            let number = u32::from_ne_bytes(*bytes.0.last_chunk().expect("it ends with a number"));
            assert!(number & 0xffff != 0 && number >> 16 != 0, "{number:08x} in {element:?}");
        }
    }
}

/// Applies changes as the kernel would.
pub(crate) fn apply(elements: &mut Elements, changes: &Changes) {
    for (element, value) in &changes.delete {
        assert_eq!(elements.remove(element).as_ref(), Some(value), "{element:?} is deleted and was there");
    }
    for (element, value) in &changes.add {
        let before = elements.insert(element.clone(), value.clone());
        assert_eq!(before, None, "{element:?} is added and was not there");
    }
}

/// The layout of a new process.
pub(crate) fn started(state: &NodeState, previous: PreviousSlots) -> Layout {
    let mut layout = Layout::default();
    layout.update(state, &[], Some(previous));
    layout
}

/// What the next process finds of elements.
pub(crate) fn left(elements: Elements) -> PreviousSlots {
    let mut previous = PreviousSlots::default();
    Snapshot { elements, ..Snapshot::default() }.previous(&mut previous);
    previous
}

/// The lines of a layout, in order.
pub(crate) fn sorted_lines(layout: &Layout) -> Vec<String> {
    let mut lines = lines(&layout.elements());
    lines.sort_unstable();
    lines
}
