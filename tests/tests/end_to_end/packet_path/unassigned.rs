//! Addresses of a ServiceCIDR that no Service has.

use tests::{EchoServer, TIMEOUT, Transport, eventually};

use super::{
    RunningCluster, apply_service_cidr, at, check_dropped, check_refused, cluster_ips, has_service_cidr,
    internal, internal_frontends, on_both_nodes, server,
};

#[test]
fn an_address_in_a_service_cidr_that_no_service_has_is_dropped() {
    let web = on_both_nodes(internal("web", 1));
    RunningCluster::each(std::slice::from_ref(&web), &[], |mut it| {
        let local = at(cluster_ips(200)[0], 80);
        it.n1.add_interface_address("10.96.0.200/32", "lo").unwrap();
        let _server = it.n1.run(|| EchoServer::start("n1", local)).unwrap();
        // Where the default route leads.
        let elsewhere = at(cluster_ips(201)[0], 80);
        it.client.add_interface_address("10.96.0.201/32", "lo").unwrap();
        let _other = it.client.run(|| EchoServer::start("elsewhere", elsewhere)).unwrap();
        let reply = it.pods[0].run(|| tests::request(Transport::Tcp, elsewhere));
        assert_eq!(reply.unwrap(), "elsewhere");

        apply_service_cidr(&it);
        let unassigned = internal_frontends(9);
        check_dropped(&it.pods[0], elsewhere);
        for address in unassigned {
            for from in [&it.pods[0], &it.client, &it.n1] {
                check_dropped(from, address);
            }
        }
        for from in [&it.pods[0], &it.client, &it.n1] {
            check_refused(from, at(cluster_ips(1)[0], 81));
            let reply = from.run(|| tests::request(Transport::Tcp, local));
            assert_eq!(reply.unwrap(), "n1", "an address of the host itself");
        }

        it.apply(&[web.clone(), on_both_nodes(internal("new", 9))]);
        for address in unassigned {
            assert!(["p1", "p3"].contains(&&*server(&it.pods[1], address)), "{address}");
            assert!(["p1", "p3"].contains(&&*server(&it.n1, address)), "{address}");
        }
        it.apply(std::slice::from_ref(&web));
        check_dropped(&it.pods[0], unassigned[0]);

        std::fs::remove_file(it.manifests().join("service-cidr.yaml")).unwrap();
        assert!(eventually(TIMEOUT, || !has_service_cidr(&it)));
    });
}
