//! How a decision is put into words, by the questions in `explain.yaml`.

#![expect(clippy::unwrap_used, reason = "a test")]

mod cluster;

use std::collections::BTreeMap;

use brain::{ExplainedEndpoint, Explanation, Options, Query, explain};
use model::cluster::ClusterState;
use serde::Deserialize;
use serde_json::Value;

use self::cluster::Cluster;

/// A cluster, and questions about it.
#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(flatten)]
    cluster: Cluster,
    questions: Vec<Question>,
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    ask: String,
    says: Option<Vec<String>>,
    reason: Option<String>,
    destination: Option<String>,
    client: Option<String>,
    #[serde(default)]
    rules: BTreeMap<String, Option<String>>,
}

fn says(answer: &Result<Explanation, String>) -> Vec<String> {
    let endpoint = |it: &ExplainedEndpoint| {
        let address = it.endpoint.ip().to_string();
        let last = address.rsplit('.').next().unwrap().to_owned();
        format!("{last} {}: {}", if it.used { "used" } else { "not used" }, it.reason)
    };
    match answer {
        Ok(it) => {
            let verdict = format!("{:?}: {}", it.verdict, it.reason);
            [verdict].into_iter().chain(it.endpoints.iter().map(endpoint)).collect()
        }
        Err(error) => vec![error.clone()],
    }
}

fn check(case: &str, cluster: &ClusterState, question: &Question) {
    let Question { ask, says: expect, reason, destination, client, rules } = question;
    let about = format!("{case}: {ask}");
    let query = Query::parse(&ask.split(' ').collect::<Vec<_>>());
    let answer = query.and_then(|it| explain(cluster, &Options::default(), "n1", &it));
    let answer = answer.map_err(|it| it.to_string());
    if let Some(expect) = expect {
        assert_eq!(&says(&answer), expect, "{about}");
    }
    let answer = answer.ok();
    let found = |of: fn(&Explanation) -> String| answer.as_ref().map(of);
    let expect_found = |expect: &Option<String>, of| {
        assert!(expect.is_none() || *expect == found(of), "{about}: {answer:#?}");
    };
    expect_found(reason, |it| it.reason.clone());
    expect_found(destination, |it| format!("{}/{}", it.destination, it.protocol));
    expect_found(client, |it| {
        let addresses: Vec<_> = it.client.addresses.iter().map(ToString::to_string).collect();
        format!("{} {}", it.client.pod.as_deref().unwrap_or_default(), addresses.join(" "))
    });
    for (rule, expect) in rules {
        let applied = answer.iter().flat_map(|it| &it.rules).find(|it| it.rule == *rule);
        assert_eq!(applied.map(|it| &it.says), expect.as_ref(), "{about}: {rule}: {answer:#?}");
    }
    assert!(answer.is_some() || rules.is_empty(), "{about}");
}

#[test]
fn each_question_is_answered_in_these_words() {
    let mut text = include_bytes!("explain.yaml").as_slice();
    let mut count = 0;
    for case in serde_saphyr::read::<_, Case>(&mut text) {
        let case = case.unwrap();
        assert!(case.unknown.is_empty(), "{}: {:?}", case.name, case.unknown);
        let cluster = case.cluster.state();
        case.questions.iter().for_each(|it| check(&case.name, &cluster, it));
        count += case.questions.len();
    }
    assert_eq!(count, 92, "no question is skipped unnoticed");
}
