//! A browser without a screen, as a program: chromedriver starts it, and both end with this value.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, TcpStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use build_tools::programs::find;
use http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::{TIMEOUT, eventually, skip};
use thirtyfour::{
    CapabilitiesHelper as _, ChromiumLikeCapabilities as _, DesiredCapabilities, WebDriver, WebElement,
    common::command::{Command as DriverCommand, ExtensionCommand},
    error::WebDriverResult,
    prelude::By,
};
use tokio::runtime::Runtime;

/// The port of chromedriver, in the network namespace of the test.
const PORT: u16 = 9515;
/// How often a condition of the page is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A browser with one page.
pub(crate) struct Browser {
    runtime: Runtime,
    driver: WebDriver,
    chromedriver: Child,
    _profile: TempDir,
}

/// What is asked of chromedriver beyond the standard: the lines of a log since the last call.
#[derive(Debug)]
struct ReadLog(&'static str);

impl ExtensionCommand for ReadLog {
    fn parameters_json(&self) -> Option<Value> {
        Some(json!({ "type": self.0 }))
    }

    fn method(&self) -> Method {
        Method::POST
    }

    fn endpoint(&self) -> Arc<str> {
        "/se/log".into()
    }
}

impl Browser {
    /// Starts it in the network namespace of this thread.
    pub(crate) fn or_skip() -> Option<Self> {
        let (Some(chromium), Some(program)) = (find("chromium"), find("chromedriver")) else {
            skip("there is no chromium with its chromedriver (packages chromium and chromium-driver)");
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        let mut chromedriver = Command::new(program);
        chromedriver.arg(format!("--port={PORT}")).stdin(Stdio::null()).stdout(Stdio::null());
        let chromedriver = chromedriver.stderr(Stdio::null()).spawn().unwrap();
        let listens = || TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)).is_ok();
        assert!(eventually(TIMEOUT, listens), "chromedriver does not listen");
        let mut capabilities = DesiredCapabilities::chrome();
        capabilities.set_binary(chromium.to_str().unwrap()).unwrap();
        let folder = format!("--user-data-dir={}", profile.path().display());
        for argument in [
            "--headless",
            // Chromium's sandbox does not work as root.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            &folder,
        ] {
            capabilities.add_arg(argument).unwrap();
        }
        capabilities.set("goog:loggingPrefs", json!({ "browser": "ALL", "performance": "ALL" })).unwrap();
        // On this thread, which is in the namespace.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let driver = WebDriver::new(format!("http://127.0.0.1:{PORT}"), capabilities);
        let driver = runtime.block_on(driver).unwrap();
        Some(Self { runtime, driver, chromedriver, _profile: profile })
    }

    fn wait<T>(&self, result: impl Future<Output = WebDriverResult<T>>) -> T {
        self.runtime.block_on(result).unwrap()
    }

    /// Calls a method of the DevTools protocol.
    fn devtools(&self, method: &str, parameters: Value) {
        let cdp = self.driver.cdp();
        self.wait(cdp.send_raw(method, parameters));
    }

    pub(crate) fn open(&self, address: &str) {
        self.wait(self.driver.goto(address));
    }

    /// A screen of this size.
    pub(crate) fn resize(&self, width: u32, height: u32) {
        let is_mobile = width < 600;
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_mobile }),
        );
    }

    /// A system that prefers this color scheme.
    pub(crate) fn prefer(&self, scheme: &str) {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.devtools("Emulation.setEmulatedMedia", json!({ "features": [feature] }));
    }

    pub(crate) fn evaluate(&self, expression: &str) -> Value {
        let script = format!("return {expression}");
        self.wait(async { self.driver.execute(script, Vec::new()).await?.convert() })
    }

    async fn element(&self, css: &str) -> WebDriverResult<WebElement> {
        self.driver.find(By::Css(css)).await
    }

    pub(crate) fn click(&self, css: &str) {
        self.wait(async { self.element(css).await?.click().await });
    }

    pub(crate) fn type_in(&self, css: &str, keys: &str) {
        self.wait(async { self.element(css).await?.send_keys(keys).await });
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, css: &str, what: &str, is_shown: impl Fn(&str) -> bool) {
        self.wait_for_at_most(TIMEOUT, css, what, is_shown);
    }

    /// Waits until the text of an element is as it should be.
    #[track_caller]
    pub(crate) fn wait_for_at_most(
        &self,
        limit: Duration,
        css: &str,
        what: &str,
        is_shown: impl Fn(&str) -> bool,
    ) {
        let script = format!("document.querySelector({})?.innerText ?? ''", json!(css));
        let text = || self.evaluate(&script).as_str().unwrap_or_default().to_owned();
        let shown = || {
            std::thread::sleep(POLL_INTERVAL);
            is_shown(&text())
        };
        assert!(eventually(limit, shown), "{what} is not shown:\n{}\n{:?}", text(), self.complaints());
    }

    /// The warnings and errors on the console since the last call.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let lines = self.log("browser").into_iter();
        lines.filter(|it| it["level"] != "DEBUG" && it["level"] != "INFO").map(|it| it.to_string()).collect()
    }

    /// The servers that were asked for something since the last call, such as `http://127.0.0.1:10247`.
    pub(crate) fn servers(&self) -> BTreeSet<String> {
        let messages = self.log("performance").into_iter();
        let messages = messages.filter_map(|it| serde_json::from_str::<Value>(it["message"].as_str()?).ok());
        let requests = messages.filter(|it| it["message"]["method"] == "Network.requestWillBeSent");
        let urls = requests.map(|it| it["message"]["params"]["request"]["url"].as_str().unwrap().to_owned());
        // The icon is in the page itself; a browser begins with a page of its own.
        let urls = urls.filter(|it| !it.starts_with("data:") && !it.starts_with("chrome://"));
        urls.map(|it| it.splitn(4, '/').take(3).collect::<Vec<_>>().join("/")).collect()
    }

    fn log(&self, kind: &'static str) -> Vec<Value> {
        let command = DriverCommand::ExtensionCommand(Box::new(ReadLog(kind)));
        self.wait(async { self.driver.handle().cmd(command).await?.value() })
    }

    /// What is visible, as PNG.
    pub(crate) fn screenshot(&self) -> Vec<u8> {
        self.wait(self.driver.screenshot_as_png())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.runtime.block_on(self.driver.clone().quit());
        let _ = self.chromedriver.kill();
        let _ = self.chromedriver.wait();
    }
}
