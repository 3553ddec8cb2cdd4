//! A backend that prints: `print unix:///run/kube-proxy-ebpf/proxy.sock NODE`.

use std::error::Error;

use proxy_contract::client::Client;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().ok_or("the first argument must be an address, such as unix:///path")?;
    let mut states = Client::new(target.parse()?, arguments.next().unwrap_or_default()).watch();
    loop {
        let state = states.next().await;
        for (name, it) in &state.services {
            println!("{name}: {:?}", it.endpoints.keys());
        }
        println!("-");
    }
}
