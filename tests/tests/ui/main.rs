//! The page for people, in a real browser.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod browser;
mod pictures;

use std::{net::Ipv4Addr, time::Duration};

use tests::{EchoConnection, Service, TestNode, WEB4, http, web4};

use browser::Browser;

const PAGE: &str = "http://127.0.0.1:10247";
/// The page asks once a second, and a change takes a few milliseconds.
const LIVE: Duration = Duration::from_secs(2);
const REFUSING: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 11);

/// A node with a page, `web` at two endpoints, `none` without any, and some more Services.
fn node_or_skip(others: u32) -> Option<TestNode> {
    let mut node = TestNode::serving_or_skip([1, 2, 3])?;
    write(&node, &[1, 2], others);
    node.start(&["--ui=127.0.0.1:10247"]);
    Some(node)
}

fn write(node: &TestNode, endpoints: &[u8], others: u32) {
    let none = Service::new("none", &[REFUSING.into()]).port("http", "TCP", 80, 80);
    let other = |n: u32| {
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 97, 0, 0).to_bits() + n);
        Service::new(&format!("other-{n:05}"), &[address.into()]).port("http", "TCP", 80, 8080).endpoints([1])
    };
    let services: Vec<_> =
        [web4(endpoints.iter().copied()), none].into_iter().chain((0..others).map(other)).collect();
    node.write(&services);
}

fn connect() {
    drop(EchoConnection::connect((WEB4, 80).into()).unwrap());
}

/// The names of the Services that the page shows, in order.
fn names(browser: &Browser) -> Vec<String> {
    let names = browser.evaluate("[...document.querySelectorAll('#rows a')].map(it => it.textContent)");
    serde_json::from_value(names).unwrap()
}

#[test]
fn a_browser_shows_services_and_what_changes_within_two_seconds() {
    let Some(node) = node_or_skip(30) else { return };
    let Some(browser) = Browser::or_skip() else { return };
    browser.open(PAGE);
    browser.wait_for("#health", "the health", |it| it == "healthy");
    browser.wait_for("#count-services", "the number of Services", |it| it == "32");
    browser.wait_for("#range", "the first page of Services", |it| it == "1–25 of 32 Services");
    browser.click("#next");
    browser.wait_for("#range", "the second page of Services", |it| it == "26–32 of 32 Services");

    browser.type_in("#search", "10.96.0.10");
    browser.wait_for("#range", "what was searched for", |it| it == "1 Service");
    assert_eq!(names(&browser), ["default/web"]);
    browser.type_in("#search", "0");
    browser.wait_for("#none", "that nothing was found", |it| it.contains("10.96.0.100"));
    browser.evaluate("document.activeElement.blur()");
    browser.type_in("#search", "\u{e00c}");
    browser.wait_for("#range", "all of them", |it| it.contains("of 32 Services"));

    // A Service that is used comes first, with its rate and a plot.
    browser.wait_for("#rows tr:first-child .rate", "the rate", |it| {
        connect();
        it.parse().is_ok_and(|it: f64| it > 0.0)
    });
    assert_eq!(names(&browser)[0], "default/web");
    let plot = browser.evaluate("document.querySelector('#rows tr:first-child .line').getAttribute('d')");
    assert!(plot.as_str().is_some_and(|it| it.starts_with('M')), "{plot}");
    browser.wait_for("#count-refused", "what is refused", |it| {
        EchoConnection::connect((REFUSING, 80).into()).unwrap_err();
        it.parse().is_ok_and(|it: f64| it > 0.0)
    });
    browser.click("#failing");
    browser.wait_for("#rows tr:first-child", "what fails first", |it| {
        EchoConnection::connect((REFUSING, 80).into()).unwrap_err();
        it.contains("default/none") && it.contains("no endpoints") && it.contains("refused/s")
    });

    // One Service, by the keyboard.
    browser.type_in("#search", "web");
    browser.wait_for("#range", "what was searched for", |it| it == "1 Service");
    browser.type_in("#rows a", "\u{e007}");
    browser.wait_for("#service-title", "the Service", |it| it == "default/web");
    let focused = browser.evaluate("document.activeElement.id");
    assert_eq!(focused, "service-title", "a screen reader reads on there");
    browser.wait_for("#verdict", "where connections go", |it| {
        it == "Connections are redirected to one of 2 endpoints"
    });
    browser.wait_for("#endpoints", "its endpoints with shares", |it| {
        connect();
        it.contains("10.244.1.1:8080")
            && it.contains("10.244.1.2:8080")
            && it.contains(" %")
            && it.contains("web-1")
            && it.contains("ready")
    });
    assert_eq!(browser.evaluate("document.getElementById('differs').hidden"), true);

    write(&node, &[1, 2, 3], 30);
    let has_new = |it: &str| it.contains("10.244.1.3:8080");
    browser.wait_for_at_most(LIVE, "#endpoints", "the new endpoint", has_new);
    browser.wait_for_at_most(LIVE, "#generations li:first-child", "what the generation changed", |it| {
        it.contains("default/web 2 → 3 endpoints") && it.contains("active ") && it.contains("brain ")
    });
    browser.wait_for("#endpoints", "connections to the new endpoint", |it| {
        connect();
        let new = it.split("10.244.1.3:8080").nth(1).unwrap_or_default();
        new.split_whitespace().any(|it| it.parse().is_ok_and(|it: u32| (1..100).contains(&it)))
    });

    assert_eq!(browser.complaints(), [""; 0]);
    let servers: Vec<_> = browser.servers().into_iter().collect();
    assert_eq!(servers, [PAGE], "nothing else is asked");
}

