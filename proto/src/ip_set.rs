//! Addresses as a message lists them, by family.

use crate::localv1::IpSet;

impl IpSet {
    /// The set of these addresses, in their order. A text with a colon is an IPv6 address.
    ///
    /// ```
    /// use proxy_contract::localv1::IpSet;
    ///
    /// let set = IpSet::of(["10.96.0.1", "fd00::1"]);
    /// assert_eq!((&set.v4[..], &set.v6[..]), (&["10.96.0.1".to_owned()][..], &["fd00::1".to_owned()][..]));
    /// assert_eq!(set.iter().count(), 2);
    /// ```
    pub fn of(addresses: impl IntoIterator<Item = impl ToString>) -> Self {
        let texts = addresses.into_iter().map(|it| it.to_string());
        let (v6, v4) = texts.partition(|it: &String| it.contains(':'));
        Self { v4, v6 }
    }

    /// The addresses of both families, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.v4.iter().chain(&self.v6).map(String::as_str)
    }
}
