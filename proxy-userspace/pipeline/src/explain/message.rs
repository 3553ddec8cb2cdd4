//! Explanations as messages of the contract, in both directions.

use brain::{AppliedRule, ClientKind, ExplainedClient, ExplainedEndpoint, Explanation, Verdict};
use proxy_contract::localv1;

pub(super) fn encode(it: Explanation) -> localv1::Explanation {
    let Explanation { node, client, destination, protocol, verdict, reason, service, port, rules, endpoints } =
        it;
    let kind = match client.kind {
        ClientKind::Node => localv1::ClientKind::NodeClient,
        ClientKind::Pod => localv1::ClientKind::PodClient,
        ClientKind::Outside => localv1::ClientKind::OutsideClient,
    };
    let verdict = match verdict {
        Verdict::Redirected => localv1::Verdict::Redirected,
        Verdict::Refused => localv1::Verdict::Refused,
        Verdict::Dropped => localv1::Verdict::Dropped,
        Verdict::Untranslated => localv1::Verdict::Untranslated,
    };
    let client = localv1::ExplainedClient {
        kind: kind.into(),
        pod: client.pod.unwrap_or_default(),
        addresses: client.addresses.iter().map(ToString::to_string).collect(),
    };
    let endpoint = |it: ExplainedEndpoint| localv1::ExplainedEndpoint {
        endpoint: it.endpoint.to_string(),
        used: it.used,
        reason: it.reason,
        pod_name: it.pod.unwrap_or_default(),
        node_name: it.node.unwrap_or_default(),
    };
    localv1::Explanation {
        node_name: node,
        client: Some(client),
        destination: destination.to_string(),
        protocol: localv1::Protocol::from_str_name(&protocol).unwrap_or_default().into(),
        verdict: verdict.into(),
        reason,
        service,
        port,
        rules: rules
            .into_iter()
            .map(|AppliedRule { rule, says }| localv1::AppliedRule { rule, says })
            .collect(),
        endpoints: endpoints.into_iter().map(endpoint).collect(),
    }
}

/// The explanation in a message; the error names the field that cannot be understood.
pub(super) fn decode(it: localv1::Explanation) -> Result<Explanation, String> {
    let (protocol, verdict) = (it.protocol(), it.verdict());
    if protocol == localv1::Protocol::UnknownProtocol {
        return Err(format!("protocol {}", it.protocol));
    }
    let client = it.client.ok_or("no client")?;
    let kind = match client.kind() {
        localv1::ClientKind::NodeClient => ClientKind::Node,
        localv1::ClientKind::PodClient => ClientKind::Pod,
        localv1::ClientKind::OutsideClient => ClientKind::Outside,
        localv1::ClientKind::UnknownClient => return Err(format!("client kind {}", client.kind)),
    };
    let verdict = match verdict {
        localv1::Verdict::Redirected => Verdict::Redirected,
        localv1::Verdict::Refused => Verdict::Refused,
        localv1::Verdict::Dropped => Verdict::Dropped,
        localv1::Verdict::Untranslated => Verdict::Untranslated,
        localv1::Verdict::UnknownVerdict => return Err(format!("verdict {}", it.verdict)),
    };
    let addresses = client.addresses.iter().map(|it| it.parse().map_err(|_| format!("address {it:?}")));
    let known = |it: String| Some(it).filter(|it| !it.is_empty());
    let endpoint = |it: localv1::ExplainedEndpoint| {
        Ok(ExplainedEndpoint {
            endpoint: it.endpoint.parse().map_err(|_| format!("endpoint {:?}", it.endpoint))?,
            used: it.used,
            reason: it.reason,
            pod: known(it.pod_name),
            node: known(it.node_name),
        })
    };
    Ok(Explanation {
        node: it.node_name,
        client: ExplainedClient {
            kind,
            pod: known(client.pod),
            addresses: addresses.collect::<Result<_, _>>()?,
        },
        destination: it.destination.parse().map_err(|_| format!("destination {:?}", it.destination))?,
        protocol: protocol.as_str_name().to_owned(),
        verdict,
        reason: it.reason,
        service: it.service,
        port: it.port,
        rules: it
            .rules
            .into_iter()
            .map(|localv1::AppliedRule { rule, says }| AppliedRule { rule, says })
            .collect(),
        endpoints: it.endpoints.into_iter().map(endpoint).collect::<Result<_, String>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explanation(kind: ClientKind, verdict: Verdict, protocol: &str) -> Explanation {
        let endpoint = |endpoint: &str, used| ExplainedEndpoint {
            endpoint: endpoint.parse().unwrap(),
            used,
            reason: "ready".into(),
            pod: used.then(|| "web-1".into()),
            node: used.then(|| "n1".into()),
        };
        Explanation {
            node: "n1".into(),
            client: ExplainedClient {
                kind,
                pod: (kind != ClientKind::Outside).then(|| "a/b".into()),
                addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            },
            destination: "[fd00::10]:80".parse().unwrap(),
            protocol: protocol.into(),
            verdict,
            reason: "to one of 2 endpoints".into(),
            service: (verdict != Verdict::Untranslated).then(|| "default/web".into()),
            port: (verdict != Verdict::Untranslated).then(String::new),
            rules: vec![AppliedRule { rule: "frontend".into(), says: "cluster IP".into() }],
            endpoints: vec![endpoint("[fd00::7]:8080", true), endpoint("10.0.0.7:8080", false)],
        }
    }

    #[test]
    fn every_explanation_survives_the_way_to_another_process() {
        for kind in [ClientKind::Node, ClientKind::Pod, ClientKind::Outside] {
            for verdict in [Verdict::Redirected, Verdict::Refused, Verdict::Dropped, Verdict::Untranslated] {
                for protocol in ["TCP", "UDP", "SCTP"] {
                    let it = explanation(kind, verdict, protocol);
                    assert_eq!(decode(encode(it.clone())), Ok(it));
                }
            }
        }
    }

    #[test]
    fn what_another_brain_says_and_is_not_understood_is_named() {
        let message = || encode(explanation(ClientKind::Node, Verdict::Refused, "TCP"));
        let check = |change: fn(&mut localv1::Explanation), expect: &str| {
            let mut message = message();
            change(&mut message);
            assert_eq!(decode(message).unwrap_err(), expect);
        };
        check(|it| it.verdict = 9, "verdict 9");
        check(|it| it.protocol = 9, "protocol 9");
        check(|it| it.client = None, "no client");
        check(|it| it.client.as_mut().unwrap().kind = 9, "client kind 9");
        check(|it| it.client.as_mut().unwrap().addresses.push("x".into()), "address \"x\"");
        check(|it| it.destination = "10.0.0.1".into(), "destination \"10.0.0.1\"");
        check(|it| it.endpoints[0].endpoint.clear(), "endpoint \"\"");
    }
}
