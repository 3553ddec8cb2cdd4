//! Frontends whose packets nodes forward whole.

use model::state::ForwardedPort;

use super::*;

/// The port of a [`Made`] Service whose forwarded packets these pods serve.
pub(super) fn port(pods: &[u32]) -> ForwardedPort {
    let targets = pods.iter().map(|it| SocketAddr::new(pod_ip(*it).into(), 5353)).collect();
    ForwardedPort { index: 0, family: Family::V4, nodes: Arc::default(), targets }
}

pub(super) fn forwarded(pods: &[u32]) -> Made {
    Made { balancer: Some(9), forwarded: Some(pods.to_vec()), ..Made::new(1, &[1, 2]) }
}

#[test]
fn without_an_endpoint_here_or_with_the_policy_local_a_frontend_serves_as_if_it_were_not_forwarded() {
    let watch = Watch::Forwarded.element(Family::V4).0;
    for made in [forwarded(&[]), Made { external_local: true, ..forwarded(&[1]) }] {
        let mut elements = laid_out(std::slice::from_ref(&made)).elements();
        // Packets that have a second node are to be sent on nevertheless.
        assert_eq!(elements.remove(&watch).is_some(), !made.external_local);
        assert_eq!(elements, laid_out(&[Made { forwarded: None, ..made }]).elements());
    }
}

#[test]
fn forwarding_costs_what_it_changes() {
    let mut layout = Layout::default();
    let mut take = |made: Made| {
        let changes = update(&mut layout, &[made]).changes;
        (changes.delete.len(), changes.add.len())
    };
    take(Made { forwarded: None, ..forwarded(&[]) });
    assert_eq!(take(forwarded(&[])), (0, 1), "chains for its packets");
    // The policy, the selector with its chain, and the endpoint.
    assert_eq!(take(forwarded(&[1])), (0, 4));
    assert_eq!(take(forwarded(&[2])), (1, 1));
    // Another endpoint that is on another node.
    assert_eq!(take(Made { pods: vec![3, 2], ..forwarded(&[2]) }), (2, 2));
    // The set of all endpoints.
    assert_eq!(take(Made { pods: vec![3, 2], ..forwarded(&[2, 3]) }), (3, 1));
    assert_eq!(take(Made { pods: vec![3, 2], forwarded: None, ..forwarded(&[]) }), (3, 0));
}
