//! What the fuzz targets call: tables with arbitrary contents, and any history of states.

use model::{Family, state::NodeState};

use crate::{
    apply::snapshot::{Snapshot, keys, value},
    encode::{
        elements::{Changes, Element, Elements},
        schema::{Bytes, Map},
    },
    observe::dump::{frontends, lines},
    plan::layout::{Layout, PreviousSlots},
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
    let mut previous = PreviousSlots::default();
    snapshot.previous(&mut previous);
    assert_eq!(described(state, &mut previous), described(state, &mut PreviousSlots::default()));
}

/// A history of states, whose changes lead from one to the next, as the kernel would apply them; each has the meaning that it
/// has without a history.
pub fn history<'a>(states: impl IntoIterator<Item = &'a NodeState>) {
    let (mut layout, mut elements) = (Layout::default(), Elements::new());
    for state in states {
        let changes = layout.update(state, &[], &mut PreviousSlots::default()).changes;
        apply(&mut elements, changes);
        assert_eq!(elements, layout.elements(), "the changes lead to the elements");
        let mut lines = lines(&elements);
        lines.sort_unstable();
        assert_eq!(lines, described(state, &mut PreviousSlots::default()));
        // As the next process finds them.
        let mut previous = PreviousSlots::default();
        Snapshot { elements: elements.clone(), ..Snapshot::default() }.previous(&mut previous);
        let mut restarted = Layout::default();
        restarted.update(state, &[], &mut previous);
        let differ = Changes::between(&elements, &restarted.elements());
        assert_eq!(differ.len(), 0, "a restart changes nothing: {differ:?}");
    }
}

fn apply(elements: &mut Elements, changes: Changes) {
    for (element, value) in changes.delete {
        assert_eq!(elements.remove(&element), Some(value), "{element:?} is deleted and was there");
    }
    for (element, value) in changes.add {
        assert_eq!(elements.insert(element.clone(), value), None, "{element:?} is added and was not there");
    }
}

/// What a new process makes of a state.
fn described(state: &NodeState, previous: &mut PreviousSlots) -> Vec<String> {
    let mut layout = Layout::default();
    layout.update(state, &[], previous);
    let mut lines = lines(&layout.elements());
    lines.sort_unstable();
    lines
}
