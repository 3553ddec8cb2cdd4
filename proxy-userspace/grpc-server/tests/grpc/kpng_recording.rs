//! A stream recorded from KPNG's brain.

use model::state::{EndpointKey, Scopes};
use prost::Message as _;
use proxy_contract::localv1::OpItem;

use crate::{
    common::{Folder, while_following},
    scripted_brain::ScriptedBrain,
};

/// Between the reset and the sync.
const CHANGE_SET: [&str; 3] = [
    "12540a150801121164656661756c742f6974702d6c6f63616c123b0a0764656661756c7412096974702d6c6f63616c1a09436c7573746572\
     4950220e0a0c0a0a31302e39362e302e32303208100118bb0328fb416001",
    "12310a190802121564656661756c742f6974702d6c6f63616c2f702d611214120a0a0831302e302e312e3218012a0408011001",
    "122d0a190802121564656661756c742f6974702d6c6f63616c2f702d621210120a0a0831302e302e322e322a021001",
];

fn item(hex: &str) -> OpItem {
    let pairs = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
    OpItem::decode(pairs.collect::<Vec<_>>().as_slice()).unwrap()
}

#[tokio::test]
async fn the_recording_is_decoded() {
    let folder = Folder::new();
    ScriptedBrain::new([CHANGE_SET.map(item).to_vec()]).serve(&folder.socket());
    let published = while_following(folder.upstream(), async |mut states| states.next().await.unwrap()).await;
    // KPNG sends no revisions: the publisher counts.
    assert_eq!((published.rev, published.state.services.len()), (1, 1));
    let state = published.state.services.values().next().unwrap();
    assert_eq!(state.service.name.to_string(), "default/itp-local");
    assert_eq!(state.service.ports[0].port.get(), 443);
    let [a, b] = state.endpoints.as_slice() else { panic!("{:?}", state.endpoints) };
    assert_eq!((&a.key, a.local), (&EndpointKey::Anonymous("p-a".into()), true));
    assert_eq!((&b.key, b.local), (&EndpointKey::Anonymous("p-b".into()), false));
    assert_eq!(a.ports[0].port.get(), 8443);
    assert_eq!(a.ports[0].scopes, Scopes { internal: true, external: true, cluster: true });
    assert_eq!(b.ports[0].scopes, Scopes { internal: false, external: true, cluster: true });
}
