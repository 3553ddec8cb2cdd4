//! The pictures of the page in the documents: `cargo xtask pictures` takes them.

use std::{
    f64::consts::TAU,
    fs,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use build_tools::command::workspace;
use tests::{ConnectLoad, Service, TestNode, Transport, endpoint};

use crate::{PAGE, browser::Browser};

struct Pictured {
    namespace: &'static str,
    name: &'static str,
    /// The last byte of its address.
    last: u8,
    port: u16,
    endpoints: &'static [u8],
    /// Between two connects, on average.
    pause: Duration,
}

const fn service(
    (namespace, name): (&'static str, &'static str),
    last: u8,
    port: u16,
    endpoints: &'static [u8],
    pause: u64,
) -> Pictured {
    Pictured { namespace, name, last, port, endpoints, pause: Duration::from_millis(pause) }
}

const SERVICES: [Pictured; 9] = [
    service(("shop", "checkout"), 21, 8443, &[1, 2, 3], 9),
    service(("shop", "cart"), 22, 80, &[2, 4], 13),
    service(("shop", "catalogue"), 23, 80, &[1, 3, 4, 5], 5),
    service(("shop", "payments"), 24, 443, &[5], 34),
    service(("shop", "recommendations"), 25, 9090, &[], 110),
    service(("identity", "oauth2-proxy"), 31, 4180, &[3, 5], 27),
    service(("monitoring", "prometheus"), 41, 9090, &[2], 120),
    service(("kube-system", "metrics-server"), 51, 443, &[1], 170),
    service(("default", "kubernetes"), 1, 443, &[1, 2, 3], 60),
];
/// Nothing listens at this one.
const DEAD: u8 = 9;
/// How long a load stays the same.
const STEP: Duration = Duration::from_secs(2);

fn services(checkout: &[u8], catalogue: &[u8]) -> Vec<Service> {
    let service = |it: &Pictured| {
        let endpoints = match it.name {
            "checkout" => checkout,
            "catalogue" => catalogue,
            _ => it.endpoints,
        };
        let ip = IpAddr::from([10, 96, 0, it.last]);
        let service = Service::new(it.name, &[ip]).port("", "TCP", it.port, 8080);
        let mut service = endpoints.iter().fold(service, |service, n| {
            let node = if n % 2 == 0 { "n2" } else { "n1" };
            service.endpoint_on(node, &format!("{}-7d9c5b-{n}kq2f", it.name), &endpoint(*n))
        });
        it.namespace.clone_into(&mut service.namespace);
        service
    };
    SERVICES.iter().map(service).collect()
}

/// Connects to all Services for some time, at rates that come and go.
fn load(from: usize, steps: usize) {
    for step in from..from + steps {
        let loads = SERVICES.iter().zip(1..).map(|(it, number)| {
            let (wave, number) = (step as f64 / 9.0, f64::from(number));
            let factor =
                1.0 + 0.45 * (TAU * (wave + number / 4.0)).sin() + 0.15 * (wave * number * 5.0).sin();
            let address = (IpAddr::from([10, 96, 0, it.last]), it.port).into();
            ConnectLoad::start(Transport::Tcp, address, 1, it.pause.mul_f64(factor))
        });
        let loads: Vec<_> = loads.collect();
        thread::sleep(STEP);
        drop(loads);
    }
}

#[test]
#[ignore = "takes the pictures of the documents: cargo xtask pictures"]
fn the_pictures_of_the_page() {
    let (services_at_first, arguments) = (services(&[1, 2], &[1, 3]), ["--ui=127.0.0.1:10247"]);
    let Some(node) = TestNode::running_or_skip(1..=5, &services_at_first, &arguments) else { return };
    let browser = Browser::or_skip().unwrap();
    browser.resize(1280, 800);
    browser.open(PAGE);
    let began = Instant::now();
    let steps: [(&[u8], &[u8]); 6] = [
        (&[1, 2], &[1, 3, 4]),
        (&[1, 2, 3], &[1, 3, 4]),
        (&[1, 2, 3], &[1, 3, 4, 5]),
        (&[1, 3], &[1, 3, 4, 5]),
        (&[1, 2, 3], &[1, 3, 4, 5]),
        (&[1, 2, 3], &[1, 3, 4, 5, DEAD]),
    ];
    for (turn, (checkout, catalogue)) in steps.into_iter().enumerate() {
        load(turn * 5, 5);
        node.write(&services(checkout, catalogue));
    }
    let folder = workspace().join("docs/pictures");
    fs::create_dir_all(&folder).unwrap();
    let take = |name: &str| {
        for scheme in ["light", "dark"] {
            browser.prefer(scheme);
            load(0, 1);
            fs::write(folder.join(format!("{name}-{scheme}.png")), browser.screenshot()).unwrap();
        }
    };
    assert!(began.elapsed() > Duration::from_secs(60), "the plots are full");
    // What is ejected is counted every five seconds.
    load(30, 3);
    take("ui");
    browser.open(&format!("{PAGE}/#/service/shop/catalogue"));
    load(33, 12);
    take("ui-service");
    assert_eq!(browser.complaints(), [""; 0]);
}
