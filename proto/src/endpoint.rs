//! The ports of an endpoint and the traffic that it may serve.
//!
//! An endpoint serves only the ports that the brain lists for it.

use crate::localv1::{Endpoint, EndpointScopes, PortName, Service};

impl Endpoint {
    /// The port that the endpoint listens on for `service.ports[index]`; `None` if it does not serve that port.
    ///
    /// ```
    /// # use proxy_contract::localv1::{Endpoint, PortMapping, PortName, Service};
    /// let port = PortMapping { name: "http".into(), port: 80, ..PortMapping::default() };
    /// let service = Service { ports: vec![port], ..Service::default() };
    /// let target = PortName { name: "http".into(), port: 8080, index: Some(0), ..PortName::default() };
    /// let endpoint = Endpoint { port_overrides: vec![target], ..Endpoint::default() };
    /// assert_eq!(endpoint.port(&service, 0), Some(8080));
    /// assert_eq!(endpoint.port(&service, 1), None);
    /// ```
    pub fn port(&self, service: &Service, index: usize) -> Option<u16> {
        let it = service.ports.get(index)?;
        let has_name = !(it.name.is_empty() && it.target_port_name.is_empty());
        let port = match self.entry(service, index) {
            Some(entry) => entry.port,
            None if has_name || self.has_indices() => return None,
            None if it.target_port == 0 => it.port,
            None => it.target_port,
        };
        u16::try_from(port).ok().filter(|it| *it > 0)
    }

    /// The traffic that the endpoint may serve on `service.ports[index]`. `cluster` is always set: if the brain does not
    /// send it, it is the union of `internal` and `external`.
    ///
    /// ```
    /// # use proxy_contract::localv1::{Endpoint, EndpointScopes, PortMapping, Service};
    /// let service = Service { ports: vec![PortMapping::default()], ..Service::default() };
    /// let scopes = EndpointScopes { internal: true, ..EndpointScopes::default() };
    /// let endpoint = Endpoint { scopes: Some(scopes), ..Endpoint::default() };
    /// let scopes = endpoint.scopes_at(&service, 0);
    /// assert!(scopes.internal && !scopes.external && scopes.cluster == Some(true));
    /// ```
    pub fn scopes_at(&self, service: &Service, index: usize) -> EndpointScopes {
        let own = self.entry(service, index).and_then(|it| it.scopes);
        let it = own.or(self.scopes).unwrap_or_default();
        EndpointScopes { cluster: Some(it.cluster.unwrap_or(it.internal || it.external)), ..it }
    }

    /// The entry of `service.ports[index]`.
    fn entry(&self, service: &Service, index: usize) -> Option<&PortName> {
        let port = service.ports.get(index)?;
        if self.has_indices() {
            let index = u32::try_from(index).ok()?;
            return self.port_overrides.iter().find(|it| it.index == Some(index));
        }
        let name = if port.name.is_empty() { &port.target_port_name } else { &port.name };
        self.port_overrides.iter().find(|it| it.name == *name)
    }

    /// Whether entries are found by index, as this project's brain sends them, or by name, as KPNG's does.
    fn has_indices(&self) -> bool {
        self.port_overrides.iter().any(|it| it.index.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::localv1::PortMapping;

    fn port(name: &str, target_port: i32, target_port_name: &str) -> PortMapping {
        let (name, target_port_name) = (name.to_owned(), target_port_name.to_owned());
        PortMapping { name, port: 80, target_port, target_port_name, ..PortMapping::default() }
    }

    fn entry(name: &str, port: i32, index: Option<u32>) -> PortName {
        PortName { name: name.to_owned(), port, index, ..PortName::default() }
    }

    #[track_caller]
    fn check(ports: &[PortMapping], entries: &[PortName], expect: &[Option<u16>]) {
        let service = Service { ports: ports.to_vec(), ..Service::default() };
        let endpoint = Endpoint { port_overrides: entries.to_vec(), ..Endpoint::default() };
        let found: Vec<_> = (0..ports.len()).map(|it| endpoint.port(&service, it)).collect();
        assert_eq!(found, expect);
        assert_eq!(endpoint.port(&service, ports.len()), None);
    }

    #[test]
    fn the_index_distinguishes_ports_of_the_same_name() {
        let ports = [port("dns", 0, ""), port("dns", 0, ""), port("", 9, "")];
        let entries = [entry("dns", 54, Some(1)), entry("dns", 53, Some(0))];
        check(&ports, &entries, &[Some(53), Some(54), None]);
    }

    #[test]
    fn without_an_index_the_name_counts_and_then_the_services_own_port() {
        let ports = [port("http", 1, ""), port("", 2, "web"), port("", 3, ""), port("gone", 4, "")];
        check(
            &ports,
            &[entry("http", 8080, None), entry("web", 8081, None)],
            &[Some(8080), Some(8081), Some(3), None],
        );
        check(&[port("", 3, "")], &[entry("", 8080, None)], &[Some(8080)]);
        check(&[port("", 0, "")], &[], &[Some(80)]);
        check(&[port("http", 80, "")], &[entry("http", 70_000, None)], &[None]);
    }

    #[test]
    fn a_port_can_have_its_own_scopes() {
        let scopes = |internal, external, cluster| EndpointScopes { internal, external, cluster };
        let service = Service { ports: vec![port("a", 0, ""), port("b", 0, "")], ..Service::default() };
        let own = PortName { scopes: Some(scopes(true, false, Some(false))), ..entry("b", 2, Some(1)) };
        let endpoint = Endpoint {
            port_overrides: vec![entry("a", 1, Some(0)), own],
            scopes: Some(scopes(false, true, None)),
            ..Endpoint::default()
        };
        assert_eq!(endpoint.scopes_at(&service, 0), scopes(false, true, Some(true)));
        assert_eq!(endpoint.scopes_at(&service, 1), scopes(true, false, Some(false)));
    }
}
