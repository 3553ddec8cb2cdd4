//! The examples for traffic from outside.

use std::fs;

use tests::deploy;

use super::{one, strings};

/// MetalLB's examples announce the addresses that they give out, and the router takes these from the peer that they name.
#[test]
fn the_examples_of_traffic_from_outside_fit_together() {
    let read = |name: &str| fs::read_to_string(deploy::folder().join("outside").join(name)).unwrap();
    for (file, kinds) in [
        ("metallb-l2.yaml", &["IPAddressPool", "L2Advertisement"][..]),
        ("metallb-bgp.yaml", &["IPAddressPool", "BGPPeer", "BGPAdvertisement"]),
    ] {
        let objects = deploy::documents(&read(file)).unwrap();
        assert_eq!(objects.iter().map(|it| it["kind"].as_str().unwrap()).collect::<Vec<_>>(), kinds);
        let named = |kind: &str| {
            let of_kind = objects.iter().filter(move |it| it["kind"] == kind);
            of_kind.map(|it| it["metadata"]["name"].as_str().unwrap()).collect::<Vec<_>>()
        };
        for it in &objects {
            assert!(it["apiVersion"].as_str().unwrap().starts_with("metallb.io/v1beta"), "{it}");
            assert_eq!(it["metadata"]["namespace"], "metallb-system", "{it}");
        }
        let advertisement = &objects.last().unwrap()["spec"];
        assert_eq!(strings(&advertisement["ipAddressPools"]), named("IPAddressPool"), "{file}");
        assert_eq!(strings(&advertisement["peers"]), named("BGPPeer"), "{file}");
    }
    let objects = deploy::documents(&read("metallb-bgp.yaml")).unwrap();
    let (pool, peer) = (&one(&objects, "IPAddressPool")["spec"], &one(&objects, "BGPPeer")["spec"]);
    let router = read("frr.conf");
    for line in [
        format!("\nrouter bgp {}\n", peer["peerASN"]),
        format!("\n neighbor nodes remote-as {}\n", peer["myASN"]),
        format!("permit {} ge 32\n", strings(&pool["addresses"])[0]),
    ] {
        assert!(router.contains(&line), "{line:?} is not in\n{router}");
    }
}
