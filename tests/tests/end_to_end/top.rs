//! `top`, on a real terminal and without one.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::Ipv4Addr,
    process::{Child, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use nix::pty::{Winsize, openpty};
use serde_json::Value;
use tests::{
    EchoConnection, FRONTEND, Service, TIMEOUT, TestNode, assert_contains, eventually, run, web, web4,
};

const REFUSING: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 96, 0, 11), 80);

/// A node with `web` at two endpoints, and `none`, which has none.
fn node_or_skip() -> Option<TestNode> {
    let none = Service::new("none", &[REFUSING.0.into()]).port("http", "TCP", 80, 80);
    TestNode::running_or_skip([1, 2], &[web4([1, 2]), none], &[])
}

/// `top` on a terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    fn start(node: &TestNode, (rows, columns): (u16, u16)) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        let mut command = node.cli("top");
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        drop(command);
        drop(pty.slave);
        let keyboard = File::from(pty.master);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (mut output, shown) = (keyboard.try_clone().unwrap(), screen.clone());
        // Ends when `top` does, and with it the other side of the terminal.
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                shown.lock().unwrap().process(&bytes[..length]);
            }
        });
        Self { child, keyboard, screen }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    #[track_caller]
    fn wait_for(&self, what: &str, is_shown: impl Fn(&str) -> bool) {
        assert!(eventually(TIMEOUT, || is_shown(&self.text())), "{what} is not shown:\n{}", self.text());
    }

    #[track_caller]
    fn quit(mut self, keys: &str) {
        self.press(keys);
        let has_ended = eventually(TIMEOUT, || self.child.try_wait().unwrap().is_some());
        if !has_ended {
            let _ = self.child.kill();
        }
        assert!(has_ended && self.child.wait().unwrap().success());
        // The last of its output may not have been read yet.
        let is_restored = || !self.screen.lock().unwrap().screen().alternate_screen();
        assert!(eventually(TIMEOUT, is_restored), "the terminal is as it was");
    }
}

fn line<'a>(text: &'a str, part: &str) -> &'a str {
    text.lines().find(|it| it.contains(part)).unwrap_or_default()
}

#[test]
fn a_terminal_shows_what_is_connected_now() {
    let Some(mut node) = node_or_skip() else { return };
    let mut top = Terminal::start(&node, (24, 120));
    top.wait_for("each Service", |it| it.contains("default/web") && it.contains("default/none"));
    let connect = |top: &Terminal, what: &str, is_shown: &dyn Fn(&str) -> bool| {
        top.wait_for(what, |it| {
            drop(EchoConnection::connect(FRONTEND).unwrap());
            EchoConnection::connect(REFUSING.into()).unwrap_err();
            is_shown(it)
        });
    };
    connect(&top, "a plot", &|it| line(it, "default/web").contains('█'));
    top.press("r");
    top.wait_for("the order", |it| it.contains("by refused"));
    connect(&top, "what refuses first", &|it| {
        it.lines().nth(2).is_some_and(|it| it.contains("default/none"))
    });
    top.press("/web\r");
    top.wait_for("the filter", |it| it.contains("with \"web\"") && !it.contains("default/none"));
    top.press("\x1b[B\r");
    top.wait_for("its endpoints", |it| it.contains("10.244.1.1:8080") && it.contains("10.244.1.2:8080"));
    // The proxy is not needed.
    node.kill();
    connect(&top, "a plot of an endpoint", &|it| line(it, "10.244.1.").contains('█'));
    top.press("\x1b");
    top.wait_for("the Services", |it| it.contains("CONN/S") && it.contains("10.96.0.10:80/TCP"));
    top.quit("q");
}

#[test]
fn a_terminal_that_is_too_small_says_so() {
    let Some(node) = node_or_skip() else { return };
    let top = Terminal::start(&node, (3, 60));
    top.wait_for("the size that is needed", |it| it.contains("60 x 3 is too small, 50 x 5 is needed"));
    top.quit("\x03");
}

#[test]
fn without_a_terminal_the_table_is_printed_once() {
    let Some(node) = node_or_skip() else { return };
    let stderr = run(&mut node.cli("top")).exits_with(1);
    assert_contains(&stderr, &["the output is no terminal; use --once to print the table"]);
    let text = run(node.cli("top").args(["--once", "--sort", "name"])).success();
    let rows: Vec<_> = text.lines().map(|it| it.split_whitespace().next().unwrap()).collect();
    assert_eq!(rows, ["SERVICE", "default/none", "default/web"], "{text}");
    assert!(line(&text, "default/web").contains("10.96.0.10:80/TCP"), "{text}");
    let filtered = run(node.cli("top").args(["--once", "--filter", "none"])).success();
    assert_eq!(filtered.lines().count(), 2, "{filtered}");
    let limited = run(node.cli("top").args(["--once", "--sort", "name", "--limit", "1"])).success();
    let lines: Vec<_> = limited.lines().collect();
    assert!(lines[1].starts_with("default/none"), "{limited}");
    assert!(lines[2].starts_with("and 1 more service ports"), "{limited}");
}

#[test]
fn a_service_is_shown_at_its_cluster_ip_with_the_endpoints_there() {
    // Addresses of both families, a node port, and one that sorts before the cluster IP.
    let external = Ipv4Addr::new(10, 1, 0, 1).into();
    let service = web([1, 2]).node_port(30_080).external_ips(&[external]);
    let Some(mut node) = TestNode::running_or_skip([1, 2], &[service], &[]) else { return };
    node.wait_until_ready();
    let json = run(node.cli("top").args(["--once", "--output", "json"])).success();
    let json: Value = serde_json::from_str(&json).unwrap();
    let ports = json["servicePorts"].as_array().unwrap();
    assert_eq!(json["count"], ports.len());
    for port in ports {
        assert_eq!(port["service"], "default/web");
        let address = port["address"].as_str().unwrap();
        assert!(address.starts_with("10.96.0.10:"), "{port}");
        assert_eq!(port["endpoints"], 2, "{port}");
    }
}
