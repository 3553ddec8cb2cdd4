//! A backend with a callback per change: `incremental unix:///run/kube-proxy-ebpf/proxy.sock NODE`.

use std::{convert::Infallible, error::Error};

use proxy_contract::{
    client::{Client, Incremental},
    localv1::{Endpoint, IpSet, Service},
};

struct Printer;

impl Incremental for Printer {
    type Error = Infallible;

    async fn set_service(&mut self, service: &Service) -> Result<(), Infallible> {
        println!("+ {}/{}", service.namespace, service.name);
        Ok(())
    }

    async fn delete_service(&mut self, namespace: &str, name: &str) -> Result<(), Infallible> {
        println!("- {namespace}/{name}");
        Ok(())
    }

    async fn set_endpoint(
        &mut self,
        namespace: &str,
        service: &str,
        key: &str,
        endpoint: &Endpoint,
    ) -> Result<(), Infallible> {
        let ips = endpoint.ips.iter().flat_map(IpSet::iter);
        println!("+ {namespace}/{service}/{key} {}", ips.collect::<Vec<_>>().join(" "));
        Ok(())
    }

    async fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str) -> Result<(), Infallible> {
        println!("- {namespace}/{service}/{key}");
        Ok(())
    }

    async fn sync(&mut self) -> Result<(), Infallible> {
        println!("= in sync");
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().ok_or("the first argument must be an address, such as unix:///path")?;
    let client = Client::new(target.parse()?, arguments.next().unwrap_or_default());
    match client.run(&mut Printer).await? {}
}
