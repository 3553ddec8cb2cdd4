//! The page as it is asked for.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use hyper::{Request, Response};
use publish::Publisher;
use reconciler::Observer as _;
use serde_json::Value;
use tokio::time::sleep;

use super::live::IDLE_TIMEOUT;
use crate::{
    admin::Admin,
    fixtures::{FixedCounts, apply, published, report, service},
    http::PageGroup,
    http::body::PageBody,
    state::Role,
};

async fn get(admin: &Admin, path: &str, headers: &[(&str, &str)]) -> Response<PageBody> {
    let mut request = Request::builder().uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    admin.respond(PageGroup::Ui, &request.body(()).unwrap()).await
}

async fn body(response: Response<PageBody>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What the page gets for a question.
async fn live(admin: &Admin, query: &str) -> Value {
    let response = get(admin, &format!("/live?{query}"), &[("host", "localhost")]).await;
    assert_eq!(response.status(), 200);
    serde_json::from_str(&body(response).await).unwrap()
}

/// A process that serves `a` with two endpoints, `b` with one and `c` without any.
fn busy() -> (Admin, Publisher) {
    let admin = Admin::new("n1", Role::Backend);
    admin.enable_timeline();
    admin.set_readers(|it| {
        it.has_sockets = true;
        it.counters = Some(Arc::new(|| Some(FixedCounts::of(&[("a", 7)]))));
    });
    let publisher = Publisher::new("n1");
    apply(&admin, &publisher, [service("a", 2, None), service("b", 1, None), service("c", 0, None)]);
    (admin, publisher)
}

#[tokio::test]
async fn a_host_that_is_not_this_one_is_refused() {
    let admin = busy().0;
    for host in ["localhost:10247", "LOCALHOST", "127.0.0.1:9", "127.1.2.3", "[::1]:10247"] {
        assert_eq!(get(&admin, "/live", &[("host", host)]).await.status(), 200, "{host}");
    }
    for host in
        ["evil.example", "evil.example:10247", "127.0.0.1.evil.example", "192.0.2.1", "a@localhost", ""]
    {
        let response = get(&admin, "/live", &[("host", host)]).await;
        assert_eq!(response.status(), 403, "{host}");
        assert!(body(response).await.contains("localhost"));
    }
    assert_eq!(get(&admin, "/", &[]).await.status(), 403);
    let from_elsewhere = [("host", "localhost"), ("sec-fetch-site", "cross-site")];
    assert_eq!(get(&admin, "/live", &from_elsewhere).await.status(), 403);
    // A link to the page is none of its requests.
    assert_eq!(get(&admin, "/", &from_elsewhere).await.status(), 200);
}

#[tokio::test]
async fn the_page_is_one_file_that_names_no_other_place() {
    let response = get(&busy().0, "/", &[("host", "localhost")]).await;
    let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    let policy = header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!((header("cache-control"), header("x-frame-options")), ("no-store".into(), "DENY".into()));
    let page = body(response).await;
    assert_eq!((page.matches("<script").count(), page.matches("<style").count()), (1, 1));
    let elsewhere = ["https://", "src=", "@import", "url(", "style=", "onclick"];
    // The name of a namespace is no address that is asked.
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for it in elsewhere.iter().chain(&["http://"]) {
        assert!(!page.contains(it), "{it}");
    }
}

#[tokio::test]
async fn rows_are_found_sorted_and_counted_by_the_server_and_one_is_shown_with_its_endpoints() {
    let (admin, _) = busy();
    let names = |it: &Value| -> Vec<String> {
        let rows = it["rows"].as_array().unwrap();
        rows.iter().map(|it| it["name"].as_str().unwrap().to_owned()).collect()
    };
    let all = live(&admin, "").await;
    assert_eq!(names(&all), ["default/a", "default/b", "default/c"]);
    assert_eq!((all["found"].as_u64(), all["services"].as_u64()), (Some(3), Some(3)));
    assert_eq!(all["rows"][0]["endpoints"], 2);
    let page = live(&admin, "sort=endpoints&from=1&count=1").await;
    assert_eq!((names(&page), page["found"].as_u64()), (vec!["default/b".into()], Some(3)));
    assert_eq!(names(&live(&admin, "q=default%2Fc").await), ["default/c"]);
    // Beyond the last one are the last ones.
    assert_eq!(names(&live(&admin, "from=1000&count=2&sort=name").await), ["default/c"]);
    let shown = live(&admin, "service=default%2Fa").await;
    let port = &shown["service"]["ports"][0];
    assert_eq!(port["endpoints"].as_array().unwrap().len(), 2);
    assert_eq!(port["endpoints"][0]["pod"], "p0");
    assert_eq!(port["addresses"][0], "10.96.0.1:80");
    assert_eq!(port["endpoints"][0]["connections"], 7);
    assert_eq!(live(&admin, "service=default%2Fnone").await["service"]["isServed"], false);
}

#[tokio::test]
async fn the_timeline_is_sent_as_far_as_it_is_new() {
    let (admin, publisher) = busy();
    let first = live(&admin, "").await;
    assert_eq!(first["timeline"]["generations"][0]["changes"][0]["service"], "default/a");
    let version = first["timeline"]["version"].as_u64().unwrap();
    let next = published(&publisher, [service("a", 3, None)]);
    admin.on_dequeued(&next);
    let second = live(&admin, &format!("since={version}")).await;
    let generations = second["timeline"]["generations"].as_array().unwrap();
    assert_eq!((generations.len(), &generations[0]["activeMicros"]), (1, &Value::Null));
    admin.on_applied(&next, &report(), Duration::from_millis(3));
    let third = live(&admin, &format!("since={}", second["timeline"]["version"])).await;
    assert!(third["timeline"]["generations"][0]["activeMicros"].is_u64(), "{third}");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_kept_once_no_browser_asks() {
    let (admin, _) = busy();
    live(&admin, "").await;
    assert!(admin.ui.watched.lock().await.is_some());
    sleep(IDLE_TIMEOUT * 3).await;
    assert!(admin.ui.watched.lock().await.is_none());
}
