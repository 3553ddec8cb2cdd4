//! A backend with a callback per change: `incremental unix:///run/kube-proxy-ebpf/proxy.sock NODE`.

use std::error::Error;

use proxy_contract::{
    client::{Client, Incremental},
    localv1::{Endpoint, Service},
};

struct Printer;

impl Incremental for Printer {
    fn set_service(&mut self, service: &Service) {
        println!("+ {}/{}", service.namespace, service.name);
    }

    fn delete_service(&mut self, namespace: &str, name: &str) {
        println!("- {namespace}/{name}");
    }

    fn set_endpoint(&mut self, namespace: &str, service: &str, key: &str, endpoint: &Endpoint) {
        let ips = endpoint.ips.iter().flat_map(|it| it.v4.iter().chain(&it.v6));
        println!("+ {namespace}/{service}/{key} {}", ips.cloned().collect::<Vec<_>>().join(" "));
    }

    fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str) {
        println!("- {namespace}/{service}/{key}");
    }

    fn sync(&mut self) {
        println!("= in sync");
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().ok_or("the first argument must be an address, such as unix:///path")?;
    let client = Client::new(target.parse()?, arguments.next().unwrap_or_default());
    client.run(&mut Printer).await;
    Ok(())
}