#[test]
fn it_fits_on_any_screen_in_both_color_schemes() {
    let Some(_node) = node_or_skip(30) else { return };
    let Some(browser) = Browser::or_skip() else { return };
    let background = |browser: &Browser| browser.evaluate("getComputedStyle(document.body).backgroundColor");
    let mut backgrounds = Vec::new();
    for scheme in ["light", "dark"] {
        browser.prefer(scheme);
        for (width, height) in [(360, 740), (768, 1024), (1280, 900), (2560, 1200)] {
            browser.resize(width, height);
            for address in [PAGE.to_owned(), format!("{PAGE}/#/service/default/web")] {
                browser.open("about:blank");
                browser.open(&address);
                browser.wait_for("#generations", "the timeline", |it| it.contains("active"));
                if address.ends_with("web") {
                    browser.wait_for("#endpoints", "the endpoints", |it| it.contains("10.244.1.1:8080"));
                }
                let widths = browser.evaluate(
                    "[document.documentElement.scrollWidth, innerWidth, \
                     ...[...document.querySelectorAll('.card')].filter(it => it.scrollWidth > it.clientWidth).map(it => it.id)]",
                );
                assert_eq!(widths, serde_json::json!([width, width]), "{scheme} {address}");
            }
        }
        backgrounds.push(background(&browser));
    }
    assert_ne!(backgrounds[0], backgrounds[1]);
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn ten_thousand_services_take_a_page_and_a_few_kilobytes() {
    let Some(_node) = node_or_skip(10_000) else { return };
    let Some(browser) = Browser::or_skip() else { return };
    browser.open(PAGE);
    browser.wait_for("#count-services", "the number of Services", |it| it == "10,002");
    assert_eq!(names(&browser).len(), 25);
    let answer = http::get((Ipv4Addr::LOCALHOST, 10247).into(), "/live?count=25").unwrap();
    assert!(answer.body.len() < 32 << 10, "{} bytes", answer.body.len());
    browser.type_in("#search", "other-09999");
    browser.wait_for("#range", "what was searched for", |it| it == "1 Service");
    assert_eq!(names(&browser), ["default/other-09999"]);
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn a_process_that_goes_is_missed_and_one_that_comes_is_followed() {
    let Some(mut node) = node_or_skip(0) else { return };
    let Some(browser) = Browser::or_skip() else { return };
    browser.open(PAGE);
    browser.wait_for("#health", "the health", |it| it == "healthy");
    node.kill();
    browser.wait_for("#lost", "that the proxy does not answer", |it| it.contains("has not answered since"));
    write(&node, &[3], 0);
    node.start(&["--ui=127.0.0.1:10247"]);
    browser.wait_for("#health", "the health", |it| it == "healthy");
    browser.wait_for("#generations", "the timeline of the new process", |it| {
        it.contains("Revision 1") && it.contains("complete")
    });
    assert_eq!(browser.evaluate("document.getElementById('lost').hidden"), true);
}
